"""DLPack both ways: arrays of ours for other libraries, and tensors of theirs without a copy.

Structs of dlpack.h 1.0 (DLTensor, DLManagedTensor, DLManagedTensorVersioned), protocol of the Python array API standard (`__dlpack__`,
`__dlpack_device__`). A capsule that was made here holds a reference to its owner until the consumer calls the deleter, or until the capsule dies
unconsumed; a tensor that was imported holds its producer's until `Imported.release`.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

import numpy as np

from glm53.errors import InputError
from glm53.spec import DType

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST = 1, 2, 3, 10, 11  # DLDeviceType
DEVICE_TYPES = {"cpu": CPU, "cuda": CUDA, "rocm": ROCM}  # of device memory, by runtime
_HOST_TYPES = (CPU, CUDA_HOST, ROCM_HOST)
_TYPE_NAMES = {CPU: "kDLCPU", CUDA: "kDLCUDA", CUDA_HOST: "kDLCUDAHost", ROCM: "kDLROCM", ROCM_HOST: "kDLROCMHost"}
# DLDataType: code (0 int, 1 uint, 2 float, 4 bfloat), bits.
_CODES = {
    DType.F32: (2, 32),
    DType.BF16: (4, 16),
    DType.U8: (1, 8),
    DType.I32: (0, 32),
    DType.I64: (0, 64),
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
VERSION = (1, 0)
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_USED, _USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"


class _Device(Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class _DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),  # in elements; null: row-major
        ("byte_offset", c_uint64),
    ]


class _Managed(Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p), ("flags", c_uint64), ("tensor", _Tensor)]


_DELETER = CFUNCTYPE(None, c_void_p)  # takes the managed tensor
_DESTRUCTOR = CFUNCTYPE(None, c_void_p)  # takes the capsule, whose count of references is 0: it must not become a Python object again


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = result, arguments
    return function


_capsule_new = _function("PyCapsule_New", py_object, c_void_p, c_char_p, _DESTRUCTOR)
_capsule_is = _function("PyCapsule_IsValid", c_int, py_object, c_char_p)
_capsule_pointer = _function("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)
_capsule_rename = _function("PyCapsule_SetName", c_int, py_object, c_char_p)
# The same functions for a dying capsule. getattr of a PyDLL is cached, so these need an instance of their own.
_raw = ctypes.PyDLL(None)
_raw.PyCapsule_IsValid.restype, _raw.PyCapsule_IsValid.argtypes = c_int, (c_void_p, c_char_p)
_raw.PyCapsule_GetPointer.restype, _raw.PyCapsule_GetPointer.argtypes = c_void_p, (c_void_p, c_char_p)

# What exports keep alive until their deleter runs, by address of the managed tensor.
_exports: dict[int, tuple[Structure, Any, object]] = {}


@_DELETER
def _release_export(managed: int) -> None:
    _exports.pop(managed, None)


@_DESTRUCTOR
def _drop_capsule(capsule: int) -> None:
    """An unconsumed capsule dies: its tensor goes with it. Consumers rename what they took."""
    for name in (_NAME, _NAME_VERSIONED):
        if _raw.PyCapsule_IsValid(capsule, name):
            _exports.pop(_raw.PyCapsule_GetPointer(capsule, name), None)


def live_exports() -> int:
    """Number of exported tensors that a consumer, or an unconsumed capsule, still holds."""
    return len(_exports)


def export(address: int, dtype: DType, shape: tuple[int, ...], device: tuple[int, int], owner: object, versioned: bool) -> Any:
    """A capsule for row-major memory at `address` of `device` (DLDeviceType, index). `owner` is kept alive as long as the tensor."""
    if dtype not in _CODES:
        raise BufferError(f"DLPack: {dtype.label} arrays cannot be exported; expected one of {', '.join(t.label for t in _CODES)}")
    managed: _Managed | _ManagedVersioned = _ManagedVersioned() if versioned else _Managed()
    ndim = len(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(ndim)]
    sizes = (c_int64 * (2 * ndim))(*shape, *strides)
    code, bits = _CODES[dtype]
    tensor = managed.tensor
    tensor.data, tensor.device, tensor.ndim, tensor.dtype = address, _Device(*device), ndim, _DataType(code, bits, 1)
    tensor.shape = ctypes.cast(sizes, POINTER(c_int64))
    tensor.strides = ctypes.cast(ctypes.addressof(sizes) + 8 * ndim, POINTER(c_int64))
    managed.deleter = ctypes.cast(_release_export, c_void_p)
    if isinstance(managed, _ManagedVersioned):
        managed.major, managed.minor = VERSION
    key = ctypes.addressof(managed)
    _exports[key] = (managed, sizes, owner)
    try:
        return _capsule_new(key, _NAME_VERSIONED if versioned else _NAME, _drop_capsule)
    except BaseException:
        del _exports[key]
        raise


class Imported:
    """A tensor of another library. shape and strides in elements; `on_host`: its memory is the host's. Ours until `release`."""

    def __init__(self, managed: _Managed | _ManagedVersioned, name: str):
        self._managed: _Managed | _ManagedVersioned | None = managed
        tensor = managed.tensor
        code = (int(tensor.dtype.code), int(tensor.dtype.bits))
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        row_major = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(tensor.ndim))
        self.strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else row_major
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.device = (int(tensor.device.type), int(tensor.device.id))
        if code not in _DTYPES or tensor.dtype.lanes != 1:
            self.release()
            expected = ", ".join(t.label for t in _CODES)
            raise InputError(f"{name}: got a DLPack tensor of type code {code[0]} with {code[1]} bits, expected one of {expected}")
        self.dtype = _DTYPES[code]

    @property
    def on_host(self) -> bool:
        return self.device[0] in _HOST_TYPES

    def view(self) -> np.ndarray:
        """Host memory as numpy (bf16 as uint16 bits), without a copy; valid until `release`."""
        assert self.on_host, "a view of device memory"
        kinds = {DType.F32: np.float32, DType.BF16: np.uint16, DType.U8: np.uint8, DType.I32: np.int32, DType.I64: np.int64}
        item = self.dtype.item_bytes
        if 0 in self.shape:
            return np.empty(self.shape, kinds[self.dtype])
        span = item + sum((size - 1) * stride * item for size, stride in zip(self.shape, self.strides, strict=True) if stride > 0)
        memory = np.ctypeslib.as_array((c_uint8 * span).from_address(self.address))
        return np.ndarray(self.shape, kinds[self.dtype], memory.data, 0, tuple(stride * item for stride in self.strides))

    def release(self) -> None:
        """Ends the use: the producer may free or reuse the memory."""
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            _DELETER(managed.deleter)(ctypes.addressof(managed))

    def __del__(self) -> None:
        self.release()


def import_tensor(producer: Any, name: str, device: tuple[int, int], stream: int) -> Imported:
    """Takes the tensor of an object with `__dlpack__`. `device`: (DLDeviceType, index) of ours; memory there is asked to be ready for `stream`.

    Raises InputError, naming `name`, if the object speaks no DLPack or its memory is neither on the host nor on that device.
    """
    if not hasattr(producer, "__dlpack__") or not hasattr(producer, "__dlpack_device__"):
        raise InputError(f"{name}: got {type(producer).__name__}, expected a numpy array, a glm53 Array or an object with __dlpack__")
    kind, index = (int(value) for value in producer.__dlpack_device__())
    if kind not in _HOST_TYPES and (kind, index) != device:
        expected = f"{_TYPE_NAMES[device[0]]} {device[1]}"
        raise InputError(f"{name}: lies on {_TYPE_NAMES.get(kind, f'device type {kind}')} {index}, expected {expected} or the host; next: move it")
    arguments: dict[str, Any] = {} if kind in _HOST_TYPES else {"stream": stream}
    try:
        capsule = producer.__dlpack__(**arguments, max_version=VERSION)
    except TypeError:  # a producer from before 2023.12 of the standard
        capsule = producer.__dlpack__(**arguments)
    for taken, used, struct in ((_NAME_VERSIONED, _USED_VERSIONED, _ManagedVersioned), (_NAME, _USED, _Managed)):
        if _capsule_is(capsule, taken):
            managed = struct.from_address(_capsule_pointer(capsule, taken))
            if isinstance(managed, _ManagedVersioned) and managed.major != VERSION[0]:
                raise InputError(f"{name}: got DLPack {managed.major}.{managed.minor}, expected {VERSION[0]}.x")
            _capsule_rename(capsule, used)
            return Imported(managed, name)
    raise InputError(f"{name}: __dlpack__ of {type(producer).__name__} gave {type(capsule).__name__}, expected an unused DLPack capsule")


def stream_handle(stream: Any, name: str = "stream") -> int:
    """hipStream_t (cudaStream_t) as a number: from a number, or an object with `cuda_stream` (torch) or `__cuda_stream__` (version, handle).

    Raises InputError for anything else.
    """
    for attribute in ("cuda_stream", "hip_stream"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, bool) or not hasattr(type(stream), "__index__") or int(stream) < 0:
        raise InputError(f"{name}: got {stream!r}, expected a stream handle as a number, or an object with cuda_stream or __cuda_stream__")
    return int(stream)


__all__ = ["CPU", "DEVICE_TYPES", "Imported", "export", "import_tensor", "live_exports", "stream_handle"]
