"""Graphs: launches recorded once on a stream of one device and replayed as a whole.

Captures are thread-local and hold kernel nodes only (DESIGN section 5); nothing may be allocated or waited for inside one.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from glm53.errors import HipError, LifetimeError
from glm53.hip import calls

if TYPE_CHECKING:
    from glm53.hip.stream import Stream


class Graph:
    """An executable graph. `kernel_count` launches were recorded. Memory that they use must stay alive as long as the graph is launched."""

    def __init__(self, device: Any, template: Any, executable: Any, kernel_count: int):
        self.device = device
        self.kernel_count = kernel_count
        self._template = template
        self._executable: Any = executable

    def launch(self, stream: Stream) -> None:
        """Enqueues one replay on `stream`, which must be of the graph's device."""
        if self._executable is None:
            raise LifetimeError("graph is launched after close()")
        with self.device.current():
            calls.graph_launch(self._executable, stream.handle)

    def close(self) -> None:
        """Destroys the graph; launches already enqueued must have finished."""
        if self._executable is not None:
            executable, self._executable = self._executable, None
            calls.graph_executable_destroy(executable)
            calls.graph_destroy(self._template)


class Capture:
    """One recording on a stream: a context manager. After it `graph` is the result; an exception inside abandons the recording."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._graph: Graph | None = None
        self.kernel_count = 0

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            raise LifetimeError("capture has no graph: it has not ended, or it was abandoned by an exception")
        return self._graph

    def __enter__(self) -> Self:
        if self._stream.capturing is not None:
            raise LifetimeError("stream is already being captured")
        with self._stream.device.current():
            calls.capture_begin(self._stream.handle)
        self._stream.capturing = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.capturing = None
        with self._stream.device.current():
            try:
                template = calls.capture_end(self._stream.handle)
            except HipError:
                # The recording became invalid inside: its own error, if there is one, says more than this one.
                if kind is None:
                    raise
                return
            if kind is not None:
                calls.graph_destroy(template)
                return
            try:
                executable = calls.graph_instantiate(template)
            except HipError:
                calls.graph_destroy(template)
                raise
        self._graph = Graph(self._stream.device, template, executable, self.kernel_count)
