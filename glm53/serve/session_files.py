"""Session files of a server: a directory, in it one directory an owner, in it files that only their owner can name. Bytes are bounded.

Names are checked before they become paths; what an owner gives never leaves its directory.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glm53.errors import InputError, SessionFileError, human_bytes
from glm53.serve.fields import ApiError

SUFFIX = ".glm53s"
NAME_PATTERN = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
log = logging.getLogger("glm53.serve")
NOBODY = "_"  # directory of the owner ""; no hash


@dataclass(frozen=True)
class SavedFile:
    """A file of an owner. changed: seconds since 1970."""

    name: str
    byte_count: int
    changed: int


class SessionFiles:
    """See the module. bytes_max: of all files together. Raises InputError where there is no such directory that can be written to."""

    def __init__(self, directory: Path, bytes_max: int):
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise InputError(f"--session-dir {directory} is no directory that can be written to; next: make it first")
        self.directory, self.bytes_max = directory.resolve(), bytes_max
        self._coming = 0  # bytes of saves that are under way
        self._lock = threading.Lock()

    def path(self, owner: str, name: str) -> Path:
        """Of a file, whether there is one or not. Raises ApiError for what is no name."""
        if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
            raise ApiError("name: wanted 1 to 64 of A-Z a-z 0-9 . _ -, and no dot at the beginning", param="name")
        return self.directory / (owner or NOBODY) / (name + SUFFIX)

    def files(self, owner: str) -> list[SavedFile]:
        """The owner's, by name."""
        return sorted(self._every(self.directory / (owner or NOBODY)), key=lambda file: file.name)

    def remove(self, owner: str, name: str) -> None:
        """Raises ApiError 404 if there is none of that name."""
        try:
            self.path(owner, name).unlink()
        except FileNotFoundError:
            raise _missing(name) from None

    def existing(self, owner: str, name: str) -> Path:
        """Raises ApiError 404 if there is none of that name."""
        path = self.path(owner, name)
        if not path.is_file():
            raise _missing(name)
        return path

    @contextmanager
    def room(self, owner: str, name: str, byte_count: int) -> Iterator[Path]:
        """Where a file of so many bytes may be written. An older one of that name counts until it is replaced. Raises ApiError 507."""
        path = self.path(owner, name)
        with self._lock:
            held = sum(file.byte_count for folder in self.directory.iterdir() if folder.is_dir() for file in self._every(folder))
            if held + self._coming + byte_count > self.bytes_max:
                raise ApiError(
                    f"the file needs {human_bytes(byte_count)}; files and saves under way have {human_bytes(held + self._coming)} of "
                    f"{human_bytes(self.bytes_max)} (--session-dir-gib); next: delete files that are not needed",
                    507,
                    code="insufficient_storage",
                )
            self._coming += byte_count
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            yield path
        finally:
            with self._lock:
                self._coming -= byte_count

    @contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """What goes wrong with a file inside becomes an ApiError that shows nothing of the server's paths; name: "" for all of an owner's.

        507 where the disk has no space, 500 for whatever else the system refuses, 400 for a file that cannot be used. The log has the paths.
        """
        try:
            yield
        except SessionFileError as error:
            cause = error.__cause__
            said, message = str(error), re.sub(re.escape(str(self.directory)) + "/(?:[^/]*/)?", "", str(error))  # names of files stay
            status = 400 if not isinstance(cause, OSError) else 507 if _is_full(cause) else 500
        except OSError as error:
            what = f"the session file {name!r}" if name else "the session files of this key"
            message = f"{what} cannot be used: {error.strerror or type(error).__name__}; next: tell whoever runs the server, whose log says more"
            said, status = str(error), 507 if _is_full(error) else 500
        else:
            return
        if status >= 500:
            log.error("session files: %s", said)
        raise ApiError(message, status, "name" if name else None, "insufficient_storage" if status == 507 else "session_file_error")

    def _every(self, folder: Path) -> Iterator[SavedFile]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                yield SavedFile(entry.name.removesuffix(SUFFIX), found.st_size, int(found.st_mtime))


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _missing(name: str) -> ApiError:
    return ApiError(f"there is no session file {name!r}; GET /v1/sessions/files lists them", 404, "name", "file_not_found")
