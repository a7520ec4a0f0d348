"""Shared fixtures: the demo model, random checkpoints, engines on the selected runtime (cpu unless GLM53_RUNTIME says otherwise)."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from glm53 import Engine
from glm53.hip import runtime

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "glm53-demo"
FAULTY_CALLS = (
    "hipDeviceCanAccessPeer",
    "hipDeviceDisablePeerAccess",
    "hipDeviceEnablePeerAccess",
    "hipDeviceSynchronize",
    "hipEventCreateWithFlags",
    "hipEventDestroy",
    "hipEventElapsedTime",
    "hipEventRecord",
    "hipEventSynchronize",
    "hipExtMallocWithFlags",
    "hipFree",
    "hipGraphLaunch",
    "hipHostFree",
    "hipHostGetDevicePointer",
    "hipHostMalloc",
    "hipHostRegister",
    "hipMalloc",
    "hipMemcpy",
    "hipMemcpy2DAsync",
    "hipMemcpyAsync",
    "hipMemcpyPeerAsync",
    "hipMemsetAsync",
    "hipModuleLaunchKernel",
    "hipStreamCreateWithFlags",
    "hipStreamDestroy",
    "hipStreamQuery",
    "hipStreamSynchronize",
    "hipStreamWaitEvent",
)  # those that tests make fail through `control`


def load_script(path: Path) -> ModuleType:
    """A script or test helper as a module, by its path."""
    name = f"script_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The runtime's own tests come first: they fork, and the parent must not have opened a HIP library by then."""
    items.sort(key=lambda item: ROOT / "tests" / "runtime" not in item.path.parents)


@pytest.fixture
def control() -> Iterator[ctypes.CDLL]:
    """The cpu runtime's own symbols; a seed and faults end with the test."""
    if runtime.select().name != "cpu":
        pytest.skip("faults, counters and schedules are the cpu runtime's")
    library = runtime.control()
    yield library
    library.glm53_cpu_seed(0, 0)
    for api in FAULTY_CALLS:
        library.glm53_cpu_fail(api.encode(), 0, 0)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a random checkpoint (options of scripts/make_checkpoint.py), once per set of options."""
    maker = load_script(ROOT / "scripts" / "make_checkpoint.py")
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("checkpoint")
            maker.make_checkpoint(made[key], **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[Engine]:
    """The demo model in f32, four sessions, 4,096 rows."""
    with Engine.open(DEMO, dtype="f32", context_rows_max=4096, sessions_max=4, prefill_chunk_rows=64) as engine:
        yield engine
