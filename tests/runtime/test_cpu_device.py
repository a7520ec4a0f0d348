"""cpu runtime: devices, properties, peers, errors, control interface."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cpu_hip import WordsArgs


def test_marker_and_versions(gpu: Any) -> None:
    assert gpu.control.glm53_runtime_name() == b"cpu"
    assert gpu.code("hipInit", 0) == "hipSuccess"
    assert gpu.code("hipInit", 1) == "hipErrorInvalidValue"
    assert gpu.hipRuntimeGetVersion() // 10_000_000 == 7
    assert gpu.hipDriverGetVersion() == gpu.hipRuntimeGetVersion()


def test_default_has_two_devices_of_4_gib(gpu: Any) -> None:
    assert gpu.hipGetDeviceCount() == 2
    free, total = gpu.hipMemGetInfo()
    assert (free, total) == (4 << 30, 4 << 30)


def test_properties(gpu: Any) -> None:
    prop = gpu.hipGetDeviceProperties(1)
    assert (str(prop.name), str(prop.gcnArchName)) == ("glm53 cpu device 1", "host")
    assert prop.warpSize == 32 and prop.maxThreadsPerBlock == 1024 and list(prop.maxGridSize)[1:] == [65535, 65535]
    assert prop.totalGlobalMem == 4 << 30 and prop.canMapHostMemory == 1
    attribute = gpu.hip.hipDeviceAttribute_t
    assert gpu.hipDeviceGetAttribute(attribute.hipDeviceAttributeWarpSize, 0) == 32
    assert gpu.hipDeviceGetAttribute(attribute.hipDeviceAttributePciBusId, 1) == 2
    assert gpu.code("hipDeviceGetAttribute", attribute.hipDeviceAttributeMaxTexture1DWidth, 0) == "hipErrorInvalidValue"


def test_names_and_bus_ids_differ(gpu: Any) -> None:
    ids = set()
    for device in (0, 1):
        text = ctypes.create_string_buffer(64)
        assert ctypes.CDLL(str(gpu.library)).hipDeviceGetPCIBusId(text, 64, device) == 0
        ids.add(text.value)
    assert len(ids) == 2
    assert ctypes.CDLL(str(gpu.library)).hipDeviceGetPCIBusId(text, 4, 0) == 1  # too short


@pytest.mark.parametrize("device", [-1, 2, 99])
def test_invalid_device(gpu: Any, device: int) -> None:
    assert gpu.code("hipSetDevice", device) == "hipErrorInvalidDevice"
    assert gpu.code("hipGetDeviceProperties", device) == "hipErrorInvalidDevice"
    assert gpu.hipGetDevice() == 0


def test_configure_before_first_use_only(gpu: Any) -> None:
    _ = gpu.hip
    assert gpu.control.glm53_cpu_configure(17, 1 << 30) == 1
    assert gpu.control.glm53_cpu_configure(3, 1 << 20) == 0
    assert gpu.hipGetDeviceCount() == 3
    assert gpu.hipMemGetInfo() == (1 << 20, 1 << 20)
    assert gpu.control.glm53_cpu_configure(1, 1 << 20) == 401


def test_no_devices(gpu: Any) -> None:
    _ = gpu.hip
    assert gpu.control.glm53_cpu_configure(0, 1 << 20) == 0
    assert gpu.code("hipGetDeviceCount") == "hipErrorNoDevice"
    for call in (("hipMalloc", 16), ("hipDeviceSynchronize",), ("hipStreamCreate",), ("hipMemset", 0, 0, 0)):
        assert gpu.code(*call) == "hipErrorNoDevice"
    assert gpu.code("hipStreamSynchronize", None) == "hipErrorInvalidHandle"
    assert gpu.code("hipFree", 4096) == "hipErrorInvalidDevicePointer"


def test_last_error_is_kept_and_cleared(gpu: Any) -> None:
    gpu.code("hipSetDevice", 99)
    assert gpu.code("hipPeekAtLastError") == "hipErrorInvalidDevice"
    assert gpu.code("hipGetLastError") == "hipErrorInvalidDevice"
    assert gpu.code("hipGetLastError") == "hipSuccess"


def test_every_error_has_name_and_text(gpu: Any) -> None:
    for name, code in (("hipErrorOutOfMemory", 2), ("hipErrorIllegalAddress", 700), ("hipErrorCapturedEvent", 907)):
        assert str(gpu.hipGetErrorName(gpu.hip.hipError_t(code))) == name
    assert str(gpu.hipGetErrorString(gpu.hip.hipError_t(2))) == "out of memory"


def test_peer_access_rules(gpu: Any) -> None:
    assert gpu.hipDeviceCanAccessPeer(0, 1) == 1
    assert gpu.hipDeviceCanAccessPeer(0, 0) == 0
    assert gpu.code("hipDeviceEnablePeerAccess", 0, 0) == "hipErrorInvalidDevice"
    assert gpu.code("hipDeviceEnablePeerAccess", 1, 1) == "hipErrorInvalidValue"
    assert gpu.code("hipDeviceDisablePeerAccess", 1) == "hipErrorPeerAccessNotEnabled"
    assert gpu.code("hipDeviceEnablePeerAccess", 1, 0) == "hipSuccess"
    assert gpu.code("hipDeviceEnablePeerAccess", 1, 0) == "hipErrorPeerAccessAlreadyEnabled"
    assert gpu.code("hipDeviceDisablePeerAccess", 1) == "hipSuccess"


def test_peer_memory_needs_access(gpu: Any) -> None:
    gpu.hipSetDevice(1)
    there = gpu.upload(np.zeros(32, np.uint32))
    gpu.hipSetDevice(0)
    gpu.hipDeviceEnablePeerAccess(1, 0)
    gpu.launch("add_one", WordsArgs(there, there, 32))
    gpu.hipDeviceSynchronize()
    assert gpu.download(there, 32).tolist() == [1] * 32
    gpu.hipDeviceDisablePeerAccess(1)
    gpu.launch("add_one", WordsArgs(there, there, 32))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "peer access" in gpu.message()


def test_lost_device_is_sticky_and_others_go_on(gpu: Any) -> None:
    gpu.launch("broken", WordsArgs())
    assert gpu.code("hipDeviceSynchronize") == "hipErrorLaunchFailure"
    assert "broken on purpose" in gpu.message() and "device 0" in gpu.message()
    for call in (("hipMalloc", 16), ("hipDeviceSynchronize",), ("hipStreamCreate",), ("hipMemGetInfo",), ("hipHostMalloc", 16, 0)):
        assert gpu.code(*call) == "hipErrorLaunchFailure"
    gpu.hipSetDevice(1)
    x = gpu.upload(np.arange(32, dtype=np.uint32))
    gpu.launch("add_one", WordsArgs(x, x, 32))
    assert gpu.download(x, 2).tolist() == [1, 2]


def test_fault_injection_hits_the_nth_call(gpu: Any) -> None:
    _ = gpu.hip
    gpu.control.glm53_cpu_fail(b"hipMalloc", 3, 2)
    assert [gpu.code("hipMalloc", 16) for _ in range(4)] == ["hipSuccess", "hipSuccess", "hipErrorOutOfMemory", "hipSuccess"]
    gpu.control.glm53_cpu_fail(b"hipMalloc", 1, 2)
    gpu.control.glm53_cpu_fail(b"hipMalloc", 0, 0)
    assert gpu.code("hipMalloc", 16) == "hipSuccess"
    assert gpu.control.glm53_cpu_calls(b"hipMalloc") == 5
    assert gpu.control.glm53_cpu_calls(b"hipFree") == 0


def test_live_counts_come_back_to_zero(gpu: Any) -> None:
    kinds = (
        "allocations",
        "allocated_bytes",
        "host_allocations",
        "registrations",
        "streams",
        "events",
        "modules",
        "graphs",
        "graph_execs",
        "queued",
    )
    before = {kind: gpu.live(kind) for kind in kinds if gpu.hip}
    address, host, stream, event = gpu.alloc(100), gpu.hipHostMalloc(64, 0), gpu.hipStreamCreate(), gpu.hipEventCreate()
    array = np.zeros(5000, np.uint8)
    gpu.hipHostRegister(array.ctypes.data, array.nbytes, 0)
    module = gpu.hipModuleLoad(str(gpu.code_object).encode())
    assert {kind: gpu.live(kind) - before[kind] for kind in kinds[:7]} == dict(zip(kinds, (1, 100, 1, 1, 1, 1, 1), strict=False))
    for call, value in (("hipFree", address), ("hipHostFree", host), ("hipStreamDestroy", stream), ("hipEventDestroy", event)):
        getattr(gpu, call)(value)
    gpu.hipHostUnregister(array.ctypes.data)
    gpu.hipModuleUnload(module)
    assert {kind: gpu.live(kind) for kind in kinds} == before
    assert gpu.live("nonsense") == 2**64 - 1


def test_reset_forgets_everything(gpu: Any) -> None:
    gpu.alloc(100)
    gpu.launch("broken", WordsArgs())
    gpu.code("hipDeviceSynchronize")
    gpu.reset()
    assert gpu.code("hipDeviceSynchronize") == "hipSuccess"
    assert gpu.live("allocations") == 0 and gpu.message() == ""
