"""Torch-free runtime for GLM-5.3 on AMD GPUs: `from glm53 import Engine, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm53.engine import Engine
    from glm53.request import Chunk, Completion
    from glm53.sampling import SamplingParams

__all__ = ["Chunk", "Completion", "Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports the engine when it is first asked for, so that `import glm53` and --help stay quick and need no device."""
    if name == "SamplingParams":
        from glm53.sampling import SamplingParams

        return SamplingParams
    if name in __all__:
        from glm53 import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'glm53' has no attribute {name!r}")
