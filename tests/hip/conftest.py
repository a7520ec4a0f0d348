"""Helpers of the hip tests: fake libraries, and children, since a process drives one runtime only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hip_fakes import FAKE_HIP, compile_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def fake_hip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(FAKE_HIP, tmp_path_factory.mktemp("fake") / "libamdhip64.so")


@pytest.fixture(scope="session")
def mock_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda.so.1 that records calls; its folder goes into LD_LIBRARY_PATH."""
    source = Path(__file__).with_name("mock_cuda.c")
    return compile_library(source, tmp_path_factory.mktemp("mock") / "libcuda.so.1", "-D_GNU_SOURCE")


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in a process of its own and returns what it printed; fails the test if the code fails.

    path: folders in front of sys.path; libraries: folders for LD_LIBRARY_PATH; runtime: GLM53_RUNTIME.
    """

    def run(code: str, path: tuple[Path, ...] = (), libraries: tuple[Path, ...] = (), runtime: str | None = None) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("GLM53_RUNTIME", "ROCM_PATH", "ROCM_HOME")}
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
        if libraries:
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
        if runtime is not None:
            environment["GLM53_RUNTIME"] = runtime
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.strip()

    return run
