"""A program in a pseudo-terminal: types as a person does, and reads what the screen was sent. Run alone, it records docs/chat.md anew."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "\n> "
# The child makes the terminal its own, so that its keys become signals.
_ATTACH = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
_PASTE = re.compile(r"\x1b\[\?2004[hl]\r?")  # readline tells the terminal to mark pasted text


class Terminal:
    """`glm53` with these arguments in a terminal of its own."""

    def __init__(self, *arguments: str, folder: Path = ROOT, **environment: str):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 400, 0, 0))  # no line of a test is broken
        command = Path(sys.executable).parent / "glm53"
        known = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ATTACH, str(command), *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=known | {"TERM": "xterm", "INPUTRC": "/dev/null"} | environment,
            start_new_session=True,
        )
        os.close(theirs)
        self._fd, self._sent = ours, b""
        self._read = 0  # characters of `screen` that were returned

    @property
    def screen(self) -> str:
        """Everything that was sent to the terminal, its lines ended by newlines alone; carriage returns that overwrite a line are still there."""
        return _PASTE.sub("", self._sent.decode("utf-8", errors="ignore")).replace("\r\n", "\n")

    def until(self, text: str, timeout_s: float = 60) -> str:
        """What came since the last call, up to the end of `text`."""
        limit = time.monotonic() + timeout_s
        while (at := self.screen.find(text, self._read)) < 0:
            if not self._more(limit - time.monotonic()):
                raise AssertionError(f"no {text!r} in {timeout_s} s; the screen shows:\n{self.screen[self._read :]}")
        start, self._read = self._read, at + len(text)
        return self.screen[start : self._read]

    def say(self, text: str) -> str:
        """Types a line; what is shown behind its echo, up to the next prompt."""
        self.type(text + "\n")
        shown = self.until(PROMPT)
        echo = text.rpartition("\n")[2] + "\n"
        return shown[shown.index(echo) + len(echo) : -len(PROMPT)]

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def ends(self, keys: str = "", timeout_s: float = 30) -> int:
        """The exit status, when the program has ended. keys: typed until then: `input` does not see a signal that comes just before it waits."""
        limit = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(OSError):  # it has ended just now
                self.type(keys)
            again = min(limit, time.monotonic() + 1)
            while self._process.poll() is None and time.monotonic() < again:
                if not self._more(0.05):
                    time.sleep(0.02)  # closed already, by a program that is about to end
        while self._more(0):
            pass
        return self._process.wait(1)

    def _more(self, timeout_s: float) -> bool:
        """Waits for output; False at its end or when the time is over."""
        if not select.select([self._fd], [], [], max(timeout_s, 0))[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self._sent += data
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)


CHAT_PAGE = ROOT / "docs" / "chat.md"
_RECORDED = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)


def recorded() -> str:
    """The dialogue of docs/chat.md: commands behind `$ `, what was typed behind `> `, what was shown."""
    found = _RECORDED.search(CHAT_PAGE.read_text())
    assert found is not None, f"{CHAT_PAGE.name} has no dialogue"
    return found.group()


def play(dialogue: str, folder: Path) -> str:
    """Types a dialogue's commands and lines again, in `folder`; the dialogue as it is now. Each chat ends with /bye."""
    (folder / "models").symlink_to(ROOT / "models")
    shown = []
    for part in re.split(r"^\$ glm53 ", dialogue, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        with Terminal(*command.split(), folder=folder, NO_COLOR="1") as terminal:
            for line in lines:
                if line.startswith("> "):
                    terminal.until(PROMPT)
                    terminal.type(line[2:] + "\n")
            assert terminal.ends() == 0
            shown.append(f"$ glm53 {command}\n{terminal.screen}")
    return "".join(shown)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        now = play(recorded(), Path(folder))
        CHAT_PAGE.write_text(_RECORDED.sub(lambda _: now, CHAT_PAGE.read_text()))
