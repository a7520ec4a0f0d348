"""The kernel cases on the cpu runtime, both built with AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own.

Both forms of each kernel. Every family is there: all quick cases of families with few, every n-th of those with many, to keep the build the larger
part of the time. Kernels rehearse (portable.h), which they do on the cuda runtime alone otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES_PER_FAMILY = 12
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -DREHEARSES=1"

# Runs in the child: the sanitized libraries come first on the package's path, where `native_directory` looks.
RUN = f"""
import sys
import glm53
glm53.__path__.insert(0, sys.argv[1])
from glm53.check.case import all_cases
from glm53.hip import Device, runtime
families = {{}}
for case in all_cases():
    if not case.thorough:
        families.setdefault(case.family, []).append(case)
assert str(runtime.native_directory()).startswith(sys.argv[1])
device = Device(0)
count = 0
for family, cases in families.items():
    for case in cases[:: -(-len(cases) // {CASES_PER_FAMILY})]:
        for fibers in (1, 0):  # work-item by work-item, then the fast forms
            print("case", case, "fibers" if fibers else "fast", flush=True)
            runtime.control().glm53_cpu_fibers(fibers)
            case.run(device)
        count += 1
device.close()
print("all", len(families), "families,", count, "cases")
"""


def sanitizer_library(name: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"g++ has no {name}")
    return Path(path)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `_native`: runtime and kernels built with the sanitizers."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not on the PATH")
    sanitizer_library("libasan.so")
    directory = tmp_path_factory.mktemp("sanitized")
    settings = ["-DCMAKE_CXX_COMPILER=g++", f"-DCMAKE_CXX_FLAGS={FLAGS}", "-DGLM53_ARCHS=none", "-DGLM53_HOST_OPTIMISATION=-O0"]
    configure = [cmake, "-S", ROOT / "hipsrc", "-B", directory / "build", *settings]
    for command in (configure, [cmake, "--build", directory / "build", "-j2", "--target", "runtime_cpu", "code_objects"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (directory / "build" / "native").rename(directory / "_native")
    return directory


def test_cases_under_the_sanitizers(sanitized: Path) -> None:
    environment = os.environ | {
        "GLM53_RUNTIME": "cpu",
        "LD_PRELOAD": str(sanitizer_library("libasan.so")),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own allocations at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run([sys.executable, "-c", RUN, str(sanitized)], env=environment, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"at {lines[-1:]}:\n{done.stderr[-6000:]}"
    assert lines[-1].startswith("all "), lines[-1]
    assert "runtime error" not in done.stderr and "AddressSanitizer" not in done.stderr, done.stderr[-6000:]
