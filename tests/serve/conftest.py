"""The demo model behind servers on real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_scene import SETTINGS
from serve_scene import Served, running

from glm53 import Engine


@pytest.fixture(scope="session")
def small_path(make_checkpoint: Callable[..., Path]) -> Path:
    """A random model with an MTP layer."""
    return make_checkpoint(layers=4, vocab=64, topk=32, seed=7, mtp=True)


@pytest.fixture(scope="module", params=["0", "2"], ids=["", "mtp"])
def small_engine(small_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Three sessions of that model, without drafts and with two."""
    with Engine.open(small_path, mtp=request.param, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def serve_engine(demo_path: Path) -> Iterator[Engine]:
    """The demo model in bf16, three sessions of 512 rows."""
    with Engine.open(demo_path, context_rows_max=512, sessions_max=3, prefill_chunk_rows=32, hot_rows=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def served(serve_engine: Engine) -> Iterator[Served]:
    with running(serve_engine) as server:
        yield server


@pytest.fixture(scope="session")
def serve_with(serve_engine: Engine) -> Callable[..., Any]:
    """A server with settings of its own, as a context manager."""
    return lambda **settings: running(serve_engine, **settings)
