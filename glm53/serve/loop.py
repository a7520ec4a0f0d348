"""One thread that runs an engine for many clients: requests come from other threads, chunks go back to each of them.

The thread does one action of the queue after the other: a chunk of a prompt, or a step of all decoding requests. Between two actions it takes what
has arrived and ends what was cancelled. A request that fails ends with an error of its own. After DeviceLost, LinkStuck, or an error that nobody
expected, every request ends with it and no new one is taken: the process has to be started again.

Every request that was taken gets exactly one last event, and holds no memory of the engine when it gets it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53.errors import DeviceLost, DeviceMemoryError, Glm53Error, LifetimeError, LinkStuck
from glm53.request import Batch, Chunk, Request
from glm53.sched.queue import Prefill, Queue, Step

if TYPE_CHECKING:
    from glm53.engine import Engine


class Busy(Glm53Error):
    """As many requests wait as may; next: try again later."""


class Stopped(Glm53Error):
    """The loop takes no requests any more: it is being closed, or its device is lost."""


class Cancelled(Glm53Error):
    """The request's caller ended it."""


@dataclass(frozen=True)
class Started:
    """The request has a session; so many rows of its prompt came from another one."""

    reused_rows: int


@dataclass(frozen=True)
class Failed:
    """The request has ended without a finish reason."""

    error: Glm53Error


Event = Started | Chunk | Failed  # a chunk with a finish reason is the last event, and so is Failed
Sink = Callable[[Event], None]


class Job:
    """A request of the loop. Made by `Loop.submit`; only the loop's thread touches what it holds."""

    def __init__(self, request: Request, sink: Sink):
        self.request = request
        self._sink = sink
        self.serial = -1  # in the queue
        self.started = False
        self.ended = False

    def tell(self, event: Event) -> bool:
        """Hands an event over; False if the one who listens has gone."""
        try:
            self._sink(event)
        except Exception:  # whatever is wrong with one listener, the others go on
            return False
        return True


@dataclass(frozen=True)
class Load:
    """What a loop has to do."""

    running: int
    waiting: int


class Loop:
    """Runs requests on an engine, which stays its caller's to close, after `close`.

    waiting_max: requests without a session at most. chunks_per_step, decode_max: see `Queue`.
    """

    def __init__(self, engine: Engine, waiting_max: int, chunks_per_step: int = 1, decode_max: int = 0):
        self.engine, self.waiting_max = engine, waiting_max
        self._batch = Batch(Queue(engine.sessions_max, engine.config.prefill_chunk_rows, chunks_per_step, decode_max))
        self._jobs: dict[int, Job] = {}  # by serial
        self._change = threading.Condition()  # guards what follows; notified when there is something to do
        self._arrived: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._taken = 0  # jobs that have not started
        self._running = 0
        self._closing = False
        self._fatal: Glm53Error | None = None
        self._thread = threading.Thread(target=self._run, name="glm53 loop", daemon=True)
        self._thread.start()

    @property
    def fatal(self) -> Glm53Error | None:
        """Why nothing runs any more, if so."""
        return self._fatal

    def load(self) -> Load:
        """Requests that run and that wait."""
        with self._change:
            return Load(self._running, self._taken)

    def submit(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> list[Job]:
        """Takes requests, all of them or none; from any thread. Sinks are called from the loop's thread and must not block.

        Raises Busy if more than `waiting_max` would wait, Stopped.
        """
        jobs = [Job(request, sink) for request, sink in zip(requests, sinks, strict=True)]
        with self._change:
            if self._fatal is not None or self._closing:
                raise Stopped(f"no request is taken any more: {self._fatal or 'the server is shutting down'}")
            if self._taken + len(jobs) > self.waiting_max + self.engine.sessions_max - self._running:
                raise Busy(f"{self._taken} requests wait and {self._running} run, at most {self.waiting_max} may wait; next: try again later")
            self._arrived += jobs
            self._taken += len(jobs)
            self._change.notify()
        return jobs

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Ends requests before the next action, from any thread; those that have ended already are none of its business."""
        with self._change:
            self._cancelled += jobs
            self._change.notify()

    def close(self) -> None:
        """Ends every request with Stopped and waits for the thread. Idempotent."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    # The loop's thread

    def _run(self) -> None:
        try:
            while self._take():
                action = self._batch.queue.next()
                if action is not None:
                    self._act(action)
        except Glm53Error as error:
            self._stop(error)
        except BaseException as error:  # an error of ours: what the engine holds is unknown
            self._stop(Glm53Error(f"the loop of the server failed: {type(error).__name__}: {error}; next: start the server again, and report this"))
        else:
            self._stop(Stopped("the server is shutting down"))

    def _take(self) -> bool:
        """Waits until there is something to do and takes what came; False to stop."""
        with self._change:
            while not (self._closing or self._arrived or self._cancelled or len(self._batch.queue)):
                self._change.wait()
            if self._closing:
                return False
            arrived, cancelled = list(self._arrived), self._cancelled
            self._arrived.clear()
            self._cancelled = []
        for job in arrived:
            job.serial = job.request.index = self._batch.add(job.request)
            self._jobs[job.serial] = job
        if cancelled:
            self._drop([job for job in cancelled if not job.ended], Cancelled("the request was cancelled"))
        return True

    def _act(self, action: Prefill | Step) -> None:
        try:
            done = self.engine.act(action, self._batch)
        except (DeviceLost, LinkStuck, LifetimeError):
            raise
        except Glm53Error as error:
            self._drop([self._jobs[serial] for serial in self._at_fault(action, error)], error)
            return
        if isinstance(action, Prefill) and action.start == 0:
            self._start(self._jobs[action.serial])
        gone = []
        for serial, chunk in done.chunks:
            job = self._jobs[serial]
            if chunk.finish_reason is not None:
                self._ended(job)
            if not job.tell(chunk) and not job.ended:
                gone.append(job)
        for serial, failure in done.failed:
            self._fail(self._jobs[serial], failure)
        if isinstance(done.error, (DeviceLost, LinkStuck)):
            raise done.error
        if gone:
            self._drop([job for job in gone if not job.ended], Cancelled("nobody listens to the request"))

    def _at_fault(self, action: Prefill | Step, error: Glm53Error) -> list[int]:
        """The requests that an action which failed was for. A step that was enqueued before for other requests fails with them.

        Memory that is short for a step is asked for again without the request that came last.
        """
        if isinstance(action, Prefill):
            return [action.serial]
        if isinstance(error, DeviceMemoryError):
            return [max(action.serials)]
        return [serial for serial in dict.fromkeys((*action.serials, *self._batch.serials)) if serial in self._batch.by_serial]

    def _start(self, job: Job) -> None:
        with self._change:
            job.started = True
            self._taken -= 1
            self._running += 1
        job.tell(Started(job.request.reused_rows))

    def _ended(self, job: Job) -> None:
        """The request has left the engine."""
        job.ended = True
        self._jobs.pop(job.serial, None)
        with self._change:
            if job.started:
                self._running -= 1
            else:
                self._taken -= 1

    def _fail(self, job: Job, error: Glm53Error) -> None:
        self._ended(job)
        job.tell(Failed(error))

    def _drop(self, jobs: Sequence[Job], error: Glm53Error) -> None:
        """Ends requests that are in the engine's batch."""
        jobs = list(dict.fromkeys(jobs))
        if not jobs:
            return
        try:
            self.engine.drop([job.serial for job in jobs], self._batch)
        except (DeviceLost, LinkStuck):
            raise
        except Glm53Error:
            pass  # the device refused to be waited for; the requests have ended all the same
        finally:
            for job in jobs:
                self._fail(job, error)

    def _stop(self, error: Glm53Error) -> None:
        """Ends every request, also those that have just arrived."""
        with self._change:
            self._fatal = None if isinstance(error, Stopped) else error
            self._closing = True
            arrived = list(self._arrived)
            self._arrived.clear()
            self._cancelled = []
        jobs = list(self._jobs.values())
        try:
            self.engine.drop([job.serial for job in jobs if job.serial in self._batch.by_serial], self._batch)
        except Glm53Error:
            pass  # the engine's close is next
        finally:
            for job in (*jobs, *arrived):
                self._fail(job, error)
