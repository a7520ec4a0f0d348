"""Litmus loops: does this machine keep the promises that the fast paths rest on? Each has a fallback made of stream order and plain copies.

Each loop is bounded (polls in kernels, seconds on the host), frees what it allocated, and reports instead of raising. A kernel that does
not come back keeps its memory: freeing would wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from glm53.errors import Glm53Error
from glm53.hip import Array, Device, HostBuffer, MemoryKind, Stream
from glm53.ops import litmus
from glm53.spec import DType

POLLS = 2_000_000  # of one wait in a kernel: seconds over a link, far longer than any message takes
HOST_SECONDS = 120.0  # of one wait on the host
WORDS = 8  # data words of a message
MULTIPLIER = 6364136223846793005  # of counter_step


@dataclass(frozen=True)
class Result:
    """One loop's outcome. detail: what was run if it passed, what went wrong if not."""

    name: str
    passed: bool
    detail: str
    seconds: float


class Broken(Exception):
    """A promise was not kept; the text says which."""


def report(name: str, body: Callable[[ExitStack], str]) -> Result:
    """Runs `body`, which returns its detail or raises; what it put on the stack is freed unless a kernel is still running."""
    started = time.perf_counter()
    stack = ExitStack()
    try:
        with stack:
            detail, passed = body(stack), True
    except (Broken, Glm53Error) as error:
        detail, passed = str(error).splitlines()[0], False
    return Result(name, passed, detail, time.perf_counter() - started)


@contextmanager
def _freed(memory: Array | HostBuffer) -> Iterator[None]:
    try:
        yield
    finally:
        memory.free()


def _array(stack: ExitStack, device: Device, count: int) -> Array:
    """[count] u64 zeros."""
    array = Array.from_numpy(device, np.zeros(count, np.uint64), category="litmus")
    stack.enter_context(_freed(array))
    return array


def _mailbox(stack: ExitStack, device: Device, words: int) -> Array:
    """[words] u64 zeros in memory that other devices may store to while a kernel here reads it."""
    array = Array(device.alloc(words * 8, category="litmus", kind=MemoryKind.UNCACHED), DType.U64, (words,))
    stack.enter_context(_freed(array))
    array.upload(np.zeros(words, np.uint64))
    return array


def _host(stack: ExitStack, device: Device, byte_count: int) -> HostBuffer:
    buffer = device.host_alloc(byte_count, category="litmus")
    stack.enter_context(_freed(buffer))
    buffer.array[:] = 0
    return buffer


def _stream(stack: ExitStack, device: Device) -> Stream:
    stream = device.stream()
    stack.callback(stream.close)
    return stream


def _finish(stack: ExitStack, *streams: Stream) -> None:
    """Waits at most HOST_SECONDS for all streams; after that their memory is given up, not freed."""
    deadline = time.monotonic() + HOST_SECONDS
    for stream in streams:
        while not stream.query():
            if time.monotonic() > deadline:
                stack.pop_all()
                raise Broken(f"device {stream.device.index} did not finish in {HOST_SECONDS:.0f} s; its memory stays allocated")
            time.sleep(0.0002)
        stream.synchronize()


def _check_messages(sent: np.ndarray, received: np.ndarray, rounds: int, way: str) -> None:
    if received[1]:
        raise Broken(f"{way}: round {received[1]} had a stale or torn data word after its sequence number was seen")
    if sent[0] != rounds or received[0] != rounds:
        raise Broken(f"{way}: {sent[0]} of {rounds} messages were echoed, {received[0]} received, before the poll budget ended")


def peer_mailbox(device_a: Device, device_b: Device, rounds: int = 1000, budget: int = POLLS) -> Result:
    """Message passing between kernels of two devices, both ways: data words, then a sequence number, stored into uncached memory of the
    receiver.

    Fallback: stream order, events and peer copies.
    """

    def one_way(sender: Device, receiver: Device) -> None:
        with ExitStack() as stack:
            box, reply = _mailbox(stack, receiver, 1 + WORDS), _mailbox(stack, sender, 1)
            sent, received = _array(stack, sender, 2), _array(stack, receiver, 2)
            there, here = _stream(stack, receiver), _stream(stack, sender)
            litmus.receive(there, box.address, reply.address, received, rounds, WORDS, budget)
            litmus.send(here, box.address, reply.address, sent, rounds, WORDS, budget)
            _finish(stack, here, there)
            _check_messages(sent.numpy(), received.numpy(), rounds, f"device {sender.index} to {receiver.index}")

    def body(_stack: ExitStack) -> str:
        if not (device_a.can_access(device_b) and device_b.can_access(device_a)):
            raise Broken(f"devices {device_a.index} and {device_b.index} cannot access each other's memory")
        device_a.enable_peer(device_b)
        device_b.enable_peer(device_a)
        one_way(device_a, device_b)
        one_way(device_b, device_a)
        return f"{rounds} messages of {WORDS} words each way between devices {device_a.index} and {device_b.index}"

    return report("peer mailbox", body)


def _host_wait(word: np.ndarray, value: int, stream: Stream) -> bool:
    """Polls one u64 in coherent host memory until it is `value`; False if the kernel ended or HOST_SECONDS went by without it."""
    deadline = time.monotonic() + HOST_SECONDS
    while word[0] != value:
        if stream.query() or time.monotonic() > deadline:
            return bool(word[0] == value)
    return True


def host_mailbox(device: Device, rounds: int = 1000, budget: int = POLLS) -> Result:
    """Message passing between a running kernel and the host through coherent host memory, both ways.

    The host's stores reach memory in program order (x86-64). Fallback: copies and stream synchronisation.
    """

    def body(stack: ExitStack) -> str:
        buffer = _host(stack, device, 4096)
        words = buffer.array.view(np.uint64)
        box, reply = words[: 1 + WORDS], words[64:65]
        box_address, reply_address = buffer.device_address, buffer.device_address + 512
        result, stream = _array(stack, device, 2), _stream(stack, device)

        litmus.receive(stream, box_address, reply_address, result, rounds, WORDS, budget)
        for number in range(1, rounds + 1):
            box[1:] = [litmus.word(number, i) for i in range(WORDS)]
            box[0] = number
            if not _host_wait(reply, number, stream):
                break
        _finish(stack, stream)
        _check_messages(reply, result.numpy(), rounds, f"host to device {device.index}")

        words[:] = 0
        result.upload(np.zeros(2, np.uint64))
        litmus.send(stream, box_address, reply_address, result, rounds, WORDS, budget)
        received = np.zeros(2, np.uint64)
        for number in range(1, rounds + 1):
            if not _host_wait(box, number, stream):
                break
            wanted = [litmus.word(number, i) for i in range(WORDS)]
            if received[1] == 0 and box[1:].tolist() != wanted:
                received[1] = number
            received[0] = number
            reply[0] = number
        _finish(stack, stream)
        _check_messages(result.numpy(), received, rounds, f"device {device.index} to host")
        return f"{rounds} messages of {WORDS} words each way"

    return report("host mailbox", body)


def _replayed(nodes: list[tuple[int, int]], slots: int, steps: np.ndarray) -> list[int]:
    """State after replaying counter_step nodes (slot, step index) once per row of `steps` [replays, 2], from zero: the composition of a
    slot's nodes is x -> a x + b0 step0 + b1 step1 mod 2^64."""
    modulus = 1 << 64
    maps = [(1, 0, 0)] * slots
    for slot, which in nodes:
        a, b0, b1 = (value * MULTIPLIER % modulus for value in maps[slot])
        maps[slot] = (a, (b0 + (which == 0)) % modulus, (b1 + (which == 1)) % modulus)
    state = [0] * slots
    for first, second in steps.tolist():
        state = [(a * x + b0 * first + b1 * second) % modulus for x, (a, b0, b1) in zip(state, maps, strict=True)]
    return state


def graph_replay(device: Device, nodes: int = 2000, replays: int = 1000) -> Result:
    """A graph of `nodes` kernels on three counters, replayed with inputs that change between replays in stream order.

    The counters' maps do not commute, so that a lost, doubled or swapped node shows. Fallback: plain launches.
    """

    def body(stack: ExitStack) -> str:
        slots = 3
        plan = [(i * i % slots, (i * 7 + i // 5) % 2) for i in range(nodes)]
        values = np.random.default_rng(53).integers(1, 1 << 63, size=(replays, 2), dtype=np.uint64)
        inputs = _host(stack, device, values.nbytes)
        inputs.array[:] = values.reshape(-1).view(np.uint8)
        state, step, stream = _array(stack, device, slots), _array(stack, device, 2), _stream(stack, device)
        with stream.capture() as capture:
            for slot, which in plan:
                litmus.counter_step(stream, state, step.slice(which, which + 1), slot)
        graph = capture.graph
        stack.callback(graph.close)
        for replay in range(replays):
            stream.copy(step.address, inputs.device_address + replay * 16, 16)
            graph.launch(stream)
        _finish(stack, stream)
        got, wanted = state.numpy().tolist(), _replayed(plan, slots, values)
        if got != wanted:
            raise Broken(f"{nodes} nodes replayed {replays} times: counters are {got}, expected {wanted}")
        return f"{nodes} nodes replayed {replays} times"

    return report("graph replay", body)


def registered_memory(device: Device, byte_count: int = 1 << 20, rounds: int = 8) -> Result:
    """Kernels read and write registered host memory in place; the host rewrites the same addresses between launches.

    Fallback: copies through staging buffers. byte_count is a multiple of 16.
    """

    def body(stack: ExitStack) -> str:
        memory = np.zeros(byte_count + 8192, np.uint8)
        memory = memory[-memory.ctypes.data % 4096 :][:byte_count]  # whole pages: registration locks those
        buffer = device.host_register(memory, category="litmus")
        stack.enter_context(_freed(buffer))
        target, stream = _array(stack, device, byte_count // 8), _stream(stack, device)
        random = np.random.default_rng(7)
        for number in range(rounds):
            values = random.integers(0, 1 << 63, size=byte_count // 8, dtype=np.uint64)
            memory[:] = values.view(np.uint8)
            litmus.copy_words(stream, buffer.device_address, target.address, byte_count // 16)
            _finish(stack, stream)
            wrong = int((target.numpy() != values).sum())
            if wrong:
                raise Broken(f"round {number}: a kernel read {wrong} of {values.size} words wrong (stale if round > 0)")
            memory[:] = 0
            litmus.copy_words(stream, target.address, buffer.device_address, byte_count // 16)
            _finish(stack, stream)
            wrong = int((memory.view(np.uint64) != values).sum())
            if wrong:
                raise Broken(f"round {number}: the host saw {wrong} of {values.size} words that a kernel stored wrong")
        return f"{rounds} rounds of {byte_count} bytes read and written in place"

    return report("registered memory", body)


def copy_2d(device: Device) -> Result:
    """Strided copies, host to device and back, with different pitches. Fallback: one copy a row."""

    def body(stack: ExitStack) -> str:
        width, height, host_pitch, device_pitch = 656, 64, 1152, 704
        host, back = _host(stack, device, host_pitch * height), _host(stack, device, width * height)
        host.array[:] = np.random.default_rng(2).integers(0, 256, size=host_pitch * height, dtype=np.uint8)
        target, stream = _array(stack, device, device_pitch * height // 8), _stream(stack, device)
        stream.copy_2d(target.address, device_pitch, host.device_address, host_pitch, width, height)
        stream.copy_2d(back.device_address, width, target.address, device_pitch, width, height)
        _finish(stack, stream)
        wanted = host.array.reshape(height, host_pitch)[:, :width]
        if not np.array_equal(back.array.reshape(height, width), wanted):
            raise Broken(f"{height} rows of {width} bytes came back different")
        gaps = target.numpy().view(np.uint8).reshape(height, device_pitch)[:, width:]
        if gaps.any():
            raise Broken("a strided copy wrote between the rows")
        return f"{height} rows of {width} bytes, pitches {host_pitch} and {device_pitch}"

    return report("2D copies", body)


def streams_events(device: Device, rounds: int = 50) -> Result:
    """Two streams take turns on one counter, ordered by events alone; time stamps do not run backwards. There is no fallback: everything
    needs this."""

    def body(stack: ExitStack) -> str:
        state = _array(stack, device, 1)
        steps = Array.from_numpy(device, np.array([3, 5], np.uint64), category="litmus")
        stack.enter_context(_freed(steps))
        streams = _stream(stack, device), _stream(stack, device)
        events = [device.event(timing=True) for _ in range(2 * rounds)]
        for event in events:
            stack.callback(event.close)
        for turn, event in enumerate(events):
            stream = streams[turn % 2]
            if turn:
                stream.wait(events[turn - 1])
            litmus.counter_step(stream, state, steps.slice(turn % 2, turn % 2 + 1), 0)
            event.record(stream)
        _finish(stack, *streams)
        wanted = _replayed([(0, 0), (0, 1)], 1, np.tile(np.array([[3, 5]], np.uint64), (rounds, 1)))
        if state.numpy().tolist() != wanted:
            raise Broken(f"{2 * rounds} turns ordered by events ran in another order")
        if not all(event.query() for event in events):
            raise Broken("an event has not happened although its stream is empty")
        elapsed = events[-1].elapsed_us(events[0])
        if elapsed < 0:
            raise Broken(f"time stamps run backwards: {elapsed:.1f} us")
        return f"{2 * rounds} turns of two streams in order, {elapsed / (2 * rounds - 1):.1f} us a turn"

    return report("streams and events", body)
