"""cpu runtime: code objects and launches."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_hip import SpinArgs, WordsArgs


def test_launch_by_kernel_params(gpu: Any) -> None:
    x, y = gpu.upload(np.arange(100_000, dtype=np.uint32)), gpu.alloc(400_000)
    gpu.launch("add_one", WordsArgs(x, y, 100_000), grid=3125)
    assert (gpu.download(y, 100_000) == np.arange(1, 100_001)).all()


def test_launch_by_extra(gpu: Any) -> None:
    x, y = gpu.upload(np.arange(32, dtype=np.uint32)), gpu.alloc(128)
    args = WordsArgs(x, y, 32)
    assert gpu.launch_code("add_one", args, extra=(args,)) == "hipSuccess"
    assert gpu.download(y, 1)[0] == 1
    assert gpu.launch_code("add_one", args, extra=(ctypes.c_uint64(1),)) == "hipErrorInvalidValue"
    assert "got 8 bytes of arguments, the kernel takes 24" in gpu.message()


def test_arguments_are_copied_at_the_call(gpu: Any) -> None:
    gpu.seed(5)
    x, y = gpu.upload(np.zeros(32, np.uint32)), gpu.alloc(128)
    stream = gpu.hipStreamCreateWithFlags(1)
    args = WordsArgs(x, y, 32)
    gpu.launch("add_one", args, stream=stream)
    args.y = 0
    gpu.hipStreamSynchronize(stream)
    assert gpu.download(y, 1)[0] == 1


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        ((0, 1, 1), (32, 1, 1), "is 0"),
        ((1, 1, 1), (0, 1, 1), "is 0"),
        ((1, 65536, 1), (32, 1, 1), "65535"),
        ((1, 1, 65536), (32, 1, 1), "65535"),
        ((1 << 27, 1, 1), (32, 1, 1), "2^32"),
        ((1, 1, 1), (64, 1, 1), "written for 32"),
        ((1, 1, 1), (32, 2, 1), "written for 32"),
        ((1, 1, 1), (2048, 1, 1), "1024"),
    ],
)
def test_launch_shape_rules(gpu: Any, grid: Any, block: Any, words: str) -> None:
    assert gpu.launch_code("add_one", WordsArgs(), grid, block) == "hipErrorInvalidConfiguration"
    assert words in gpu.message()
    assert gpu.code("hipDeviceSynchronize") == "hipSuccess"  # a refused launch loses nothing


def test_largest_grid_x_is_accepted(gpu: Any) -> None:
    gpu.seed(1)
    stream = gpu.hipStreamCreateWithFlags(1)
    assert gpu.launch_code("add_one", WordsArgs(), ((1 << 27) - 1, 1, 1), stream=stream) == "hipSuccess"
    gpu.reset()


def test_too_many_argument_bytes(gpu: Any) -> None:
    args = (ctypes.c_uint8 * 4104)()
    assert gpu.launch_code("huge_args", args) == "hipErrorInvalidValue"
    assert "4096" in gpu.message()


def test_arguments_must_be_given_once(gpu: Any) -> None:
    params = (ctypes.c_void_p * 1)(ctypes.addressof(WordsArgs()))
    function = gpu.function("add_one")
    assert gpu.code("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == "hipErrorInvalidValue"
    both = ctypes.addressof(params), (ctypes.c_uint64(0),) * 3
    assert gpu.code("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, *both) == "hipErrorInvalidValue"
    assert gpu.code("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 64, None, both[0], None) == "hipErrorInvalidValue"


def test_invalid_handles(gpu: Any) -> None:
    module = gpu.hipModuleLoad(str(gpu.code_object).encode())
    function = gpu.hipModuleGetFunction(module, b"add_one")
    assert gpu.code("hipModuleGetFunction", module, b"nope") == "hipErrorNotFound"
    gpu.hipModuleUnload(module)
    assert gpu.code("hipModuleUnload", module) == "hipErrorInvalidHandle"
    assert gpu.code("hipModuleGetFunction", module, b"add_one") == "hipErrorInvalidHandle"
    assert gpu.code("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == "hipErrorInvalidHandle"
    args = WordsArgs()
    assert gpu.launch_code("add_one", args, stream=0x777) == "hipErrorInvalidHandle"


def test_function_of_another_device(gpu: Any) -> None:
    function = gpu.function("add_one")
    gpu.hipSetDevice(1)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(WordsArgs()))
    stream = gpu.hipStreamCreate()
    assert gpu.code("hipModuleLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, ctypes.addressof(params), None) == "hipErrorInvalidHandle"
    assert "loaded on device 0" in gpu.message()


def test_function_attributes(gpu: Any) -> None:
    attribute = gpu.hip.hipFunction_attribute
    assert gpu.hipFuncGetAttribute(attribute.HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, gpu.function("add_one")) == 32
    assert gpu.hipFuncGetAttribute(attribute.HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, gpu.function("add_one")) == 0
    assert gpu.code("hipFuncGetAttribute", attribute.HIP_FUNC_ATTRIBUTE_MAX, gpu.function("add_one")) == "hipErrorInvalidValue"


def test_module_from_memory(gpu: Any) -> None:
    image = gpu.code_object.read_bytes()
    modules = [gpu.hipModuleLoadData(image) for _ in range(3)]
    function = gpu.hipModuleGetFunction(modules[1], b"add_one")
    x, y = gpu.upload(np.arange(32, dtype=np.uint32)), gpu.alloc(128)
    args = WordsArgs(x, y, 32)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    gpu.hipModuleLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, ctypes.addressof(params), None)
    gpu.hipModuleUnload(modules[1])  # the queued kernel keeps its code
    gpu.hipDeviceSynchronize()
    assert gpu.download(y, 1)[0] == 1


def test_bad_code_objects(gpu: Any, tmp_path: Path, cpu_code_object_wrong_abi: Path) -> None:
    def load(data: bytes, name: str = "object") -> str:
        (tmp_path / name).write_bytes(data)
        result = gpu.code("hipModuleLoad", str(tmp_path / name).encode())
        if len(data) > 64:
            assert gpu.code("hipModuleLoadData", data) == result
        return result

    image = gpu.code_object.read_bytes()
    assert gpu.code("hipModuleLoad", str(tmp_path / "absent").encode()) == "hipErrorFileNotFound"
    assert gpu.code("hipModuleLoad", str(tmp_path).encode()) == "hipErrorFileNotFound"
    assert load(b"short") == "hipErrorInvalidImage"
    assert load(b"not an ELF file at all" * 10) == "hipErrorInvalidImage"
    assert load(image[:18] + (224).to_bytes(2, "little") + image[20:]) == "hipErrorNoBinaryForGpu"
    assert "224" in gpu.message() and "kernels.so" in gpu.message()
    assert load(cpu_code_object_wrong_abi.read_bytes(), "wrong") == "hipErrorNoBinaryForGpu"
    assert "host ABI 99" in gpu.message()
    libm = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line or "libm-" in line)
    assert gpu.code("hipModuleLoad", libm.encode()) == "hipErrorInvalidImage"
    assert "glm53_host_module_get" in gpu.message()


def test_plain_kernel_may_not_wait(gpu: Any) -> None:
    x = gpu.upload(np.zeros(8, np.uint64))
    gpu.launch("waits_unflagged", SpinArgs(x, x, x, 1, 0))
    assert gpu.code("hipDeviceSynchronize") == "hipErrorLaunchFailure"
    assert "gave up waiting" in gpu.message()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(gpu: Any, threads: int) -> None:
    _ = gpu.hip
    gpu.control.glm53_cpu_set_threads(threads)
    blocks = 20_000  # long enough for the other threads to be woken
    x, y = gpu.upload(np.zeros(1, np.uint32)), gpu.alloc(4 * blocks)
    for _ in range(5):
        gpu.launch("ticket", WordsArgs(x, y, 0), grid=blocks)
    gpu.hipDeviceSynchronize()
    assert gpu.download(x, 1)[0] == 5 * blocks
    assert (np.sort(gpu.download(y, blocks)) == np.arange(4 * blocks, 5 * blocks)).all()


def test_fast_form_runs_unless_fibers_are_called_for(gpu: Any) -> None:
    def form() -> int:
        gpu.launch("two_forms", WordsArgs(y, y, 100), grid=100)
        gpu.hipDeviceSynchronize()
        (seen,) = set(gpu.download(y, 100).tolist())
        return int(seen)

    y = gpu.alloc(400)
    assert form() == 2
    gpu.control.glm53_cpu_fibers(1)
    assert form() == 1
    gpu.control.glm53_cpu_fibers(0)
    assert form() == 2
    gpu.control.glm53_cpu_fail(b"hipHostMalloc", 1, 2)
    assert form() == 1
    gpu.control.glm53_cpu_fail(b"hipHostMalloc", 0, 0)
    assert form() == 2
    gpu.seed(3)
    assert form() == 1


def test_fast_form_is_refused_a_forbidden_address(gpu: Any) -> None:
    y = gpu.alloc(400)
    gpu.launch("two_forms", WordsArgs(y, y, 50), grid=100)
    assert gpu.code("hipDeviceSynchronize") == "hipErrorIllegalAddress"
    assert "kernel two_forms read the address 0x10 from memory (4 bytes)" in gpu.message()


def test_blocks_run_in_random_order_when_seeded(gpu: Any) -> None:
    orders = []
    for seed in (1, 2, 1):
        gpu.reset()
        gpu.seed(seed)
        x, y = gpu.upload(np.zeros(1, np.uint32)), gpu.alloc(400)
        gpu.launch("ticket", WordsArgs(x, y, 0), grid=100)
        gpu.hipDeviceSynchronize()
        orders.append(gpu.download(y, 100).tolist())
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != sorted(orders[0]) and sorted(orders[0]) == list(range(100))
