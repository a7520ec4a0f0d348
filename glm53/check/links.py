"""Links between devices, opened with the kernel whose stores are to be checked, and the matrix of all of them on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations
from typing import Any

from glm53.errors import Glm53Error, LinkStuck
from glm53.hip import Device, Link, PeerAccess, runtime
from glm53.ops import litmus


def open_link(a: Device, b: Device, mode: PeerAccess) -> Link:
    """`Link.probe` with the kernel that copies words; arguments, result and errors are its own."""
    return Link.probe(a, b, mode, litmus.copy_words)


def link_matrix() -> list[dict[str, Any]]:
    """One row per ordered pair of devices of the runtime in use, in order of (source, target); none for a single device.

    source, target: indices; peer_access: copies and kernels of the source reach the target's memory; checked: a payload arrived unchanged, by peer
    access or staged; bytes_per_s, latency_us: of copies, None if not checked; reason: why there is no peer access or no link, else "".
    Raises LinkStuck if a device does not come back; its memory and the devices stay open then.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        devices = [Device(index) for index in range(runtime.select().device_count)]
        for device in devices:
            stack.callback(device.close)
        for a, b in combinations(devices, 2):
            try:
                rows += _rows(a, b)
            except LinkStuck:
                stack.pop_all()
                raise
    return sorted(rows, key=lambda row: (row["source"], row["target"]))


def _rows(a: Device, b: Device) -> list[dict[str, Any]]:
    try:
        with open_link(a, b, PeerAccess.AUTO) as link:
            return [
                {
                    "source": way.source,
                    "target": way.target,
                    "peer_access": link.peer,
                    "checked": True,
                    "bytes_per_s": round(way.bytes_per_s),
                    "latency_us": round(way.latency_us, 2),
                    "reason": link.reason,
                }
                for way in link.ways.values()
            ]
    except LinkStuck:
        raise
    except Glm53Error as error:
        none = {"peer_access": False, "checked": False, "bytes_per_s": None, "latency_us": None, "reason": str(error)}
        return [{"source": source.index, "target": target.index, **none} for source, target in ((a, b), (b, a))]
