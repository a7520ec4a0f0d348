"""Devices, memory, arrays, kernels, graphs, on the runtime in use; what only the cpu runtime can provoke says so."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from glm53.errors import DeviceLost, DeviceMemoryError, HipError, InputError, LifetimeError, RuntimeUnavailable
from glm53.hip import Array, Device, Kernel, MemoryKind, calls, runtime
from glm53.hip.array import bf16_from_f32, f32_from_bf16, f32_from_e4m3
from glm53.hip.module import Module, object_path
from glm53.ops.args import copy_words_args, counter_args
from glm53.spec import DType

MULTIPLIER = 6364136223846793005


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close(free_buffers=True)


@pytest.fixture
def fail_next(device: Device) -> Iterator[object]:
    """fail_next(api, code): the next call of that HIP function fails. cpu runtime only."""
    if device.runtime.name != "cpu":
        pytest.skip("needs the cpu runtime's fault injection")
    inject = runtime.control().glm53_cpu_fail
    names = []

    def fail(name: str, code: int) -> None:
        names.append(name)
        inject(name.encode(), 1, code)

    yield fail
    for name in names:
        inject(name.encode(), 0, 0)


def counter(device: Device) -> tuple[Kernel, Array, Array, counter_args]:
    state = Array.from_numpy(device, np.zeros(2, np.uint64), category="state")
    step = Array.from_numpy(device, np.array([7], np.uint64), category="step")
    return device.kernel("counter_step"), state, step, counter_args(state.address, step.address, 1, 0)


def test_memory_is_counted_by_category(device: Device) -> None:
    weights = device.alloc(1000, "weights")
    device.alloc(24, "weights", MemoryKind.UNCACHED)
    device.host_alloc(4096, category="history")
    assert device.allocated_bytes() == {"weights": 1024, "host: history": 4096}
    weights.free()
    assert device.allocated_bytes() == {"weights": 24, "host: history": 4096}


def test_double_free_and_use_after_free_are_errors(device: Device) -> None:
    array = Array.from_numpy(device, np.zeros(4, np.float32))
    array.free()
    with pytest.raises(LifetimeError, match="twice"):
        array.free()
    with pytest.raises(LifetimeError, match="after its buffer was freed"):
        array.numpy()
    host = device.host_alloc(64)
    host.free()
    with pytest.raises(LifetimeError, match="twice"):
        host.free()


def test_close_lists_live_buffers_by_category() -> None:
    device = Device(0)
    kept = device.alloc(2048, "index keys")
    with pytest.raises(LifetimeError, match=r"index keys 2048 B \(2.0 KiB\)"):
        device.close()
    kept.free()
    device.close()
    assert device.closed


def test_exhaustion_names_category_asked_and_free(device: Device) -> None:
    with pytest.raises(DeviceMemoryError, match=r"for expert weights: asked .* free ") as caught:
        device.alloc(device.total_bytes + (1 << 20), "expert weights")
    assert str(device.total_bytes + (1 << 20)) in str(caught.value) and caught.value.exit_code == 4
    device.alloc(1 << 20).free()


def test_unknown_device_and_bad_sizes(device: Device) -> None:
    with pytest.raises(InputError, match="device 99 does not exist"):
        Device(99)
    with pytest.raises(ValueError, match="expected at least 1"):
        device.alloc(0)


def test_callers_current_device_is_restored() -> None:
    if runtime.select().device_count < 2:
        pytest.skip("needs two devices")
    calls.set_device(0)
    with Device(1) as other:
        stream, event = other.stream(), other.event()
        array = Array.from_numpy(other, np.arange(8, dtype=np.uint64))
        event.record(stream)
        stream.wait(event)
        stream.fill(array.address, 0, array.nbytes)
        kernel, state, step, args = counter(other)
        kernel.launch(stream, (1, 1, 1), args)
        other.synchronize()
        assert calls.current_device() == 0
        with other.current():
            assert calls.current_device() == 1
        assert calls.current_device() == 0
        for item in (array, state, step):
            item.free()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_arrays_come_back_as_they_went(device: Device, dtype: type) -> None:
    values = np.random.default_rng(1).integers(0, 200, size=(3, 5, 7)).astype(dtype)
    array = Array.from_numpy(device, values)
    assert array.shape == (3, 5, 7) and array.nbytes == values.nbytes
    np.testing.assert_array_equal(array.numpy(), values)
    np.testing.assert_array_equal(array.slice(1, 3).numpy(), values[1:3])
    np.testing.assert_array_equal(array.reshape(-1, 7).numpy(), values.reshape(15, 7))
    stream = device.stream()
    array.upload(values[::-1], stream)
    np.testing.assert_array_equal(array.numpy(stream), values[::-1])


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0xFFC12345, 0x80000000], np.uint32)
    wanted = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x8000]
    assert bf16_from_f32(bits.view(np.float32)).tolist() == wanted
    every = np.arange(1 << 16, dtype=np.uint16)
    exact = f32_from_bf16(every)
    numbers = ~np.isnan(exact)
    np.testing.assert_array_equal(bf16_from_f32(exact)[numbers], every[numbers])


def test_e4m3_values() -> None:
    got = f32_from_e4m3(np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8, 0x80], np.uint8))
    np.testing.assert_array_equal(got, np.array([0, 2**-9, 2**-6, 1, 448, -1, -0.0], np.float32))
    assert np.isnan(f32_from_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()


def test_bf16_arrays_cross_as_floats_and_bits(device: Device) -> None:
    values = np.array([[1.0, 1.00390625, -3.0]], np.float32)
    array = Array.from_numpy(device, values, DType.BF16)
    assert array.bits().tolist() == [[0x3F80, 0x3F80, 0xC040]]
    assert array.numpy().tolist() == [[1.0, 1.0, -3.0]]
    np.testing.assert_array_equal(Array.from_numpy(device, array.bits(), DType.BF16).bits(), array.bits())


def test_array_contract_errors(device: Device) -> None:
    array = Array.empty(device, DType.F32, (4, 4))
    for broken, error in (
        (lambda: array.upload(np.zeros((4, 5), np.float32)), ValueError),
        (lambda: array.upload(np.zeros((4, 4), np.float64)), TypeError),
        (lambda: Array.from_numpy(device, np.zeros(3)), TypeError),
        (lambda: array.slice(2, 5), ValueError),
        (lambda: array.reshape(3, 5), ValueError),
        (lambda: array.view((5, 4)), ValueError),
        (lambda: Array(array.buffer, DType.F32, (1,), 2), ValueError),
        (lambda: Array(array.buffer, DType.F32, (17,)), ValueError),
    ):
        with pytest.raises(error):
            broken()


def test_adopted_memory_is_not_freed(device: Device) -> None:
    owner = Array.from_numpy(device, np.arange(4, dtype=np.int32))
    view = Array.from_address(device, owner.address, DType.I32, (4,))
    view.free()
    assert owner.numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("coherent", [True, False])
def test_kernels_reach_host_memory(device: Device, coherent: bool) -> None:
    values = np.random.default_rng(3).integers(0, 256, size=8192, dtype=np.uint8)
    allocated = device.host_alloc(8192, coherent)
    memory = np.zeros(16384, np.uint8)
    registered = device.host_register(memory[-memory.ctypes.data % 4096 :][:8192], coherent)
    allocated.array[:] = values
    args = copy_words_args(allocated.device_address, registered.device_address, 512)
    device.kernel("copy_words").launch(device.default_stream, (1, 1, 1), args)
    device.default_stream.synchronize()
    np.testing.assert_array_equal(registered.array, values)


def test_register_takes_contiguous_arrays_only(device: Device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        device.host_register(np.zeros((8, 8), np.float32)[:, ::2])


def test_launch_copies_its_arguments(device: Device) -> None:
    kernel, state, _, args = counter(device)
    stream = device.stream()
    kernel.launch(stream, (1, 1, 1), args)
    args.state = 0  # a launch that read it later would fault
    stream.synchronize()
    assert state.numpy().tolist() == [0, 7]


def test_launch_refuses_another_struct(device: Device) -> None:
    kernel, *_ = counter(device)
    with pytest.raises(TypeError, match="args is copy_words_args of 24 B, expected counter_args"):
        kernel.launch(device.default_stream, (1, 1, 1), copy_words_args(0, 0, 0))


def test_launch_failure_names_the_kernel(device: Device) -> None:
    kernel, _, _, args = counter(device)
    with pytest.raises(HipError, match="kernel counter_step, grid \\(1, 70000, 1\\)"):
        kernel.launch(device.default_stream, (1, 70000, 1), args)


def test_threads_share_a_kernel(device: Device) -> None:
    kernel = device.kernel("counter_step")
    step = Array.from_numpy(device, np.array([1], np.uint64))
    states = [Array.from_numpy(device, np.zeros(1, np.uint64)) for _ in range(4)]

    def work(state: Array) -> None:
        stream = device.stream()
        for _ in range(200):
            kernel.launch(stream, (1, 1, 1), counter_args(state.address, step.address, 0, 0))
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = 0
    for _ in range(200):
        wanted = (wanted * MULTIPLIER + 1) % (1 << 64)
    assert [int(state.numpy()[0]) for state in states] == [wanted] * 4


def test_missing_code_object_names_those_built_and_the_command() -> None:
    with pytest.raises(RuntimeUnavailable, match=r"no code object for gfx906; built: .*host.*GLM53_ARCHS=gfx906 pip install \."):
        object_path("gfx906")


def test_changed_code_object_is_refused(tmp_path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"changed")
    (tmp_path / "manifest.json").write_text('{"format": 1, "objects": {"host": {"file": "kernels.so", "sha256": "00"}}, "kernels": {}}')
    with pytest.raises(RuntimeUnavailable, match=r"has sha256 .* expected 00"):
        object_path("host", tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"format": 99}'])
def test_damaged_manifest_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match=r"manifest\.json .*next: pip install"):
        object_path("host", tmp_path)


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(device: Device) -> None:
    child = os.fork()
    if child == 0:
        try:
            device.free_bytes()
        except RuntimeUnavailable as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    device.alloc(64).free()


def test_unknown_kernel(device: Device) -> None:
    with pytest.raises(RuntimeUnavailable, match="no kernel 'nothing'"):
        Module(device).kernel("nothing")


def test_capture_records_and_replays(device: Device) -> None:
    kernel, state, step, args = counter(device)
    stream = device.stream()
    with stream.capture() as capture:
        for _ in range(3):
            kernel.launch(stream, (1, 1, 1), args)
    graph = capture.graph
    assert graph.kernel_count == 3
    assert state.numpy()[1] == 0, "a captured launch ran"
    wanted = 0
    for value in (7, 8):
        step.upload(np.array([value], np.uint64), stream)
        graph.launch(stream)
        for _ in range(3):
            wanted = (wanted * MULTIPLIER + value) % (1 << 64)
    assert int(state.numpy(stream)[1]) == wanted
    graph.close()
    with pytest.raises(LifetimeError):
        graph.launch(stream)


def test_an_exception_abandons_the_capture(device: Device) -> None:
    kernel, state, _, args = counter(device)
    stream = device.stream()
    capture = stream.capture()
    with pytest.raises(ZeroDivisionError), capture:
        kernel.launch(stream, (1, 1, 1), args)
        raise ZeroDivisionError
    with pytest.raises(LifetimeError, match="abandoned"):
        _ = capture.graph
    kernel.launch(stream, (1, 1, 1), args)
    assert state.numpy(stream).tolist() == [0, 7]


def test_upload_during_capture_is_refused(device: Device) -> None:
    array = Array.empty(device, DType.U64, (1,))
    stream = device.stream()
    with pytest.raises(LifetimeError, match="during a capture"), stream.capture():
        array.upload(np.zeros(1, np.uint64), stream)


def test_event_times(device: Device) -> None:
    stream = device.stream()
    first, last, plain = device.event(timing=True), device.event(timing=True), device.event()
    first.record(stream)
    last.record(stream)
    last.synchronize()
    assert first.query() and last.elapsed_us(first) >= 0
    with pytest.raises(ValueError, match="time stamp"):
        plain.elapsed_us(first)


def test_a_failed_call_says_call_code_and_text(device: Device, fail_next) -> None:
    fail_next("hipMalloc", 999)
    with pytest.raises(HipError, match=r"hipMalloc failed: hipErrorUnknown.*999") as caught:
        device.alloc(64, "x")
    assert (caught.value.call, caught.value.code, device.allocated_bytes()) == ("hipMalloc", 999, {})
    device.alloc(64, "x").free()


def test_a_refused_registration_leaves_nothing(device: Device, fail_next) -> None:
    memory = np.zeros(8192, np.uint8)
    fail_next("hipHostGetDevicePointer", 1)
    with pytest.raises(HipError, match="hipHostGetDevicePointer"):
        device.host_register(memory)
    assert device.allocated_bytes() == {}
    device.host_register(memory).free()


def test_faults_mean_the_device_is_lost(device: Device, fail_next) -> None:
    kernel, _, _, args = counter(device)
    fail_next("hipModuleLaunchKernel", 719)
    with pytest.raises(DeviceLost, match="restart the process"):
        kernel.launch(device.default_stream, (1, 1, 1), args)
