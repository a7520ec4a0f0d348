"""Every benchmark at tiny sizes: it runs, its tables are whole, and what it claims to check it checks."""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm53.errors import Glm53Error
from glm53.hip import Device, Stream
from glm53.ops.hotcache import Counter

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """A benchmark or a module beside it, by name."""
    sys.path.insert(0, str(SCRIPTS))

    def one(name: str) -> ModuleType:
        path = next(path for path in (SCRIPTS / name, SCRIPTS / f"{name}.py") if path.exists())
        spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
        assert spec is not None and spec.loader is not None
        if name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    yield one
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(0) as device:
        yield device


def run(name: str, *options: str) -> str:
    """What a benchmark printed. It must end well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(SCRIPTS / name), *options], capture_output=True, text=True, timeout=300, cwd=ROOT, env=env)
    assert done.returncode == 0, f"{name} {options} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def rows_of(directory: Path, table: str) -> list[dict[str, str]]:
    with (directory / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_gather(tmp_path: Path) -> None:
    text = run("bench_gather", "--tiny", "--out", str(tmp_path))
    gathered = rows_of(tmp_path, "gather")
    points = {(int(r["layers"]), int(r["history rows"]), r["cache"], int(r["misses %"])) for r in gathered}
    assert len(points) == len(gathered) == 2 * 2 * 3 * 4
    for row in gathered:
        missed = round(64 * int(row["misses %"]) / 100)
        assert int(row["bytes"]) == missed * 656 * int(row["layers"])
        assert 0 < float(row["min us"]) <= float(row["median us"]) and float(row["decision us"]) > 0
        judged = row["misses %"] == "100" or (row["misses %"] == "1" and row["cache"] != "free")
        assert (row["holds"] in ("True", "False")) == judged, row
        limit = 1.3 * float(row["floor us"]) + float(row["0 % us"])
        assert float(row["t / limit"]) == pytest.approx(float(row["median us"]) / limit)
    assert [(r["planes"], r["groups"], r["method"]) for r in rows_of(tmp_path, "copy_back")] == [("6", "2", "kernel"), ("6", "2", "copy2d")]
    assert [r["method"] for r in rows_of(tmp_path, "host_memory")] == ["register", "hostmalloc"]
    assert [r["blocks"] for r in rows_of(tmp_path, "blocks_1")] == ["0", "1", "3"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["machine"]) == {"device", "runtime", "python", "commit", "date", "command"}
    assert report["machine"]["command"].startswith("bench_gather --tiny") and all(remark in text for remark in report["remarks"])
    assert sum("allowed" in remark for remark in report["remarks"]) == 2 and sum("best default" in remark for remark in report["remarks"]) == 2


def test_append() -> None:
    report = json.loads(run("bench_append", "--tiny", "--json"))
    found = report["tables"]["append"]
    assert [(r["rows kept %"], r["m"]) for r in found] == [(kept, m) for kept in (0, 80) for m in (4, 16, 64)]
    for row in found:
        assert row["gather / stream"] == pytest.approx(row["gather ms"] / row["stream ms"])
        assert 0 < row["rows fetched per new row"] <= 64
    # Rows that keep most of the selection before them fetch less.
    assert found[3]["rows fetched per new row"] < found[0]["rows fetched per new row"]
    assert len(report["remarks"]) == 2


def test_append_of_a_model() -> None:
    """Streamed and gathered rows give the same logits, or the script ends with an error."""
    options = ("--model", str(ROOT / "models" / "glm53-demo"), "--histories", "330", "--hot-rows", "264", "--rows-most", "16", "--repeats", "1")
    found = json.loads(run("bench_append", *options, "--multiples", "6,12", "--json"))["tables"]["append_model"]
    assert [row["m"] for row in found] == [8, 15] and all(row["rows fetched per new row"] > 0 for row in found)


def test_session(tmp_path: Path) -> None:
    """The restored session gives the file again, or the script ends with an error; no file stays."""
    found = json.loads(run("bench_session", "--tiny", "--directory", str(tmp_path), "--repeats", "1", "--json"))["tables"]["session"]
    assert [(row["tier"], row["rows"]) for row in found] == [("host", 20_000), ("resident", 20_000)]
    for row in found:
        assert row["save / disk"] == pytest.approx(row["save GB/s"] / row["disk write GB/s"]) and row["GB"] > 0.01
        assert row["save MiB"] < 256 and row["restore MiB"] < 256
    assert not list(tmp_path.iterdir())


def test_demo(tmp_path: Path) -> None:
    run("bench_demo", "--tiny", "--out", str(tmp_path))
    (key,) = rows_of(tmp_path, "pass_keys")
    assert (key["resident right"], key["host right"], key["all bits equal"]) == ("1.0", "1.0", "True")
    hits = rows_of(tmp_path, "hit_rates")
    assert [row["layers"] for row in hits] == ["0", "1", "2 to 5", "6 to 7"]
    for row in hits:
        assert float(row["hits %"]) + float(row["recent %"]) + float(row["misses %"]) == pytest.approx(100)
        assert int(row["cache slots"]) == int(row["hot rows"]) - 192 and float(row["misses %"]) > 0
    assert [row["tier"] for row in rows_of(tmp_path, "speed")] == ["resident", "host, 300 hot rows"]


@pytest.mark.parametrize("place", ["host memory", "hot buffer"])
def test_the_gather_oracle_sees_one_wrong_byte(load: Any, device: Device, place: str) -> None:
    scene_module = load("gather_scene")
    sizes = scene_module.Sizes(k=64, hot_rows=448, layers=2, extent_rows=64)
    host = scene_module.HostRows(device, 900, sizes, "register")
    scene = scene_module.Scene(device, device.default_stream, sizes, host, 900)
    graph = scene.graph([range(2)])
    full = scene_module.Fill.FULL
    try:
        for fill in scene_module.Fill:
            scene.verify(graph, fill, 20, 1)
        held, selection = scene.snapshots[full].position_of, scene.selections(full, 20, 1, 1)[0]
        hit = int(np.flatnonzero(held == selection[np.isin(selection, held)][0])[0])
        last_byte = scene.hot.address + (scene_module.RING_ROWS + hit + 1) * scene_module.ROW_BYTES - 1

        class SpoiledGraph:
            """Changes the last byte of a row that is a hit, behind the gather."""

            def launch(self, stream: Stream) -> None:
                graph.launch(stream)
                right = int(scene_module.pattern(held[[hit]], 0).view(np.uint8)[0, -1])
                stream.fill(last_byte, right ^ 1, 1)

        if place == "host memory":
            for slab in host.slabs:  # the last byte of every row, so that the first one fetched is wrong
                slab.array[655::656] ^= 1
        with pytest.raises(Glm53Error, match="13 of 64 rows" if place == "host memory" else "1 of 64 rows"):
            scene.verify(graph if place == "host memory" else SpoiledGraph(), full, 20, 1)
    finally:
        graph.close()
        scene.free()
        host.free()


def test_the_gather_counts_what_it_says(load: Any, device: Device) -> None:
    """Every repetition of a point misses as many rows as the others."""
    scene_module = load("gather_scene")
    sizes = scene_module.Sizes(k=64, hot_rows=448, layers=1, extent_rows=64)
    host = scene_module.HostRows(device, 900, sizes, "register")
    scene = scene_module.Scene(device, device.default_stream, sizes, host, 900)
    try:
        for fill in scene_module.Fill:
            bank = scene.bank(scene.selections(fill, 50, 3, seed=9))
            for index in range(3):
                scene.restore(fill)
                scene.select(bank, index)
                scene.gather([range(1)], None)
                counters = scene.tables.counters.numpy(scene.stream)[0, 0]
                assert (counters[Counter.HITS], counters[Counter.MISSES]) == (32, 32)
                assert counters[Counter.EVICTIONS] == (0 if fill is scene_module.Fill.FREE else 32)
    finally:
        scene.free()
        host.free()


def test_sizes_that_cannot_be_measured(load: Any) -> None:
    with pytest.raises(Glm53Error, match="history of 500"):
        load("gather_scene").Sizes(k=64, hot_rows=640, layers=1, extent_rows=64).check(500)


def test_crossover(load: Any) -> None:
    crossover = load("bench_append").crossover
    assert crossover([1, 4, 16], [0.5, 0.5, 2.0]) == pytest.approx(8)
    assert crossover([1, 2], [0.5, 0.9]) is None and crossover([1, 2], [1.5, 2.0]) is None


def test_sessions(tmp_path: Path) -> None:
    text = run("bench_sessions", "--tiny", "--out", str(tmp_path))
    rows = rows_of(tmp_path, "sessions")
    assert [row["session"] for row in rows] == ["0", "1", "2"]
    assert all(row["tokens equal"] == row["logprobs equal"] == "True" for row in rows), rows
    assert all(float(row["alone us a token"]) > 0 and float(row["together us a token"]) > 0 for row in rows)
    assert "all 3 complete: 72 tokens" in text and "device memory sampled" in text
    steps = rows_of(tmp_path, "step")
    assert [(row["selections"], row["tier"]) for row in steps] == [
        ("natural, served", "host"),
        ("natural", "host"),
        ("drawn", "host"),
        ("drawn", "resident"),
    ]
    for row in steps:
        assert row["rows"] == "3" and 0 < float(row["floor us"]) < float(row["step us"])
        assert float(row["step / floor"]) == pytest.approx(float(row["step us"]) / float(row["floor us"]))
    assert float(steps[2]["misses %"]) == pytest.approx(100 * 8 / 64) and float(steps[1]["MB from host"]) > float(steps[2]["MB from host"]) > 0
