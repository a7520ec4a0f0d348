"""Placement of slabs on the device's NUMA node: what sysfs says, what mbind is asked for, and that failures are only noted."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from glm53.hip import Device
from glm53.kv import numa
from glm53.kv.slabs import Slab

GET_MEMPOLICY = 239  # x86_64
MPOL_F_ADDR = 2


def sysfs(folder: Path, text: str) -> Path:
    place = folder / "0000:1b:00.0"
    place.mkdir()
    (place / "numa_node").write_text(text)
    return folder


def device_at(pci_bus: str, runtime: str = "rocm") -> Any:
    return SimpleNamespace(index=3, runtime=SimpleNamespace(name=runtime), properties=SimpleNamespace(pci_bus=pci_bus))


@pytest.mark.parametrize("text, node", [("0\n", 0), ("7\n", 7), ("-1\n", None), ("", None), ("none\n", None), ("1024\n", None)])
def test_node_of_a_device(tmp_path: Path, text: str, node: int | None) -> None:
    devices = sysfs(tmp_path, text)
    assert numa.node_of("0000:1b:00", devices) == node
    assert numa.node_of("0000:1c:00", devices) is None


def test_pages_are_preferred_on_the_node_of_the_device(tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []
    devices, array = sysfs(tmp_path, "1\n"), np.zeros(3 * mmap.PAGESIZE + 5, np.uint8)
    for device in (device_at("0000:1b:00"), device_at("0000:1b:00", "cpu"), device_at("0000:1c:00")):
        numa.place(array, device, devices, lambda *call: asked.append(call))
    assert asked == [(array.ctypes.data, 4 * mmap.PAGESIZE, 1)]


def test_a_refusal_is_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int, byte_count: int, node: int) -> None:
        raise OSError(1, "Operation not permitted")

    devices, array = sysfs(tmp_path, "1\n"), np.zeros(16, np.uint8)
    with caplog.at_level(logging.WARNING, logger="glm53"):
        numa._note.cache_clear()
        for _ in range(3):
            numa.place(array, device_at("0000:1b:00"), devices, refuse)
    assert [record.getMessage() for record in caplog.records] == [
        "host memory is not placed on NUMA node 1 of device 3: [Errno 1] Operation not permitted"
    ]


def test_mbind_sets_the_policy_of_the_pages() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the number of get_mempolicy is known for x86_64")
    mapping = mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    try:
        numa.mbind(address, 4 * mmap.PAGESIZE, 0)
    except OSError as error:
        pytest.skip(f"this system does not let processes place memory: {error}")
    call = ctypes.CDLL(None).syscall
    found = []
    for page in (0, 3, 4):
        policy, mask = ctypes.c_int(-1), (ctypes.c_uint64 * 16)()
        where = ctypes.c_void_p(address + page * mmap.PAGESIZE)
        assert call(GET_MEMPOLICY, ctypes.byref(policy), mask, ctypes.c_ulong(1024), where, ctypes.c_ulong(MPOL_F_ADDR)) == 0
        found.append((policy.value, mask[0]))
    assert found == [(numa.MPOL_PREFERRED, 1), (numa.MPOL_PREFERRED, 1), (0, 0)]
    with pytest.raises(OSError, match="Errno"):
        numa.mbind(address + 1, mmap.PAGESIZE, 0)


def test_a_slab_is_placed_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    resident: list[int] = []

    def look(array: np.ndarray, device: Device) -> None:
        pages = array.nbytes // mmap.PAGESIZE
        states = (ctypes.c_ubyte * pages)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), states) == 0
        resident.append(sum(state & 1 for state in states))

    monkeypatch.setattr(numa, "place", look)
    with Device(0) as device:
        slab = Slab(device, 1 << 20, "register", "host history")
        look(slab.array, device)
        slab.free()
    assert resident == [0, (1 << 20) // mmap.PAGESIZE]
