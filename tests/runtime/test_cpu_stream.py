"""cpu runtime: streams, hardware queues, the null stream, events."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cpu_hip import NON_BLOCKING, WordsArgs


def chain(gpu: Any, stream: Any, count: int) -> tuple[int, int]:
    """Queues `count` dependent kernels on a stream: y[0] counts in an order-sensitive way."""
    x, y = gpu.upload(np.array([3], np.uint32)), gpu.upload(np.array([1], np.uint32))
    for _ in range(count):
        gpu.launch("step_state", WordsArgs(x, y, 0), stream=stream)
    return x, y


def chained(count: int) -> int:
    value = 1
    for _ in range(count):
        value = (value * 1664525 + 3) % 2**32
    return value


def test_a_stream_is_ordered(gpu: Any) -> None:
    stream = gpu.hipStreamCreate()
    _, y = chain(gpu, stream, 200)
    gpu.hipStreamSynchronize(stream)
    assert gpu.download(y, 1)[0] == chained(200)


def test_unseeded_work_goes_on_by_itself(gpu: Any) -> None:
    stream, event = gpu.hipStreamCreate(), gpu.hipEventCreate()
    chain(gpu, stream, 3)
    gpu.hipEventRecord(event, stream)
    deadline = time.monotonic() + 20
    while gpu.live("queued") and time.monotonic() < deadline:  # no HIP call, no wait
        time.sleep(0.001)
    assert gpu.live("queued") == 0


def test_seeded_work_moves_only_inside_calls(gpu: Any) -> None:
    gpu.seed(1)
    stream = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    chain(gpu, stream, 50)
    queued, trace = gpu.live("queued"), gpu.trace()
    time.sleep(0.05)
    assert queued and (gpu.live("queued"), gpu.trace()) == (queued, trace)


def test_four_hardware_queues_shared_in_order_of_creation(gpu: Any) -> None:
    gpu.seed(7)
    streams = [gpu.hipStreamCreateWithFlags(NON_BLOCKING) for _ in range(8)]
    for stream in streams:
        gpu.launch("add_one", WordsArgs(0, 0, 0), stream=stream)
    gpu.hipDeviceSynchronize()
    queue_of = {int(op): queue for queue, op, _ in (line.split() for line in gpu.trace().splitlines())}
    # The null stream has queue 0, so the first stream made has queue 1.
    assert [queue_of[op] for op in sorted(queue_of)] == [f"0.{(1 + i) % 4}" for i in range(8)]


def test_streams_of_one_queue_keep_order(gpu: Any) -> None:
    """Head of line: work of the 5th stream waits behind that of the 1st, whatever the seed."""
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        streams = [gpu.hipStreamCreateWithFlags(NON_BLOCKING) for _ in range(5)]
        x, y = chain(gpu, streams[0], 5)
        gpu.launch("step_state", WordsArgs(x, y, 0), stream=streams[4])
        gpu.hipStreamSynchronize(streams[4])
        assert gpu.code("hipStreamQuery", streams[0]) == "hipSuccess"
        assert gpu.download(y, 1)[0] == chained(6)


def test_null_stream_waits_for_blocking_streams_and_they_for_it(gpu: Any) -> None:
    for seed in range(20):
        gpu.reset()
        gpu.seed(seed)
        stream, other = gpu.hipStreamCreate(), gpu.hipStreamCreate()
        x, y = chain(gpu, stream, 4)
        gpu.launch("step_state", WordsArgs(x, y, 0))
        gpu.launch("step_state", WordsArgs(x, y, 0), stream=other)
        gpu.hipDeviceSynchronize()
        assert gpu.download(y, 1)[0] == chained(6)


def test_non_blocking_streams_do_not_wait_for_the_null_stream(gpu: Any) -> None:
    overtaken = 0
    for seed in range(20):
        gpu.reset()
        gpu.seed(seed)
        x, y = gpu.upload(np.array([1000], np.uint32)), gpu.upload(np.zeros(32, np.uint32))
        z, stream = gpu.alloc(128), gpu.hipStreamCreateWithFlags(NON_BLOCKING)
        for _ in range(4):
            gpu.launch("step_state", WordsArgs(x, y, 0))
        gpu.launch("add_one", WordsArgs(y, z, 1), stream=stream)
        gpu.hipDeviceSynchronize()
        overtaken += int(gpu.download(z, 1)[0]) == 1
    assert overtaken > 0


def test_null_stream_query_and_sync_cover_blocking_streams(gpu: Any) -> None:
    states = set()
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        stream = gpu.hipStreamCreate()
        chain(gpu, stream, 20)
        states.add(gpu.code("hipStreamQuery", None))
        gpu.hipStreamSynchronize(None)
        assert gpu.code("hipStreamQuery", stream) == "hipSuccess"
    assert "hipErrorNotReady" in states


def test_stream_query(gpu: Any) -> None:
    states = set()
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        stream = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
        assert gpu.code("hipStreamQuery", stream) == "hipSuccess"
        chain(gpu, stream, 20)
        states.add(gpu.code("hipStreamQuery", stream))
        while gpu.code("hipStreamQuery", stream) != "hipSuccess":
            pass
        assert gpu.live("queued") == 0
    assert "hipErrorNotReady" in states


def test_destroyed_stream_finishes_its_work(gpu: Any) -> None:
    gpu.seed(5)
    stream = gpu.hipStreamCreate()
    _, y = chain(gpu, stream, 10)
    gpu.hipStreamDestroy(stream)
    for call in ("hipStreamDestroy", "hipStreamSynchronize", "hipStreamQuery"):
        assert gpu.code(call, stream) == "hipErrorInvalidHandle"
    gpu.hipDeviceSynchronize()
    assert gpu.download(y, 1)[0] == chained(10)


def test_stream_flags(gpu: Any) -> None:
    assert gpu.code("hipStreamCreateWithFlags", 2) == "hipErrorInvalidValue"
    assert gpu.code("hipStreamCreateWithPriority", 1, -1) == "hipSuccess"
    assert gpu.code("hipStreamDestroy", None) == "hipErrorInvalidHandle"


@pytest.mark.parametrize("with_event", [True, False])
def test_missing_event_is_found_by_some_seed(gpu: Any, with_event: bool) -> None:
    """A producer and a consumer on two streams: right under every seed with the event, wrong under some of 20 without."""
    wrong = 0
    for seed in range(20):
        gpu.reset()
        gpu.seed(seed)
        x, y, z = gpu.upload(np.full(64, 41, np.uint32)), gpu.alloc(256), gpu.alloc(256)
        producer, consumer = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipStreamCreateWithFlags(NON_BLOCKING)
        event = gpu.hipEventCreateWithFlags(2)
        gpu.launch("add_one", WordsArgs(x, y, 64), grid=2, stream=producer)
        gpu.hipEventRecord(event, producer)
        if with_event:
            gpu.hipStreamWaitEvent(consumer, event, 0)
        gpu.launch("add_one", WordsArgs(y, z, 64), grid=2, stream=consumer)
        gpu.hipStreamSynchronize(consumer)
        wrong += (gpu.download(z, 64) != 43).any()
    assert wrong == 0 if with_event else wrong > 0


def test_same_seed_same_trace(gpu: Any) -> None:
    def run(seed: int) -> str:
        gpu.reset()
        gpu.seed(seed)
        streams = [gpu.hipStreamCreateWithFlags(NON_BLOCKING) for _ in range(3)]
        for _ in range(4):
            for stream in streams:
                chain(gpu, stream, 2)
        gpu.hipDeviceSynchronize()
        return gpu.trace()

    traces = [run(seed) for seed in (1, 2, 3, 1, 2, 3)]
    assert traces[:3] == traces[3:] and len(set(traces)) == 3 and "step_state" in traces[0]


def test_event_states(gpu: Any) -> None:
    states = set()
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        stream, event = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipEventCreate()
        assert gpu.code("hipEventQuery", event) == "hipSuccess"  # never recorded
        assert gpu.code("hipEventSynchronize", event) == "hipSuccess"
        chain(gpu, stream, 20)
        gpu.hipEventRecord(event, stream)
        states.add(gpu.code("hipEventQuery", event))
        gpu.hipEventSynchronize(event)
        assert gpu.code("hipEventQuery", event) == "hipSuccess"
    assert states == {"hipErrorNotReady", "hipSuccess"}


def test_wait_uses_the_record_of_its_time(gpu: Any) -> None:
    """Recording again after the wait was queued does not move the wait."""
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        one, two = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipStreamCreateWithFlags(NON_BLOCKING)
        event = gpu.hipEventCreate()
        gpu.hipEventRecord(event, one)
        gpu.hipStreamWaitEvent(two, event, 0)
        gpu.hipEventRecord(event, two)
        gpu.hipStreamWaitEvent(one, event, 0)
        gpu.hipStreamSynchronize(one)


def test_elapsed_time(gpu: Any) -> None:
    start, stop, silent = gpu.hipEventCreate(), gpu.hipEventCreate(), gpu.hipEventCreateWithFlags(2)
    stream = gpu.hipStreamCreate()
    assert gpu.code("hipEventElapsedTime", start, stop) == "hipErrorInvalidHandle"
    gpu.hipEventRecord(start, stream)
    gpu.hipStreamSynchronize(stream)
    time.sleep(0.02)
    gpu.hipEventRecord(stop, stream)
    gpu.hipEventRecord(silent, stream)
    gpu.hipStreamSynchronize(stream)
    assert 15 < gpu.hipEventElapsedTime(start, stop) < 5000
    assert gpu.hipEventElapsedTime(stop, start) < -15
    assert gpu.code("hipEventElapsedTime", start, silent) == "hipErrorInvalidHandle"
    states = set()
    for seed in range(10):
        gpu.seed(seed)
        chain(gpu, stream, 20)
        gpu.hipEventRecord(stop, stream)
        states.add(gpu.code("hipEventElapsedTime", start, stop))
    assert states == {"hipErrorNotReady", "hipSuccess"}


def test_event_handles_and_flags(gpu: Any) -> None:
    event = gpu.hipEventCreateWithFlags(0x2 | 0x20000000)
    assert gpu.code("hipEventCreateWithFlags", 0x10) == "hipErrorInvalidValue"
    assert gpu.code("hipEventCreateWithFlags", 0x4) == "hipErrorInvalidValue"  # interprocess needs disabled timing
    assert gpu.code("hipStreamWaitEvent", None, event, 4) == "hipErrorInvalidValue"
    gpu.hipEventDestroy(event)
    assert gpu.code("hipEventDestroy", event) == "hipErrorInvalidHandle"
    assert gpu.code("hipEventRecord", event, None) == "hipErrorInvalidHandle"
    assert gpu.code("hipEventQuery", event) == "hipErrorInvalidHandle"
    assert gpu.code("hipStreamWaitEvent", None, event, 0) == "hipErrorInvalidHandle"


def test_event_and_stream_of_different_devices(gpu: Any) -> None:
    event = gpu.hipEventCreate()
    gpu.hipSetDevice(1)
    stream = gpu.hipStreamCreate()
    assert gpu.code("hipEventRecord", event, stream) == "hipErrorInvalidHandle"
    assert gpu.code("hipStreamWaitEvent", stream, event, 0) == "hipSuccess"


def test_event_orders_two_devices(gpu: Any) -> None:
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        x, y = gpu.upload(np.full(32, 1, np.uint32)), gpu.alloc(128)
        one, event = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipEventCreateWithFlags(2)
        gpu.launch("add_one", WordsArgs(x, y, 32), stream=one)
        gpu.hipEventRecord(event, one)
        gpu.hipSetDevice(1)
        two, z = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.alloc(128)
        gpu.hipStreamWaitEvent(two, event, 0)
        gpu.hipMemcpyPeerAsync(z, 1, y, 0, 128, two)
        gpu.hipStreamSynchronize(two)
        assert gpu.download(z, 32).tolist() == [2] * 32


def test_event_of_a_lost_device_does_not_block_another(gpu: Any) -> None:
    one, event = gpu.hipStreamCreate(), gpu.hipEventCreate()
    gpu.launch("broken", WordsArgs(), stream=one)
    gpu.code("hipEventRecord", event, one)
    gpu.hipSetDevice(1)
    two = gpu.hipStreamCreate()
    gpu.hipStreamWaitEvent(two, event, 0)
    _, y = chain(gpu, two, 3)
    gpu.hipStreamSynchronize(two)
    assert gpu.download(y, 1)[0] == chained(3)
    assert gpu.code("hipEventSynchronize", event) == "hipErrorLaunchFailure"
