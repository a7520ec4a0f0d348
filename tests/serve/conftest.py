"""The demo model behind servers on real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_scene import Served, running

from glm53 import Engine


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
