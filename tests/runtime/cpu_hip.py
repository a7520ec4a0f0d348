"""A short spelling of HIP for the tests: hip-python on the cpu runtime, plus the runtime's own control symbols."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

FINE, UNCACHED = 1, 3
NON_BLOCKING = 1
HOST_NONCOHERENT = 0x80000000


class WordsArgs(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("y", c_void_p), ("count", c_uint64)]


class SpinArgs(ctypes.Structure):
    _fields_ = [("mine", c_void_p), ("theirs", c_void_p), ("result", c_void_p), ("rounds", c_uint64), ("first", c_uint64)]


class HipFailure(Exception):
    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class Gpu:
    """Calls are attributes: gpu.hipMalloc(n) returns the value, or raises HipFailure; gpu.code("hipMalloc", n) returns the error's name."""

    def __init__(self, library: Path, code_object: Path) -> None:
        self.library, self.code_object = library, code_object
        self._hip: Any = None
        self._control: Any = None
        self._kept: list[Any] = []
        self._functions: dict[tuple[int, str], Any] = {}

    @property
    def hip(self) -> Any:
        if self._hip is None:
            from rocm.bindings.util import paths

            original = paths.get_library_path
            paths.get_library_path = lambda name: str(self.library).encode() if name == "amdhip64" else original(name)
            try:
                from rocm.bindings import hip

                hip.hipGetErrorName(hip.hipError_t.hipSuccess)
            finally:
                paths.get_library_path = original
            self._hip = hip
        return self._hip

    @property
    def control(self) -> Any:
        if self._control is None:
            control = ctypes.CDLL(str(self.library))
            control.glm53_runtime_name.restype = c_char_p
            control.glm53_runtime_message.restype = c_char_p
            control.glm53_cpu_configure.argtypes = [c_uint32, c_uint64]
            control.glm53_cpu_seed.argtypes = [c_uint64, c_int]
            control.glm53_cpu_fibers.argtypes = [c_int]
            control.glm53_cpu_fail.argtypes = [c_char_p, c_uint64, c_int]
            control.glm53_cpu_calls.argtypes, control.glm53_cpu_calls.restype = [c_char_p], c_uint64
            control.glm53_cpu_live.argtypes, control.glm53_cpu_live.restype = [c_char_p], c_uint64
            control.glm53_cpu_set_threads.argtypes = [c_uint32]
            control.glm53_cpu_trace.argtypes, control.glm53_cpu_trace.restype = [c_void_p, c_uint64], c_uint64
            self._control = control
        return self._control

    def code(self, call: str, *args: Any) -> str:
        return str(self._raw(call, *args)[0].name)

    def __getattr__(self, call: str) -> Any:
        if not call.startswith("hip"):
            raise AttributeError(call)

        def checked(*args: Any) -> Any:
            result = self._raw(call, *args)
            if result[0] != self.hip.hipError_t.hipSuccess:
                raise HipFailure(call, result[0].name)
            return result[1] if len(result) == 2 else result[1:]

        return checked

    def _raw(self, call: str, *args: Any) -> tuple[Any, ...]:
        result = getattr(self.hip, call)(*args)
        return result if isinstance(result, tuple) else (result,)

    # Control

    def message(self) -> str:
        return self.control.glm53_runtime_message().decode()

    def seed(self, value: int) -> None:
        self.control.glm53_cpu_seed(value, 1)

    def live(self, kind: str) -> int:
        return int(self.control.glm53_cpu_live(kind.encode()))

    def trace(self) -> str:
        size = self.control.glm53_cpu_trace(None, 0)
        out = ctypes.create_string_buffer(size + 1)
        self.control.glm53_cpu_trace(out, size + 1)
        return out.value.decode()

    def reset(self) -> None:
        self.control.glm53_cpu_reset()
        self._functions.clear()

    # Memory

    def alloc(self, byte_count: int, flags: int = 0) -> int:
        return int(self.hipExtMallocWithFlags(byte_count, flags)) if flags else int(self.hipMalloc(byte_count))

    def upload(self, values: Any, flags: int = 0) -> int:
        values = np.ascontiguousarray(values)
        address = self.alloc(values.nbytes, flags)
        self.hipMemcpy(address, values.ctypes.data, values.nbytes, self.hip.hipMemcpyKind.hipMemcpyHostToDevice)
        return address

    def download(self, address: int, count: int, dtype: Any = np.uint32) -> Any:
        values = np.zeros(count, dtype)
        self.hipMemcpy(values.ctypes.data, address, values.nbytes, self.hip.hipMemcpyKind.hipMemcpyDeviceToHost)
        return values

    def pinned(self, count: int, dtype: Any = np.uint32, flags: int = 0) -> Any:
        """Pinned host memory as an array."""
        item_bytes = np.dtype(dtype).itemsize
        address = int(self.hipHostMalloc(count * item_bytes, flags))
        return np.frombuffer((ctypes.c_uint8 * (count * item_bytes)).from_address(address), dtype=dtype)

    # Kernels

    def function(self, name: str) -> Any:
        device = self.hipGetDevice()
        if (device, name) not in self._functions:
            module = self.hipModuleLoad(str(self.code_object).encode())
            self._functions[device, name] = self.hipModuleGetFunction(module, name.encode())
        return self._functions[device, name]

    def launch(self, name: str, args: ctypes.Structure, grid: Any = 1, block: Any = None, stream: Any = None) -> None:
        result = self.launch_code(name, args, grid, block, stream)
        if result != "hipSuccess":
            raise HipFailure("hipModuleLaunchKernel", result)

    def launch_code(self, name: str, args: ctypes.Structure, grid: Any = 1, block: Any = None, stream: Any = None, extra: Any = None) -> str:
        grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        block = block or (32 if name in ("add_one", "ticket") else 1)
        block = block if isinstance(block, tuple) else (block, 1, 1)
        params = (c_void_p * 1)(ctypes.addressof(args))
        self._kept += [args, params]
        pointer = None if extra else ctypes.addressof(params)
        return self.code("hipModuleLaunchKernel", self.function(name), *grid, *block, 0, stream, pointer, extra)
