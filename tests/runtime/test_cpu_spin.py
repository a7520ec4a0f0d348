"""cpu runtime: kernels that wait for others while they run, and what they see of memory."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
from cpu_hip import FINE, HOST_NONCOHERENT, NON_BLOCKING, UNCACHED, SpinArgs

SEEDS = [None, 1, 2, 3]


def pair(gpu: Any, words: int = 64, flags: int = UNCACHED) -> list[tuple[int, int, Any]]:
    """Per device: mailbox, result, stream; peer access both ways; mailboxes zeroed."""
    made = []
    for device in (0, 1):
        gpu.hipSetDevice(device)
        gpu.hipDeviceEnablePeerAccess(1 - device, 0)
        gpu.function("exchange")
        made.append(
            (
                gpu.upload(np.zeros(words, np.uint64), flags),
                gpu.upload(np.zeros(words, np.uint64)),
                gpu.hipStreamCreateWithFlags(NON_BLOCKING),
            )
        )
    return made


def start(gpu: Any, sides: list[tuple[int, int, Any]], rounds: int, grid: int = 1) -> None:
    for device in (0, 1):
        gpu.hipSetDevice(device)
        args = SpinArgs(sides[device][0], sides[1 - device][0], sides[device][1], rounds, 1 - device)
        gpu.launch("exchange", args, grid=grid, stream=sides[device][2])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flags", [UNCACHED, FINE])
def test_two_devices_exchange_while_running(gpu: Any, seed: int | None, flags: int) -> None:
    if seed is not None and gpu.hip:
        gpu.seed(seed)
    sides = pair(gpu, flags=flags)
    start(gpu, sides, 200)
    for device in (0, 1):
        gpu.hipSetDevice(device)
        gpu.hipStreamSynchronize(sides[device][2])
        assert gpu.download(sides[device][1], 1, np.uint64)[0] == 200


@pytest.mark.parametrize("seed", SEEDS)
def test_several_workgroups_exchange(gpu: Any, seed: int | None) -> None:
    if seed is not None and gpu.hip:
        gpu.seed(seed)
    sides = pair(gpu)
    start(gpu, sides, 20, grid=24)
    for device in (0, 1):
        gpu.hipSetDevice(device)
        gpu.hipStreamSynchronize(sides[device][2])
        assert gpu.download(sides[device][1], 24, np.uint64).tolist() == [20] * 24


@pytest.mark.parametrize("seed", SEEDS)
def test_host_wakes_a_kernel(gpu: Any, seed: int | None) -> None:
    if seed is not None and gpu.hip:
        gpu.seed(seed)
    flags, result = gpu.pinned(2, np.uint64), gpu.upload(np.zeros(1, np.uint64))
    flags[:] = 0
    alias = int(gpu.hipHostGetDevicePointer(flags.ctypes.data, 0))
    stream = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    gpu.launch("exchange", SpinArgs(alias, alias + 8, result, 3, 0), stream=stream)
    for sequence in (1, 2, 3):
        for _ in range(20):
            assert gpu.code("hipStreamQuery", stream) == "hipErrorNotReady"
        flags[0] = sequence
        deadline = time.monotonic() + 20
        while flags[1] != sequence and time.monotonic() < deadline:
            gpu.code("hipStreamQuery", stream)
        assert flags[1] == sequence
    gpu.hipStreamSynchronize(stream)


@pytest.mark.parametrize("seed", [None, 4])
def test_deadlock_is_a_failure_with_a_message(gpu: Any, seed: int | None) -> None:
    if seed is not None and gpu.hip:
        gpu.seed(seed)
    sides = pair(gpu)
    gpu.hipSetDevice(0)
    gpu.launch("exchange", SpinArgs(sides[0][0], sides[1][0], sides[0][1], 1, 0), stream=sides[0][2])
    assert gpu.code("hipDeviceSynchronize") == "hipErrorLaunchFailure"
    assert "deadlock" in gpu.message() and "exchange" in gpu.message()
    gpu.hipSetDevice(1)
    assert gpu.code("hipDeviceSynchronize") == "hipSuccess"


def test_partner_behind_it_in_the_same_queue_is_a_deadlock(gpu: Any) -> None:
    """Streams 1 and 5 share a hardware queue: a kernel cannot wait for one that is queued behind it."""
    gpu.seed(1)
    streams = [gpu.hipStreamCreateWithFlags(NON_BLOCKING) for _ in range(5)]
    one, two = (gpu.upload(np.zeros(4, np.uint64), UNCACHED) for _ in range(2))
    results = gpu.upload(np.zeros(4, np.uint64))
    gpu.launch("exchange", SpinArgs(one, two, results, 1, 0), stream=streams[0])
    gpu.launch("exchange", SpinArgs(two, one, results + 8, 1, 1), stream=streams[4])
    assert gpu.code("hipDeviceSynchronize") == "hipErrorLaunchFailure"
    assert "deadlock" in gpu.message()


def test_a_long_exchange_is_no_deadlock(gpu: Any) -> None:
    gpu.seed(9)
    sides = pair(gpu)
    start(gpu, sides, 3000)
    gpu.hipSetDevice(0)
    assert gpu.code("hipStreamSynchronize", sides[0][2]) == "hipSuccess"


def publish(gpu: Any, data: int, alias_of_data: int | None = None) -> tuple[int, int]:
    """Runs publish_then_wait until it waits; what the others see in data[0] meanwhile, then what it saw in data[1] after data[1] = 6."""
    flag = gpu.pinned(1, np.uint64)
    flag[0] = 0
    result, stream = gpu.upload(np.zeros(1, np.uint64)), gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    target = alias_of_data or data
    gpu.launch("publish_then_wait", SpinArgs(int(gpu.hipHostGetDevicePointer(flag.ctypes.data, 0)), target, result, 0, 0), stream=stream)
    for _ in range(200):
        assert gpu.code("hipStreamQuery", stream) == "hipErrorNotReady"
    words = (ctypes.c_uint64 * 2).from_address(data)
    seen = words[0]
    words[1] = 6
    gpu.code("hipStreamQuery", stream)
    flag[0] = 1
    gpu.hipStreamSynchronize(stream)
    assert words[0] == 5 and words[1] == 6
    return seen, int(gpu.download(result, 1, np.uint64)[0])


@pytest.mark.parametrize(("flags", "seen", "read"), [(0, 0, 0), (FINE, 5, 6), (UNCACHED, 5, 6)])
def test_stores_to_own_memory(gpu: Any, flags: int, seen: int, read: int) -> None:
    """Ordinary device memory: others see the stores at the end of the kernel, and it keeps what it read."""
    _ = gpu.hip
    gpu.seed(1)
    data = gpu.upload(np.zeros(2, np.uint64), flags)
    assert publish(gpu, data) == (seen, read)


@pytest.mark.parametrize(("flags", "seen", "read"), [(0, 0, 0), (UNCACHED, 5, 6)])
def test_stores_to_peer_memory(gpu: Any, flags: int, seen: int, read: int) -> None:
    _ = gpu.hip
    gpu.seed(1)
    gpu.hipSetDevice(1)
    data = gpu.upload(np.zeros(2, np.uint64), flags)
    gpu.hipSetDevice(0)
    gpu.hipDeviceEnablePeerAccess(1, 0)
    assert publish(gpu, data) == (seen, read)


@pytest.mark.parametrize(("flags", "seen", "read"), [(HOST_NONCOHERENT, 0, 0), (0, 5, 6)])
def test_stores_to_host_memory(gpu: Any, flags: int, seen: int, read: int) -> None:
    _ = gpu.hip
    gpu.seed(1)
    data = gpu.pinned(2, np.uint64, flags)
    data[:] = 0
    assert publish(gpu, data.ctypes.data, int(gpu.hipHostGetDevicePointer(data.ctypes.data, 0))) == (seen, read)


def test_reset_ends_a_waiting_kernel(gpu: Any) -> None:
    sides = pair(gpu)
    gpu.hipSetDevice(0)
    gpu.launch("exchange", SpinArgs(sides[0][0], sides[1][0], sides[0][1], 1, 0), grid=3, stream=sides[0][2])
    time.sleep(0.01)
    gpu.reset()
    assert gpu.live("queued") == 0


def test_same_seed_same_exchange(gpu: Any) -> None:
    traces = []
    for seed in (5, 6, 5):
        gpu.reset()
        gpu.seed(seed)
        sides = pair(gpu)
        start(gpu, sides, 20, grid=3)
        for device in (0, 1):
            gpu.hipSetDevice(device)
            gpu.hipStreamSynchronize(sides[device][2])
        traces.append(gpu.trace())
    assert traces[0] == traces[2] != traces[1]
