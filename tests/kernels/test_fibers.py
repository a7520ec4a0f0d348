"""The fiber back end of portable.h itself: barriers, shuffles, LDS poison, and what it says of kernels that break its rules.

Builds a module of small kernels with the host compiler and calls it through host_abi.h, without any runtime.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("g++") or shutil.which("clang++")
BLOCK = 96

SOURCE = """
#include "portable.h"
KERNEL(sums, fiber_args, 96) {
  SHARED(float, lds, 3);
  float* out = (float*)a.out;
  float v = (float)(thread_id() + 1000 * block_x());
  out[block_x() * 96 + thread_id()] = block_sum<96>(v, lds);
}
KERNEL(wide_sums, fiber_args, 96) { ((uint64_t*)a.out)[thread_id()] = wave_sum((uint64_t)(thread_id() + 1) << 40); }
KERNEL(reversed, fiber_args, 96) {
  SHARED(uint32_t, lds, 96);
  lds[thread_id()] = thread_id();
  block_sync();
  ((uint32_t*)a.out)[thread_id()] = lds[95 - thread_id()];
}
KERNEL(unwritten, fiber_args, 96) {
  SHARED(float, lds, 96);
  float* out = (float*)a.out;
  out[block_x() * 96 + thread_id()] = lds[thread_id()];
  block_sync();
  lds[thread_id()] = 1;
}
KERNEL(divergent_barrier, fiber_args, 96) { if (thread_id() < 64) block_sync(); }
KERNEL(divergent_shuffle, fiber_args, 96) { if (thread_id() != 5) shuffle_xor(1.0f, 1); }
KERNEL(follows, fiber_args, 96) { *pointer_from<uint32_t>(((uint64_t*)a.out)[0], 4) = 7; }
SPIN_KERNEL(waits, fiber_args, 96) { if (thread_id() == 0) ((uint64_t*)a.out)[1] = spin_until((uint64_t*)a.out, 1, 1000) ? 1 : 2; }
KERNEL(overruns, fiber_args, 96) {
  SHARED(float, lds, 96);
  float* p = lds;
  p[thread_id() + a.shift] = 1;
  ((float*)a.out)[thread_id()] = p[thread_id()];
}
KERNEL(many, fiber_args, 1024) { block_sync(); ((uint32_t*)a.out)[thread_id()] = thread_id(); }
__attribute__((noinline)) int deep(const char* top) {
  volatile char frame[256];
  for (int i = 0; i < 256; i++) frame[i] = 1;
  return (size_t)(top - (const char*)frame) < 66000 ? deep(top) + frame[7] : frame[3];
}
KERNEL(overflows, fiber_args, 96) {
  char top;
  if (thread_id() == a.shift) ((uint32_t*)a.out)[0] = deep(&top);
}
"""
ARGS_H = """
struct fiber_args { void* out; uint64_t shift; };
static const unsigned short fiber_args_pointers[] = {0};
enum { fiber_args_pointer_count = 1 };
"""


class Args(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("shift", ctypes.c_uint64)]


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("args_bytes", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pointer_count", ctypes.c_uint32),
        ("pointer_offsets", ctypes.c_void_p),
        ("fast", ctypes.c_void_p),
    ]


GIVE_WAY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
MAY_TOUCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


class Hooks(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p), ("give_way", GIVE_WAY), ("may_touch", MAY_TOUCH)]


RUN_BLOCKS = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Kernel),
    ctypes.c_void_p,
    Dim3,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.POINTER(Hooks),
    ctypes.c_char_p,
    ctypes.c_size_t,
)


class Module(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("kernel_count", ctypes.c_uint32),
        ("kernels", ctypes.POINTER(Kernel)),
        ("run_blocks", RUN_BLOCKS),
    ]


class Library:
    """The built module; `run` gives (result, message)."""

    def __init__(self, path: Path):
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.glm53_host_module_get.restype = ctypes.POINTER(Module)
        self.module = self._library.glm53_host_module_get().contents
        self.kernels = {self.module.kernels[i].name.decode(): self.module.kernels[i] for i in range(self.module.kernel_count)}

    def run(self, name: str, out: np.ndarray, blocks: int = 1, hooks: Hooks | None = None, shift: int = 0) -> tuple[int, str]:
        message = ctypes.create_string_buffer(512)
        args = Args(out.ctypes.data, shift)
        given = ctypes.byref(hooks) if hooks is not None else None
        result = self.module.run_blocks(
            ctypes.byref(self.kernels[name]), ctypes.byref(args), Dim3(blocks, 1, 1), 0, blocks, given, message, len(message)
        )
        return result, message.value.decode()


def build(directory: Path, *flags: str) -> Path:
    if CXX is None:
        pytest.skip("no host compiler")
    (directory / "args.h").write_text(ARGS_H)
    (directory / "kernels.cpp").write_text(SOURCE)
    command = [CXX, "-shared", "-fPIC", "-DGLM53_HOST", "-std=c++17", "-O2", "-ffp-contract=fast", *flags]
    command += [f"-I{ROOT / 'hipsrc' / 'include'}", f"-I{directory}", str(directory / "kernels.cpp"), "-o", str(directory / "kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory / "kernels.so"


@pytest.fixture(scope="module", params=["", "-DGLM53_UCONTEXT"], ids=["native", "ucontext"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(build(tmp_path_factory.mktemp("fibers"), *filter(None, [request.param])))


def test_block_sum_is_the_same_in_every_work_item_of_every_block(library: Library) -> None:
    out = np.zeros((3, BLOCK), np.float32)
    assert library.run("sums", out, blocks=3) == (0, "")
    want = [sum(range(BLOCK)) + 1000 * block * BLOCK for block in range(3)]
    np.testing.assert_array_equal(out, np.repeat(np.float32(want)[:, None], BLOCK, axis=1))


def test_eight_byte_shuffles_keep_both_halves(library: Library) -> None:
    out = np.zeros(BLOCK, np.uint64)
    assert library.run("wide_sums", out) == (0, "")
    want = np.repeat([sum(range(32 * w + 1, 32 * w + 33)) for w in range(3)], 32).astype(np.uint64) << np.uint64(40)
    np.testing.assert_array_equal(out, want)


def test_barrier_orders_lds(library: Library) -> None:
    out = np.zeros(BLOCK, np.uint32)
    assert library.run("reversed", out) == (0, "")
    np.testing.assert_array_equal(out, np.arange(BLOCK)[::-1])


def test_lds_is_nan_at_the_start_of_every_block(library: Library) -> None:
    out = np.zeros((2, BLOCK), np.float32)
    assert library.run("unwritten", out, blocks=2) == (0, "")
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("divergent_barrier", "divergent barrier: block (0, 0, 0), work-items 0 to 95: 0 at a shuffle, 64 at a barrier, 32 returned"),
        ("divergent_shuffle", "divergent wave: block (0, 0, 0), work-items 0 to 31: 31 at a shuffle, 0 at a barrier, 1 returned"),
    ],
)
def test_divergence_is_reported_and_the_thread_goes_on(library: Library, name: str, words: str) -> None:
    assert library.run(name, np.zeros(BLOCK, np.uint32)) == (1, words)
    test_barrier_orders_lds(library)
    test_block_sum_is_the_same_in_every_work_item_of_every_block(library)


def hooks(give_way: Callable[[], int], may_touch: Callable[[int, int], int]) -> Hooks:
    return Hooks(None, GIVE_WAY(lambda _: give_way()), MAY_TOUCH(lambda _, address, count: may_touch(address, count)))


def test_addresses_from_memory_are_asked_for(library: Library) -> None:
    target, asked = np.zeros(1, np.uint32), []
    out = np.array([target.ctypes.data], np.uint64)

    def allow(address: int, count: int) -> int:
        asked.append((address, count))
        return 1

    assert library.run("follows", out, hooks=hooks(lambda: 0, allow)) == (0, "")
    assert target[0] == 7
    assert asked == [(target.ctypes.data, 4)], "one question for the 96 work-items that ask for the same range"
    result, message = library.run("follows", out, hooks=hooks(lambda: 0, lambda address, count: 0))
    assert result == 1
    assert f"{target.ctypes.data:#x} (4 bytes)" in message


def test_a_spinning_kernel_gives_way_until_the_store_comes(library: Library) -> None:
    out = np.zeros(2, np.uint64)
    turns = []

    def give_way() -> int:
        turns.append(1)
        out[0] = len(turns) == 3
        return 0

    assert library.run("waits", out, hooks=hooks(give_way, lambda address, count: 1)) == (0, "")
    assert (len(turns), out[1]) == (3, 1)


def test_a_spinning_kernel_ends_when_told_to_give_up(library: Library) -> None:
    result, message = library.run("waits", np.zeros(2, np.uint64), hooks=hooks(lambda: 1, lambda address, count: 1))
    assert (result, message.split(";")[0]) == (1, "gave up waiting: the runtime ended the wait of a spinning kernel")


def test_a_wait_that_is_never_answered_is_bounded(library: Library) -> None:
    out = np.zeros(2, np.uint64)
    assert library.run("waits", out, hooks=hooks(lambda: 0, lambda address, count: 1)) == (0, "")
    assert out[1] == 2


def test_a_stack_overflow_is_reported_and_the_thread_goes_on(library: Library) -> None:
    for _ in range(2):
        assert library.run("overflows", np.zeros(BLOCK, np.uint32), shift=40) == (1, "stack overflow: work-item 40 needs more than 65536 bytes")
        test_barrier_orders_lds(library)


@pytest.mark.parametrize("item", [0, 31, 64])
def test_a_stack_overflow_above_a_guard_ends_the_process(library: Library, item: int) -> None:
    script = "import sys, numpy as np; from tests.kernels.test_fibers import Library\n"
    script += "Library(sys.argv[1]).run('overflows', np.zeros(96, np.uint32), shift=int(sys.argv[2]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, library.path, str(item)], env=environment, capture_output=True, cwd=ROOT)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_stacks_take_few_mappings(library: Library) -> None:
    """A process has 65,530 of them; the threads of a pair's waiting blocks have 1,024 stacks each."""
    out, found = np.zeros(1024, np.uint32), []

    def run() -> None:
        before = len(Path("/proc/self/maps").read_text().splitlines())
        assert library.run("many", out) == (0, "")
        found.append(len(Path("/proc/self/maps").read_text().splitlines()) - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(out, np.arange(1024))
    assert found[0] < 200


def test_lds_overrun_is_caught_by_address_sanitizer(tmp_path: Path) -> None:
    libasan = subprocess.run([str(CXX), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(libasan).is_absolute():
        pytest.skip("the compiler has no libasan.so")
    path = build(tmp_path, "-fsanitize=address,undefined", "-g1")
    script = "import sys, numpy as np; from tests.kernels.test_fibers import Library\n"
    script += "lib = Library(sys.argv[1]); out = np.zeros(96, np.float32)\n"
    script += "for name in ('sums', 'reversed', 'divergent_barrier', 'sums'): lib.run(name, out)\n"
    script += "print('before'); lib.run('overruns', out, shift=int(sys.argv[2])); print('after')"
    environment = os.environ | {"LD_PRELOAD": libasan, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0", "PYTHONPATH": str(ROOT)}
    outcome = {}
    for shift in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", script, str(path), shift], env=environment, capture_output=True, text=True, cwd=ROOT)
        outcome[shift] = done.stdout.split(), "AddressSanitizer: use-after-poison" in done.stderr
    assert outcome == {"0": (["before", "after"], False), "1": (["before"], True)}, done.stderr
