"""cpu runtime: sizes, poison, red zones, freed memory, registered memory and its second mapping."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from cpu_hip import WordsArgs


def small(gpu: Any, device_bytes: int = 1 << 20) -> None:
    _ = gpu.hip
    assert gpu.control.glm53_cpu_configure(2, device_bytes) == 0


def test_device_memory_runs_out(gpu: Any) -> None:
    small(gpu)
    first = gpu.alloc(1 << 19)
    assert gpu.code("hipMalloc", (1 << 19) + 1) == "hipErrorOutOfMemory"
    second = gpu.alloc(1 << 19)
    assert gpu.hipMemGetInfo() == (0, 1 << 20)
    assert gpu.code("hipMalloc", 1) == "hipErrorOutOfMemory"
    gpu.hipSetDevice(1)
    assert gpu.code("hipMalloc", 1 << 20) == "hipSuccess"  # the other device has its own
    gpu.hipSetDevice(0)
    gpu.hipFree(first)
    gpu.hipFree(second)
    assert gpu.hipMemGetInfo() == (1 << 20, 1 << 20)


def test_memory_is_counted_in_pages(gpu: Any) -> None:
    small(gpu)
    gpu.alloc(1)
    gpu.alloc(4097)
    assert gpu.hipMemGetInfo()[0] == (1 << 20) - 3 * 4096


def test_absurd_sizes(gpu: Any) -> None:
    assert gpu.code("hipMalloc", 2**63) == "hipErrorOutOfMemory"
    assert gpu.code("hipHostMalloc", 2**63, 0) == "hipErrorOutOfMemory"
    assert gpu.code("hipMalloc", 0) == "hipSuccess"
    assert gpu.live("allocations") == 0


@pytest.mark.parametrize(
    ("flags", "result"), [(0, "hipSuccess"), (1, "hipSuccess"), (3, "hipSuccess"), (2, "hipErrorInvalidValue"), (9, "hipErrorInvalidValue")]
)
def test_allocation_flags(gpu: Any, flags: int, result: str) -> None:
    assert gpu.code("hipExtMallocWithFlags", 64, flags) == result


@pytest.mark.parametrize("byte_count", [1, 100, 5000, 9 << 20])
def test_fresh_memory_is_poisoned(gpu: Any, byte_count: int) -> None:
    assert (gpu.download(gpu.alloc(byte_count), byte_count, np.uint8) == 0xFF).all()


def test_large_allocation_is_committed_lazily(gpu: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    address = gpu.alloc(2 << 30)
    assert resident() - before < 64 << 20
    gpu.hipFree(address)


def test_write_past_the_end_loses_the_device(gpu: Any) -> None:
    x, y = gpu.alloc(16), gpu.alloc(40)
    gpu.launch("overrun", WordsArgs(x, y, 10))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "red zone after the 40-byte allocation" in gpu.message() and "overrun" in gpu.message()


def test_red_zone_is_checked_at_device_sync(gpu: Any) -> None:
    ctypes.c_uint32.from_address(gpu.alloc(40) - 4).value = 1
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "red zone before" in gpu.message()


def test_red_zone_is_checked_at_free(gpu: Any) -> None:
    address = gpu.alloc(40)
    ctypes.c_uint32.from_address(address + 40).value = 1
    assert gpu.code("hipFree", address) == "hipErrorIllegalAddress"
    assert gpu.code("hipMalloc", 16) == "hipErrorIllegalAddress"


def test_red_zone_of_host_memory(gpu: Any) -> None:
    address = int(gpu.hipHostMalloc(40, 0))
    ctypes.c_uint32.from_address(address + 40).value = 1
    assert gpu.code("hipHostFree", address) == "hipErrorIllegalAddress"


def test_freed_memory_is_poisoned_and_watched(gpu: Any) -> None:
    address = gpu.upload(np.zeros(64, np.uint32))
    gpu.hipFree(address)
    assert ctypes.c_uint32.from_address(address).value == 0xFFFFFFFF  # in quarantine
    ctypes.c_uint32.from_address(address + 8).value = 3
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "freed memory" in gpu.message() and "offset 8" in gpu.message()


def test_kernel_on_freed_memory(gpu: Any) -> None:
    address = gpu.alloc(128)
    gpu.hipFree(address)
    gpu.launch("add_one", WordsArgs(address, address, 32))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "freed" in gpu.message() and "add_one, argument offset 0" in gpu.message()


def test_free_rules(gpu: Any) -> None:
    address = gpu.alloc(64)
    assert gpu.code("hipFree", None) == "hipSuccess"
    assert gpu.code("hipFree", address + 4) == "hipErrorInvalidDevicePointer"
    assert gpu.code("hipFree", address) == "hipSuccess"
    assert gpu.code("hipFree", address) == "hipErrorInvalidDevicePointer"
    host = gpu.hipHostMalloc(64, 0)
    assert gpu.code("hipFree", host) == "hipErrorInvalidDevicePointer"
    assert gpu.code("hipHostFree", gpu.alloc(64)) == "hipErrorInvalidValue"
    assert gpu.code("hipHostFree", host) == "hipSuccess"
    assert gpu.code("hipHostFree", host) == "hipErrorInvalidValue"


def test_free_waits_for_queued_work(gpu: Any) -> None:
    gpu.seed(3)
    for _ in range(10):
        x, y = gpu.upload(np.zeros(32, np.uint32)), gpu.alloc(128)
        stream = gpu.hipStreamCreateWithFlags(1)
        for _ in range(5):
            gpu.launch("add_one", WordsArgs(x, y, 32), stream=stream)
        gpu.hipFree(x)
        assert gpu.code("hipStreamQuery", stream) == "hipSuccess"
        gpu.hipFree(y)


def test_host_memory_has_another_address_on_the_device(gpu: Any) -> None:
    host = gpu.pinned(32)
    host[:] = np.arange(32)
    alias = int(gpu.hipHostGetDevicePointer(host.ctypes.data, 0))
    assert alias != host.ctypes.data
    gpu.launch("add_one", WordsArgs(alias, alias, 32))
    gpu.hipDeviceSynchronize()
    assert host.tolist() == list(range(1, 33))
    assert int(gpu.hipHostGetDevicePointer(host.ctypes.data + 20, 0)) == alias + 20


def test_host_pointer_on_the_device_fails(gpu: Any) -> None:
    host = gpu.pinned(32)
    gpu.launch("add_one", WordsArgs(host.ctypes.data, host.ctypes.data, 32))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "host address" in gpu.message() and "hipHostGetDevicePointer" in gpu.message()


def test_pageable_pointer_on_the_device_fails(gpu: Any) -> None:
    array = np.zeros(32, np.uint32)
    gpu.launch("add_one", WordsArgs(array.ctypes.data, 0, 0))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"


def test_null_pointers_are_allowed(gpu: Any) -> None:
    gpu.launch("add_one", WordsArgs(0, 0, 0))
    assert gpu.code("hipDeviceSynchronize") == "hipSuccess"


@pytest.mark.parametrize(("offset", "byte_count"), [(0, 4096), (100, 5000), (8, 64), (4000, 3 << 20)])
def test_register_keeps_contents_both_ways(gpu: Any, offset: int, byte_count: int) -> None:
    array = np.random.default_rng(1).integers(0, 256, byte_count + 8192, dtype=np.uint8)
    copy = array.copy()
    address = array.ctypes.data + offset
    gpu.hipHostRegister(address, byte_count, 0)
    alias = int(gpu.hipHostGetDevicePointer(address, 0))
    assert (array == copy).all() and alias != address
    assert ctypes.string_at(alias, byte_count) == copy[offset : offset + byte_count].tobytes()
    array[offset + 5] = copy[offset + 5] = 77
    assert ctypes.c_uint8.from_address(alias + 5).value == 77
    ctypes.c_uint8.from_address(alias + 6).value = copy[offset + 6] = 78
    gpu.hipHostUnregister(address)
    assert (array == copy).all()
    assert gpu.code("hipHostGetDevicePointer", address, 0) == "hipErrorInvalidValue"
    array[:] = 1  # private again, and writable


def test_two_registrations_on_one_page(gpu: Any) -> None:
    array = np.arange(4096 * 3, dtype=np.uint8)
    base = array.ctypes.data
    gpu.hipHostRegister(base + 100, 200, 0)
    gpu.hipHostRegister(base + 400, 5000, 0)
    first, second = (int(gpu.hipHostGetDevicePointer(base + at, 0)) for at in (100, 400))
    array[100], array[400] = 11, 22
    assert (ctypes.c_uint8.from_address(first).value, ctypes.c_uint8.from_address(second).value) == (11, 22)
    gpu.hipHostUnregister(base + 100)
    array[401] = 33
    assert ctypes.c_uint8.from_address(second + 1).value == 33
    gpu.hipHostUnregister(base + 400)
    assert array[100] == 11 and array[401] == 33


def test_register_rules(gpu: Any) -> None:
    array = np.zeros(10000, np.uint8)
    gpu.hipHostRegister(array.ctypes.data, 5000, 0)
    assert gpu.code("hipHostRegister", array.ctypes.data + 4000, 5000, 0) == "hipErrorHostMemoryAlreadyRegistered"
    assert gpu.code("hipHostUnregister", array.ctypes.data + 1) == "hipErrorHostMemoryNotRegistered"
    gpu.hipHostUnregister(array.ctypes.data)
    assert gpu.code("hipHostUnregister", array.ctypes.data) == "hipErrorHostMemoryNotRegistered"
    assert gpu.code("hipHostRegister", array.ctypes.data, 0, 0) == "hipErrorInvalidValue"
    assert gpu.code("hipHostRegister", array.ctypes.data, 100, 0x40) == "hipErrorInvalidValue"
    assert gpu.code("hipHostRegister", 1 << 20, 4096, 0) == "hipErrorInvalidValue"  # nothing there
    assert gpu.code("hipHostRegister", gpu.alloc(64), 64, 0) == "hipErrorHostMemoryAlreadyRegistered"


def test_register_shared_and_read_only_mappings(gpu: Any) -> None:
    shared = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    gpu.hipHostRegister(shared.ctypes.data, 8192, 0)
    alias = int(gpu.hipHostGetDevicePointer(shared.ctypes.data, 0))
    shared[7] = 9
    assert ctypes.c_uint8.from_address(alias + 7).value == 9
    gpu.hipHostUnregister(shared.ctypes.data)
    assert shared[7] == 9
    with open("/proc/self/exe", "rb") as file:
        read_only = np.frombuffer(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ), np.uint8)
        assert gpu.code("hipHostRegister", read_only.ctypes.data, 4096, 0) == "hipErrorInvalidValue"


def test_pointer_attributes(gpu: Any) -> None:
    kind = gpu.hip.hipMemoryType
    device, host = gpu.alloc(64), gpu.pinned(16)
    found = gpu.hipPointerGetAttributes(device + 4)
    assert found.type == kind.hipMemoryTypeDevice and int(found.devicePointer) == device + 4
    found = gpu.hipPointerGetAttributes(host.ctypes.data)
    assert found.type == kind.hipMemoryTypeHost and int(found.hostPointer) == host.ctypes.data
    assert int(found.devicePointer) == int(gpu.hipHostGetDevicePointer(host.ctypes.data, 0))
    assert gpu.code("hipPointerGetAttributes", np.zeros(4).ctypes.data) == "hipErrorInvalidValue"


def test_host_flags(gpu: Any) -> None:
    assert gpu.code("hipHostMalloc", 64, 0x80) == "hipErrorInvalidValue"
    assert gpu.code("hipHostMalloc", 64, 0x40000000 | 0x80000000) == "hipErrorInvalidValue"
    assert gpu.code("hipHostMalloc", 64, 0x40000000) == "hipSuccess"


def test_address_read_from_memory_is_checked(gpu: Any) -> None:
    target, result = gpu.alloc(64), gpu.alloc(64)
    table = gpu.upload(np.array([target], np.uint64))
    gpu.launch("chase", WordsArgs(table, result, 4))
    gpu.hipDeviceSynchronize()
    assert gpu.download(target, 1)[0] == 9
    gpu.hipFree(target)
    gpu.launch("chase", WordsArgs(table, result, 4))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert f"{target:#x}" in gpu.message() and "chase" in gpu.message()


def test_address_read_from_memory_is_checked_to_its_end(gpu: Any) -> None:
    target, result = gpu.alloc(64), gpu.alloc(64)
    table = gpu.upload(np.array([target + 60], np.uint64))
    gpu.launch("chase", WordsArgs(table, result, 8))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "only 4 are left" in gpu.message()
