"""Fast kernels of the host against their fibers: each launch of each case is done both ways on the same memory, and every byte compared."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from glm53.check.case import Case, all_cases
from glm53.hip import Buffer, Device, runtime
from glm53.hip.module import Kernel, object_path

Launch = Callable[..., None]
# Buffers whose content after a launch means nothing, by field of the argument struct.
SCRATCH = {
    "step_topk": ("entries", "entry_counts"),
    **dict.fromkeys((f"step_halves_{kind}" for kind in ("bf16_bf16", "bf16_q8g64", "one_bf16_q8g64")), ("partial",)),
    **dict.fromkeys((f"step_down_bf16_{weights}" for weights in ("bf16", "q8g64", "q4g64")), ("partial",)),
}


class HostKernel(ctypes.Structure):
    """glm53_host_kernel of hipsrc/include/host_abi.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("numbers", ctypes.c_uint32 * 4),
        ("pointer_offsets", ctypes.c_void_p),
        ("fast", ctypes.c_void_p),
    ]


class HostModule(ctypes.Structure):
    _fields_ = [("abi", ctypes.c_uint32), ("kernel_count", ctypes.c_uint32), ("kernels", ctypes.POINTER(HostKernel)), ("run_blocks", ctypes.c_void_p)]


def fast_kernels() -> set[str]:
    """Names of the kernels that have a fast form."""
    get = ctypes.CDLL(str(object_path("host"))).glm53_host_module_get
    get.restype = ctypes.POINTER(HostModule)
    module = get().contents
    return {module.kernels[i].name.decode() for i in range(module.kernel_count) if module.kernels[i].fast}


def memory_of(device: Device) -> dict[int, np.ndarray]:
    """The bytes of every live buffer of the device, in place: on the cpu runtime a device address is an address of the process."""
    spans = {buffer.address: buffer.byte_count for buffer in device.live.values() if isinstance(buffer, Buffer) and buffer.byte_count}
    return {address: np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address)) for address, count in spans.items()}


class BothWays:
    """Replaces Kernel.launch: what a fast kernel leaves in memory must be what its fibers leave there."""

    def __init__(self, launch: Launch, names: set[str]):
        self.launch, self.names = launch, names
        self.seen: set[str] = set()
        self.control = runtime.control()

    @contextmanager
    def fibers(self) -> Iterator[None]:
        self.control.glm53_cpu_fibers(1)
        try:
            yield
        finally:
            self.control.glm53_cpu_fibers(0)

    def __call__(self, kernel: Kernel, stream: object, grid: tuple[int, int, int], args: ctypes.Structure) -> None:
        if kernel.name not in self.names:
            self.launch(kernel, stream, grid, args)
            return
        device = kernel.device
        device.synchronize()
        memory = memory_of(device)
        before = {address: view.copy() for address, view in memory.items()}
        with self.fibers():
            self.launch(kernel, stream, grid, args)
            device.synchronize()
        want = {address: view.copy() for address, view in memory.items()}
        for address, view in memory.items():
            view[:] = before[address]
        self.launch(kernel, stream, grid, args)
        device.synchronize()
        self.seen.add(kernel.name)
        for field in SCRATCH.get(kernel.name, ()):
            memory.pop(getattr(args, field), None)
        for address, view in memory.items():
            wrong = np.flatnonzero(view != want[address])
            where = f"{kernel.name}, grid {grid}: {len(wrong)} of {len(view)} bytes of the buffer at {address:#x} differ"
            assert not len(wrong), f"{where}, first at {wrong[0]}: fast {view[wrong[0]]}, fibers {want[address][wrong[0]]}"


@pytest.fixture(scope="module")
def both(device: Device) -> Iterator[BothWays]:
    if device.runtime.name != "cpu":
        pytest.skip("only the cpu runtime has two forms of a kernel")
    launch = Kernel.launch
    ways = BothWays(launch, fast_kernels())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", lambda kernel, *args: ways(kernel, *args))
        yield ways


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_fast_kernel_leaves_the_bits_of_its_fibers(device: Device, both: BothWays, case: Case) -> None:
    case.run(device)


def test_every_fast_kernel_has_a_case(device: Device, both: BothWays) -> None:
    for case in all_cases():  # those that ran before in this module have left nothing to do
        if not both.names - both.seen:
            break
        case.run(device)
    assert not both.names - both.seen, f"no case launches {sorted(both.names - both.seen)}"
