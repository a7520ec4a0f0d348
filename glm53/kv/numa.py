"""Host memory near a device: which NUMA node the device hangs on, and a preference for that node before pages are touched.

Reads sysfs and calls mbind(2) (Linux man-pages, mbind and set_mempolicy). Placement is a matter of speed: where it cannot be had, the log says so
once and memory stays where the system puts it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from glm53.hip import Device

PCI_DEVICES = Path("/sys/bus/pci/devices")
MPOL_PREFERRED = 1
MASK_WORDS = 16  # 1,024 nodes, the most a kernel is built for
MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}  # of the system call, by machine

_log = logging.getLogger("glm53")


def node_of(pci_bus: str, devices: Path = PCI_DEVICES) -> int | None:
    """NUMA node of the device at `pci_bus` ("0000:1b:00"); None where the system does not tell or the device belongs to none (-1)."""
    try:
        node = int((devices / f"{pci_bus}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < MASK_WORDS * 64 else None


def mbind(address: int, byte_count: int, node: int) -> None:
    """Pages of [address, address + byte_count) that are touched from now on come from `node` while it has free ones. Raises OSError."""
    number = MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"mbind is not known for {platform.machine()}")
    mask = (ctypes.c_uint64 * MASK_WORDS)()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype, call.argtypes = (
        ctypes.c_long,
        (ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint),
    )
    # The kernel takes one bit less than it is told.
    if call(number, address, byte_count, MPOL_PREFERRED, ctypes.addressof(mask), MASK_WORDS * 64 + 1, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def place(array: np.ndarray, device: Device, devices: Path = PCI_DEVICES, bind: Callable[[int, int, int], None] = mbind) -> None:
    """Prefers the device's node for the pages of `array`, which starts at one and is not touched yet. Never raises; the cpu runtime has no node."""
    if device.runtime.name == "cpu":
        return
    node = node_of(device.properties.pci_bus, devices)
    if node is None:
        return
    try:
        bind(array.ctypes.data, -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, node)
    except OSError as error:
        _note(f"host memory is not placed on NUMA node {node} of device {device.index}: {error}")


@functools.cache
def _note(text: str) -> None:
    """Once each: slabs come by the dozen."""
    _log.warning(text)


__all__ = ["mbind", "node_of", "place"]
