"""The cuda runtime against a driver that records calls: what HIP's flags, kinds, codes and structs become. No GPU needed.

The children load the built library with ctypes and print values that are compared here; each starts with PRELUDE.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hip_fakes import compile_library

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hipsrc" / "runtime" / "cuda"

PRELUDE = """
import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from glm53.hip import runtime
hip = ctypes.CDLL(str(runtime.native_directory() / "cuda" / "libamdhip64.so"))
mock = ctypes.CDLL("libcuda.so.1")
mock.mock_log.restype = hip.glm53_runtime_message.restype = hip.hipGetErrorName.restype = c_char_p
big = lambda value: c_ulonglong(value)
def log():
    text = mock.mock_log().decode().split("\\n")[:-1]
    mock.mock_clear()
    return text
def call(name, *args):
    return getattr(hip, name)(*args)
pointer, count = c_void_p(), c_int()
assert call("hipInit", 0) == 0
mock.mock_context(0)
assert call("hipDeviceSynchronize") == 0
log()
"""


@pytest.fixture
def cuda(child: Callable[..., str], mock_cuda: Path) -> Callable[[str], list[str]]:
    def run(code: str) -> list[str]:
        return child(PRELUDE + code, libraries=(mock_cuda.parent,)).splitlines()

    return run


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_exports_every_call_that_is_used(child: Callable[..., str], name: str) -> None:
    names = sorted(set(re.findall(r"_hip\.(hip[A-Z]\w+)\(", (ROOT / "glm53" / "hip" / "calls.py").read_text())) - {"hipDeviceProp_t", "hipError_t"})
    assert len(names) > 40
    names[names.index("hipGetDeviceProperties")] += "R0600"
    code = f"""
    import ctypes
    from glm53.hip import runtime
    library = ctypes.CDLL(str(runtime.native_directory() / {name!r} / "libamdhip64.so"))
    print([name for name in {names} if not hasattr(library, name)])
    """
    assert child(code) == "[]"


def test_host_allocation_flags(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
for flags in (0, 0x1 | 0x2 | 0x40000000, 0x80000000, 0x4, 0x20000000, 0x10000000, 0x8, 0x40000000 | 0x80000000):
    print(hex(flags), call("hipHostMalloc", byref(pointer), c_size_t(64), c_uint(flags)), log())
""")
    assert lines == [
        "0x0 0 ['cuMemHostAlloc(64, 3)']",
        "0x40000003 0 ['cuMemHostAlloc(64, 3)']",
        "0x80000000 0 ['cuMemHostAlloc(64, 3)']",
        "0x4 0 ['cuMemHostAlloc(64, 7)']",
        "0x20000000 0 ['cuMemHostAlloc(64, 3)']",
        "0x10000000 0 ['cuMemHostAlloc(64, 3)']",
        "0x8 1 []",
        "0xc0000000 1 []",
    ]


def test_registration_flags_never_become_read_only(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
memory = ctypes.create_string_buffer(64)
for flags in (0, 3, 0x8, 0xB, 0x4, 0x80000000, 0x10, 0x40000000):
    print(hex(flags), call("hipHostRegister", memory, c_size_t(64), c_uint(flags)), log())
""")
    assert lines == [
        "0x0 0 ['cuMemHostRegister_v2(64, 3)']",
        "0x3 0 ['cuMemHostRegister_v2(64, 3)']",
        "0x8 0 ['cuMemHostRegister_v2(64, 3)']",
        "0xb 0 ['cuMemHostRegister_v2(64, 3)']",
        "0x4 0 ['cuMemHostRegister_v2(64, 7)']",
        "0x80000000 0 ['cuMemHostRegister_v2(64, 3)']",
        "0x10 1 []",
        "0x40000000 1 []",
    ]


def test_device_allocation_flags(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
for flags in (0, 1, 3, 2, 4):
    print(flags, call("hipExtMallocWithFlags", byref(pointer), c_size_t(256), c_uint(flags)), log())
print(call("hipMalloc", byref(pointer), c_size_t(0)), pointer.value, log(), call("hipFree", None), log())
call("hipMalloc", byref(pointer), c_size_t(256))
log()
print(call("hipFree", pointer), log())
""")
    alloc = "['cuMemAlloc_v2(256)']"
    assert lines == [
        f"0 0 {alloc}",
        f"1 0 {alloc}",
        f"3 0 {alloc}",
        "2 1 []",
        "4 1 []",
        "0 None [] 0 []",
        "0 ['cuCtxSynchronize()', 'cuMemFree_v2(0)']",
    ]


def test_event_and_stream_flags(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
for flags in (0, 1, 2, 2 | 4, 4, 2 | 0x20000000, 0x40000000, 0x80000000, 0xC0000000, 8):
    print(hex(flags), call("hipEventCreateWithFlags", byref(pointer), c_uint(flags)), log())
for flags in (0, 1, 2):
    print(flags, call("hipStreamCreateWithFlags", byref(pointer), c_uint(flags)), log())
print(call("hipStreamCreateWithPriority", byref(pointer), 1, -1), log())
wait = lambda event, flags: call("hipStreamWaitEvent", None, event, flags)
print(wait(c_void_p(8), 1), wait(None, 0), wait(c_void_p(8), 0), log())
""")
    assert lines == [
        "0x0 0 ['cuEventCreate(0)']",
        "0x1 0 ['cuEventCreate(1)']",
        "0x2 0 ['cuEventCreate(2)']",
        "0x6 0 ['cuEventCreate(6)']",
        "0x4 1 []",
        "0x20000002 0 ['cuEventCreate(2)']",
        "0x40000000 0 ['cuEventCreate(0)']",
        "0x80000000 0 ['cuEventCreate(0)']",
        "0xc0000000 1 []",
        "0x8 1 []",
        "0 0 ['cuStreamCreate(0)']",
        "1 0 ['cuStreamCreate(1)']",
        "2 1 []",
        "0 ['cuStreamCreateWithPriority(1, -1)']",
        "1 400 0 ['cuStreamWaitEvent(0)']",
    ]


def test_capture_modes_and_states(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
for mode in (0, 1, 2, 3):
    print(mode, call("hipStreamBeginCapture", c_void_p(16), mode), log())
print(call("hipStreamIsCapturing", c_void_p(16), byref(count)), count.value)
print(call("hipStreamEndCapture", c_void_p(16), byref(pointer)), bool(pointer.value), log())
print(call("hipStreamIsCapturing", c_void_p(16), byref(count)), count.value)
for flags in (0, 1, 8, 9, 2, 4):
    print(flags, call("hipGraphInstantiateWithFlags", byref(c_void_p()), pointer, big(flags)), log())
""")
    assert lines == [
        "0 0 ['cuStreamBeginCapture_v2(0)']",
        "1 0 ['cuStreamBeginCapture_v2(1)']",
        "2 0 ['cuStreamBeginCapture_v2(2)']",
        "3 1 []",
        "0 1",
        "0 True ['cuStreamEndCapture()']",
        "0 0",
        "0 0 ['cuGraphInstantiateWithFlags(0)']",
        "1 0 ['cuGraphInstantiateWithFlags(1)']",
        "8 0 ['cuGraphInstantiateWithFlags(8)']",
        "9 0 ['cuGraphInstantiateWithFlags(9)']",
        "2 1 []",
        "4 1 []",
    ]


def test_copies_finish_before_synchronous_calls_return(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
a, b = ctypes.create_string_buffer(b"x" * 64), ctypes.create_string_buffer(64)
print(call("hipMemcpy", b, a, c_size_t(64), 4), b.raw == a.raw[:64], log())
print(call("hipMemcpyHtoD", b, a, c_size_t(8)), log())
print(call("hipMemcpyDtoH", b, a, c_size_t(8)), log())
print(call("hipMemset", b, 0x1FF, c_size_t(8)), b.raw[:9], log())
print(call("hipMemcpyAsync", b, a, c_size_t(8), 1, c_void_p(16)), log())
print([call("hipMemcpy", b, a, c_size_t(8), kind) for kind in (5, -1, 1024)], log())
print(call("hipMemcpy", None, a, c_size_t(8), 4), call("hipMemcpy", None, None, c_size_t(0), 4), log())
print(call("hipMemcpyPeerAsync", b, 1, a, 0, c_size_t(8), None), log())
print(call("hipMemcpyPeerAsync", b, 2, a, 0, c_size_t(8), None), log())
""")
    assert lines == [
        "0 True ['cuMemcpy(64)', 'cuStreamSynchronize(null)']",
        "0 ['cuMemcpyHtoD_v2(8)', 'cuStreamSynchronize(null)']",
        "0 ['cuMemcpyDtoH_v2(8)', 'cuStreamSynchronize(null)']",
        "0 b'\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xffx' ['cuMemsetD8_v2(255, 8)', 'cuStreamSynchronize(null)']",
        "0 ['cuMemcpyAsync(8)']",
        "[21, 21, 21] []",
        "1 0 []",
        "0 ['cuDevicePrimaryCtxRetain(1)', 'cuMemcpyPeerAsync(1, 0, 8)']",
        "101 []",
    ]


def test_strided_copies(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
a, b = ctypes.create_string_buffer(bytes(range(64)), 64), ctypes.create_string_buffer(64)
for kind in range(5):
    ctypes.memset(b, 0, 64)
    code = call("hipMemcpy2DAsync", b, c_size_t(8), a, c_size_t(16), c_size_t(5), c_size_t(3), kind, c_void_p(16))
    print(kind, code, b.raw[:24] == b"".join(bytes(range(16 * i, 16 * i + 5)) + bytes(3) for i in range(3)), log())
print(call("hipMemcpy2DAsync", b, c_size_t(4), a, c_size_t(16), c_size_t(5), c_size_t(3), 4, None), log())
print(call("hipMemcpy2DAsync", b, c_size_t(4), a, c_size_t(16), c_size_t(0), c_size_t(3), 4, None), log())
""")
    shape = "16, 8, 5, 3"
    types = ["1, 1", "1, 2", "2, 1", "2, 2", "4, 4"]
    assert lines == [f"{kind} 0 True ['cuMemcpy2DAsync_v2({sides}, {shape})']" for kind, sides in enumerate(types)] + ["12 []", "0 []"]


def test_launch_parameters(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
state, step = (ctypes.c_uint64 * 2)(), ctypes.c_uint64(9)
args = (ctypes.c_uint64 * 3)(ctypes.addressof(state), ctypes.addressof(step), 1)
assert call("hipModuleGetFunction", byref(pointer), c_void_p(16), b"counter_step") == 0
print(call("hipModuleGetFunction", byref(c_void_p()), c_void_p(16), b"absent"))
size = c_size_t(24)
extra = (c_void_p * 5)(1, ctypes.addressof(args), 2, ctypes.addressof(size), 3)
params = (c_void_p * 1)(ctypes.addressof(args))
log()
def launch(grid, block, params, extra):
    return call("hipModuleLaunchKernel", pointer, *map(c_uint, grid), *map(c_uint, block), 0, c_void_p(16), params, extra)
print(launch((3, 2, 1), (32, 1, 1), params, None), list(state), log())
print(launch((1, 1, 1), (32, 1, 1), None, extra), list(state), log())
print(launch((1, 1, 1), (32, 1, 1), params, extra), log())
unknown = (c_void_p * 3)(7, 7, 3)
print(launch((1, 1, 1), (32, 1, 1), None, unknown), log())
for grid in ((0, 1, 1), (1, 65536, 1), (1, 1, 65536), (1 << 27, 1, 1)):
    print(launch(grid, (32, 1, 1), params, None), log())
""")
    first = 9
    second = (9 * 6364136223846793005 + 9) % (1 << 64)
    assert lines == [
        "500",
        f"0 [0, {first}] ['cuLaunchKernelEx(counter_step, 3 2 1, 32 1 1, 0, extra 0)']",
        f"0 [0, {second}] ['cuLaunchKernelEx(counter_step, 1 1 1, 32 1 1, 0, extra 24)']",
        "1 []",
        "1 []",
        *["9 []"] * 4,
    ]


def test_overlap_is_for_code_objects_that_ask(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
mock.mock_overlap_module(c_void_p(32))
args = (ctypes.c_uint64 * 3)()
params = (c_void_p * 1)(ctypes.addressof(args))
def launch(module):
    function = c_void_p()
    assert call("hipModuleGetFunction", byref(function), c_void_p(module), b"embed") == 0
    log()
    result = call("hipModuleLaunchKernel", function, *map(c_uint, (1, 1, 1, 32, 1, 1)), 0, c_void_p(16), params, None)
    return function, result, log()
asking, *rest = launch(32)
print(*rest)
print(*launch(16)[1:])
assert call("hipModuleUnload", c_void_p(32)) == 0
log()
print(call("hipModuleLaunchKernel", asking, *map(c_uint, (1, 1, 1, 32, 1, 1)), 0, c_void_p(16), params, None), log())
""")
    launched = "embed, 1 1 1, 32 1 1, 0, extra 0"
    assert lines == [f"0 ['cuLaunchKernelEx({launched}{asked})']" for asked in (", overlap", "", "")]


def test_a_kernel_gets_the_lds_that_its_code_object_names(cuda: Callable[[str], list[str]]) -> None:
    """More than 48 KiB: the driver is told when the function is found, and every launch asks for it."""
    lines = cuda("""
args = (ctypes.c_uint64 * 3)()
params = (c_void_p * 1)(ctypes.addressof(args))
for name in (b"wide", b"embed"):
    function = c_void_p()
    assert call("hipModuleGetFunction", byref(function), c_void_p(16), name) == 0
    print([line for line in log() if "Attribute" in line])
    print(call("hipModuleLaunchKernel", function, *map(c_uint, (1, 1, 1, 32, 1, 1)), 0, c_void_p(16), params, None), log())
""")
    launches = [f"0 ['cuLaunchKernelEx({name}, 1 1 1, 32 1 1, {lds}, extra 0)']" for name, lds in (("wide", 70000), ("embed", 0))]
    assert lines == ["['cuFuncSetAttribute(wide, 8, 70000)']", launches[0], "[]", launches[1]]


@pytest.mark.parametrize(
    ("cuda_code", "hip_code"),
    [
        *[(1, 1), (2, 2), (34, 35), (46, 100), (201, 201), (220, 214), (222, 209), (300, 200), (700, 700), (711, 217), (714, 719)],
        *[(716, 719), (719, 719), (800, 801), (802, 3), (803, 35), (904, 904), (910, 910), (999, 999), (12345, 999)],
    ],
)
def test_error_codes(cuda: Callable[[str], list[str]], cuda_code: int, hip_code: int) -> None:
    lines = cuda(f"""
mock.mock_fail(b"cuMemAlloc_v2", {cuda_code})
code = call("hipMalloc", byref(pointer), c_size_t(64))
print(code, pointer.value, hip.hipPeekAtLastError(), hip.hipGetLastError(), hip.hipGetLastError())
print(hip.glm53_runtime_message().decode())
""")
    assert lines[0] == f"{hip_code} None {hip_code} {hip_code} 0"
    assert lines[1].startswith("cuMemAlloc_v2: CUDA_ERROR_") and f"({cuda_code})" in lines[1]


def test_not_ready_is_an_answer(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
mock.mock_event_status(600)
print(call("hipEventQuery", c_void_p(16)), call("hipStreamQuery", c_void_p(16)), hip.hipGetLastError())
""")
    assert lines == ["600 600 0"]


def test_current_device_is_per_thread(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
import threading
def other():
    print("thread", call("hipGetDevice", byref(count)), count.value)
    call("hipMalloc", byref(c_void_p()), c_size_t(64))
    print(log())
print(call("hipSetDevice", 1), call("hipMalloc", byref(pointer), c_size_t(64)), log())
print(call("hipSetDevice", 2), call("hipSetDevice", -1))
thread = threading.Thread(target=other)
thread.start()
thread.join()
print(call("hipMalloc", byref(pointer), c_size_t(64)), log())
mock.mock_context(1)
print(call("hipDeviceEnablePeerAccess", 0, 0), log(), call("hipDeviceEnablePeerAccess", 1, 0), call("hipDeviceEnablePeerAccess", 0, 1))
mock.mock_fail(b"cuCtxEnablePeerAccess", 704)
print(call("hipDeviceEnablePeerAccess", 0, 0))
""")
    assert lines == [
        "0 0 ['cuDevicePrimaryCtxRetain(1)', 'cuCtxSetCurrent(1)', 'cuMemAlloc_v2(64)', 'cuCtxSetCurrent(0)']",
        "101 101",
        "thread 0 0",
        "['cuCtxSetCurrent(0)', 'cuMemAlloc_v2(64)', 'cuCtxSetCurrent(none)']",
        "0 ['cuCtxSetCurrent(1)', 'cuMemAlloc_v2(64)', 'cuCtxSetCurrent(0)']",
        "0 ['cuCtxEnablePeerAccess(0, 0)'] 101 1",
        "704",
    ]


def test_the_callers_context_stays_and_decides_the_device(cuda: Callable[[str], list[str]]) -> None:
    """Contexts of another user of CUDA in the thread: none, the primary ones, and one of its own on device 1, in which we never work."""
    lines = cuda("""
def look():
    assert call("hipGetDevice", byref(count)) == 0
    return count.value, mock.mock_current()
for context in (-1, 0, 1, 2):
    mock.mock_context(context)
    print(context, look(), call("hipMalloc", byref(pointer), c_size_t(64)), look(), log())
    mock.mock_fail(b"cuMemAlloc_v2", 2)
    print(call("hipMalloc", byref(pointer), c_size_t(64)), mock.mock_current(), "out of memory" in hip.glm53_runtime_message().decode())
    found = look()[0]
    for device in (0, 1):
        call("hipSetDevice", device)
        log()
        print(device, look(), call("hipMalloc", byref(pointer), c_size_t(64)), mock.mock_current(), [each for each in log() if "Set" in each][:1])
    call("hipSetDevice", found)
mock.mock_context(1)
print(look())
""")
    assert lines == [
        "-1 (0, -1) 0 (0, -1) ['cuCtxSetCurrent(0)', 'cuMemAlloc_v2(64)', 'cuCtxSetCurrent(none)']",
        "2 -1 True",
        "0 (0, -1) 0 -1 ['cuCtxSetCurrent(0)']",
        "1 (1, -1) 0 -1 ['cuCtxSetCurrent(1)']",
        "0 (0, 0) 0 (0, 0) ['cuMemAlloc_v2(64)']",
        "2 0 True",
        "0 (0, 0) 0 0 []",
        "1 (1, 0) 0 0 ['cuCtxSetCurrent(1)']",
        "1 (1, 1) 0 (1, 1) ['cuMemAlloc_v2(64)']",
        "2 1 True",
        "0 (0, 1) 0 1 ['cuCtxSetCurrent(0)']",
        "1 (1, 1) 0 1 []",
        "2 (1, 2) 0 (1, 2) ['cuCtxSetCurrent(1)', 'cuMemAlloc_v2(64)', 'cuCtxSetCurrent(other)']",
        "2 2 True",
        "0 (0, 2) 0 2 ['cuCtxSetCurrent(0)']",
        "1 (1, 2) 0 2 ['cuCtxSetCurrent(1)']",
        "(1, 1)",
    ], "\n".join(lines)


def test_properties_in_the_layout_hip_python_reads(child: Callable[..., str], mock_cuda: Path) -> None:
    code = """
    from glm53.hip import Device, calls, runtime
    runtime.select("cuda")
    print(Device(1).properties)
    """
    text = child(code, libraries=(mock_cuda.parent,))
    wanted = "name='Mock 1'", "arch='sm_90'", "total_bytes=1073741824", "wave_width=32", "compute_units=132", "max_threads_per_block=1024"
    for part in wanted:
        assert part in text


def test_attributes(cuda: Callable[[str], list[str]]) -> None:
    lines = cuda("""
for attribute in (87, 63, 23, 19, 16, 9999, 7):
    print(attribute, call("hipDeviceGetAttribute", byref(count), attribute, 0), count.value)
for attribute in (0, 4, 9, 10, -1):
    print(call("hipFuncGetAttribute", byref(count), attribute, c_void_p(16)), count.value)
text = ctypes.create_string_buffer(32)
print(call("hipDeviceGetPCIBusId", text, 32, 1), text.value, call("hipDeviceGetName", text, 32, 1), text.value)
class Attributes(ctypes.Structure):
    _fields_ = [("type", c_int), ("device", c_int), ("pointer", c_void_p), ("host", c_void_p), ("managed", c_int), ("flags", c_uint)]
for kind in (1, 2, 4, 0):
    mock.mock_pointer_type(kind)
    found = Attributes()
    code = call("hipPointerGetAttributes", byref(found), c_void_p(4096))
    print(kind, code, found.type, found.device, found.pointer, found.host, found.managed)
""")
    assert lines == [
        "87 0 32",
        "63 0 132",
        "23 0 9",
        "19 0 1038",
        "16 0 1018",
        "9999 1 1018",
        "7 1 1018",
        "0 100",
        "0 104",
        "0 109",
        "1 109",
        "1 109",
        "0 b'0000:1b:00.1' 0 b'Mock 1'",
        "1 0 1 1 4096 4096 0",
        "2 0 2 1 4096 None 0",
        "4 0 3 1 4096 None 1",
        "0 1 0 0 None None 0",
    ]


def test_no_driver_is_no_device(child: Callable[..., str], tmp_path: Path) -> None:
    code = PRELUDE.split("mock =")[0] + "print(hip.hipInit(0), hip.hipGetDeviceCount(ctypes.byref(c_int())))\n"
    code += "hip.glm53_runtime_message.restype = c_char_p\nprint(hip.glm53_runtime_message().decode())"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "libcuda.so.1").write_text("not a library")
    codes, message = child(code, libraries=(tmp_path / "empty",)).splitlines()
    assert codes == "100 100" and "CUDA driver cannot be opened" in message


def test_an_old_driver_is_named(child: Callable[..., str], tmp_path: Path) -> None:
    old = compile_library("int cuInit(unsigned flags) { return 0; }\n", tmp_path / "old" / "libcuda.so.1")
    code = PRELUDE.split("mock =")[0] + "print(hip.hipInit(0))\n"
    code += "hip.glm53_runtime_message.restype = c_char_p\nprint(hip.glm53_runtime_message().decode())"
    code_text, message = child(code, libraries=(old.parent,)).splitlines()
    assert code_text == "35" and message == "libcuda.so.1 has no cuDriverGetVersion; CUDA 12.3 or later is needed"


def check_header(include: Path, source: Path) -> str:
    command = ["c++", "-std=c++17", "-fsyntax-only", "-I", str(include), "-I", str(SOURCES), str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_declarations_agree_with_cuda_h(tmp_path: Path) -> None:
    include = Path("/usr/local/cuda/include")
    if not (include / "cuda.h").is_file():
        pytest.skip("cuda.h is not installed")
    assert check_header(include, SOURCES / "check_cuda_header.cpp") == ""
    # The check itself must notice a difference.
    folder = tmp_path / "cuda"
    folder.mkdir()
    (tmp_path / "hip_abi.h").symlink_to(SOURCES.parent / "hip_abi.h")
    (tmp_path / "hip_errors.h").symlink_to(SOURCES.parent / "hip_errors.h")
    header = (SOURCES / "driver.h").read_text()
    changed = header.replace("X(cuMemAlloc_v2, (Address*, size_t))", "X(cuMemAlloc_v2, (Address*, int))")
    changed = changed.replace("kWarpSize, 10", "kWarpSize, 11")
    (folder / "driver.h").write_text(changed)
    check = folder / "check_cuda_header.cpp"
    check.write_text((SOURCES / "check_cuda_header.cpp").read_text())
    errors = check_header(include, check)
    assert "cuMemAlloc_v2: the signature" in errors and "WARP_SIZE differs" in errors
