"""What the benchmarks share: the machine they ran on, event times behind a flushed L2, tables for the screen and for files.

A time is that of the device between two events around the work alone. Before each one a large buffer is written, so that nothing of the run before
is left in L2, and so that the host has enqueued everything when the device gets there. Cases take turns: drift falls on all of them alike.
"""

from __future__ import annotations

import csv
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from glm53.hip import Device, Event, Stream
from glm53.hip.runtime import native_directory

ROOT = Path(__file__).resolve().parent.parent
Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Times:
    """Microseconds of one case: every sample, in order."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def least(self) -> float:
        return min(self.samples)


@dataclass(frozen=True)
class Case:
    """What is timed. prepare(i): enqueued before the flush of repetition i; place(i): enqueued after it, so that its stores lie in L2 as they would
    if a kernel had just made them; run(): enqueued between the events."""

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda index: None
    place: Callable[[int], object] = lambda index: None


class Timer:
    """Times cases on one stream. `flush_bytes` of device memory are written before every repetition."""

    def __init__(self, device: Device, stream: Stream, flush_bytes: int):
        self.device, self.stream = device, stream
        self._buffer = device.alloc(flush_bytes, category="flush")

    def flush(self, value: int) -> None:
        self.stream.fill(self._buffer.address, value % 256, self._buffer.byte_count)

    def times(self, cases: Mapping[Any, Case], repeats: int, warm: int = 3) -> dict[Any, Times]:
        """`repeats` samples of each case, after `warm` ones that do not count (their repetitions have the indices from `repeats` on)."""
        events = {key: (self.device.event(timing=True), self.device.event(timing=True)) for key in cases}
        samples: dict[Any, list[float]] = {key: [] for key in cases}
        for turn in range(-warm, repeats):
            index = turn if turn >= 0 else repeats - 1 - turn
            for key, case in cases.items():
                self._enqueue(case, index, *events[key])
            self.stream.synchronize()
            if turn < 0:
                continue
            for key, (first, last) in events.items():
                samples[key].append(last.elapsed_us(first))
        for pair in events.values():
            for event in pair:
                event.close()
        return {key: Times(tuple(every)) for key, every in samples.items()}

    def time(self, run: Callable[[], object], repeats: int, warm: int = 2) -> Times:
        """Samples of one case without preparation."""
        return self.times({None: Case(run)}, repeats, warm)[None]

    def _enqueue(self, case: Case, index: int, first: Event, last: Event) -> None:
        case.prepare(index)
        self.flush(index)
        case.place(index)
        first.record(self.stream)
        case.run()
        last.record(self.stream)

    def free(self) -> None:
        self._buffer.free()


def copy_bandwidth(device: Device, byte_count: int, repeats: int) -> float:
    """Bytes read and written per second by device-to-device copies."""
    stream = device.stream()
    timer = Timer(device, stream, 1 << 20)
    source, target = device.alloc(byte_count, category="copy"), device.alloc(byte_count, category="copy")
    try:
        times = timer.time(lambda: stream.copy(target.address, source.address, byte_count), repeats)
    finally:
        source.free()
        target.free()
        timer.free()
    return 2 * byte_count / times.median * 1e6


def commit() -> str:
    """Short hash of the checkout and whether it has changes; where there is no git, what the kernels were built from."""
    sources = json.loads((native_directory() / "manifest.json").read_text())["source_sha256"][:12]
    try:
        run = lambda *words: subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True).stdout.strip()
        head, changed = run("rev-parse", "--short", "HEAD"), run("status", "--porcelain", "--untracked-files=no")
        return f"{head}{' with changes' if changed else ''}, kernel sources {sources}"
    except (OSError, subprocess.CalledProcessError):
        return f"no git here, kernel sources {sources}"


def machine(device: Device) -> dict[str, str]:
    """Where and when a benchmark ran."""
    info = device.runtime
    return {
        "device": f"{device.name} ({device.arch}), {device.properties.compute_units} compute units",
        "runtime": f"{info.name} {info.runtime_version}, driver {info.driver_version}",
        "python": f"{platform.python_version()}, {info.binding}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def spell(value: Cell) -> str:
    """A cell for the screen."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else value


@dataclass
class Table:
    """Rows of one kind. `name` is also that of its file; units stand in the names of the columns."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns), f"{self.name}: {len(cells)} cells, {len(self.columns)} columns"
        self.rows.append(cells)

    def text(self) -> str:
        lines = [tuple(self.columns), *(tuple(spell(cell) for cell in row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join([self.title, *("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)])

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Report:
    """Collects what a benchmark found. Without `as_json` each table and remark is printed as it comes; `close` writes files and JSON."""

    def __init__(self, device: Device, out: Path | None, as_json: bool):
        self.machine, self._out, self._as_json = machine(device), out, as_json
        self._tables: list[Table] = []
        self._remarks: list[str] = []
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self._say("\n".join(f"{key:>8}  {value}" for key, value in self.machine.items()))

    def table(self, table: Table) -> None:
        self._tables.append(table)
        self._say("\n" + table.text())
        if self._out is not None:
            with (self._out / f"{table.name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([table.columns, *table.rows])

    def remark(self, text: str) -> None:
        self._remarks.append(text)
        self._say(text)

    def _say(self, text: str) -> None:
        if not self._as_json:
            click.echo(text)

    def close(self) -> None:
        found = {"machine": self.machine, "tables": {table.name: table.dicts() for table in self._tables}, "remarks": self._remarks}
        text = json.dumps(found, indent=1)
        if self._out is not None:
            (self._out / "report.json").write_text(text + "\n")
        if self._as_json:
            click.echo(text)


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every benchmark."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print one JSON document instead of tables"),
        click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="directory for CSV files and report.json"),
        click.option("--runtime", "runtime_name", default="auto", show_default=True, help="auto, rocm, cuda or cpu"),
    ):
        command = option(command)
    return command


def numbers(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Callback of options such as --layers 1,4."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise click.BadParameter(f"got {value!r}, wanted whole numbers with commas, e.g. {parameter.default}")
    return found
