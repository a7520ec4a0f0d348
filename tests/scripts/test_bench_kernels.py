"""bench_kernels at tiny sizes: every kernel of a step is timed once for each number of rows, and its figures agree with each other. The projection
to gfx1100 from a made-up table."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm53.errors import Glm53Error
from glm53.hip import Device
from glm53.hip.module import code_objects, manifest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
STEP_KERNELS = {
    "step_begin_bf16_bf16",
    "step_gemv_bf16_q8g64",
    "step_gemv_one_bf16_q8g64",
    "step_gemv_router_bf16_q8g64",
    "step_gemv_router_one_bf16_q8g64",
    "step_halves_bf16_q8g64",
    "step_halves_one_bf16_q8g64",
    "step_score_bf16",
    "step_topk",
    "step_attend_bf16_q8g64",
    "step_attend_one_bf16_q8g64",
    "step_expand_bf16",
    "step_expand_one_bf16",
    "step_experts_bf16_q4g64",
    "step_experts_one_bf16_q4g64",
    "step_down_bf16_q4g64",
    "sample_best",
    "sample_draw",
    "step_end",
}


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """A script or a module beside it, by file name."""
    sys.path.insert(0, str(SCRIPTS))

    def one(file: str) -> ModuleType:
        name = file.removesuffix(".py")
        if name not in sys.modules:
            spec = spec_from_loader(name, SourceFileLoader(name, str(SCRIPTS / file)))
            assert spec is not None and spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    yield one
    sys.path.remove(str(SCRIPTS))


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPTS / script), *options], capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(report, directory) of a whole tiny run."""
    out = tmp_path_factory.mktemp("kernels")
    done = run("bench_kernels", "--runtime", "cpu", "--tiny", "--json", "--out", str(out))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout), out


def test_every_kernel_of_a_step_is_timed(load: Any, tiny: tuple[dict[str, Any], Path]) -> None:
    found = tiny[0]["tables"]["kernels"]
    points = {(row["op"], row["part"] == "prefill", row["rows"]) for row in found}
    assert len(points) == len(found)
    steps = [row for row in found if row["part"] != "prefill"]
    assert {row["kernel"] for row in steps} == STEP_KERNELS <= set(manifest()["kernels"])
    ops = {row["op"] for row in steps}
    assert ops == {*load("project_gfx1100.py").OPS, "sample, top-p 0.95", "q_b, place", "q_b, give", "absorb, fetch"}
    assert {(row["op"], row["rows"]) for row in steps} == {(op, rows) for op in ops for rows in (1, 2)}
    assert {row["kernel"] for row in found if row["part"] == "prefill"} == {"matmul_tile_bf16_q8g64_bf16", "attend_bf16_q8g64"}
    assert {row["op"] for row in found if row["history"] is not None} == {"score", "top-k"}


def test_figures_agree(load: Any, tiny: tuple[dict[str, Any], Path]) -> None:
    report, out = tiny
    peak = max(row["GB/s"] for row in report["tables"]["peak"])
    assert all(row["bytes"] == 2 << 20 and row["GB/s"] == pytest.approx(row["bytes"] / row["median us"] / 1e3) for row in report["tables"]["peak"])
    for row in report["tables"]["kernels"]:
        assert 0 < row["min us"] <= row["median us"] and row["launches"] >= 1, row
        assert row["GB/s"] == pytest.approx(row["bytes"] / row["median us"] / 1e3), row
        assert row["% of peak"] == pytest.approx(100 * row["GB/s"] / peak), row
    with (out / "kernels.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert written[0].keys() == set(load("bench_kernels").COLUMNS) and len(written) == len(report["tables"]["kernels"])
    assert any("includes the gap between launches" in remark for remark in report["remarks"])


def test_bytes_are_those_of_the_operands(tiny: tuple[dict[str, Any], Path]) -> None:
    """By hand: codes and f16 scales of q8g64 (33 / 32 bytes a weight) and q4g64 (17 / 32), activations in bf16, router, logits and gates in f32."""
    found = {(row["op"], row["rows"]): row["bytes"] for row in tiny[0]["tables"]["kernels"] if row["part"] != "prefill"}
    for rows in (1, 2):
        assert found["head", rows] == 640 * 128 * 33 // 32 + 128 * 2 + rows * (128 * 2 + 640 * 4)
        assert found["o", rows] == 128 * 64 * 33 // 32 + rows * (64 + 2 * 128) * 2
        assert found["absorb", rows] == 2 * 512 * 64 * 33 // 32 + rows * 2 * (64 + 512) * 2
        assert found["sample, greedy", rows] == rows * 640 * 4
        history, key = 656, 64 * 2
        plain = 256 * 64 * 33 // 32 + 64 * 2 + rows * (64 + 256) * 2
        assert found["q_b", rows] == plain
        assert found["q_b, rows", rows] - plain == rows * (576 * 2 + history + 8)
        assert found["index query, rows, key", rows] - found["q_b, rows", rows] == rows * 2 * key
    assert found["routed gate and up", 1] == 2 * (2 * 64 * 128) * 17 // 32 + 128 * 2 + 2 * (64 * 2 + 4)
    # Two rows draw two of eight experts each: what is hit, on average over the draws, lies between two experts and four.
    one = 2 * 64 * 128 * 17 // 32
    assert 2 * one < found["routed gate and up", 2] - 2 * (128 * 2 + 2 * (64 * 2 + 4)) < 4 * one


def test_widths_are_those_of_the_release(load: Any) -> None:
    shapes = load("kernel_cases.py").RELEASED
    assert (shapes.hidden, shapes.heads, shapes.q_lora, shapes.latent, shapes.head_dim, shapes.v) == (6144, 64, 2048, 512, 256, 256)
    assert (shapes.width, shapes.experts, shapes.slots, shapes.dense, shapes.vocab) == (2048, 256, 8, 12288, 154_880)
    assert (shapes.index_heads, shapes.index_dim, shapes.topk, shapes.row_bytes, shapes.key_bytes) == (32, 128, 2048, 656, 256)


def test_graphs_hold_whole_turns_of_the_copies(load: Any) -> None:
    cases, bench = load("kernel_cases.py"), load("bench_kernels")
    point = lambda byte_count, copies: cases.Point("", "", "", 1, (print,) * copies, cases.Cost(byte_count, 0))
    assert bench.launch_count(point(4_000_000_000, 3), 4e12, 1000.0) == 3  # 1 ms each: one turn
    assert bench.launch_count(point(40_000_000, 3), 4e12, 1000.0) == 102  # 10 us each: 34 turns are 1,020 us
    assert bench.launch_count(point(8, 1), 4e12, 1000.0) == 500  # taken as 2 us
    assert bench.launch_count(point(8, 700), 4e12, 10_000.0) == 700  # two turns would be more than a graph's most


def test_experts_of_one_row_take_turns(load: Any) -> None:
    cases = load("kernel_cases.py")
    maker = type("Sizes", (), {"shapes": cases.RELEASED})()
    alone = np.stack(cases.expert_draws(maker, 1))
    assert alone.shape == (cases.EXPERT_DRAWS, 1, 8) and len(np.unique(alone)) == cases.EXPERT_DRAWS * 8
    for ids in cases.expert_draws(maker, 8):
        assert ids.shape == (8, 8) and all(len(set(row)) == 8 for row in ids.tolist()) and len(np.unique(ids)) > 32


def test_a_round_with_a_miss_is_not_timed(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load("kernel_cases.py")
    with Device(0) as device:
        maker = cases.Maker(device, device.default_stream, cases.TINY, (2,), (200,), 1 << 15)
        try:
            assert cases.HotRound(maker, 2).fetch.counts.numpy().tolist() == [0]
            monkeypatch.setattr(cases.hotcache, "seed", lambda *_: None)
            with pytest.raises(Glm53Error, match=r"missed \[\d+\] of its rows, wanted none"):
                cases.HotRound(maker, 2)
        finally:
            maker.free()


def test_histories_too_short_are_refused() -> None:
    done = run("bench_kernels", "--runtime", "cpu", "--part", "select", "--histories", "2048")
    assert done.returncode == 2 and "histories above 2048" in done.stderr


# The projection


def write_measured(directory: Path, ops: dict[str, tuple[str, int, float, float]]) -> Path:
    """kernels.csv with op: (kernel, bytes, us, % of peak) at 1 row, and rows that the projection must pass over."""
    with (directory / "kernels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("part", "op", "kernel", "rows", "history", "bytes", "median us", "% of peak"))
        for op, (kernel, byte_count, us, percent) in ops.items():
            history = 50_000 if op in ("score", "top-k") else ""
            writer.writerow(("step", op, kernel, 1, history, byte_count, us, percent))
            writer.writerow(("step", op, kernel, 2, history, 9 * byte_count, 9 * us, 1.0))
            writer.writerow(("prefill", op, kernel, 1, "", 7, 7.0, 1.0))
            if history:
                writer.writerow(("step", op, kernel, 1, 1_000_000, 7, 7.0, 1.0))
    return directory


def made_up(project: ModuleType) -> dict[str, tuple[str, int, float, float]]:
    """Every launch moves 8.64 MB at 50 % of the peak: 10 us is its floor on a card, 20 us its projection."""
    return dict.fromkeys(project.OPS, ("step_gemv_bf16_q8g64", 8_640_000, 4.0, 50.0))


def test_projection_of_a_made_up_table(load: Any, tmp_path: Path) -> None:
    project = load("project_gfx1100.py")
    ops = made_up(project)
    ops["top-k"] = ("step_topk", 864_000, 5.0, 2.0)  # waits for latency: floor 1 us, projected 50 us
    ops["score"] = ("step_score_bf16", 8_640_000, 2.0, 125.0)  # faster than a copy: counts as 100 %
    measured = project.read_measured(write_measured(tmp_path, ops), 50_000)
    assert measured["q_b"].us == 4.0 and measured["score"].efficiency == 1.0
    full, shared = project.LAYER_KINDS[1][1], project.LAYER_KINDS[2][1]
    assert (len(full), len(shared), sum(count for *_, count in project.LAYER_KINDS)) == (12, 9, 78)
    alone = project.sum_of(measured, full, pair=False)
    assert (alone.launches, alone.floor) == (12, pytest.approx(111))
    assert alone.projected == pytest.approx(10 * 20 + 10 + 50) and alone.mixed == pytest.approx(10 * 20 + 10 + 5)
    # A pair halves all but top-k and the history rows that attention reads: 2,048 of 656 bytes and 8 of their references.
    rows = 2048 * 664
    pair = project.sum_of(measured, full, pair=True)
    assert pair.bytes == 9 * 4_320_000 + 864_000 + (8_640_000 + rows) / 2 + 4_320_000
    nine = project.sum_of(measured, shared, pair=True)
    assert nine.projected == pytest.approx(90 + rows / 2 / 864e3 / 0.5)
    token = project.token_table(measured, 3.0, 10.0, 50.0)
    launches = 3 * 11 + 18 * 12 + 57 * 9 + 4
    assert f"{launches} launches" in token
    fixed = launches * 3 + 2 * 78 * 10 + 7 * 50
    attend = 10 + rows / 2 / 864e3 / 0.5
    busy = 21 * (5 + 50) + 78 * attend + (3 * 8 + 18 * 9 + 57 * 8) * 10 + 3 * 20 + 10
    assert f"| projected | {(busy + fixed) / 1e3:.2f} | {1e6 / (busy + fixed):.2f} |" in token
    assert "| published, no MTP | 71.28 | 14.03 | 1.00 |" in token


@pytest.mark.parametrize(
    ("vgprs", "lds", "threads", "waves"),
    [(96, 0, 256, 16), (97, 0, 256, 12), (256, 0, 256, 4), (24, 48 << 10, 256, 4), (24, 16 << 10, 256, 16), (120, 0, 1024, 8), (24, 0, 64, 16)],
)
def test_waves_that_fit(load: Any, vgprs: int, lds: int, threads: int, waves: float) -> None:
    assert load("project_gfx1100.py").Resources(vgprs, 20, lds, 0, threads).waves == waves


def test_projection_says_what_is_missing(load: Any, tmp_path: Path) -> None:
    project = load("project_gfx1100.py")
    with pytest.raises(Glm53Error, match=r"kernels.csv does not exist; next: scripts/bench_kernels"):
        project.read_measured(tmp_path, 50_000)
    ops = made_up(project)
    del ops["absorb"]
    with pytest.raises(Glm53Error, match=r"1 row .* of: absorb; next"):
        project.read_measured(write_measured(tmp_path, ops), 50_000)
    with pytest.raises(Glm53Error, match="score; top-k"):
        project.read_measured(write_measured(tmp_path, made_up(project)), 60_000)
    measured = project.read_measured(write_measured(tmp_path, made_up(project)), 50_000)
    with pytest.raises(Glm53Error, match="no kernel step_gemv_bf16_q8g64"):
        project.kernel_table(measured, {})


def test_projection_of_the_built_object(load: Any, tmp_path: Path) -> None:
    project = load("project_gfx1100.py")
    kernels = dict(zip(project.OPS, ["step_gemv_bf16_q8g64"] * len(project.OPS), strict=True)) | {
        "score": "step_score_bf16",
        "top-k": "step_topk",
        "attend": "step_attend_bf16_q8g64",
    }
    write_measured(tmp_path, {op: (kernel, *made_up(project)[op][1:]) for op, kernel in kernels.items()})
    done = run("project_gfx1100.py", "--measured", str(tmp_path), "--launch-gap-us", "2.5")
    if "gfx1100" not in code_objects():
        assert done.returncode == 3 and "no code object for gfx1100" in done.stderr
        pytest.skip("no code object for gfx1100 was built here")
    if not any(shutil.which(name) for name in project.READELF_NAMES):
        pytest.skip("llvm-readelf is not installed")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith(("| score |", "| attend |"))]
    assert len(table) == 2 and all("| 8,640,000 |" in line and "| 10.0 | 20.0 |" in line for line in table)
    assert "no spills" in done.stdout and "Launch gap: 2.5 us" in done.stdout and "14.03" in done.stdout
