"""Session files: the history of a session with what belongs to it, streamed to and from one file. Knows no devices.

    prefix   24 B        magic, version, length and CRC-32 of the header, CRC-32 of the prefix
    header   JSON        model, formats, rows, sampling state, and the sections: planes, rows and bytes of a row of each
    pieces               [planes, rows, row_bytes] of up to `Section.piece_rows` rows, section by section
    contents 40 B each   section, CRC-32, rows, place and length of every piece
    trailer  44 B        magic, place and CRC-32 of the contents, length of the file, CRC-32 of the header and of the trailer

All little-endian. The header, by spaces, and each piece, by zeros, are filled up to a multiple of `ALIGN` bytes, the filling under the checksum,
so that every byte of the file is. The place of every piece follows from the header. Nothing depends on how an engine that wrote or reads the file is
split over devices or cuts its extents, and the same session gives the same bytes.

Pieces go to and from the disk past the system's page cache where the file system can do that (O_DIRECT): through the cache a copy is slower than a
disk, and a long history would drive everything else out. Writing goes to `.NAME.partial` in the same directory, which becomes NAME when it is
complete and on the disk; a process that is killed leaves the old file or the new one, and maybe a partial file, which the next save of that name
takes over: it knows partial files by their first bytes, zeros until all others are on the disk, and leaves any other file of such a name alone. A
new file is its owner's alone to read; one that is replaced keeps its mode.
CRC-32: that of zlib, which is fast and lets other threads run. It finds damage, not forgery.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import stat
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from glm53.errors import SessionFileError, human_bytes
from glm53.partialfile import PartialFile, check_room, keep_mode, kind_of, partial_of, refuse_foreign, remedy, reserve, sync_directory, target_of

MAGIC, END_MAGIC = b"\x89GLM53S\n", b"\x89GLM53E\n"
VERSION = 1
HEADER_BYTES_MAX = 64 << 20
PIECE_BYTES = 8 << 20  # of a piece, unless 64 rows have more: long enough for the disk, short enough for a few of them to be in memory
PIECE_BYTES_MAX = 64 << 20
ALIGN = 4096  # what O_DIRECT asks of places, lengths and addresses on every disk
BUFFERS = 4  # pieces in memory at a time
SYNC_BYTES = 64 << 20  # written between two requests that the disk should have it
FINGERPRINT_SAMPLES, SAMPLE_BYTES = 4, 4096
# "mtp.hidden", the hidden row of the last position after the final norm, is there with an MTP layer, whose planes of rows and keys are then the last.
SECTION_NAMES = ("tokens", "rows", "keys", "mtp.hidden")

_PREFIX = struct.Struct("<8sIIII")
_TRAILER = struct.Struct("<8sQIIQIII")
_ENTRY = np.dtype([("section", "<u4"), ("crc", "<u4"), ("first", "<u8"), ("rows", "<u8"), ("offset", "<u8"), ("bytes", "<u8")])

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, section


def filled(byte_count: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-byte_count // ALIGN) * ALIGN


@dataclass(frozen=True)
class Section:
    """A named array [planes, rows, row_bytes] u8, kept in pieces of `piece_rows` rows. Raises ValueError for a name or size that no file can have."""

    name: str
    planes: int
    row_bytes: int
    rows: int

    def __post_init__(self) -> None:
        if self.name not in SECTION_NAMES:
            raise ValueError(f"section {self.name!r}, wanted one of {', '.join(SECTION_NAMES)}")
        for key in ("planes", "row_bytes", "rows"):
            value = getattr(self, key)
            if type(value) is not int or not (key != "rows") <= value < 1 << 40:
                raise ValueError(f"section {self.name}: {key} is {value!r}, wanted a whole number of at least {int(key != 'rows')}")
        if self.piece_bytes > PIECE_BYTES_MAX:
            raise ValueError(f"section {self.name}: {human_bytes(self.piece_bytes)} in {self.piece_rows} rows, wanted at most {PIECE_BYTES_MAX}")

    @property
    def piece_rows(self) -> int:
        """Rows of a piece but the last: the multiple of 64 that fits `PIECE_BYTES`, at least 64. Depends on the bytes of a row alone."""
        return max(PIECE_BYTES // (self.planes * self.row_bytes) // 64, 1) * 64

    @property
    def piece_bytes(self) -> int:
        """Bytes of the longest piece."""
        return min(self.piece_rows, self.rows) * self.planes * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.planes * self.row_bytes

    @property
    def pieces(self) -> int:
        return -(-self.rows // self.piece_rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        whole, rest = divmod(self.rows, self.piece_rows)
        row = self.planes * self.row_bytes
        return whole * filled(self.piece_rows * row) + filled(rest * row)


@dataclass(frozen=True)
class Header:
    """What a session file says about itself. `model`: shape, and identity of the weights (`weights_fingerprint`), None if they are not of files."""

    model: Mapping[str, Any]
    weights: str | None
    weight_format: str
    dtype: str
    row_format: str
    rows: int
    sections: tuple[Section, ...]
    sampling: Any = None  # a JSON value of whoever draws the tokens
    pending: tuple[int, ...] = ()  # the token drawn behind the last row, which has no row yet
    prompt_rows: int = 0  # the first rows that were all computed as prompt rows; files that do not say have none
    notes: Mapping[str, Any] = field(default_factory=dict)  # a JSON object of whoever drives the session

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)

    @property
    def data_bytes(self) -> int:
        return sum(section.nbytes for section in self.sections)

    @property
    def piece_bytes(self) -> int:
        """Bytes that the longest piece of all sections has in the file."""
        return filled(max((section.piece_bytes for section in self.sections), default=0))

    def encode(self) -> bytes:
        """The JSON text, the same for equal headers, filled up. Raises ValueError or TypeError if `sampling` is no JSON value."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        return text.ljust(filled(_PREFIX.size + len(text)) - _PREFIX.size)

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """Raises ValueError, TypeError or KeyError for what `encode` does not make."""
        value = json.loads(text)
        value["sections"] = tuple(Section(**section) for section in value["sections"])
        names = [section.name for section in value["sections"]]
        if len(set(names)) != len(names):
            raise ValueError(f"sections {names}, wanted each once")
        value["pending"] = tuple(value["pending"])
        header = cls(**value)
        header._check_kinds()
        return header

    def _check_kinds(self) -> None:
        """Raises ValueError naming the field that no session has."""
        whole = lambda number: type(number) is int and 0 <= number < 1 << 40
        text = lambda one: isinstance(one, str)
        for name, good in (
            ("model", isinstance(self.model, dict)),
            ("weights", self.weights is None or text(self.weights)),
            ("weight_format", text(self.weight_format)),
            ("dtype", text(self.dtype)),
            ("row_format", text(self.row_format)),
            ("rows", whole(self.rows)),
            ("sampling", self.sampling is None or isinstance(self.sampling, dict)),
            ("pending", len(self.pending) <= 1 and all(map(whole, self.pending))),
            ("prompt_rows", whole(self.prompt_rows) and whole(self.rows) and self.prompt_rows <= self.rows),
            ("notes", isinstance(self.notes, dict)),
        ):
            if not good:
                value = repr(getattr(self, name))
                raise ValueError(f"{name} is {value if len(value) <= 60 else value[:57] + '...'}")

    def file_bytes(self, header_bytes: int) -> int:
        """Bytes of a whole file whose header has `header_bytes`."""
        stored = sum(section.stored_bytes + section.pieces * _ENTRY.itemsize for section in self.sections)
        return _PREFIX.size + header_bytes + stored + _TRAILER.size

    def contents(self, header_bytes: int) -> np.ndarray:
        """The table of contents, checksums 0."""
        table = np.zeros(sum(section.pieces for section in self.sections), _ENTRY)
        index, offset = 0, _PREFIX.size + header_bytes
        for number, section in enumerate(self.sections):
            for first in range(0, section.rows, section.piece_rows):
                rows = min(section.piece_rows, section.rows - first)
                byte_count = rows * section.planes * section.row_bytes
                table[index] = (number, 0, first, rows, offset, byte_count)
                index, offset = index + 1, offset + filled(byte_count)
        return table


def weights_fingerprint(directory: Path, files: Sequence[str]) -> str:
    """Identity of the weights in safetensors files, as hexadecimal SHA-256; costs milliseconds.

    Covers of each file, in order of names: name, size, the header (names, types, shapes and places of all tensors), and `FINGERPRINT_SAMPLES` blocks
    of `SAMPLE_BYTES` bytes evenly spread over the data, its first and last bytes among them. Weights that differ elsewhere alone are not told apart.
    Raises OSError.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        with (directory / name).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(8)
            header = stream.read(min(int.from_bytes(head, "little"), size))
            digest.update(f"{name}\0{size}\0".encode() + head + header)
            first, last = 8 + len(header), max(size - SAMPLE_BYTES, 8 + len(header))
            for sample in range(FINGERPRINT_SAMPLES):
                stream.seek(first + (last - first) * sample // (FINGERPRINT_SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def host_buffers(byte_count: int) -> np.ndarray:
    """Memory for pieces of at most `byte_count` bytes: [`BUFFERS`, bytes] u8, each row at a multiple of `ALIGN`."""
    row = max(filled(byte_count), ALIGN)
    return np.frombuffer(mmap.mmap(-1, BUFFERS * row), np.uint8).reshape(BUFFERS, row)


# Writing


def save(
    path: str | Path,
    header: Header,
    read: Callable[[Section, int, np.ndarray], None],
    progress: Progress | None = None,
    buffers: np.ndarray | None = None,
) -> int:
    """Writes a session file and gives its length in bytes. It is complete and on the disk when this returns.

    read(section, first, target) fills target [planes, rows, row_bytes] u8 with the rows from `first` on; it is called in order, in this thread.
    buffers: as `host_buffers` of `header.piece_bytes`. If anything raises, an older file of that name is as it was and no partial file stays.
    Raises SessionFileError for what the file system refuses, and what `read` raises.
    """
    target = target_of(path)
    try:
        text = header.encode()
    except (TypeError, ValueError) as error:
        raise SessionFileError(f"{target} cannot be saved: {error}; next: sampling and notes have to be JSON values") from error
    buffers = host_buffers(header.piece_bytes) if buffers is None else buffers
    try:
        with PartialFile(target, MAGIC) as (partial, fd):
            total = header.file_bytes(len(text))
            check_room(target, fd, total)
            reserve(fd, total)
            _write(fd, text, _PREFIX.size)
            table = header.contents(len(text))
            with _direct(partial, os.O_WRONLY) as direct:
                behind = None if direct is not None else _WriteBehind(fd)
                _write_pieces(fd if direct is None else direct, header, table, read, progress, buffers, behind)
            contents, at = table.tobytes(), total - _TRAILER.size - table.nbytes
            trailer = _TRAILER.pack(END_MAGIC, at, len(table), zlib.crc32(contents), total, zlib.crc32(text), VERSION, 0)[:-4]
            _write(fd, contents + trailer + zlib.crc32(trailer).to_bytes(4, "little"), at)
            os.fsync(fd)
            prefix = _PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text), 0)[:-4]
            _write(fd, prefix + zlib.crc32(prefix).to_bytes(4, "little"), 0)
            keep_mode(target, fd)
            os.fsync(fd)
            os.replace(partial, target)
            sync_directory(target.parent)
    except OSError as error:
        raise SessionFileError(f"{target} cannot be saved: {error.strerror or error}; {remedy(error)}") from error
    return total


def check_target(path: str | Path) -> None:
    """Raises SessionFileError where `save` would refuse this name at once, so that nothing is computed for it first."""
    target = target_of(path)
    refuse_foreign(target, MAGIC)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SessionFileError(
            f"{target} cannot be saved: {target.parent} cannot be written to; next: choose a file in a directory that exists and can be written to"
        )
    partial_of(target)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


@contextlib.contextmanager
def _direct(path: Path, flags: int) -> Iterator[int | None]:
    """The file opened past the page cache, None where its file system has no such thing (tmpfs of older systems, some network ones)."""
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _threads() -> int:
    return max(2, min(BUFFERS, os.cpu_count() or 1))


class _WriteBehind:
    """Where the page cache is in between: asks for what was written to go to the disk while more is written, so that the last fsync has little left
    to wait for."""

    def __init__(self, fd: int):
        self._fd, self._waiting = fd, 0
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def written(self, byte_count: int) -> None:
        self._waiting += byte_count
        if self._waiting >= SYNC_BYTES and (self._running is None or self._running.done()):
            self.check()
            self._waiting, self._running = 0, self._pool.submit(os.fdatasync, self._fd)

    def check(self) -> None:
        """Raises what a request met: the system reports an error once, and a later fsync would not."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._pool.shutdown()


def _write_pieces(
    fd: int,
    header: Header,
    table: np.ndarray,
    read: Callable[[Section, int, np.ndarray], None],
    progress: Progress | None,
    buffers: np.ndarray,
    behind: _WriteBehind | None,
) -> None:
    """Writes every piece, and its checksum into `table`: read here, summed and written by threads while the next ones are read."""
    free, pending, done = list(buffers), deque[tuple[int, np.ndarray, Future[int]]](), 0

    def store(data: np.ndarray, offset: int) -> int:
        _write(fd, data, offset)
        return zlib.crc32(data.data)

    def finish_first() -> None:
        nonlocal done
        index, buffer, future = pending.popleft()
        table[index]["crc"] = future.result()
        free.append(buffer)
        done += int(table[index]["bytes"])
        if behind is not None:
            behind.written(int(table[index]["bytes"]))
        if progress is not None:
            progress(done, header.data_bytes, header.sections[table[index]["section"]].name)

    try:
        with ThreadPoolExecutor(_threads()) as pool:
            for index, (number, _, first, rows, offset, byte_count) in enumerate(table.tolist()):
                if not free:
                    finish_first()
                section, buffer = header.sections[number], free.pop()
                data = buffer[: filled(byte_count)]
                read(section, first, data[:byte_count].reshape(section.planes, rows, section.row_bytes))
                data[byte_count:] = 0
                pending.append((index, buffer, pool.submit(store, data, offset)))
            while pending:
                finish_first()
        if behind is not None:
            behind.check()
    finally:
        if behind is not None:
            behind.close()


# Reading


def read_header(path: str | Path) -> tuple[Header, int]:
    """The header of a session file, checked, and the bytes that the whole file must have. Raises SessionFileError."""
    with SessionFile(path) as file:
        return file.header, file.file_bytes


class SessionFile:
    """A session file opened for reading: the header is checked; the rest is by `check_complete` and as it is read. Use a `with` block.

    Attributes: path, header, file_bytes (what the file must have), size (what it has). Every method raises SessionFileError, which says what is
    wrong with the file.
    """

    def __init__(self, path: str | Path):
        try:
            self.path = Path(path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe that nobody writes to answers at once
        except OSError as error:
            raise SessionFileError(f"{self.path} cannot be read: {error.strerror}; next: glm53 session save makes session files") from error
        except (ValueError, TypeError) as error:
            raise SessionFileError(f"{path!r} cannot be read: {error}; next: choose the name of a file") from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                self._refuse("cannot be read", f"it is {kind_of(found.st_mode)}", "choose a session file; glm53 session save makes them")
            self.size = found.st_size
            self.header, self._header_bytes, self._header_crc = self._read_header()
        except OSError as error:
            os.close(self._fd)
            raise SessionFileError(f"{self.path} cannot be read: {error.strerror}; next: choose a session file") from error
        except BaseException:
            os.close(self._fd)
            raise
        self.file_bytes = self.header.file_bytes(self._header_bytes)
        self._table: np.ndarray | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)

    def _refuse(self, state: str, why: str, following: str = "copy it again from where it is whole, or use another file") -> NoReturn:
        raise SessionFileError(f"{self.path} {state}: {why}; next: {following}")

    def _read_header(self) -> tuple[Header, int, int]:
        prefix = os.pread(self._fd, _PREFIX.size, 0)
        if prefix[:8] != MAGIC[: len(prefix)] or not prefix:
            self._refuse("is no session file", f"it begins with {prefix[:8]!r}, wanted {MAGIC!r}", "glm53 session save makes session files")
        if len(prefix) < _PREFIX.size:
            self._refuse("is truncated", f"{self.size} B, the first part alone has {_PREFIX.size} B")
        _, version, header_bytes, header_crc, prefix_crc = _PREFIX.unpack(prefix)
        self._compare(zlib.crc32(prefix[:-4]), prefix_crc, f"bytes 0 to {_PREFIX.size}")
        if version != VERSION:
            self._refuse("is of another format", f"version {version}, wanted {VERSION}", "use the glm53 that wrote it")
        text = os.pread(self._fd, min(header_bytes, HEADER_BYTES_MAX + 1), _PREFIX.size)
        if len(text) < min(header_bytes, HEADER_BYTES_MAX + 1):
            self._refuse("is truncated", f"{human_bytes(self.size)}, prefix and header alone have {human_bytes(_PREFIX.size + header_bytes)}")
        self._compare(zlib.crc32(text), header_crc, f"the header, bytes {_PREFIX.size} to {_PREFIX.size + header_bytes}")
        try:
            header = Header.decode(text)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._refuse("has a header that cannot be used", f"{type(error).__name__}: {error}", "use the glm53 that wrote it")
        return header, header_bytes, header_crc

    def _compare(self, crc: int, wanted: int, what: str) -> None:
        if crc != wanted:
            self._refuse("is damaged", f"{what}: checksum {crc:#010x}, wanted {wanted:#010x}")

    def check_complete(self) -> None:
        """The file has its whole length, and its end and table of contents are those of its header."""
        if self.size != self.file_bytes:
            state = "is truncated" if self.size < self.file_bytes else "is longer than its header says"
            self._refuse(state, f"{human_bytes(self.size)}, wanted {human_bytes(self.file_bytes)}")
        table = self.header.contents(self._header_bytes)
        at = self.file_bytes - _TRAILER.size - table.nbytes
        end = os.pread(self._fd, table.nbytes + _TRAILER.size, at)
        if len(end) != table.nbytes + _TRAILER.size:
            self._refuse("is truncated", f"{len(end)} bytes at {at}, wanted {table.nbytes + _TRAILER.size}")
        contents, trailer = end[: table.nbytes], end[table.nbytes :]
        self._compare(zlib.crc32(trailer[:-4]), int.from_bytes(trailer[-4:], "little"), f"the end, bytes {at + table.nbytes} to {self.file_bytes}")
        found = _TRAILER.unpack(trailer)[:-1]
        wanted = (END_MAGIC, at, len(table), zlib.crc32(contents), self.file_bytes, self._header_crc, VERSION)
        if found != wanted:
            self._refuse("is damaged", f"its end says {found}, wanted {wanted}")
        stored = np.frombuffer(contents, _ENTRY)
        for name in _ENTRY.names or ():
            if name != "crc" and not np.array_equal(stored[name], table[name]):
                self._refuse("is damaged", f"its table of contents has another {name} than its header asks for")
        self._table = stored

    def pieces(self, buffers: np.ndarray | None = None, progress: Progress | None = None) -> Iterator[tuple[Section, int, np.ndarray]]:
        """Every piece in order, checked: (section, first row, [planes, rows, row_bytes] u8), valid until the next one is asked for.

        buffers: as `host_buffers` of `header.piece_bytes`. Threads read ahead.
        """
        if self._table is None:
            self.check_complete()
        assert self._table is not None
        entries, ahead = self._table.tolist(), deque[tuple[int, np.ndarray, Future[None]]]()
        free, done, following = list(host_buffers(self.header.piece_bytes) if buffers is None else buffers), 0, 0
        # By the number of the open file, so that it is the one that was checked, whoever has its name now.
        with _direct(Path(f"/proc/self/fd/{self._fd}"), os.O_RDONLY) as direct, ThreadPoolExecutor(_threads()) as pool:
            for index, (number, _, first, rows, _, byte_count) in enumerate(entries):
                while free and following < len(entries):
                    buffer = free.pop()
                    ahead.append((following, buffer, pool.submit(self._load, direct, entries[following], buffer)))
                    following += 1
                at, buffer, loaded = ahead.popleft()
                assert at == index
                loaded.result()
                section = self.header.sections[number]
                yield section, first, buffer[:byte_count].reshape(section.planes, rows, section.row_bytes)
                free.append(buffer)
                done += byte_count
                if progress is not None:
                    progress(done, self.header.data_bytes, section.name)

    def _load(self, direct: int | None, entry: tuple[int, int, int, int, int, int], buffer: np.ndarray) -> None:
        number, crc, first, rows, offset, byte_count = entry
        byte_count = filled(byte_count)
        data, got = buffer[:byte_count], 0
        try:
            while got < byte_count:
                count = os.preadv(self._fd if direct is None else direct, [data[got:].data], offset + got)
                if count == 0 or (direct is not None and count % ALIGN):  # the end, which is no end of a piece
                    self._refuse("is truncated", f"it ends at {human_bytes(offset + got)}, wanted {human_bytes(self.file_bytes)}")
                got += count
        except OSError as error:
            self._refuse("cannot be read", f"bytes {offset + got} to {offset + byte_count}: {error.strerror}")
        section = self.header.sections[number]
        where = f"rows {first} to {first + rows} of section {section.name}, bytes {offset} to {offset + byte_count}"
        self._compare(zlib.crc32(data.data), crc, where)

    def verify(self, progress: Progress | None = None) -> None:
        """Checks every checksum of the file."""
        for _ in self.pieces(progress=progress):
            pass
