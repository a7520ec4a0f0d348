"""Saved and restored sessions: every following call gives the bits of the session that was saved, whatever tier, split or extents either side has;
and what does not continue is refused."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_scene
from tier_scene import RING, VOCAB

from glm53 import Engine, SamplingParams
from glm53.errors import DeviceMemoryError, HipError, InputError, LifetimeError, SessionFileError
from glm53.hip import runtime
from glm53.model.stage import Stage
from glm53.session import Session
from glm53.sessionfile import SessionFile

MODEL: dict[str, Any] = {"layers": 5, "seed": 12, "overrides": {"moe_intermediate_size": 192}}
SMALL: dict[str, Any] = {"layers": 2, "vocab": 64, "topk": 32, "seed": 7, "overrides": {"moe_intermediate_size": 128}}
BF16: dict[str, Any] = {"seed": 13, "real_widths": True, "dtype": "bfloat16", "scale": 0.5, "overrides": {"moe_intermediate_size": 128}}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "f32": (MODEL, {}),
    "bf16": (BF16, {"dtype": "bf16", "kv_format": "bf16"}),
    "q8g64": (BF16, {"dtype": "bf16", "kv_format": "q8g64"}),
}
HOST, RESIDENT = {"kv_tier": "host", "hot_rows": RING + 40}, {"kv_tier": "resident"}
PAIR = {"devices": (0, 1)}


def opened(path: Path, **changes: Any) -> Engine:
    return Engine.open(path, **tier_scene.settings(**(HOST | changes)))


def drive(session: Session, calls: list[tier_scene.Call]) -> list[np.ndarray]:
    """Logits of every call that gives some."""
    found = [getattr(session, kind)(value) for kind, value in calls if kind != "settle"]
    return [logits for logits in found if logits is not None]


def ids(count: int, vocab: int = VOCAB) -> list[int]:
    return [(i * 37 + 11) % vocab for i in range(count)]


def need_two() -> None:
    if runtime.select().device_count < 2:
        pytest.skip("a pair needs two devices")


@pytest.mark.parametrize("row_format", FORMATS)
def test_restored_is_continued(row_format: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """From each kind of engine to each other kind, with extents of other sizes."""
    need_two()
    model, settings = FORMATS[row_format]
    path, few = make_checkpoint(**model), row_format != "f32"
    before, after = (
        tier_scene.script(3, 300, 4 if few else 12),
        [("step", [5]), ("prefill", ids(70)), ("step", [1, 2, 3]), ("truncate", 250), ("step", [9])],
    )
    engines = {
        "host": HOST,
        "resident": RESIDENT | {"extent_rows": 256},
        "pair": PAIR | HOST | {"extent_rows": 128},
        "resident pair": PAIR | RESIDENT | {"p2p": "off"},
    }
    files: dict[str, bytes] = {}
    for name in ("host", "pair") if few else engines:
        with opened(path, **(settings | engines[name])) as engine, engine.session() as session:
            drive(session, before)
            kept = session.tokens
            session.save(tmp_path / name)
            files[name] = (tmp_path / name).read_bytes()
            expected = drive(session, after)
            tokens = session.tokens
    assert len(set(files.values())) == 1, f"the files of {sorted(files)} differ"
    targets = ("resident", "pair") if row_format == "bf16" else ("host", "resident pair") if few else tuple(engines)
    for name in targets:
        with opened(path, **(settings | engines[name])) as engine:
            with engine.restore(tmp_path / "host") as session:
                engine.stage.check()
                assert session.tokens == kept and session.rows == len(kept)
                session.save(tmp_path / "again")
                assert (tmp_path / "again").read_bytes() == files["host"], name
                tier_scene.assert_same_bits(expected, drive(session, after), f"restored into {name}")
                assert session.tokens == tokens
            tier_scene.assert_all_given_back(engine, name)


@pytest.mark.parametrize("kind", ["host", "resident", "pair"])
def test_lengths_at_every_border(kind: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Rows 0, around 64 and around the ends of extents, after appending and after a truncate."""
    if kind == "pair":
        need_two()
    path, file = make_checkpoint(**SMALL), tmp_path / "s"
    changes = {"host": HOST, "resident": RESIDENT, "pair": PAIR | HOST}[kind]
    with opened(path, **changes) as engine, opened(path, **(RESIDENT | {"extent_rows": 128})) as other:
        for rows in (0, 1, 63, 64, 65, 128, 129, 256):
            for cut in (0, 70):  # rows that were there and are no more
                with engine.session() as session:
                    if rows + cut:
                        session.prefill(ids(rows + cut, 64))
                    if cut:
                        session.truncate(rows)
                    assert len(session.tokens) == rows
                    session.save(file)
                    expected = [session.prefill([3, 4, 5]), session.step([6, 7])]
                for target in (engine, other):
                    with target.restore(file) as session:
                        assert session.rows == rows and session.tokens == tuple(ids(rows, 64))
                        tier_scene.assert_same_bits(expected, [session.prefill([3, 4, 5]), session.step([6, 7])], f"{rows} rows, {cut} cut")
        tier_scene.assert_all_given_back(engine, kind)


@pytest.mark.parametrize("changes", [HOST | {"extent_rows": 192}, RESIDENT | {"extent_rows": 320}], ids=["host", "resident"])
def test_pieces_of_a_file(changes: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of many pieces, whose borders are none of the extents' borders."""
    monkeypatch.setattr("glm53.sessionfile.PIECE_BYTES", 1)  # 64 rows
    told: list[tuple[int, int]] = []
    with opened(make_checkpoint(**SMALL), **changes) as engine, engine.session() as session:
        session.prefill(ids(1000, 64))
        session.save(tmp_path / "s", lambda done, total, _: told.append((done, total)))
        assert len(told) == 3 * 16 and told[-1][0] == told[-1][1]
        with SessionFile(tmp_path / "s") as file:
            file.verify()
        expected = session.step([1, 2])
        with engine.restore(tmp_path / "s") as restored:
            np.testing.assert_array_equal(restored.step([1, 2]), expected)


def test_stream_goes_on_as_one_call(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A sampled text cut in three by saves is that of one request, penalties and seed included."""
    path, prompt = make_checkpoint(**MODEL), ids(90)
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=2**63 + 5, max_tokens=18, ignore_eos=True)
    with opened(path) as engine:
        whole = engine.generate(prompt, params)
        with engine.session() as session:
            found = [token for chunk in session.stream(prompt, replace(params, max_tokens=5)) for token in chunk.token_ids]
            session.save(tmp_path / "a")
    for file, count in (("a", 6), ("b", 7)):
        with opened(path, **RESIDENT) as engine, engine.restore(tmp_path / file) as session:
            assert session.sampling is not None and session.sampling.seed == params.seed
            found += [token for chunk in session.stream((), replace(session.sampling, max_tokens=count)) for token in chunk.token_ids]
            assert session.tokens == (*prompt, *found[:-1])
            session.save(tmp_path / "b")
    assert tuple(found) == whole.token_ids
    with opened(path) as engine, engine.restore(tmp_path / "b") as session:
        session.truncate(50)
        with pytest.raises(InputError, match="nothing to go on from"):
            next(session.stream())
        assert next(session.stream([1, 2], replace(params, max_tokens=1))).token_ids
        assert session.tokens == (*prompt[:50], 1, 2)


def test_drafts_go_on(demo_path: Path, tmp_path: Path) -> None:
    """With the MTP layer's state restored the drafts are those of the session that was saved; without one, or without its state, the tokens are."""
    need_two()
    params = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=4, max_tokens=31, ignore_eos=True)
    more = replace(params, max_tokens=30)
    drawn = lambda session, *arguments: [token for chunk in session.stream(*arguments) for token in chunk.token_ids]
    with opened(demo_path, **RESIDENT) as engine, engine.session() as session:
        expected = drawn(session, "And the king said unto", params)
        session.save(tmp_path / "plain")
        expected += drawn(session, (), more)
        tokens = session.tokens
    with opened(demo_path, mtp=3) as engine, engine.session() as session:
        assert drawn(session, "And the king said unto", params) == expected[:31]
        session.save(tmp_path / "drafts")
        counts = engine.draft_counts()
        rounds, accepted = counts.rounds, np.array(counts.accepted)
        assert drawn(session, (), more) == expected[31:] and session.tokens == tokens
        counts = engine.draft_counts()
        rounds, accepted = counts.rounds - rounds, np.array(counts.accepted) - accepted
        assert accepted[0] > 5, "a model whose drafts stand shows whether they are the same"
        session.step([9])
        session.save(tmp_path / "stepped")
    with SessionFile(tmp_path / "stepped") as opened_file:
        assert any(section.name == "mtp.hidden" and data.any() for section, _, data in opened_file.pieces())
    for file, changes in (
        ("drafts", {"mtp": 3}),
        ("drafts", RESIDENT | {"mtp": 3, "extent_rows": 128}),
        ("drafts", PAIR | {"mtp": 3}),
        ("drafts", {}),
        ("plain", {"mtp": 3}),
    ):
        with opened(demo_path, **changes) as engine, engine.restore(tmp_path / file) as session:
            whole = file == "drafts" and changes.get("mtp") == 3
            session.save(tmp_path / "again")
            assert ((tmp_path / "again").read_bytes() == (tmp_path / file).read_bytes()) is whole, changes
            assert drawn(session, (), more) == expected[31:] and session.tokens == tokens, f"{file} into {changes}"
            if whole:
                with engine.restore(tmp_path / "stepped") as stepped:
                    stepped.save(tmp_path / "again")
                assert (tmp_path / "again").read_bytes() == (tmp_path / "stepped").read_bytes(), changes
                counts = engine.draft_counts()
                assert (counts.rounds, counts.accepted) == (rounds, accepted.tolist()), changes


@pytest.mark.parametrize("changes", [HOST, RESIDENT], ids=["host", "resident"])
def test_saved_while_another_session_decodes(
    changes: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session steps, and this one is appended to, between the pieces; truncate and close are refused meanwhile."""
    monkeypatch.setattr("glm53.sessionfile.PIECE_BYTES", 1)
    inside, seen, real = threading.Event(), list[int](), Stage.export
    with opened(make_checkpoint(**SMALL), **changes, sessions_max=3) as engine, engine.session() as session, engine.session() as twin:
        other = engine.session()
        for one in (session, other, twin):
            one.prefill(ids(500, 64))
        twin_logits = [twin.step([token]) for token in range(40)]

        def export(stage: Stage, *arguments: Any) -> None:
            if not seen:
                seen.append(session.rows)
                session.step([9])
                for call in (session.close, lambda: session.truncate(3)):
                    with pytest.raises(LifetimeError, match="being saved"):
                        call()
            real(stage, *arguments)

        monkeypatch.setattr(Stage, "export", export)
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(session.save, tmp_path / "s", lambda *_: inside.set())
            assert inside.wait(30)
            other_logits = [other.step([token]) for token in range(40)]
            saving.result()
        assert seen == [500]
        tier_scene.assert_same_bits(twin_logits, other_logits, "the other session")
        expected = session.step([5])
        other.close()
        with engine.restore(tmp_path / "s") as restored:
            assert restored.rows == 500 and session.rows == 502
            restored.step([9])
            np.testing.assert_array_equal(restored.step([5]), expected)


# What does not continue


@pytest.fixture
def saved(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    file = tmp_path / "s.glm53"
    with opened(make_checkpoint(**SMALL)) as engine, engine.session() as session:
        session.prefill(ids(100, 64))
        session.save(file)
    return file


@pytest.mark.parametrize(
    "model, changes, reason",
    [
        ({"layers": 3}, {}, r"has n?_?layer\w* .*wanted"),
        ({"seed": 8}, {}, "weights with fingerprint .*, wanted"),
        ({}, {"context_rows_max": 99}, "it has 100 rows, wanted at most 99.*context_rows_max above 100"),
        ({}, {"latent_norm_eps": 1e-5}, "latent_norm_eps 1e-06, wanted 1e-05"),
        ({}, {"weights": "q8q4"}, "weights are auto, wanted q8q4.*weights auto"),
    ],
)
def test_refusals(model: dict[str, Any], changes: dict[str, Any], reason: str, saved: Path, make_checkpoint: Callable[..., Path]) -> None:
    with opened(make_checkpoint(**(SMALL | model)), **changes) as engine:
        with pytest.raises(SessionFileError, match=reason) as error:
            engine.restore(saved)
        assert "next: open the engine with" in str(error.value) and error.value.exit_code == 2
        tier_scene.assert_all_given_back(engine, reason)


def test_other_dtypes_and_row_formats(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(**BF16)
    with opened(path, dtype="bf16", kv_format="q8g64") as engine, engine.session() as session:
        session.prefill(ids(10))
        session.save(tmp_path / "s")
    for changes, reason in (
        ({"dtype": "bf16", "kv_format": "bf16"}, "history rows are q8g64, wanted bf16; next: open the engine with kv_format q8g64"),
        ({"dtype": "f32"}, "activations are bf16, wanted f32; next: open the engine with dtype bf16"),
    ):
        with opened(path, **changes) as engine, pytest.raises(SessionFileError, match=reason):
            engine.restore(tmp_path / "s")


def test_damage_leaves_no_session(saved: Path, make_checkpoint: Callable[..., Path]) -> None:
    """Found while the rows come in: nothing stays open, and the engine goes on."""
    whole = saved.read_bytes()
    with opened(make_checkpoint(**SMALL), sessions_max=1) as engine:
        for place in (-1, -60, len(whole) // 2, len(whole) // 4 * 3, 3000):
            bad = bytearray(whole)
            bad[place] ^= 16
            saved.write_bytes(bad)
            with pytest.raises(SessionFileError, match="damaged"):
                engine.restore(saved)
            tier_scene.assert_all_given_back(engine, str(place))
        saved.write_bytes(whole[:-100])
        with pytest.raises(SessionFileError, match="truncated"):
            engine.restore(saved)
        saved.write_bytes(whole)
        with engine.restore(saved) as session:
            assert session.rows == 100
            with pytest.raises(InputError, match="all 1 sessions are in use"):
                engine.restore(saved)
        engine.close()
        with pytest.raises(LifetimeError):
            engine.restore(saved)


def test_tokens_of_another_vocabulary(saved: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(make_checkpoint(**SMALL)) as engine, engine.session() as session:
        session.prefill(ids(10, 64))
        session._tokens[3] = 64
        session.save(saved)
        with pytest.raises(SessionFileError, match=r"token ids \d+ to 64, wanted 0 to 63"):
            engine.restore(saved)


@pytest.mark.parametrize("kind", ["host", "resident", "pair"])
def test_failing_calls(kind: str, control: ctypes.CDLL, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Whichever call of a save or a restore fails: the session saved goes on, no file and no session stays, and the next try is right."""
    if kind == "pair":
        need_two()
    path, file = make_checkpoint(**SMALL), tmp_path / "s"
    changes = {"host": HOST, "resident": RESIDENT, "pair": PAIR | RESIDENT}[kind]
    with opened(path, **changes, sessions_max=2) as engine, engine.session() as session:
        session.prefill(ids(200, 64))
        session.save(file)
        whole, wanted = file.read_bytes(), session.step([1])
        session.truncate(200)
        failures = {"save": 0, "restore": 0}
        for api in ("hipHostMalloc", "hipMemcpy2DAsync", "hipMemcpyAsync", "hipMalloc", "hipHostRegister"):
            for nth in (1, 2, 5):
                for work in ("save", "restore"):
                    control.glm53_cpu_fail(api.encode(), nth, 2)
                    try:
                        if work == "save":
                            session.save(tmp_path / "t")
                            os.unlink(tmp_path / "t")
                        else:
                            engine.restore(file).close()
                    except (HipError, DeviceMemoryError):
                        failures[work] += 1
                    finally:
                        control.glm53_cpu_fail(api.encode(), 0, 0)
                    assert os.listdir(tmp_path) == ["s"], f"{work}, {api} {nth}"
                    engine.stage.check()
                    assert len(engine.keys._rows) == 1, f"{work}, {api} {nth} left a session"
        session.save(file)
        assert file.read_bytes() == whole
        with engine.restore(file) as restored:
            np.testing.assert_array_equal(restored.step([1]), wanted)
        np.testing.assert_array_equal(session.step([1]), wanted)
    assert failures["save"] >= 3 and failures["restore"] >= 3, failures


def test_host_memory_of_a_save_is_bounded(saved: Path, make_checkpoint: Callable[..., Path]) -> None:
    """Buffers are given back, and are four pieces at most."""
    with opened(make_checkpoint(**SMALL)) as engine:
        with SessionFile(saved) as file:
            piece_bytes = file.header.piece_bytes
        with engine.restore(saved) as session:
            session.save(saved)
        assert engine.memory().get("host: session file", 0) == 0
        assert 0 < piece_bytes <= 8 << 20
