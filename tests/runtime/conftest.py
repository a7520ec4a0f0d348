"""The cpu runtime's own tests. Each test body runs in a forked child: a lost device is lost for good, and counters start at zero.

The parent never opens the runtime, so that the child can. `--cpu-runtime PATH` tests another build (a sanitised one).
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_hip import Gpu

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CHILD_SECONDS = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-runtime", default=None, help="libamdhip64.so to test instead of glm53/_native/cpu/libamdhip64.so")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests come first: afterwards the session's own engines keep a runtime open."""
    items.sort(key=lambda item: HERE not in item.path.parents)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the test function in a child process; its traceback comes back as text."""
    if HERE not in pyfuncitem.path.parents or not pyfuncitem.path.name.startswith("test_cpu_"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            os.close(read_end)
            _give_up_in_time()
            pyfuncitem.obj(**arguments)
        except BaseException:
            os.write(write_end, traceback.format_exc().encode()[-60000:])
            status = 1
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if status != 0:
        pytest.fail(text or f"the child ended with wait status {status} (signal {status & 127})", pytrace=False)
    return True


def _give_up_in_time() -> None:
    faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True)


@pytest.fixture(scope="session")
def cpu_library(pytestconfig: pytest.Config) -> Path:
    path = Path(pytestconfig.getoption("--cpu-runtime", default=None) or ROOT / "glm53" / "_native" / "cpu" / "libamdhip64.so")
    assert path.is_file(), f"no cpu runtime at {path}; next: build the native parts"
    maps = Path("/proc/self/maps").read_text()
    assert "libamdhip64" not in maps, "a HIP runtime is open in this process already; next: run tests/runtime in a process of its own"
    return path


@pytest.fixture(scope="session")
def cpu_code_object(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield _build(tmp_path_factory.mktemp("code") / "cpu_kernels.so")


@pytest.fixture(scope="session")
def cpu_code_object_wrong_abi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield _build(tmp_path_factory.mktemp("code") / "cpu_kernels_abi.so", "-DTEST_ABI=99")


def _build(target: Path, *options: str) -> Path:
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++17", "-O1", "-g", "-fPIC", "-shared", *options, str(HERE / "cpu_kernels.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return target


@pytest.fixture
def gpu(cpu_library: Path, cpu_code_object: Path) -> Gpu:
    """Not opened yet: the first call in the child opens it."""
    return Gpu(cpu_library, cpu_code_object)
