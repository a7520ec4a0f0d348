"""Which fast paths an engine takes on its devices: those whose litmus loop passes, with a note that says so; else the fallback, and why."""

from __future__ import annotations

from collections.abc import Sequence

from glm53.check import litmus
from glm53.check.links import exchange_litmus, open_link
from glm53.config import EngineConfig
from glm53.hip import Device, Link, PeerAccess


def fetch_method(devices: Sequence[Device], config: EngineConfig, notes: list[str]) -> str:
    """How the host tier moves rows: by kernels that read and write host memory where the litmus loop passes, else by copies, misses gathered by the
    host."""
    if config.kv_tier == "resident":
        return "kernel"
    results = [litmus.registered_memory(device) for device in devices]
    failed = next((result for result in results if not result.passed), None)
    notes.append(
        f"missed rows are read, and new rows written, by kernels straight in host memory ({results[0].detail})"
        if failed is None
        else f"missed rows are gathered by the host and new rows copied, since kernels cannot use registered memory here: {failed.detail}"
    )
    return "kernel" if failed is None else "copy"


def replays_graphs(devices: Sequence[Device], config: EngineConfig, notes: list[str]) -> bool:
    """Whether decode steps are recorded and replayed: if asked for, and a short replay gives what launches give."""
    if not config.graphs:
        return False
    results = [litmus.graph_replay(device, nodes=64, replays=8) for device in devices]
    failed = next((result for result in results if not result.passed), None)
    notes.append(
        f"decode steps are recorded and replayed as graphs ({results[0].detail})"
        if failed is None
        else f"decode steps are enqueued launch by launch, since graphs do not replay right here: {failed.detail}"
    )
    return failed is None


def pair_link(devices: Sequence[Device], config: EngineConfig, notes: list[str]) -> tuple[Link, bool]:
    """The checked link of a pair, and whether kernels of the two devices may wait for each other's words. Raises LinkError, LinkStuck."""
    a, b = devices
    link = open_link(a, b, PeerAccess(config.p2p))
    try:
        rates = ", ".join(f"{way.source} to {way.target} {way.bytes_per_s / 1e9:.1f} GB/s and {way.latency_us:.1f} us" for way in link.ways.values())
        how = "peer access, checked" if link.peer else f"staged through host memory ({link.reason}), checked"
        notes.append(f"devices {a.index} and {b.index}: {how}; {rates}")
        if not link.peer:
            notes.append("sums of a decode step are exchanged by copies")
            return link, False
        result = exchange_litmus(link)
        notes.append(
            f"sums of a decode step are exchanged by kernels ({result.detail})"
            if result.passed
            else f"sums of a decode step are exchanged by copies, since kernels do not hear each other right here: {result.detail}"
        )
        return link, result.passed
    except BaseException:
        link.close()
        raise
