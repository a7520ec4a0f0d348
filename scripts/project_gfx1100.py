#!/usr/bin/env python3
"""What a decode step would take on Radeon PRO W7900D cards (gfx1100), from the built code object and times measured on another device.

    scripts/bench_kernels --runtime cuda --out results/kernels
    scripts/project_gfx1100.py --measured results/kernels

Prints Markdown: registers, LDS and waves of every kernel of a step, the time projected from its bytes and its measured efficiency, sums by layer and
for a token through eight pairs, and every assumption. A projection: nobody here has run it on an AMD GPU.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from kernel_cases import RELEASED

from glm53.errors import Glm53Error
from glm53.hip.module import manifest, object_path

ARCH = "gfx1100"
CARD_BYTES_PER_US = 864e9 / 1e6
PUBLISHED_TOKENS_PER_S = 14.03  # 16 cards, 50K history on the GPUs, no MTP
PAIRS, LAYERS = 8, 78
VGPRS_A_LANE, VGPR_UNIT, WAVES_MAX, SIMDS, LDS_BYTES = 1536, 24, 16, 4, 128 << 10  # of a SIMD in wave32, of a work-group processor
LOW = 0.25  # efficiency below which a kernel waits for latency rather than for memory
READELF_NAMES = ("llvm-readelf", *(f"llvm-readelf-{version}" for version in range(22, 14, -1)))

FULL = ("q_a, kv_a, index key, gates", "index query, rows, key", "score", "top-k", "q_b")
SHARED = ("q_a, kv_a", "q_b, rows")
ATTENTION = ("absorb", "attend", "expand", "o")
SPARSE = ("router, shared gate and up", "routed gate and up", "routed and shared down")
DENSE = ("dense gate and up", "dense down")
TOKEN = ("begin", "head", "sample, greedy", "end")
# Name, launches in order of kind, how many of the 78 layers.
LAYER_KINDS = (
    ("full selection, dense", (*FULL, *ATTENTION, *DENSE), 3),
    ("full selection, experts", (*FULL, *ATTENTION, *SPARSE), 18),
    ("shared selection, experts", (*SHARED, *ATTENTION, *SPARSE), 57),
)
OPS = tuple(dict.fromkeys((*FULL, *SHARED, *ATTENTION, *SPARSE, *DENSE, *TOKEN)))
WHOLE = ("top-k", "begin", "sample, greedy", "end")  # both devices of a pair do all of it


@dataclass(frozen=True)
class Measured:
    """One launch at batch 1 on the device of bench_kernels. efficiency: of the copy bandwidth there, at most 1."""

    kernel: str
    bytes: int
    us: float
    efficiency: float

    def us_of(self, byte_count: float) -> float:
        """On a card, at the efficiency measured."""
        return byte_count / (CARD_BYTES_PER_US * self.efficiency)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a compute unit, from the code object."""

    vgprs: int
    sgprs: int
    lds: int
    spills: int
    threads: int

    @property
    def waves(self) -> float:
        """Waves a SIMD that fit by VGPRs and LDS, in whole workgroups of a work-group processor."""
        waves = self.threads / 32
        by_registers = min(WAVES_MAX, VGPRS_A_LANE // (-(-max(self.vgprs, 1) // VGPR_UNIT) * VGPR_UNIT))
        groups = by_registers * SIMDS // waves
        if self.lds:
            groups = min(groups, LDS_BYTES // self.lds)
        return groups * waves / SIMDS


def read_measured(directory: Path, history: int) -> dict[str, Measured]:
    """Rows = 1 of kernels.csv by op; score and top-k at `history`. Raises Glm53Error if an op of the step is not there."""
    path = directory / "kernels.csv"
    found: dict[str, Measured] = {}
    if not path.is_file():
        raise Glm53Error(f"{path} does not exist; next: scripts/bench_kernels --runtime cuda --out {directory}")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["part"] == "prefill" or row["rows"] != "1" or row["history"] not in ("", str(history)):
                continue
            efficiency = min(1.0, float(row["% of peak"]) / 100)
            found[row["op"]] = Measured(row["kernel"], int(row["bytes"]), float(row["median us"]), efficiency)
    missing = [op for op in OPS if op not in found]
    if missing:
        raise Glm53Error(
            f"{path} has no time at 1 row (history {history:,}) of: {'; '.join(missing)}; next: run bench_kernels with all parts and these"
        )
    return {op: found[op] for op in OPS}


def parse_notes(text: str) -> dict[str, Resources]:
    """Kernels of `llvm-readelf --notes` of an AMD code object."""
    document: dict[str, Any] = yaml.safe_load(text[text.index("---") : text.rindex("...")])
    return {
        kernel[".name"]: Resources(
            kernel[".vgpr_count"],
            kernel[".sgpr_count"],
            kernel[".group_segment_fixed_size"],
            kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"],
            kernel[".max_flat_workgroup_size"],
        )
        for kernel in document["amdhsa.kernels"]
    }


def read_resources() -> dict[str, Resources]:
    """Of the built code object for gfx1100. Raises Glm53Error where it, or llvm-readelf, is missing, or a kernel spills."""
    program = next((path for name in READELF_NAMES if (path := shutil.which(name))), None)
    if program is None:
        raise Glm53Error(
            f"none of {', '.join(READELF_NAMES)} is installed; next: install llvm, whose readelf prints the metadata of AMD code objects"
        )
    text = subprocess.run([program, "--notes", str(object_path(ARCH))], capture_output=True, text=True, check=True).stdout
    kernels = parse_notes(text)
    spilling = [f"{name} {r.spills}" for name, r in kernels.items() if r.spills]
    if spilling:
        raise Glm53Error(f"kernels of {ARCH} spill registers, wanted none: {', '.join(spilling)}; next: fewer values alive at once in these")
    return kernels


def pair_bytes(op: str, byte_count: int) -> float:
    """Bytes that the busier device of a pair moves: weights, heads and keys are split in two; history rows are read whole by both."""
    if op in WHOLE:
        return byte_count
    whole = RELEASED.topk * (RELEASED.row_bytes + 8) if op == "attend" else 0
    return (byte_count - whole) / 2 + whole


@dataclass(frozen=True)
class Sum:
    """Several launches. floor: bytes at full bandwidth; projected: at the measured efficiency; mixed: likewise, but launches below LOW keep the time
    measured. Microseconds."""

    launches: int
    bytes: float
    floor: float
    projected: float
    mixed: float

    def __add__(self, other: Sum) -> Sum:
        mine, theirs = (vars(one) for one in (self, other))
        return Sum(**{name: mine[name] + theirs[name] for name in mine})

    def times(self, count: int) -> Sum:
        return Sum(**{name: value * count for name, value in vars(self).items()})


def sum_of(measured: Mapping[str, Measured], ops: Sequence[str], pair: bool) -> Sum:
    total = Sum(0, 0, 0, 0, 0)
    for op in ops:
        m = measured[op]
        moved = pair_bytes(op, m.bytes) if pair else float(m.bytes)
        projected = m.us_of(moved)
        total += Sum(1, moved, moved / CARD_BYTES_PER_US, projected, m.us if m.efficiency < LOW else projected)
    return total


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def kernel_table(measured: Mapping[str, Measured], resources: Mapping[str, Resources]) -> str:
    lines = []
    for op, m in measured.items():
        if m.kernel not in resources:
            raise Glm53Error(f"the code object has no kernel {m.kernel}, which kernels.csv names for {op}; next: build and measure the same sources")
        r, halved = resources[m.kernel], pair_bytes(op, m.bytes)
        used = (f"{m.bytes:,}", f"{r.lds:,}", str(r.vgprs), str(r.sgprs), str(r.spills), f"{r.waves:g}")
        times = (
            f"{m.us:.1f}",
            f"{100 * m.efficiency:.0f} %",
            f"{m.bytes / CARD_BYTES_PER_US:.1f}",
            f"{m.us_of(m.bytes):.1f}",
            f"{m.us_of(halved):.1f}",
        )
        lines.append((op, f"`{m.kernel}`", *used, *times))
    header = ("launch", "kernel", "bytes", "LDS B", "VGPRs", "SGPRs", "spills", "waves a SIMD")
    return markdown((*header, "measured us", "efficiency", "floor us", "projected us", "on a pair us"), lines)


def layer_table(measured: Mapping[str, Measured], gap_us: float, exchange_us: float) -> str:
    lines = []
    for name, ops, count in LAYER_KINDS:
        for pair in (False, True):
            s, extra = sum_of(measured, ops, pair), 2 * exchange_us * pair
            gaps = s.launches * gap_us
            place = "a device of a pair" if pair else "one card"
            times = (f"{s.floor:.0f}", f"{s.projected:.0f}", f"{s.mixed:.0f}", f"{gaps:.0f}", f"{extra:.0f}")
            totals = (f"{s.projected + gaps + extra:.0f}", f"{s.mixed + gaps + extra:.0f}")
            lines.append((f"{name} ({count})", place, str(s.launches), f"{s.bytes / 1e6:.1f}", *times, *totals))
    header = ("layer (how many)", "on", "launches", "MB", "floor us", "projected us", "mixed us", "gaps us", "exchanges us")
    return markdown((*header, "projected, all us", "mixed, all us"), lines)


def token_table(measured: Mapping[str, Measured], gap_us: float, exchange_us: float, hop_us: float) -> str:
    """One token through all stages, one after another."""
    total = sum_of(measured, TOKEN, pair=True)
    for _, ops, count in LAYER_KINDS:
        total += sum_of(measured, ops, pair=True).times(count)
    fixed = total.launches * gap_us + 2 * LAYERS * exchange_us + (PAIRS - 1) * hop_us
    lines = []
    for name, us in (
        ("floor: bytes at 864 GB/s a card, nothing else", total.floor),
        ("projected", total.projected + fixed),
        (f"mixed: launches below {100 * LOW:.0f} % keep the time measured", total.mixed + fixed),
        ("published, no MTP", 1e6 / PUBLISHED_TOKENS_PER_S),
    ):
        lines.append((name, f"{us / 1e3:.2f}", f"{1e6 / us:.2f}", f"{1e6 / us / PUBLISHED_TOKENS_PER_S:.2f}"))
    head = f"{LAYERS} layers on {PAIRS} pairs: {total.launches} launches, {total.bytes / 1e9:.2f} GB by one device of each pair, all pairs together"
    return f"{head}\n\n" + markdown(("token", "ms", "tokens/s", "against published"), lines)


def assumptions(history: int, gap_us: float, exchange_us: float, hop_us: float) -> str:
    """Everything that the tables take for granted."""
    kinds = "; ".join(f"{count} with {name}" for name, _, count in LAYER_KINDS)
    lines = (
        "No AMD GPU has run this. Efficiency: bytes a second in the `kernels.csv` named above, over the copy bandwidth of its device.",
        "projected us = bytes / (864 GB/s x efficiency): a kernel is as efficient on gfx1100 as there. Efficiencies above 1 count as 1: "
        "a kernel that only reads can be faster than a copy.",
        "Where latency binds a launch, this multiplies latency by the ratio of bandwidths, which is too slow: *mixed* keeps the time "
        f"measured of launches below {100 * LOW:.0f} % efficiency, also on a pair. The card may have another latency.",
        "864 GB/s is the card's nominal figure, not a measured copy. What its last-level cache would keep is not counted on.",
        f"Batch 1, history of {history:,} positions, resident, {RELEASED.topk:,} selected rows.",
        "q8g64 weights, q4g64 routed experts, f32 router, bf16 activations and index keys, q8g64 history rows.",
        "A pair splits every weight in two equal shares (experts, heads, columns, vocabulary), and the positions that are scored. Half of "
        "a launch is as efficient as the whole. Both devices read all selected history rows and run top-k, begin, sampling and end.",
        "The stages, of about ten layers each, work one after another on a token: its time is the sum over "
        f"{LAYERS} layers ({kinds}), embedding and head.",
        f"Launch gap: {gap_us:g} us are added for each launch, although a time measured contains the gap of a graph there already.",
        f"Exchange of a pair's partial sums: {exchange_us:g} us, twice a layer. Hop to the next stage: {hop_us:g} us, {PAIRS - 1} times, "
        "the one by TCP like the others. Nobody has measured either.",
        "Waves a SIMD: 1,536 VGPRs a lane in wave32, handed out by 24; 128 KiB of LDS for a pair of compute units (four SIMDs); at most "
        "16 waves; whole workgroups.",
        f"Published: {PUBLISHED_TOKENS_PER_S} tokens/s of another program, 50K history on the GPUs, two nodes of eight W7900D, no MTP.",
    )
    return "\n".join(f"- {line}" for line in lines)


@click.command()
@click.option("--measured", type=click.Path(file_okay=False, path_type=Path), required=True, help="directory that bench_kernels --out wrote")
@click.option("--history", default=50_000, show_default=True, help="positions that score and top-k see; bench_kernels must have timed it")
@click.option("--launch-gap-us", "gap_us", default=3.0, show_default=True, help="added for each launch")
@click.option("--exchange-us", default=10.0, show_default=True, help="a pair's exchange of partial sums, twice a layer")
@click.option("--hop-us", default=50.0, show_default=True, help="activations to the next stage")
def main(measured: Path, history: int, gap_us: float, exchange_us: float, hop_us: float) -> None:
    """Prints the table of gfx1100 kernels and the time of a token projected on eight pairs of W7900D, as Markdown."""
    found, resources = read_measured(measured, history), read_resources()
    entry = manifest()["objects"][ARCH]
    click.echo(f"Code object {entry['file']}, {entry['compiler']}, sources {entry['source_sha256'][:12]}: {len(resources)} kernels, no spills.")
    click.echo(f"Measured: `{measured / 'kernels.csv'}`.\n")
    click.echo(kernel_table(found, resources) + "\n")
    click.echo(layer_table(found, gap_us, exchange_us) + "\n")
    click.echo(token_table(found, gap_us, exchange_us, hop_us) + "\n")
    click.echo(assumptions(history, gap_us, exchange_us, hop_us))


if __name__ == "__main__":
    try:
        main()
    except Glm53Error as error:
        click.echo(f"project_gfx1100.py: {error}", err=True)
        sys.exit(error.exit_code)
