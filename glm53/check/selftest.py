"""`glm53 selftest`: every kernel family against its numpy reference on one device, then the litmus loops, as a table a user can send us."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from glm53.check import links, litmus
from glm53.check.case import all_cases
from glm53.errors import Glm53Error
from glm53.hip import Device, code_objects, list_devices, runtime


@dataclass(frozen=True)
class Line:
    """One row of the table: a kernel family or a litmus loop."""

    kind: str  # "kernels" or "litmus"
    name: str
    cases: int
    passed: bool
    detail: str
    seconds: float


@dataclass
class SelfTest:
    """What was run where, and what held."""

    versions: dict[str, str]
    code_object: dict[str, object]
    lines: list[Line] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.lines)

    @property
    def failed(self) -> int:
        return sum(not line.passed for line in self.lines)

    def as_dict(self) -> dict[str, object]:
        return {
            "versions": self.versions,
            "code_object": self.code_object,
            "lines": [asdict(line) for line in self.lines],
            "total": self.total,
            "failed": self.failed,
        }


def package_versions(device: Device) -> dict[str, str]:
    """Versions that decide what a result means: this package, Python, hip-python, numpy, runtime, device, kernel of the system."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("glm53", "hip-python", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    info = runtime.select()
    return versions | {
        "runtime": f"{info.name} {info.runtime_version} ({info.reason})",
        "library": str(info.library),
        "device": f"{device.name}, {device.arch}, {device.total_bytes / 2**30:.1f} GiB",
    }


def run_selftest(runtime_name: str | None, device_index: int, thorough: bool, echo: Callable[[str], None] | None) -> SelfTest:
    """Runs all checks on one device; peer checks with the next device where one exists. A failed check never stops the others.

    echo: called with each line of the table as it is known; None: silent.
    """
    say = echo or (lambda _line: None)
    runtime.select(runtime_name)
    device = Device(device_index)
    try:
        result = SelfTest(package_versions(device), dict(code_objects().get(device.arch, {})))
        for name, value in result.versions.items():
            say(f"{name:<12} {value}")
        for name, fact in result.code_object.items():
            say(f"{'object ' + name:<16} {fact}")
        say(f"{'check':<40} {'cases':>5} {'result':<6} {'seconds':>8}  worst error or reason")
        for family, cases in _families(thorough).items():
            _record(result, say, _run_family(device, family, cases))
        for loop in _litmus_loops(device):
            _record(result, say, loop())
        say(f"{result.total - result.failed} of {result.total} hold")
        return result
    finally:
        device.close(free_buffers=True)


def _families(thorough: bool) -> dict[str, list]:
    families: dict[str, list] = {}
    for case in all_cases():
        if thorough or not case.thorough:
            families.setdefault(case.family, []).append(case)
    return families


def _record(result: SelfTest, say: Callable[[str], None], line: Line) -> None:
    result.lines.append(line)
    say(f"{line.name:<40} {line.cases:>5} {'ok' if line.passed else 'FAIL':<6} {line.seconds:>8.2f}  {line.detail}")


def _run_family(device: Device, family: str, cases: list) -> Line:
    started = time.perf_counter()
    worst, problems = 0.0, []
    for case in cases:
        try:
            worst = max(worst, case.run(device).worst)
        except (AssertionError, Glm53Error) as error:
            problems.append(f"{case.name}: {str(error).splitlines()[0]}")
    detail = f"worst error {worst:.1e}" if not problems else f"{len(problems)} failed; " + "; ".join(problems[:2])
    return Line("kernels", family, len(cases), not problems, detail, time.perf_counter() - started)


def _litmus_loops(device: Device) -> list[Callable[[], Line]]:
    def line(result: litmus.Result) -> Line:
        return Line("litmus", result.name, 1, result.passed, result.detail, result.seconds)

    loops = [
        lambda: line(litmus.streams_events(device)),
        lambda: line(litmus.registered_memory(device)),
        lambda: line(litmus.copy_2d(device)),
        lambda: line(litmus.host_mailbox(device, rounds=1000)),
        lambda: line(litmus.graph_replay(device)),
    ]
    others = [row["index"] for row in list_devices() if row["index"] != device.index]
    if others:

        def with_other(loop: Callable[[Device, Device], litmus.Result]) -> Line:
            other = Device(others[0])
            try:
                return line(loop(device, other))
            finally:
                other.close(free_buffers=True)

        loops += [lambda: with_other(litmus.peer_mailbox), lambda: with_other(links.sum_exchange)]
    return loops
