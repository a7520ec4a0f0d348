"""A file while it is being written, beside the one that it will replace: its name, lock, space and mode. Knows nothing of what is in it, but that
its first bytes are zeros until all others are on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from glm53.errors import SessionFileError, human_bytes

_NAMES = 8  # that a save tries, past those of other files
_HEAD_BYTES = 8  # which are zeros in a partial file


def target_of(path: str | Path) -> Path:
    """The file that a path means, where it may not exist yet. Raises SessionFileError for what no file can be called."""
    try:
        return Path(os.path.realpath(path))
    except (ValueError, TypeError) as error:
        raise SessionFileError(f"{str(path)!r} cannot be saved: {error}; next: choose the name of a file") from error


def keep_mode(target: Path, fd: int) -> None:
    """A file that is replaced hands its mode on."""
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))


def refuse_foreign(path: Path, magic: bytes) -> None:
    """Raises SessionFileError if a save would destroy what does not begin with `magic`, or not yet: a device, a pipe, somebody's text."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            raise SessionFileError(f"{path} cannot be saved: it is {kind_of(kind)}, wanted the name of a file; next: choose another name")
        with path.open("rb") as file:
            head = file.read(len(magic))
    except FileNotFoundError:
        return
    except OSError as error:
        raise SessionFileError(f"{path} cannot be saved: {error.strerror or error}; {remedy(error)}") from error
    if head not in (magic[: len(head)], bytes(len(head))):
        raise SessionFileError(
            f"{path} cannot be saved: a file of that name is no session file (it begins with {head!r}) and would be lost; "
            "next: choose another name, or remove it"
        )


def kind_of(mode: int) -> str:
    return "a directory" if stat.S_ISDIR(mode) else "no regular file"


def remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "an older file of that name is as it was; next: free space on that disk, or save elsewhere"
    return "next: choose a file in a directory that exists and can be written to"


def partial_of(target: Path) -> Path:
    """Where a save of this name writes: past the names that other files have. Raises SessionFileError if there is no such place."""
    try:
        for number in range(_NAMES):
            path = target.with_name(f".{target.name}.partial" + (f"-{number}" if number else ""))
            if _is_partial(path):
                return path
    except OSError as error:
        raise SessionFileError(f"{target} cannot be saved: {error.strerror or error}; {remedy(error)}") from error
    raise SessionFileError(f"{target} cannot be saved: other files have the names {path.name[:-2]} and on; next: remove them")


def _is_partial(path: Path) -> bool:
    """Whether a save may write there: nothing is, or what a save left that did not end."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            return not any(file.read(_HEAD_BYTES))
    except FileNotFoundError:
        return True


class PartialFile:
    """The partial file of a target, empty and ours alone; removed at the end unless it has become the target."""

    def __init__(self, target: Path, magic: bytes):
        self.target, self.path, self._magic, self._fd = target, target, magic, -1

    def __enter__(self) -> tuple[Path, int]:
        refuse_foreign(self.target, self._magic)
        self.path = partial_of(self.target)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not self._locked():
            os.close(self._fd)
            raise SessionFileError(f"{self.target} is being saved by somebody else; next: wait for that, or choose another file")
        try:
            os.ftruncate(self._fd, 0)
            os.fchmod(self._fd, 0o600)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self.path, self._fd

    def _locked(self) -> bool:
        """Takes the file's lock unless somebody has it; a process that ends lets it go. File systems without locks go without."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(self._fd)
                raise
        return self._named()  # between open and lock it may have become somebody's target

    def _named(self) -> bool:
        """Whether the name of the partial file still means the one that is open."""
        with contextlib.suppress(FileNotFoundError):
            held, named = os.fstat(self._fd), os.stat(self.path)
            return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._named():  # else it is the target now, and another save may have begun
                os.unlink(self.path)
        finally:
            os.close(self._fd)


def check_room(target: Path, fd: int, total: int) -> None:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if total > free:
        raise SessionFileError(
            f"{target} cannot be saved: the session has {human_bytes(total)}, its disk {human_bytes(free)} free; "
            "next: free space there, or save elsewhere"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reserve(fd: int, total: int) -> None:
    """Takes the space, in one stretch where the disk has one, so that nobody else can; file systems that cannot do that give it as it is written."""
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
