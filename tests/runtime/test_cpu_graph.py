"""cpu runtime: stream capture and graphs."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from cpu_hip import NON_BLOCKING, WordsArgs

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def begin(gpu: Any, mode: int = THREAD_LOCAL, flags: int = NON_BLOCKING) -> Any:
    stream = gpu.hipStreamCreateWithFlags(flags)
    gpu.function("step_state"), gpu.function("add_one")  # loaded before the capture
    gpu.hipStreamBeginCapture(stream, gpu.hip.hipStreamCaptureMode(mode))
    return stream


def status(gpu: Any, stream: Any) -> str:
    return str(gpu.hipStreamIsCapturing(stream).name).removeprefix("hipStreamCaptureStatus")


def node_count(gpu: Any, graph: Any) -> int:
    count = ctypes.c_size_t(0)
    assert ctypes.CDLL(str(gpu.library)).hipGraphGetNodes(ctypes.c_void_p(int(graph)), None, ctypes.byref(count)) == 0
    return count.value


def step_value(start: int, steps: list[int]) -> int:
    for step in steps:
        start = (start * 1664525 + step) % 2**32
    return start


def test_capture_runs_nothing_and_replays_read_new_state(gpu: Any) -> None:
    x, y = gpu.upload(np.array([3], np.uint32)), gpu.upload(np.array([1], np.uint32))
    stream = begin(gpu)
    assert status(gpu, stream) == "Active"
    for _ in range(5):
        gpu.launch("step_state", WordsArgs(x, y, 0), stream=stream)
    graph = gpu.hipStreamEndCapture(stream)
    assert status(gpu, stream) == "None" and node_count(gpu, graph) == 5
    executable = gpu.hipGraphInstantiateWithFlags(graph, 0)
    gpu.hipGraphDestroy(graph)
    gpu.hipDeviceSynchronize()
    assert gpu.download(y, 1)[0] == 1
    steps = []
    for step in (3, 8, 21):
        gpu.hipMemset(x, step, 1)
        gpu.hipGraphLaunch(executable, stream)
        gpu.hipGraphLaunch(executable, stream)
        gpu.hipStreamSynchronize(stream)
        steps += [step] * 10
    assert gpu.download(y, 1)[0] == step_value(1, steps)
    gpu.hipGraphExecDestroy(executable)
    assert gpu.code("hipGraphLaunch", executable, stream) == "hipErrorInvalidValue"


def test_arguments_are_copied_at_capture(gpu: Any) -> None:
    x, y = gpu.upload(np.zeros(32, np.uint32)), gpu.alloc(128)
    stream = begin(gpu)
    args = WordsArgs(x, y, 32)
    gpu.launch("add_one", args, stream=stream)
    args.x = args.y = 12345
    executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
    gpu.hipGraphLaunch(executable, stream)
    gpu.hipStreamSynchronize(stream)
    assert gpu.download(y, 1)[0] == 1


def test_copy_and_fill_nodes(gpu: Any) -> None:
    kind = gpu.hip.hipMemcpyKind
    host, back = gpu.pinned(32), gpu.pinned(32)
    x, y = gpu.alloc(128), gpu.alloc(128)
    stream = begin(gpu)
    gpu.hipMemcpyAsync(x, host.ctypes.data, 128, kind.hipMemcpyHostToDevice, stream)
    gpu.hipMemsetAsync(x, 0, 4, stream)
    gpu.launch("add_one", WordsArgs(x, y, 32), stream=stream)
    gpu.hipMemcpyAsync(back.ctypes.data, y, 128, kind.hipMemcpyDeviceToHost, stream)
    graph = gpu.hipStreamEndCapture(stream)
    assert node_count(gpu, graph) == 4
    executable = gpu.hipGraphInstantiate(graph, 0)[0]
    for value in (10, 20):
        host[:] = value
        gpu.hipGraphLaunch(executable, stream)
        gpu.hipStreamSynchronize(stream)
        assert back.tolist() == [1] + [value + 1] * 31


def fork_and_join(gpu: Any, join: bool) -> tuple[Any, int, int]:
    x, y, z = gpu.upload(np.full(64, 5, np.uint32)), gpu.alloc(256), gpu.alloc(256)
    side = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    forked, joined = gpu.hipEventCreateWithFlags(2), gpu.hipEventCreateWithFlags(2)
    stream = begin(gpu)
    gpu.hipEventRecord(forked, stream)
    gpu.hipStreamWaitEvent(side, forked, 0)
    assert status(gpu, side) == "Active"
    gpu.launch("add_one", WordsArgs(x, y, 64), grid=2, stream=side)
    gpu.hipEventRecord(joined, side)
    if join:
        gpu.hipStreamWaitEvent(stream, joined, 0)
        gpu.launch("add_one", WordsArgs(y, z, 64), grid=2, stream=stream)
    return stream, y, z


def test_fork_and_join_by_events(gpu: Any) -> None:
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        stream, _, z = fork_and_join(gpu, join=True)
        executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
        gpu.hipGraphLaunch(executable, stream)
        gpu.hipStreamSynchronize(stream)
        assert gpu.download(z, 64).tolist() == [7] * 64


def test_unjoined_fork(gpu: Any) -> None:
    stream, _, _ = fork_and_join(gpu, join=False)
    assert gpu.code("hipStreamEndCapture", stream) == "hipErrorStreamCaptureUnjoined"
    assert status(gpu, stream) == "None"


def test_independent_nodes_run_in_random_order(gpu: Any) -> None:
    values = set()
    for seed in range(12):
        gpu.reset()
        gpu.seed(seed)
        y = gpu.upload(np.array([1], np.uint32))
        steps = [gpu.upload(np.array([value], np.uint32)) for value in (3, 7)]
        side, forked, joined = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipEventCreate(), gpu.hipEventCreate()
        stream = begin(gpu)
        gpu.hipEventRecord(forked, stream)
        gpu.hipStreamWaitEvent(side, forked, 0)
        gpu.launch("step_state", WordsArgs(steps[0], y, 0), stream=stream)
        gpu.launch("step_state", WordsArgs(steps[1], y, 0), stream=side)
        gpu.hipEventRecord(joined, side)
        gpu.hipStreamWaitEvent(stream, joined, 0)
        executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
        gpu.hipGraphLaunch(executable, stream)
        gpu.hipStreamSynchronize(stream)
        values.add(int(gpu.download(y, 1)[0]))
    assert values == {step_value(1, [3, 7]), step_value(1, [7, 3])}


UNSAFE = ["hipMalloc", "hipFree", "hipDeviceSynchronize", "hipHostMalloc", "hipMemcpy"]


def unsafe(gpu: Any, call: str, address: int) -> str:
    args = {"hipMalloc": (16,), "hipFree": (address,), "hipDeviceSynchronize": (), "hipHostMalloc": (16, 0)}
    args["hipMemcpy"] = (address, np.zeros(4, np.uint8).ctypes.data, 4, gpu.hip.hipMemcpyKind.hipMemcpyHostToDevice)
    return gpu.code(call, *args[call])


@pytest.mark.parametrize("call", UNSAFE)
def test_unsafe_call_in_global_mode_ends_the_capture(gpu: Any, call: str) -> None:
    address = gpu.alloc(64)
    stream = begin(gpu, GLOBAL)
    assert unsafe(gpu, call, address) == "hipErrorStreamCaptureUnsupported"
    assert status(gpu, stream) == "Invalidated"
    assert gpu.launch_code("add_one", WordsArgs(), stream=stream) == "hipErrorStreamCaptureInvalidated"
    assert gpu.code("hipStreamEndCapture", stream) == "hipErrorStreamCaptureInvalidated"
    assert status(gpu, stream) == "None" and unsafe(gpu, call, address) == "hipSuccess"


@pytest.mark.parametrize(("mode", "here", "elsewhere"), [(GLOBAL, False, False), (THREAD_LOCAL, False, True), (RELAXED, True, True)])
def test_capture_modes_and_threads(gpu: Any, mode: int, here: bool, elsewhere: bool) -> None:
    results = []
    for in_thread in (False, True):
        stream = begin(gpu, mode)
        if in_thread:
            thread = threading.Thread(target=lambda: results.append(gpu.code("hipMalloc", 16)))
            thread.start()
            thread.join()
        else:
            results.append(gpu.code("hipMalloc", 16))
        ended = gpu.code("hipStreamEndCapture", stream)
        assert (ended == "hipSuccess") == (results[-1] == "hipSuccess")
    assert [result == "hipSuccess" for result in results] == [here, elsewhere]


def test_capture_ends_in_its_thread_unless_relaxed(gpu: Any) -> None:
    for mode, wanted in ((THREAD_LOCAL, "hipErrorStreamCaptureWrongThread"), (RELAXED, "hipSuccess")):
        stream, results = begin(gpu, mode), []
        thread = threading.Thread(target=lambda: results.append(gpu.code("hipStreamEndCapture", stream)))  # noqa: B023
        thread.start()
        thread.join()
        assert results == [wanted]


@pytest.mark.parametrize("call", ["hipStreamSynchronize", "hipStreamQuery"])
def test_waiting_for_a_capturing_stream(gpu: Any, call: str) -> None:
    stream = begin(gpu)
    assert gpu.code(call, stream) == "hipErrorStreamCaptureUnsupported"
    assert status(gpu, stream) == "Invalidated"


def test_captured_event_cannot_be_waited_for_by_the_host(gpu: Any) -> None:
    event = gpu.hipEventCreate()
    stream = begin(gpu)
    gpu.hipEventRecord(event, stream)
    assert gpu.code("hipEventSynchronize", event) == "hipErrorCapturedEvent"
    assert gpu.code("hipStreamEndCapture", stream) == "hipErrorStreamCaptureInvalidated"


def test_event_from_outside_the_capture(gpu: Any) -> None:
    other, event = gpu.hipStreamCreateWithFlags(NON_BLOCKING), gpu.hipEventCreate()
    gpu.hipEventRecord(event, other)
    stream = begin(gpu)
    assert gpu.code("hipStreamWaitEvent", stream, event, 0) == "hipErrorStreamCaptureIsolation"
    assert status(gpu, stream) == "Invalidated"


def test_two_captures_do_not_merge(gpu: Any) -> None:
    event = gpu.hipEventCreate()
    one, two = begin(gpu), begin(gpu)
    gpu.hipEventRecord(event, one)
    assert gpu.code("hipStreamWaitEvent", two, event, 0) == "hipErrorStreamCaptureMerge"
    assert status(gpu, one) == status(gpu, two) == "Invalidated"


def test_null_stream_and_capture(gpu: Any) -> None:
    mode = gpu.hip.hipStreamCaptureMode(RELAXED)
    assert gpu.code("hipStreamBeginCapture", None, mode) == "hipErrorStreamCaptureUnsupported"
    stream = begin(gpu, RELAXED, flags=0)
    assert gpu.launch_code("add_one", WordsArgs()) == "hipErrorStreamCaptureImplicit"
    assert status(gpu, stream) == "Invalidated"
    gpu.code("hipStreamEndCapture", stream)
    begin(gpu, RELAXED, flags=NON_BLOCKING)
    assert gpu.launch_code("add_one", WordsArgs()) == "hipSuccess"


def test_capture_states(gpu: Any) -> None:
    stream = begin(gpu)
    mode = gpu.hip.hipStreamCaptureMode(THREAD_LOCAL)
    assert gpu.code("hipStreamBeginCapture", stream, mode) == "hipErrorIllegalState"
    gpu.hipStreamEndCapture(stream)
    assert gpu.code("hipStreamEndCapture", stream) == "hipErrorIllegalState"
    stream, _, _ = fork_and_join(gpu, join=True)
    side = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    event = gpu.hipEventCreate()
    gpu.hipEventRecord(event, stream)
    gpu.hipStreamWaitEvent(side, event, 0)
    assert gpu.code("hipStreamEndCapture", side) == "hipErrorStreamCaptureUnmatched"


def test_graph_of_two_devices_is_refused(gpu: Any) -> None:
    event = gpu.hipEventCreateWithFlags(2)
    stream = begin(gpu)
    gpu.hipEventRecord(event, stream)
    gpu.hipSetDevice(1)
    other = gpu.hipStreamCreateWithFlags(NON_BLOCKING)
    assert gpu.code("hipStreamWaitEvent", other, event, 0) == "hipErrorStreamCaptureUnsupported"
    assert "several devices" in gpu.message()
    assert gpu.code("hipStreamEndCapture", stream) == "hipErrorStreamCaptureInvalidated"


def test_copy_between_devices_is_no_node(gpu: Any) -> None:
    x = gpu.alloc(64)
    gpu.hipSetDevice(1)
    y = gpu.alloc(64)
    gpu.hipSetDevice(0)
    stream = begin(gpu)
    assert gpu.code("hipMemcpyPeerAsync", y, 1, x, 0, 64, stream) == "hipErrorStreamCaptureUnsupported"


def test_graph_belongs_to_its_device(gpu: Any) -> None:
    stream = begin(gpu)
    gpu.launch("add_one", WordsArgs(), stream=stream)
    executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
    gpu.hipSetDevice(1)
    assert gpu.code("hipGraphLaunch", executable, gpu.hipStreamCreate()) == "hipErrorInvalidValue"
    assert "device 0" in gpu.message()


def test_graph_handles(gpu: Any) -> None:
    graph = gpu.hipStreamEndCapture(begin(gpu))
    assert node_count(gpu, graph) == 0
    assert gpu.code("hipGraphInstantiateWithFlags", graph, 1) == "hipErrorInvalidValue"
    executable = gpu.hipGraphInstantiateWithFlags(graph, 0)
    gpu.hipGraphLaunch(executable, None)
    gpu.hipDeviceSynchronize()
    gpu.hipGraphDestroy(graph)
    assert gpu.code("hipGraphDestroy", graph) == "hipErrorInvalidValue"
    assert gpu.code("hipGraphInstantiateWithFlags", graph, 0) == "hipErrorInvalidValue"
    assert gpu.code("hipGraphExecDestroy", 12345) == "hipErrorInvalidValue"


def test_destroyed_graph_still_runs_what_was_launched(gpu: Any) -> None:
    gpu.seed(1)
    x, y = gpu.upload(np.array([3], np.uint32)), gpu.upload(np.array([1], np.uint32))
    stream = begin(gpu)
    for _ in range(20):
        gpu.launch("step_state", WordsArgs(x, y, 0), stream=stream)
    executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
    gpu.hipGraphLaunch(executable, stream)
    gpu.hipGraphExecDestroy(executable)
    gpu.hipStreamSynchronize(stream)
    assert gpu.download(y, 1)[0] == step_value(1, [3] * 20)


def test_launches_of_one_graph_do_not_overlap(gpu: Any) -> None:
    for seed in range(10):
        gpu.reset()
        gpu.seed(seed)
        x, y = gpu.upload(np.array([3], np.uint32)), gpu.upload(np.array([1], np.uint32))
        stream, other = begin(gpu), gpu.hipStreamCreateWithFlags(NON_BLOCKING)
        for _ in range(4):
            gpu.launch("step_state", WordsArgs(x, y, 0), stream=stream)
        executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
        for target in (stream, other, stream):
            gpu.hipGraphLaunch(executable, target)
        gpu.hipDeviceSynchronize()
        assert gpu.download(y, 1)[0] == step_value(1, [3] * 12)


def test_failing_kernel_in_a_graph(gpu: Any) -> None:
    stream = begin(gpu)
    gpu.launch("add_one", WordsArgs(12345, 0, 0), stream=stream)
    executable = gpu.hipGraphInstantiateWithFlags(gpu.hipStreamEndCapture(stream), 0)
    gpu.hipGraphLaunch(executable, stream)
    assert gpu.code("hipStreamSynchronize", stream) == "hipErrorIllegalAddress"
    assert "add_one, argument offset 0" in gpu.message()
