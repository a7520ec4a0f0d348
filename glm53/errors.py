"""Every error a user of this package can meet. Each says what, got, wanted and the next step; `exit_code` is what the CLI exits with."""

from __future__ import annotations


def human_bytes(count: int) -> str:
    """`count` bytes exactly and in a binary unit: `23500000 B (22.4 MiB)`."""
    return f"{count} B" if abs(count) < 1024 else f"{count} B ({short_bytes(count)})"


def short_bytes(count: int) -> str:
    """`count` bytes in the binary unit that suits: `212 B`, `22.4 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Glm53Error(Exception):
    """Base of all errors of this package that a person can act on."""

    exit_code = 1


class InputError(Glm53Error):
    """The caller's input is at fault: prompt, sampling parameter, option, path."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint cannot be used: missing or truncated file, wrong name, dtype or shape, unsupported model."""


class RuntimeUnavailable(Glm53Error):
    """No HIP runtime, no code object for the device, or another HIP library is already loaded."""

    exit_code = 3


class DeviceMemoryError(Glm53Error):
    """Device memory is not enough: says what was asked, what is free and for which category."""

    exit_code = 4


class LifetimeError(Glm53Error):
    """An object is used after its end, ended twice, or its owner ends while it still lives."""


class InUse(LifetimeError):
    """A session is another call's or request's until that has ended."""


class WouldCut(InputError):
    """A request's prompt has not the text of the session that it continues, and may not cut it."""


class HipError(Glm53Error):
    """A HIP call failed. Carries the call's name, the code and the runtime's text."""

    exit_code = 5

    def __init__(self, call: str, code: int, text: str, detail: str = ""):
        self.call, self.code, self.text, self.detail = call, code, text, detail
        super().__init__(f"{call} failed: {text} (hipError {code})" + (f"; {detail}" if detail else ""))


class DeviceLost(HipError):
    """The device faulted and is lost for this process: its requests end, nothing more runs on it. Next step: restart the process."""


class LinkError(Glm53Error):
    """Two devices cannot pass bytes to each other in the way that was asked for: says which devices and what failed."""

    exit_code = 5


class LinkStuck(LinkError):
    """Work between two devices does not end, so that nothing it uses can be freed. Next step: another process, without peer access."""


class SessionFileError(InputError):
    """A session file cannot be written, or cannot be used: truncated, damaged, of another model or another format. Says which and why."""
