"""One thread that runs an engine for many clients: requests come from other threads, chunks go back to each of them.

The thread does one action of the scheduler after the other: a chunk of a prompt, a step of decoding requests, or what makes room for a request.
Between two actions it takes what has arrived and ends what was cancelled or is past its deadline. A request that fails ends with an error of its
own. After DeviceLost, LinkStuck, or an error that nobody expected, every request ends with it and no new one is taken: the process has to be started
again.

Every request that was taken gets exactly one last event, and has no history of its own in the engine when it gets it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from glm53.errors import DeviceLost, DeviceMemoryError, Glm53Error, InputError, InUse, LifetimeError, LinkStuck
from glm53.prices import SHARE, books_of
from glm53.request import Chunk, Lender, Request
from glm53.sched.queue import Step
from glm53.sched.scheduler import Action, Drop, Park, Rest, Scheduler, Start
from glm53.served import Served

if TYPE_CHECKING:
    from glm53.engine import Engine


class Busy(Glm53Error):
    """As many requests wait as may; next: try again later."""


class NeverFits(InputError):
    """The request needs more memory than there is for histories when nobody else has any."""


class Stopped(Glm53Error):
    """The loop takes no requests any more: it is being closed, or its device is lost."""


class Cancelled(Glm53Error):
    """The request's caller ended it."""


class Expired(Glm53Error):
    """The request has not ended by its deadline."""


@dataclass(frozen=True)
class Started:
    """The request has a history; so many rows of its prompt came from another one."""

    reused_rows: int


@dataclass(frozen=True)
class Failed:
    """The request has ended without a finish reason."""

    error: Glm53Error


Event = Started | Chunk | Failed  # a chunk with a finish reason is the last event, and so is Failed
Sink = Callable[[Event], None]
T = TypeVar("T")


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

    waiting_max: requests that have not started at most. device_share: of the device memory that is free now, what histories may have. The other
    settings are those of `Scheduler`.
    """

    def __init__(
        self,
        engine: Engine,
        waiting_max: int,
        chunks_per_step: int = 1,
        decode_max: int = 0,
        parked_max: int = 0,
        keeps: bool = True,
        device_share: float = SHARE,
    ):
        self.engine, self.waiting_max = engine, waiting_max
        self.books = books_of(engine, device_share)
        chunk_rows = engine.config.prefill_chunk_rows
        self._scheduler = Scheduler(self.books, engine.sessions_max, chunk_rows, chunks_per_step, decode_max, parked_max, keeps=keeps)
        self._batch = Served(engine, self._scheduler)
        self._batch.sync()
        self._rows_ahead = engine.tier.rows_max - engine.context_rows_max  # that drafts may write behind the last row
        self._even_rows = self.books.rows_max(engine.sessions_max, engine.tier.rows_max) - self._rows_ahead
        self._deadlines: list[tuple[float, int, Job]] = []  # a heap
        self._order = count()
        self._idle = False  # nothing can be done before something comes
        self._jobs: dict[int, Job] = {}  # by serial
        self._change = threading.Condition()  # guards what follows; notified when there is something to do
        self._arrived: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._bound: list[Lender] = []  # that requests continue, waiting or running
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

    @property
    def parks(self) -> int:
        """How often a request was parked for another one's sake, since the start."""
        return self._batch.parks

    def load(self) -> Load:
        """Requests that run and that wait."""
        with self._change:
            return Load(self._running, self._taken)

    def submit(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> list[Job]:
        """Takes requests, all of them or none; from any thread. Sinks are called from the loop's thread and must not block.

        Raises NeverFits for one that would not even fit alone, Busy if more than `waiting_max` would wait, InUse if a session that one of them
        continues is another one's, Stopped.
        """
        jobs = [Job(request, sink) for request, sink in zip(requests, sinks, strict=True)]
        bound = [request.session for request in requests if request.session is not None]
        for request in requests:
            refusal = self.books.never(self._rows_max(request))
            if refusal is not None:
                raise NeverFits(f"{refusal}; next: shorten the prompt, lower max_tokens, or start the server with more")
        with self._change:
            if self._fatal is not None or self._closing:
                raise Stopped(f"no request is taken any more: {self._fatal or 'the server is shutting down'}")
            if self._taken + len(jobs) > self.waiting_max + max(self.engine.sessions_max - self._running, 0):
                raise Busy(
                    f"got {_requests(len(jobs))} beside {self._taken} that have not started and {self._running} that run, wanted at most "
                    f"{self.waiting_max} waiting beside {self.engine.sessions_max} running; next: try again later"
                )
            if len(set(map(id, bound))) < len(bound) or any(session is other for session in bound for other in self._bound):
                raise InUse("the session is another request's; next: wait until that has ended, or fork the session")
            self._bound += bound
            self._arrived += jobs
            self._taken += len(jobs)
            self._change.notify()
        return jobs

    def _rows_max(self, request: Request) -> int:
        """Of its history, the longest that it can get."""
        return min(len(request.prompt) + request.params.max_tokens, self.engine.context_rows_max) + self._rows_ahead

    def tokens_for(self, prompt_rows: int, least: int) -> int:
        """How many tokens a request may draw that does not say: what the context holds, but with its prompt no more than an even share of the memory,
        unless that leaves fewer than `least`; never more than fit alone. At least 1."""
        room = self.engine.context_rows_max - prompt_rows
        alone = self.books.rows_max(1, self.engine.tier.rows_max) - self._rows_ahead - prompt_rows
        return max(min(room, alone, max(self._even_rows - prompt_rows, least)), 1)

    @contextmanager
    def room(self, rows: int) -> Iterator[None]:
        """On the loop's thread (`call`): host memory for a history of `rows` rows that is made inside, without a slot. Raises NeverFits, Busy if
        there is none now."""
        key = self.promise(rows)
        try:
            yield
        finally:
            self.redeem(key)

    def promise(self, rows: int) -> int:
        """As `room`, for a history that is made between this call and `redeem`, both on the loop's thread."""
        refusal = self.books.never(rows)
        if refusal is not None:
            raise NeverFits(f"{refusal}; next: start the server with more")
        key = self._batch.promise(rows)
        if key is None:
            raise Busy(f"requests and sessions hold the memory that {rows} rows need; next: try again later, or delete a session")
        return key

    def redeem(self, key: int) -> None:
        """See `promise`."""
        self._batch.sync()
        self._scheduler.redeem(key)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Ends requests before the next action, from any thread; those that have ended already are none of its business."""
        with self._change:
            self._cancelled += jobs
            self._change.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Has the loop's thread run `function` between two actions; from any thread. Its result or exception goes to the future; Stopped if the loop
        ends before. Cancelling the future prevents a call that has not begun."""
        future: Future[T] = Future()
        with self._change:
            if self._fatal is None and not self._closing:
                self._calls.append((function, future))
                self._change.notify()
                return future
        future.set_exception(Stopped(f"nothing is done any more: {self._fatal or 'the server is shutting down'}"))
        return future

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
                action = self._scheduler.next()
                self._idle = action is None
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
            while self._idle and not (self._closing or self._arrived or self._cancelled or self._calls):
                if not self._change.wait(self._seconds_left()):
                    break
            if self._closing:
                return False
            arrived, cancelled, calls = list(self._arrived), self._cancelled, list(self._calls)
            self._arrived.clear()
            self._calls.clear()
            self._cancelled = []
        for function, future in calls:
            self._answer(function, future)
        if calls:
            self._batch.sync()
        for job in arrived:
            job.serial = job.request.index = self._batch.enter(job.request, self._rows_max(job.request))
            self._jobs[job.serial] = job
            if job.request.deadline is not None:
                heapq.heappush(self._deadlines, (job.request.deadline, next(self._order), job))
        if cancelled:
            self._drop([job for job in cancelled if not job.ended], Cancelled("the request was cancelled"))
        self._expire()
        return True

    def _seconds_left(self) -> float | None:
        """Until the next deadline."""
        return max(self._deadlines[0][0] - time.monotonic(), 0.0) if self._deadlines else None

    def _expire(self) -> None:
        """Ends requests that are past their deadline."""
        late: list[Job] = []
        while self._deadlines and (self._deadlines[0][2].ended or self._seconds_left() == 0.0):
            job = heapq.heappop(self._deadlines)[2]
            if not job.ended:
                late.append(job)
        self._drop(late, Expired("the request did not end by its deadline; next: give it more time, or ask for fewer tokens"))

    def _answer(self, function: Callable[[], Any], future: Future[Any]) -> None:
        """Runs a call. What it raises is its caller's, but for what ends the loop."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except (DeviceLost, LinkStuck) as error:
            future.set_exception(error)
            raise
        except Exception as error:
            future.set_exception(error)

    def _act(self, action: Action) -> None:
        try:
            done = self._batch.act(action)
        except (DeviceLost, LinkStuck):
            raise
        except Glm53Error as error:
            if isinstance(error, LifetimeError) and not isinstance(error, InUse):
                raise
            self._drop([self._jobs[serial] for serial in self._at_fault(action, error)], error)
            return
        if isinstance(action, Start):
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

    def _at_fault(self, action: Action, error: Glm53Error) -> list[int]:
        """The requests that an action which failed was for. A step that was enqueued before for other requests fails with them.

        Memory that is short for a step is asked for again without the request that came last.
        """
        assert not isinstance(action, Rest | Drop)
        if not isinstance(action, Step | Park):
            return [action.serial]
        if isinstance(action, Step) and isinstance(error, DeviceMemoryError):
            return [max(action.serials)]
        asked = action.serials if isinstance(action, Step) else (action.serial,)
        return [serial for serial in dict.fromkeys((*asked, *self._batch.serials)) if serial in self._batch.by_serial]

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
            if job.request.session is not None:
                self._bound.remove(job.request.session)
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
        for job in jobs:
            job.request.spoiled = not isinstance(error, Cancelled | Expired)
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
            arrived, calls = list(self._arrived), list(self._calls)
            self._arrived.clear()
            self._calls.clear()
            self._cancelled = []
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Stopped(str(error)))
        jobs = list(self._jobs.values())
        for job in jobs:
            job.request.spoiled = True
        try:
            self.engine.drop([job.serial for job in jobs if job.serial in self._batch.by_serial], self._batch)
            self._batch.close()
        except Glm53Error:
            pass  # the engine's close is next
        finally:
            for job in (*jobs, *arrived):
                self._fail(job, error)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
