"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What the system would give without swapping, and at most what the control group of this process leaves."""
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    found = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        cached = next(int(line.split()[1]) for line in (_CGROUP / "memory.stat").read_text().splitlines() if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):
        return found
    return found if limit == "max" else min(found, max(int(limit) - used + cached, 0))
