"""The link between two devices: peer access that was checked and measured, or staging through page-locked host memory, and copies by either.

Invariants: a link that exists has carried a payload both ways, unchanged; every event, buffer and peer access that a link made ends with
`close()`; copies one way, in one stream each side, arrive in the order of the calls. It knows no kernel: the caller of `Link.probe` passes the one
whose stores into the other device's memory are to be checked.
"""

from __future__ import annotations

import enum
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from glm53.errors import DeviceLost, HipError, InputError, LifetimeError, LinkError, LinkStuck, human_bytes
from glm53.hip.array import Array
from glm53.hip.buffer import Buffer, HostBuffer, MemoryKind
from glm53.hip.device import Device
from glm53.hip.stream import Event, Stream
from glm53.spec import DType

# (stream, source address, target address, 16-byte words): enqueues a kernel of the stream's device that copies them.
KernelCopy = Callable[[Stream, int, int, int], None]

RATE_BYTES = 32 << 20  # payload of the check and of each timed copy: milliseconds on PCIe 4 x16
MAILBOX_BYTES = 64 << 10  # what the kernel stores into the other's uncached memory
LATENCY_BYTES = 16
REPEATS = 5
STAGING_BYTES = 4 << 20  # of a staging buffer; two each way, so that one is filled while the other is emptied
FINISH_SECONDS = 60.0  # of one wait in a check; a copy that takes longer does not end
PROBE, STAGING = "link probe", "link staging"  # categories of memory


class PeerAccess(enum.Enum):
    """What a link may rest on."""

    AUTO = "auto"  # peer access where it passes the check, staging where it does not
    ON = "on"  # peer access or an error
    OFF = "off"  # staging; peer access is never enabled


@dataclass(frozen=True)
class LinkWay:
    """One direction of a link, as measured when it was opened: medians of copies between two streams that wait for each other."""

    source: int  # device indices
    target: int
    bytes_per_s: float  # of copies of `rate_bytes`
    latency_us: float  # of a copy of 16 bytes


class _Unfit(Exception):
    """The way that was tried does not carry what it should; the text says what."""


@contextmanager
def _checking(what: str) -> Iterator[None]:
    """Inside, a HIP call that fails is a failed check. The loss of a device stays an error of its own."""
    try:
        yield
    except DeviceLost:
        raise
    except HipError as error:
        raise _Unfit(f"{what}: {error}") from error


# Peer access that links enabled, (device, peer) -> how many links rest on it. What others enabled is theirs to end and not in here.
_granted: dict[tuple[int, int], int] = {}
_granting = threading.Lock()


def _grant(device: Device, peer: Device, undo: ExitStack) -> None:
    """Lets kernels of `device` reach `peer`; the last link to end takes it back, after all work of both devices."""
    key = (device.index, peer.index)
    with _granting:
        if key not in _granted and not device.enable_peer(peer):
            return
        _granted[key] = _granted.get(key, 0) + 1
    undo.callback(_revoke, device, peer)


def _revoke(device: Device, peer: Device) -> None:
    key = (device.index, peer.index)
    with _granting:
        _granted[key] -= 1
        if _granted[key]:
            return
        del _granted[key]
        try:
            device.synchronize()
            peer.synchronize()
        finally:
            device.disable_peer(peer)


def _event(device: Device, undo: ExitStack, timing: bool = False) -> Event:
    event = device.event(timing)
    undo.callback(event.close)
    return event


def _free(buffer: Buffer | HostBuffer) -> None:
    if not buffer.freed:  # Device.close(free_buffers=True) may have come first
        buffer.free()


def _settle(event: Event) -> None:
    if event in event.device.events:
        event.synchronize()


class _Lane(Protocol):
    """One direction. The bytes are read after the work enqueued on the source's stream and written after that on the target's; work enqueued on
    either after the call comes after the copy's use of its side."""

    def enqueue(self, source_address: int, target_address: int, byte_count: int, source_stream: Stream, target_stream: Stream) -> None: ...


class _PeerLane:
    """One copy on the source's stream: writes across a bus are posted, reads wait for their answer."""

    def __init__(self, source: Device, target: Device, undo: ExitStack):
        self._writable = _event(target, undo)
        self._arrived = _event(source, undo)

    def enqueue(self, source_address: int, target_address: int, byte_count: int, source_stream: Stream, target_stream: Stream) -> None:
        self._writable.record(target_stream)
        source_stream.wait(self._writable)
        source_stream.copy_peer(target_address, target_stream.device, source_address, source_stream.device, byte_count)
        self._arrived.record(source_stream)
        target_stream.wait(self._arrived)


@dataclass(frozen=True)
class _Slot:
    """A staging buffer; `filled` is recorded on the source's stream, `emptied` on the target's."""

    memory: HostBuffer
    filled: Event
    emptied: Event


class _StagedLane:
    """Pieces of at most a slot's size take turns in two slots: a slot is filled again once its last piece has left it, in whatever streams."""

    def __init__(self, source: Device, target: Device, undo: ExitStack, staging_bytes: int):
        self._piece_bytes = staging_bytes
        self._slots = [self._slot(source, target, undo) for _ in range(2)]
        self._turn = 0

    def _slot(self, source: Device, target: Device, undo: ExitStack) -> _Slot:
        memory = source.host_alloc(self._piece_bytes, category=STAGING)
        undo.callback(_free, memory)
        slot = _Slot(memory, _event(source, undo), _event(target, undo))
        undo.callback(_settle, slot.emptied)
        return slot

    def enqueue(self, source_address: int, target_address: int, byte_count: int, source_stream: Stream, target_stream: Stream) -> None:
        for offset in range(0, byte_count, self._piece_bytes):
            piece_bytes = min(self._piece_bytes, byte_count - offset)
            slot = self._slots[self._turn]
            self._turn = 1 - self._turn
            source_stream.wait(slot.emptied)
            source_stream.copy(slot.memory.device_address, source_address + offset, piece_bytes)
            slot.filled.record(source_stream)
            target_stream.wait(slot.filled)
            target_stream.copy(target_address + offset, slot.memory.device_address, piece_bytes)
            slot.emptied.record(target_stream)


class Link:
    """Two devices that can pass bytes to each other. Made by `probe`; close it before its devices.

    devices: (a, b). peer: True if kernels and copies reach the other's memory directly, False if copies are staged. reason: why they are staged, ""
    for peer access. ways: what was measured, by (source index, target index). Several links of one pair are independent; one may be used from
    several threads, each stream by one at a time. A device whose kernels store into the other's memory needs a link with `peer` open as long.
    """

    def __init__(self, a: Device, b: Device, peer: bool, reason: str, staging_bytes: int, undo: ExitStack):
        """Takes peer access or allocates staging memory; what must be undone is put on `undo`. Raises _Unfit or HipError."""
        self.devices = (a, b)
        self.peer = peer
        self.reason = reason
        self.ways: dict[tuple[int, int], LinkWay] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._lock = threading.Lock()  # events and slots of a lane belong to one copy at a time while it is enqueued
        self._unusable = ""
        self._closed = False
        self._undo = undo
        for device, other in ((a, b), (b, a)) if peer else ():
            with _checking(f"peer access from device {device.index} to device {other.index}"):
                if not device.can_access(other):
                    raise _Unfit(f"device {device.index} cannot access the memory of device {other.index}")
                _grant(device, other, undo)
        for source, target in ((a, b), (b, a)):
            way = (source.index, target.index)
            self._lanes[way] = _PeerLane(source, target, undo) if peer else _StagedLane(source, target, undo, staging_bytes)

    @classmethod
    def probe(
        cls, a: Device, b: Device, mode: PeerAccess, kernel_copy: KernelCopy, rate_bytes: int = RATE_BYTES, staging_bytes: int = STAGING_BYTES
    ) -> Link:
        """Opens the link of two devices and checks it: `rate_bytes` whose values tell position, direction and path go each way by copy, for peer
        access also 64 KiB by `kernel_copy` into uncached memory of the other; then copies are timed. rate_bytes > 0; staging_bytes > 0: size of
        each of the four staging buffers.

        mode AUTO stages where peer access is refused, fails or changes a byte, and says why in `reason`. Raises LinkError naming both devices and
        what failed: peer access with mode ON, staging with the others, and any other HIP call; LinkStuck if a copy does not end; DeviceMemoryError;
        DeviceLost; InputError for a device and itself. Nothing is left behind then, but by LinkStuck: what a device still works on cannot be freed.
        """
        if a.index == b.index:
            raise InputError(f"a link needs two devices, got device {a.index} twice")
        if rate_bytes < 1 or staging_bytes < 1:
            raise ValueError(f"Link.probe: rate_bytes {rate_bytes}, staging_bytes {staging_bytes}: expected at least 1")
        pair = f"no link between {a} and {b}"
        reason = "peer access is off"
        try:
            if mode is not PeerAccess.OFF:
                try:
                    return cls._open(a, b, "", kernel_copy, rate_bytes, staging_bytes)
                except _Unfit as error:
                    reason = str(error)
                if mode is PeerAccess.ON:
                    raise LinkError(f"{pair} by peer access: {reason}; next: --p2p auto, which stages through host memory")
            return cls._open(a, b, reason, None, rate_bytes, staging_bytes)
        except DeviceLost:
            raise
        except _Unfit as error:
            raise LinkError(f"{pair} through host memory: {error} (staged because: {reason}); next: glm53 selftest on both devices") from error
        except HipError as error:
            raise LinkError(f"{pair}: {error}; next: glm53 selftest on both devices") from error

    @classmethod
    def _open(cls, a: Device, b: Device, reason: str, kernel_copy: KernelCopy | None, rate_bytes: int, staging_bytes: int) -> Link:
        """A link that passed its check. kernel_copy: the kernel to check peer access with; None: staged."""
        with ExitStack() as undo:
            link = cls(a, b, kernel_copy is not None, reason, staging_bytes, undo)
            try:
                for source, target in ((a, b), (b, a)):
                    link.ways[source.index, target.index] = _Check(link, source, target, rate_bytes).run(kernel_copy)
            except LinkStuck:
                undo.pop_all()
                raise
            link._undo = undo.pop_all()
        return link

    def copy(self, source: Array | Buffer, target: Array | Buffer, source_stream: Stream, target_stream: Stream) -> None:
        """Enqueues a copy of all bytes of `source`, memory of one device, to `target`, memory of the other and of the same size; `Array.slice` gives
        parts. Asynchronous; only where a HIP call fails it waits for both streams before it raises.

        source_stream, target_stream: of the two devices. The copy starts after the work enqueued on both so far; work enqueued afterwards may change
        the source (on source_stream) and use the target (on target_stream). Raises LifetimeError after `close()`, for freed memory and during a
        capture, ValueError if devices or sizes do not fit, LinkError after a failure that could not be cleared up, HipError from the runtime: then
        nothing of the copy is under way any more and the contents of `target` are undefined.
        """
        byte_count = self._accept(source, target, source_stream, target_stream)
        if byte_count == 0:
            return
        lane = self._lanes[source.device.index, target.device.index]
        with self._lock:
            try:
                lane.enqueue(source.address, target.address, byte_count, source_stream, target_stream)
            except BaseException:
                self._drain(source_stream, target_stream)
                raise

    def _accept(self, source: Array | Buffer, target: Array | Buffer, source_stream: Stream, target_stream: Stream) -> int:
        """Bytes to copy; raises what `copy` says."""
        if self._closed:
            raise LifetimeError("link is used after close()")
        if self._unusable:
            raise LinkError(f"the link of {self.devices[0]} and {self.devices[1]} cannot be used after {self._unusable}; next: open it again")
        sizes = []
        for name, memory, stream in (("source", source, source_stream), ("target", target, target_stream)):
            buffer = memory.buffer if isinstance(memory, Array) else memory
            sizes.append(memory.nbytes if isinstance(memory, Array) else memory.byte_count)
            if buffer.freed:
                raise LifetimeError(f"Link.copy: {name} {memory!r} is used after it was freed")
            if stream.device.index != memory.device.index:
                raise ValueError(f"Link.copy: {name}_stream is of device {stream.device.index}, expected device {memory.device.index} of {memory!r}")
            if stream.capturing is not None:
                raise LifetimeError(f"Link.copy: {name}_stream captures, a graph holds one device; next: copy between launches of graphs")
        if (source.device.index, target.device.index) not in self._lanes:
            ends = " and ".join(str(device.index) for device in self.devices)
            raise ValueError(f"Link.copy: from device {source.device.index} to device {target.device.index}, expected the link's devices {ends}")
        if sizes[0] != sizes[1]:
            raise ValueError(f"Link.copy: target has {human_bytes(sizes[1])}, expected {human_bytes(sizes[0])} as the source")
        return sizes[0]

    def _drain(self, *streams: Stream) -> None:
        """After a failure: pieces that no event tells of must not be under way when a slot is used again."""
        for stream in streams:
            try:
                stream.synchronize()
            except HipError as error:
                self._unusable = str(error)

    def close(self) -> None:
        """Waits for copies under way, then ends events, staging memory and, with the last link of a pair, peer access (after all work of both
        devices). Again is not an error. Raises HipError if the runtime refuses a call; all others are made then too."""
        self._closed = True
        with suppress(DeviceLost):  # nothing on a lost device can be given back; the process's end does it
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


# Checks


def payload(byte_count: int, salt: int) -> np.ndarray:
    """[byte_count] u8 in which every 8-byte word is another, in all payloads of other salts too: splitmix64's mixer over (salt, position)."""
    words = np.arange(-(-byte_count // 8), dtype=np.uint64) + np.uint64(salt << 40)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:byte_count]


def _compare(what: str, got: np.ndarray, wanted: np.ndarray) -> None:
    wrong = np.flatnonzero(got != wanted)
    if wrong.size:
        first = int(wrong[0])
        values = f"got {got[first]:#04x}, wanted {wanted[first]:#04x}"
        raise _Unfit(f"{what}: {wrong.size} of {wanted.size} bytes are wrong, byte {first} the first: {values}")


def _finish(*streams: Stream) -> None:
    """Waits at most FINISH_SECONDS for all streams; raises LinkStuck after that."""
    deadline = time.monotonic() + FINISH_SECONDS
    for stream in streams:
        while not stream.query():
            if time.monotonic() > deadline:
                raise LinkStuck(
                    f"work between devices {' and '.join(str(s.device.index) for s in streams)} did not end in {FINISH_SECONDS:.0f} s; "
                    "its memory stays allocated; next: another process with --p2p off"
                )
            time.sleep(0.0001)


class _Check:
    """Payload and times of one direction of a link, with memory and streams of its own."""

    def __init__(self, link: Link, source: Device, target: Device, rate_bytes: int):
        self._link, self._source, self._target = link, source, target
        self._rate_bytes = rate_bytes
        self._way = f"from device {source.index} to device {target.index}"
        self._stack = ExitStack()

    def _array(self, device: Device, byte_count: int, kind: MemoryKind = MemoryKind.DEVICE) -> Array:
        buffer = device.alloc(byte_count, PROBE, kind)
        self._stack.callback(buffer.free)
        return Array(buffer, DType.U8, (byte_count,))

    def run(self, kernel_copy: KernelCopy | None) -> LinkWay:
        """Raises _Unfit, LinkStuck (its memory is not freed then) or HipError."""
        with self._stack:
            try:
                sent, received = self._array(self._source, self._rate_bytes), self._array(self._target, self._rate_bytes)
                mail = self._mail() if kernel_copy is not None else None
                # After the memory, so that a failure waits for their work before it is freed: the other device may work on it.
                self._here = self._stream(self._source)
                self._there = self._stream(self._target)
                self._by_copy(sent, received)
                if kernel_copy is not None and mail is not None:
                    self._by_kernel(kernel_copy, *mail)
                seconds = self._median_us(sent, received) * 1e-6
                tiny = min(LATENCY_BYTES, self._rate_bytes)
                latency_us = self._median_us(sent.slice(0, tiny), received.slice(0, tiny))
                return LinkWay(self._source.index, self._target.index, self._rate_bytes / seconds, latency_us)
            except LinkStuck:
                self._stack.pop_all()
                raise

    def _stream(self, device: Device) -> Stream:
        stream = device.stream()
        self._stack.callback(stream.close)
        return stream

    def _mail(self) -> tuple[Array, Array, Array]:
        """What the kernel sends, the mailbox, and what the target reads there."""
        mailbox = self._array(self._target, MAILBOX_BYTES, MemoryKind.UNCACHED)
        return self._array(self._source, MAILBOX_BYTES), mailbox, self._array(self._target, MAILBOX_BYTES)

    def _salt(self, path: int) -> int:
        return (self._source.index << 12) + (self._target.index << 4) + path

    def _by_copy(self, sent: Array, received: Array) -> None:
        wanted = payload(self._rate_bytes, self._salt(1))
        sent.upload(wanted)
        self._there.fill(received.address, 0, received.nbytes)
        with _checking(f"a copy {self._way}"):
            self._link.copy(sent, received, self._here, self._there)
            _finish(self._here, self._there)
        _compare(f"a copy {self._way}", received.numpy(self._there), wanted)

    def _by_kernel(self, kernel_copy: KernelCopy, sent: Array, mailbox: Array, read: Array) -> None:
        """The source's kernel stores into the target's uncached memory, and a kernel of the target reads it there."""
        wanted = payload(MAILBOX_BYTES, self._salt(2))
        with ExitStack() as events:
            ready, stored = _event(self._target, events), _event(self._source, events)
            sent.upload(wanted)
            for array in (mailbox, read):
                self._there.fill(array.address, 0, array.nbytes)
            ready.record(self._there)
            self._here.wait(ready)
            what = f"stores of a kernel {self._way}"
            with _checking(what):
                kernel_copy(self._here, sent.address, mailbox.address, MAILBOX_BYTES // 16)
                stored.record(self._here)
                self._there.wait(stored)
                kernel_copy(self._there, mailbox.address, read.address, MAILBOX_BYTES // 16)
                _finish(self._here, self._there)
            _compare(what, read.numpy(self._there), wanted)

    def _median_us(self, sent: Array, received: Array) -> float:
        """Microseconds from the start of a copy to its arrival as the source's stream sees it, median of REPEATS."""
        times = []
        with ExitStack() as events:
            start, end = _event(self._source, events, timing=True), _event(self._source, events, timing=True)
            arrived = _event(self._target, events)
            for _ in range(REPEATS):
                with _checking(f"a timed copy {self._way}"):
                    start.record(self._here)
                    self._link.copy(sent, received, self._here, self._there)
                    arrived.record(self._there)
                    self._here.wait(arrived)
                    end.record(self._here)
                    _finish(self._here, self._there)
                times.append(end.elapsed_us(start))
        return max(statistics.median(times), 0.001)  # the step of a coarse clock may be longer than a copy
