"""cpu runtime: copies and fills, kinds, pageable and pinned memory, pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_hip import WordsArgs


def kinds(gpu: Any) -> Any:
    return gpu.hip.hipMemcpyKind


def test_round_trip_and_device_to_device(gpu: Any) -> None:
    data = np.arange(3_000_000, dtype=np.uint32)
    x, y = gpu.upload(data), gpu.alloc(data.nbytes)
    gpu.hipMemcpy(y, x, data.nbytes, kinds(gpu).hipMemcpyDeviceToDevice)
    assert (gpu.download(y, data.size) == data).all()


def test_driver_style_copies(gpu: Any) -> None:
    data, back = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    x, stream = gpu.alloc(256), gpu.hipStreamCreate()
    gpu.hipMemcpyHtoD(x, data.ctypes.data, 256)
    gpu.hipMemcpyDtoH(back.ctypes.data, x, 256)
    assert (back == data).all()
    gpu.hipMemcpyHtoDAsync(x, (data * 2).ctypes.data, 256, stream)
    gpu.hipMemcpyDtoHAsync(back.ctypes.data, x, 256, stream)
    gpu.hipStreamSynchronize(stream)
    assert (back == data * 2).all()


@pytest.mark.parametrize(
    ("kind", "target", "source", "result"),
    [
        (0, "host", "host", "hipSuccess"),
        (1, "device", "host", "hipSuccess"),
        (2, "host", "device", "hipSuccess"),
        (3, "device", "device", "hipSuccess"),
        (4, "host", "device", "hipSuccess"),
        (1, "host", "device", "hipErrorInvalidMemcpyDirection"),
        (2, "device", "host", "hipErrorInvalidMemcpyDirection"),
        (3, "device", "host", "hipErrorInvalidMemcpyDirection"),
        (0, "device", "device", "hipErrorInvalidMemcpyDirection"),
    ],
)
def test_copy_kinds(gpu: Any, kind: int, target: str, source: str, result: str) -> None:
    host = [np.zeros(64, np.uint8), np.zeros(64, np.uint8)]
    place = {"host": lambda i: host[i].ctypes.data, "device": lambda i: gpu.alloc(64)}
    assert gpu.code("hipMemcpy", place[target](0), place[source](1), 64, gpu.hip.hipMemcpyKind(kind)) == result


def test_copy_outside_an_allocation(gpu: Any) -> None:
    x, host = gpu.alloc(64), np.zeros(256, np.uint8)
    kind = kinds(gpu).hipMemcpyDefault
    assert gpu.code("hipMemcpy", x, host.ctypes.data, 65, kind) == "hipErrorInvalidValue"
    assert gpu.code("hipMemcpy", x + 60, host.ctypes.data, 4, kind) == "hipSuccess"
    assert gpu.code("hipMemcpy", x + 60, host.ctypes.data, 5, kind) == "hipErrorInvalidValue"
    assert gpu.code("hipMemcpy", x, 4096, 64, kind) == "hipErrorInvalidValue"  # unmapped host address, no crash
    assert gpu.code("hipMemcpy", x, None, 64, kind) == "hipErrorInvalidValue"
    assert gpu.code("hipMemcpy", x, None, 0, kind) == "hipSuccess"


def test_copy_from_freed_memory(gpu: Any) -> None:
    x, host = gpu.alloc(64), np.zeros(64, np.uint8)
    gpu.hipFree(x)
    assert gpu.code("hipMemcpy", host.ctypes.data, x, 64, kinds(gpu).hipMemcpyDeviceToHost) == "hipErrorInvalidValue"


def test_copy_2d(gpu: Any) -> None:
    source = np.arange(100, dtype=np.uint8).reshape(5, 20)
    target = gpu.upload(np.zeros((5, 32), np.uint8))
    gpu.hipMemcpy2DAsync(target, 32, source.ctypes.data + 2, 20, 7, 5, kinds(gpu).hipMemcpyHostToDevice, None)
    gpu.hipDeviceSynchronize()
    got = gpu.download(target, 160, np.uint8).reshape(5, 32)
    assert (got[:, :7] == source[:, 2:9]).all() and (got[:, 7:] == 0).all()
    assert (
        gpu.code("hipMemcpy2DAsync", target, 6, source.ctypes.data, 20, 7, 5, kinds(gpu).hipMemcpyHostToDevice, None) == "hipErrorInvalidPitchValue"
    )


def test_copy_between_devices_needs_no_peer_access(gpu: Any) -> None:
    x = gpu.upload(np.arange(16, dtype=np.uint32))
    gpu.hipSetDevice(1)
    y, stream = gpu.alloc(64), gpu.hipStreamCreate()
    gpu.hipMemcpyPeerAsync(y, 1, x, 0, 64, stream)
    gpu.hipStreamSynchronize(stream)
    assert (gpu.download(y, 16) == np.arange(16)).all()
    assert gpu.code("hipMemcpyPeerAsync", y, 0, x, 0, 64, stream) == "hipErrorInvalidValue"
    assert gpu.code("hipMemcpyPeerAsync", y, 1, x, 7, 64, stream) == "hipErrorInvalidDevice"


def test_memset(gpu: Any) -> None:
    x = gpu.alloc(100)
    gpu.hipMemset(x, 0x1AB, 90)
    got = gpu.download(x, 100, np.uint8)
    assert (got[:90] == 0xAB).all() and (got[90:] == 0xFF).all()
    assert gpu.code("hipMemset", x, 0, 101) == "hipErrorInvalidValue"
    assert gpu.code("hipMemset", np.zeros(8).ctypes.data, 0, 8) == "hipErrorInvalidValue"


def test_small_pageable_source_is_read_at_the_call(gpu: Any) -> None:
    for seed in range(10):
        gpu.seed(seed)
        data, x, stream = np.full(1000, 5, np.uint32), gpu.alloc(4000), gpu.hipStreamCreateWithFlags(1)
        gpu.hipMemcpyAsync(x, data.ctypes.data, 4000, kinds(gpu).hipMemcpyHostToDevice, stream)
        data[:] = 6
        gpu.hipStreamSynchronize(stream)
        assert (gpu.download(x, 1000) == 5).all()


def test_large_pageable_copy_is_synchronous(gpu: Any) -> None:
    gpu.seed(1)
    data = np.full(100_000, 5, np.uint32)
    x, stream = gpu.alloc(data.nbytes), gpu.hipStreamCreateWithFlags(1)
    gpu.hipMemcpyAsync(x, data.ctypes.data, data.nbytes, kinds(gpu).hipMemcpyHostToDevice, stream)
    data[:] = 6
    assert (gpu.download(x, data.size) == 5).all()
    back = np.zeros(100_000, np.uint32)
    gpu.hipMemcpyAsync(back.ctypes.data, x, data.nbytes, kinds(gpu).hipMemcpyDeviceToHost, stream)
    assert (back == 5).all()


def test_pinned_copies_are_asynchronous(gpu: Any) -> None:
    torn = late = 0
    for seed in range(20):
        gpu.seed(seed)
        host, x, stream = gpu.pinned(1024), gpu.alloc(4096), gpu.hipStreamCreateWithFlags(1)
        host[:] = 5
        gpu.hipMemcpyAsync(x, host.ctypes.data, 4096, kinds(gpu).hipMemcpyHostToDevice, stream)
        gpu.code("hipStreamQuery", stream)  # lets some steps run
        host[:] = 6
        gpu.hipStreamSynchronize(stream)
        got = set(gpu.download(x, 1024).tolist())
        late += got == {6}
        torn += got == {5, 6}
    assert late and torn, f"late {late}, torn {torn} of 20 seeds"


def test_pieces_of_a_copy_are_seen_by_another_queue(gpu: Any) -> None:
    partial = 0
    for seed in range(20):
        gpu.seed(seed)
        host = gpu.pinned(1024)
        host[:] = 7
        x, y = gpu.upload(np.zeros(1024, np.uint32)), gpu.alloc(4096)
        one, two = gpu.hipStreamCreateWithFlags(1), gpu.hipStreamCreateWithFlags(1)
        gpu.hipMemcpyAsync(x, host.ctypes.data, 4096, kinds(gpu).hipMemcpyHostToDevice, one)
        gpu.launch("add_one", WordsArgs(x, y, 1024), grid=32, stream=two)  # no event: races with the copy
        gpu.hipDeviceSynchronize()
        got = set(gpu.download(y, 1024).tolist())
        partial += got == {1, 8}
        gpu.hipStreamDestroy(one)
        gpu.hipStreamDestroy(two)
    assert partial, "no seed of 20 showed a copy half done"


def test_unseeded_large_copy(gpu: Any) -> None:
    host = gpu.pinned(6_000_000)
    host[:] = np.arange(6_000_000)
    x, stream = gpu.alloc(24_000_000), gpu.hipStreamCreate()
    gpu.hipMemcpyAsync(x, host.ctypes.data, 24_000_000, kinds(gpu).hipMemcpyHostToDevice, stream)
    gpu.hipStreamSynchronize(stream)
    assert (gpu.download(x, 6_000_000) == host).all()
