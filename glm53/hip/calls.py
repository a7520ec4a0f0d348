"""The one module that calls hip-python. Every call is checked; a failure is a `HipError` with call, code and text.

`bind()` is called once by `glm53.hip.runtime` with the hip-python module (`rocm.bindings.hip` of hip-python 10, `hip.hip` of 6.x and 7.x)
after it made sure which library is underneath. Addresses cross this border as int, handles as the objects that hip-python returned (they
convert without a look-up when passed again). Nothing here keeps state but the binding.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glm53.errors import DeviceLost, HipError, RuntimeUnavailable
from glm53.hip import literals


class _Unbound:
    """In the place of hip-python when it must not be called."""

    def __init__(self, when: str):
        self._when = when

    def __getattr__(self, name: str) -> Any:
        raise RuntimeUnavailable(f"{name} was called {self._when}")


_hip: Any = _Unbound("before a HIP runtime was chosen; next: glm53.hip.runtime.select() or Device(0)")
_message: Callable[[], bytes] | None = None


def bind(module: Any, message: Callable[[], bytes] | None) -> None:
    """Binds the hip-python `module`; `message` returns the last message of one of our runtimes, None on AMD's."""
    global _hip, _message
    _hip, _message = module, message
    os.register_at_fork(after_in_child=_unbind_after_fork)


def _unbind_after_fork() -> None:
    """A child has the parent's handles but none of the runtime's threads: a call would wait for ever."""
    global _hip, _message
    _hip, _message = _Unbound("in a forked process, where no HIP runtime works; next: start processes with the spawn method"), None


def error_text(code: int) -> str:
    """`hipErrorInvalidValue: invalid argument`, from hip-python's enumeration and the runtime."""
    try:
        error = _hip.hipError_t(code)
    except ValueError:
        return "unknown error"
    text = _hip.hipGetErrorString(error)[1]
    plain = "" if text is None else text.decode() if hasattr(text, "decode") else str(text)
    return f"{error.name}: {plain}" if plain else error.name


def failure(call: str, code: int) -> HipError:
    """The exception for a failed `call`; clears the runtime's sticky error so that a later check does not see it again."""
    detail = ""
    if _message is not None:
        detail = (_message() or b"").decode(errors="replace")
    text = error_text(code)
    _hip.hipGetLastError()
    if code in literals.ERRORS_DEVICE_LOST:
        detail += ("; " if detail else "") + "the device is lost for this process; next: restart the process"
        return DeviceLost(call, code, text, detail)
    return HipError(call, code, text, detail)


def _check(call: str, result: tuple) -> Any:
    """Raises unless result[0] is hipSuccess; returns the one output, or a tuple of several."""
    if result[0]:
        raise failure(call, int(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def _address(pointer: Any) -> int:
    return 0 if pointer is None else int(pointer)


# Versions and devices


@dataclass(frozen=True)
class DeviceProperties:
    """What we use of hipDeviceProp_tR0600. `arch` is gcnArchName without feature suffixes (`gfx90a:sramecc+:xnack-` -> `gfx90a`)."""

    name: str
    arch: str
    full_arch: str
    total_bytes: int
    wave_width: int
    compute_units: int
    max_threads_per_block: int
    shared_bytes_per_block: int
    pci_bus: str


def init() -> None:
    _check("hipInit", _hip.hipInit(0))


def runtime_version() -> int:
    return _check("hipRuntimeGetVersion", _hip.hipRuntimeGetVersion())


def driver_version() -> int:
    return _check("hipDriverGetVersion", _hip.hipDriverGetVersion())


def device_count() -> int:
    """Number of visible devices; 0 where the runtime answers hipErrorNoDevice."""
    result = _hip.hipGetDeviceCount()
    if int(result[0]) == literals.ERROR_NO_DEVICE:
        _hip.hipGetLastError()
        return 0
    return _check("hipGetDeviceCount", result)


def current_device() -> int:
    result = _hip.hipGetDevice()
    if result[0]:
        raise failure("hipGetDevice", int(result[0]))
    return result[1]


def set_device(index: int) -> None:
    result = _hip.hipSetDevice(index)
    if result[0]:
        raise failure("hipSetDevice", int(result[0]))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def device_properties(index: int) -> DeviceProperties:
    if hasattr(_hip, "has_symbol"):  # hip-python 10 returns the struct, 6.x and 7.x fill the caller's
        properties = _check("hipGetDeviceProperties", _hip.hipGetDeviceProperties(index))
    else:
        properties = _hip.hipDeviceProp_t()
        _check("hipGetDeviceProperties", _hip.hipGetDeviceProperties(properties, index))
    full_arch = _text(properties.gcnArchName)
    return DeviceProperties(
        name=_text(properties.name),
        arch=full_arch.split(":")[0],
        full_arch=full_arch,
        total_bytes=int(properties.totalGlobalMem),
        wave_width=int(properties.warpSize),
        compute_units=int(properties.multiProcessorCount),
        max_threads_per_block=int(properties.maxThreadsPerBlock),
        shared_bytes_per_block=int(properties.sharedMemPerBlock),
        pci_bus=f"{int(properties.pciDomainID):04x}:{int(properties.pciBusID):02x}:{int(properties.pciDeviceID):02x}",
    )


def device_synchronize() -> None:
    _check("hipDeviceSynchronize", _hip.hipDeviceSynchronize())


def can_access_peer(index: int, peer: int) -> bool:
    return bool(_check("hipDeviceCanAccessPeer", _hip.hipDeviceCanAccessPeer(index, peer)))


def enable_peer(peer: int) -> bool:
    """Lets the current device reach `peer`'s memory; False if it could already, which is not an error."""
    result = _hip.hipDeviceEnablePeerAccess(peer, 0)
    if int(result[0]) == literals.ERROR_PEER_ACCESS_ALREADY_ENABLED:
        _hip.hipGetLastError()
        return False
    _check("hipDeviceEnablePeerAccess", result)
    return True


def disable_peer(peer: int) -> None:
    """Ends what `enable_peer` began. No work that reaches `peer` may be under way."""
    _check("hipDeviceDisablePeerAccess", _hip.hipDeviceDisablePeerAccess(peer))


# Memory


def malloc(byte_count: int) -> int:
    return _address(_check("hipMalloc", _hip.hipMalloc(byte_count)))


def malloc_with_flags(byte_count: int, flags: int) -> int:
    return _address(_check("hipExtMallocWithFlags", _hip.hipExtMallocWithFlags(byte_count, flags)))


def free(address: int) -> None:
    _check("hipFree", _hip.hipFree(address))


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current device."""
    return _check("hipMemGetInfo", _hip.hipMemGetInfo())


def host_malloc(byte_count: int, flags: int) -> int:
    return _address(_check("hipHostMalloc", _hip.hipHostMalloc(byte_count, flags)))


def host_free(address: int) -> None:
    _check("hipHostFree", _hip.hipHostFree(address))


def host_register(address: int, byte_count: int, flags: int) -> None:
    _check("hipHostRegister", _hip.hipHostRegister(address, byte_count, flags))


def host_unregister(address: int) -> None:
    _check("hipHostUnregister", _hip.hipHostUnregister(address))


def host_device_pointer(address: int) -> int:
    return _address(_check("hipHostGetDevicePointer", _hip.hipHostGetDevicePointer(address, 0)))


def copy(target: int, source: int, byte_count: int) -> None:
    """Copies and returns when the bytes are there. The direction is found from the addresses."""
    _check("hipMemcpy", _hip.hipMemcpy(target, source, byte_count, _hip.hipMemcpyKind.hipMemcpyDefault))


def copy_async(target: int, source: int, byte_count: int, stream: Any) -> None:
    _check("hipMemcpyAsync", _hip.hipMemcpyAsync(target, source, byte_count, _hip.hipMemcpyKind.hipMemcpyDefault, stream))


def copy_2d_async(target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: Any) -> None:
    kind = _hip.hipMemcpyKind.hipMemcpyDefault
    _check("hipMemcpy2DAsync", _hip.hipMemcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind, stream))


def copy_peer_async(target: int, target_device: int, source: int, source_device: int, byte_count: int, stream: Any) -> None:
    _check("hipMemcpyPeerAsync", _hip.hipMemcpyPeerAsync(target, target_device, source, source_device, byte_count, stream))


def fill_async(target: int, value: int, byte_count: int, stream: Any) -> None:
    _check("hipMemsetAsync", _hip.hipMemsetAsync(target, value, byte_count, stream))


# Streams and events


def stream_create() -> Any:
    return _check("hipStreamCreateWithFlags", _hip.hipStreamCreateWithFlags(literals.STREAM_NON_BLOCKING))


def stream_destroy(stream: Any) -> None:
    _check("hipStreamDestroy", _hip.hipStreamDestroy(stream))


def stream_synchronize(stream: Any) -> None:
    _check("hipStreamSynchronize", _hip.hipStreamSynchronize(stream))


def stream_wait_event(stream: Any, event: Any) -> None:
    _check("hipStreamWaitEvent", _hip.hipStreamWaitEvent(stream, event, 0))


def _ready(call: str, result: tuple) -> bool:
    if int(result[0]) == literals.ERROR_NOT_READY:
        return False
    _check(call, result)
    return True


def stream_query(stream: Any) -> bool:
    """True when everything enqueued on the stream has finished."""
    return _ready("hipStreamQuery", _hip.hipStreamQuery(stream))


def event_create(flags: int) -> Any:
    return _check("hipEventCreateWithFlags", _hip.hipEventCreateWithFlags(flags))


def event_destroy(event: Any) -> None:
    _check("hipEventDestroy", _hip.hipEventDestroy(event))


def event_record(event: Any, stream: Any) -> None:
    _check("hipEventRecord", _hip.hipEventRecord(event, stream))


def event_query(event: Any) -> bool:
    return _ready("hipEventQuery", _hip.hipEventQuery(event))


def event_synchronize(event: Any) -> None:
    _check("hipEventSynchronize", _hip.hipEventSynchronize(event))


def event_elapsed_ms(earlier: Any, later: Any) -> float:
    return _check("hipEventElapsedTime", _hip.hipEventElapsedTime(earlier, later))


# Modules and launches


def module_load(path: str) -> Any:
    return _check("hipModuleLoad", _hip.hipModuleLoad(path.encode()))


def module_unload(module: Any) -> None:
    _check("hipModuleUnload", _hip.hipModuleUnload(module))


def module_function(module: Any, name: str) -> Any:
    return _check("hipModuleGetFunction", _hip.hipModuleGetFunction(module, name.encode()))


class LaunchSlot:
    """A kernel's argument struct at a fixed address, with the one-element kernelParams array that points at it, both converted for
    hip-python once. The runtime copies the arguments during the launch call, so a slot may be refilled as soon as that call returned."""

    def __init__(self, args_bytes: int):
        self._struct = (ctypes.c_uint64 * ((args_bytes + 7) // 8))()
        self._array = (ctypes.c_void_p * 1)(ctypes.addressof(self._struct))
        self.struct_address = ctypes.addressof(self._struct)
        self.params = ctypes.c_void_p(ctypes.addressof(self._array))


def prepare_params(slot: LaunchSlot) -> Any:
    """The slot's kernelParams as the type that hipModuleLaunchKernel takes without conversion."""
    if not hasattr(_hip, "has_symbol"):
        return slot.params
    from rocm.bindings.util.types import ListOfPointer

    return ListOfPointer(slot.params)


def launch(function: Any, grid: tuple[int, int, int], block: int, stream: Any, params: Any) -> None:
    """Launches with `params` from `prepare_params`; no dynamic LDS."""
    result = _hip.hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], block, 1, 1, 0, stream, params, None)
    if result[0]:
        raise failure("hipModuleLaunchKernel", int(result[0]))


# Graphs. hipGraphGetNodes is not used: every hip-python passes it an uninitialised count, so that the runtime writes past the result.


def capture_begin(stream: Any) -> None:
    """Starts a thread-local capture: unsafe calls of other threads do not break it."""
    mode = _hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
    _check("hipStreamBeginCapture", _hip.hipStreamBeginCapture(stream, mode))


def capture_end(stream: Any) -> Any:
    return _check("hipStreamEndCapture", _hip.hipStreamEndCapture(stream))


def graph_instantiate(graph: Any) -> Any:
    return _check("hipGraphInstantiateWithFlags", _hip.hipGraphInstantiateWithFlags(graph, 0))


def graph_launch(executable: Any, stream: Any) -> None:
    _check("hipGraphLaunch", _hip.hipGraphLaunch(executable, stream))


def graph_executable_destroy(executable: Any) -> None:
    _check("hipGraphExecDestroy", _hip.hipGraphExecDestroy(executable))


def graph_destroy(graph: Any) -> None:
    _check("hipGraphDestroy", _hip.hipGraphDestroy(graph))
