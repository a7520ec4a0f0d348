"""Safetensors files of a model directory: index, headers, and memory-mapped views of the tensors.

Invariant: after `Checkpoint.open`, every `TensorInfo` lies inside its file, no two of a file overlap, and bytes equal shape times item
size. Nothing is read but headers until a view is touched. Knows no model and no device. Format: github.com/huggingface/safetensors (8 bytes
little-endian header length, a JSON object, then the tensors' bytes without holes).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from glm53.errors import CheckpointError, human_bytes
from glm53.files import INDEX_FILE, LFS_PREFIX, SINGLE_FILE, check_directory, check_not_lfs_pointer, read_json_object

HEADER_BYTES_MAX = 100_000_000  # the limit of the reference implementation

# safetensors dtype -> (bytes per item, numpy type of a view). Types this program cannot compute with are listed so that a file holding
# them is read, and the tensor then refused by name.
_TYPES: dict[str, tuple[int, str]] = {
    "F32": (4, "<f4"),
    "BF16": (2, "<u2"),  # raw bits
    "F8_E4M3": (1, "u1"),  # raw codes
    "F64": (8, "<f8"),
    "F16": (2, "<f2"),
    "F8_E5M2": (1, "u1"),
    "F8_E8M0": (1, "u1"),
    "I64": (8, "<i8"),
    "I32": (4, "<i4"),
    "I16": (2, "<i2"),
    "I8": (1, "i1"),
    "U64": (8, "<u8"),
    "U32": (4, "<u4"),
    "U16": (2, "<u2"),
    "U8": (1, "u1"),
    "BOOL": (1, "u1"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a stored tensor lies: `nbytes` bytes from byte `offset` of `file` (a name inside the model directory), row-major `shape`."""

    name: str
    dtype: str  # safetensors spelling: F32, BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a model directory. Views stay valid after `close` as long as someone holds them."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo], maps: dict[str, mmap.mmap], disk_bytes: int):
        self.path = path
        self.tensors = tensors
        self.disk_bytes = disk_bytes  # of the weight files, headers included
        self._maps = maps

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Maps the directory's safetensors files and checks their headers. Raises `CheckpointError` naming file, got and expected."""
        path = Path(path)
        check_directory(path)
        index = None if (path / SINGLE_FILE).exists() else _read_index(path)
        files = [SINGLE_FILE] if index is None else sorted(set(index.values()))
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise CheckpointError(
                f"{path}: {len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:10])}{more}; fetch them again"
            )
        tensors: dict[str, TensorInfo] = {}
        maps: dict[str, mmap.mmap] = {}
        for name in files:
            maps[name] = _map(path / name)
            for info in _read_header(path, name, maps[name]):
                if info.name in tensors:
                    raise CheckpointError(f"{path}: tensor {info.name} is in {tensors[info.name].file} and again in {name}, expected once")
                tensors[info.name] = info
        if index is not None:
            _check_index(path, index, tensors)
        return cls(path, tensors, maps, sum(len(m) for m in maps.values()))

    def view(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only array over the file's pages: F32 as float32, BF16 as uint16 bits, F8_E4M3 as uint8 codes."""
        info = self.tensors[name]
        item_bytes, numpy_type = _TYPES[info.dtype]
        if info.nbytes == 0:
            return np.empty(info.shape, dtype=numpy_type)
        flat = np.frombuffer(self._maps[info.file], dtype=numpy_type, count=info.nbytes // item_bytes, offset=info.offset)
        return flat.reshape(info.shape)

    def bytes_of(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Bytes [start, stop) of a tensor as a view over the file's pages."""
        stop = info.nbytes if stop is None else stop
        assert 0 <= start <= stop <= info.nbytes
        if start == stop:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(self._maps[info.file], dtype=np.uint8, count=stop - start, offset=info.offset + start)

    def release(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> None:
        """Drops the pages of bytes [start, stop) from this process, so that a streamed file does not count as resident memory. The data
        stays readable: a later touch reads it again (from the page cache if still there)."""
        stop = info.nbytes if stop is None else stop
        if stop <= start or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[info.file].madvise(mmap.MADV_DONTNEED, first, info.offset + stop - first)

    def close(self) -> None:
        """Forgets the mappings; each goes away with its last view."""
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of the index: tensor name -> file name, each a plain name inside the directory."""
    file = path / INDEX_FILE
    if not file.exists():
        found = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        seen = f"; it holds {', '.join(found[:4])}{', ...' if len(found) > 4 else ''}" if found else ""
        raise CheckpointError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{seen}")
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        got = "empty" if weight_map == {} else type(weight_map).__name__
        raise CheckpointError(f"{file}: weight_map is {got}, expected tensor names and files")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name == os.path.basename(name) and not set(name) & {"\\", "\0"}
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{file}: {tensor} is said to be in {name!r}, expected the name of a .safetensors file in the same directory")
    return weight_map


def _check_index(path: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for tensor, name in index.items():
        if tensor not in tensors:
            raise CheckpointError(f"{path / INDEX_FILE}: {tensor} is said to be in {name}, which lacks it; fetch both files again")
        if tensors[tensor].file != name:
            raise CheckpointError(f"{path / INDEX_FILE}: {tensor} is said to be in {name}, found in {tensors[tensor].file}")


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as stream:
            check_not_lfs_pointer(file, stream.read(len(LFS_PREFIX)))
            size = os.fstat(stream.fileno()).st_size
            if size < 8:
                raise CheckpointError(f"{file} is truncated: {size} bytes, expected at least the 8 of the header's length; fetch it again")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {repeated!r} appears twice")
    return result


def _read_header(path: Path, name: str, data: mmap.mmap) -> Iterator[TensorInfo]:
    """The tensors of one file in file order. The header must describe the whole file: no holes, no overlap, nothing behind."""
    file, size = path / name, len(data)
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > HEADER_BYTES_MAX or header_bytes < 2:
        raise CheckpointError(
            f"{file}: header length is {header_bytes} bytes, expected 2 to {HEADER_BYTES_MAX}; it is no safetensors file, or damaged"
        )
    base = 8 + header_bytes
    if base > size:
        raise CheckpointError(f"{file} is truncated: {human_bytes(size)}, the header alone has {human_bytes(base)}; fetch it again")
    try:
        header = json.loads(data[8:base].decode("utf-8"), object_pairs_hook=_object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not usable JSON ({error}); the file is damaged, fetch it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is a JSON {type(header).__name__}, expected an object")
    entries = [_entry(file, key, value, base) for key, value in header.items() if key != "__metadata__"]
    entries.sort(key=lambda e: (e.offset, e.nbytes))
    end, previous = base, "the header"
    for entry in entries:
        if entry.offset != end:
            fault = "overlap" if entry.offset < end else "leave a hole"
            raise CheckpointError(
                f"{file}: {previous} and {entry.name} {fault}: {entry.name} starts at byte {entry.offset - base} of the data, expected {end - base}"
            )
        end, previous = entry.offset + entry.nbytes, entry.name
    if end > size:
        short = next(e for e in entries if e.offset + e.nbytes > size)
        got = f"{human_bytes(size)}, expected {human_bytes(end)}"
        raise CheckpointError(f"{file} is truncated: {got}; {short.name} is cut off; fetch it again")
    if end < size:
        raise CheckpointError(f"{file}: {human_bytes(size)}, expected {human_bytes(end)}: bytes follow the last tensor; fetch it again")
    yield from entries


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(file: Path, name: str, value: Any, base: int) -> TensorInfo:
    """One header entry, checked on its own; offsets are turned into file offsets."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{file}: the entry of {name} is {str(value)[:80]}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise CheckpointError(f"{file}: {name} has dtype {str(dtype)[:40]!r}, expected one of {', '.join(_TYPES)}")
    if not isinstance(shape, list) or not all(_is_count(d) for d in shape):
        raise CheckpointError(f"{file}: {name} has shape {str(shape)[:80]}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(o) for o in offsets) or offsets[0] > offsets[1]:
        raise CheckpointError(f"{file}: {name} has data_offsets {str(offsets)[:80]}, expected [begin, end]")
    wanted = math.prod(shape) * _TYPES[dtype][0]
    if offsets[1] - offsets[0] != wanted:
        raise CheckpointError(f"{file}: {name} spans {offsets[1] - offsets[0]} bytes, expected {wanted} for {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), file.name, base + offsets[0], wanted)
