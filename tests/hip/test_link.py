"""The link of two devices: what is checked and measured, copies in order on every schedule, nothing left by `close()` or by a call that fails."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from glm53.check.links import link_matrix, open_link
from glm53.cli import main
from glm53.errors import DeviceMemoryError, Glm53Error, HipError, InputError, LifetimeError, LinkError, LinkStuck
from glm53.hip import Array, Device, HostBuffer, Link, PeerAccess, Stream, calls, link, runtime
from glm53.ops import litmus
from glm53.spec import DType

SMALL: dict[str, int] = {"rate_bytes": 5000, "staging_bytes": 1024}  # five pieces, the last one ragged
KINDS = ("allocations", "allocated_bytes", "host_allocations", "registrations", "streams", "events", "queued")
PROBE_CALLS = (
    "hipDeviceCanAccessPeer",
    "hipDeviceEnablePeerAccess",
    "hipMalloc",
    "hipExtMallocWithFlags",
    "hipHostMalloc",
    "hipHostGetDevicePointer",
    "hipStreamCreateWithFlags",
    "hipStreamSynchronize",
    "hipStreamQuery",
    "hipStreamWaitEvent",
    "hipStreamDestroy",
    "hipEventCreateWithFlags",
    "hipEventRecord",
    "hipEventElapsedTime",
    "hipEventSynchronize",
    "hipEventDestroy",
    "hipMemcpy",
    "hipMemcpyAsync",
    "hipMemcpyPeerAsync",
    "hipMemsetAsync",
    "hipModuleLaunchKernel",
    "hipDeviceSynchronize",
    "hipDeviceDisablePeerAccess",
    "hipFree",
    "hipHostFree",
)
COPY_CALLS = ("hipEventRecord", "hipStreamWaitEvent", "hipMemcpyPeerAsync", "hipMemcpyAsync")
# What destroys an object: where such a call fails, that object stays, and only that one.
DESTROYS = {"hipStreamDestroy": "streams", "hipEventDestroy": "events", "hipFree": "allocations", "hipHostFree": "host_allocations"}
OTHER = 999  # hipErrorUnknown


@pytest.fixture
def pair() -> Iterator[tuple[Device, Device]]:
    if runtime.select().device_count < 2:
        pytest.skip("needs two devices")
    devices = Device(0), Device(1)
    if devices[0].can_access(devices[1]):
        peer_access_left(devices)  # other tests may have enabled it
    yield devices
    for device in devices:
        device.close(free_buffers=True)


def live(control: ctypes.CDLL) -> dict[str, int]:
    return {kind: control.glm53_cpu_live(kind.encode()) for kind in KINDS}


def count(control: ctypes.CDLL, api: str) -> int:
    return int(control.glm53_cpu_calls(api.encode()))


def opened(pair: tuple[Device, Device], mode: PeerAccess, **sizes: int) -> Link:
    return Link.probe(*pair, mode, kernel_copy=litmus.copy_words, **SMALL | sizes)


def peer_access_left(pair: tuple[Device, Device]) -> list[int]:
    """Devices whose access to the other one is still enabled; none after this call."""
    left = []
    for device, other in (pair, pair[::-1]):
        if not device.enable_peer(other):
            left.append(device.index)
        device.disable_peer(other)
    return left


def array(device: Device, values: np.ndarray) -> Array:
    return Array.from_numpy(device, values, category="test")


@contextmanager
def two_streams(pair: tuple[Device, Device]) -> Iterator[tuple[Stream, Stream]]:
    streams = pair[0].stream(), pair[1].stream()
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


# What a probe finds


@pytest.mark.parametrize("mode", PeerAccess)
def test_a_link_is_measured_both_ways(pair: tuple[Device, Device], mode: PeerAccess) -> None:
    if mode is PeerAccess.ON and not pair[0].can_access(pair[1]):
        pytest.skip("the devices have no peer access")
    with open_link(*pair, mode) as made:
        assert set(made.ways) == {(0, 1), (1, 0)} and made.devices == pair
        for (source, target), way in made.ways.items():
            assert (way.source, way.target) == (source, target) and way.bytes_per_s > 1e6 and 0 < way.latency_us < 1e6
        assert made.peer == (made.reason == "")
        if mode is not PeerAccess.AUTO:
            assert made.peer == (mode is PeerAccess.ON) and made.reason == ("" if made.peer else "peer access is off")
        staged = {"host: link staging": 2 * link.STAGING_BYTES}
        assert [device.allocated_bytes() for device in pair] == ([{}, {}] if made.peer else [staged, staged])


def test_off_never_enables_peer_access(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    before = count(control, "hipDeviceEnablePeerAccess")
    with opened(pair, PeerAccess.OFF):
        assert count(control, "hipDeviceEnablePeerAccess") == before
    assert peer_access_left(pair) == []


def lossy_kernel(sender: int) -> link.KernelCopy:
    """Stores of that device lose the last 16 bytes."""

    def copy(stream: Stream, source: int, target: int, words: int) -> None:
        litmus.copy_words(stream, source, target, words - (stream.device.index == sender and words > 1))

    return copy


@pytest.mark.parametrize("sender", [0, 1])
def test_a_kernel_whose_stores_do_not_arrive_is_caught(pair: tuple[Device, Device], sender: int) -> None:
    way = r"stores of a kernel from device \d to device \d: 16 of 65536 bytes are wrong, byte 65520 the first: got 0x00"
    with pytest.raises(LinkError, match=rf"no link between .*Device\(0, .*Device\(1, .*{way}.*next: --p2p auto"):
        Link.probe(*pair, PeerAccess.ON, kernel_copy=lossy_kernel(sender), **SMALL)
    with Link.probe(*pair, PeerAccess.AUTO, kernel_copy=lossy_kernel(sender), **SMALL) as made:
        assert not made.peer and made.reason.startswith("stores of a kernel from device ")
        assert peer_access_left(pair) == [], "peer access that failed its check stays enabled"
    assert [device.allocated_bytes() for device in pair] == [{}, {}]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_copy_that_changes_bytes_is_caught(pair: tuple[Device, Device], sender: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the right value at the wrong position, one way only."""
    copy_peer = Stream.copy_peer

    def shifted(self: Stream, target: int, target_device: Device, source: int, source_device: Device, byte_count: int) -> None:
        copy_peer(self, target, target_device, source, source_device, byte_count)
        if source_device.index == sender and byte_count > 64:
            copy_peer(self, target + 8, target_device, source, source_device, byte_count - 8)

    monkeypatch.setattr(Stream, "copy_peer", shifted)
    reason = f"a copy from device {sender} to device {1 - sender}: "
    with pytest.raises(LinkError, match=f"{reason}49.. of 5000 bytes are wrong, byte 8 the first"):
        opened(pair, PeerAccess.ON)
    with opened(pair, PeerAccess.AUTO) as made:
        assert not made.peer and made.reason.startswith(reason)


def test_staging_that_changes_bytes_is_an_error(pair: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Stream.copy
    monkeypatch.setattr(Stream, "copy", lambda self, target, source, n: copy(self, target, source, n - (n == 1024)))
    with pytest.raises(LinkError, match=r"Device\(0, .*Device\(1, .*through host memory: a copy from .*\(staged because: peer access is off\)"):
        opened(pair, PeerAccess.OFF)
    assert [device.allocated_bytes() for device in pair] == [{}, {}]


def test_no_access_is_said(pair: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "can_access", lambda self, peer: self.index == 0)
    with opened(pair, PeerAccess.AUTO) as made:
        assert not made.peer and made.reason == "device 1 cannot access the memory of device 0"
        assert peer_access_left(pair) == []
    with pytest.raises(LinkError, match="device 1 cannot access the memory of device 0; next: --p2p auto"):
        opened(pair, PeerAccess.ON)


def test_a_copy_that_does_not_end_is_an_error_and_keeps_its_memory(pair: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FINISH_SECONDS", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "query", lambda self: False)
        with pytest.raises(LinkStuck, match=r"work between devices 0 and 1 did not end .* next: another process with --p2p off"):
            opened(pair, PeerAccess.AUTO)
    assert [device.allocated_bytes()["link probe"] > 0 for device in pair] == [True, True]
    link._granted.clear()
    peer_access_left(pair)


def test_refused_arguments(pair: tuple[Device, Device]) -> None:
    with pytest.raises(InputError, match="two devices, got device 0 twice"):
        opened((pair[0], pair[0]), PeerAccess.AUTO)
    with pytest.raises(ValueError, match="staging_bytes 0"):
        opened(pair, PeerAccess.OFF, staging_bytes=0)


# Copies


@pytest.mark.parametrize("mode", [PeerAccess.AUTO, PeerAccess.OFF])
def test_copies_of_any_size_arrive_and_touch_nothing_else(pair: tuple[Device, Device], mode: PeerAccess) -> None:
    random = np.random.default_rng(11)
    with opened(pair, mode) as made, two_streams(pair) as streams:
        for byte_count in (0, 1, 15, 16, 1023, 1024, 1025, 2048, 7 * 1024 + 5):
            for source, target in ((0, 1), (1, 0)):
                values = random.integers(0, 256, byte_count + 32, dtype=np.uint8)
                sent, received = array(pair[source], values), array(pair[target], np.full(byte_count + 48, 0xEE, np.uint8))
                made.copy(sent.slice(7, 7 + byte_count), received.slice(13, 13 + byte_count), streams[source], streams[target])
                got = received.numpy(streams[target])
                np.testing.assert_array_equal(got[13 : 13 + byte_count], values[7 : 7 + byte_count])
                assert (got[:13] == 0xEE).all() and (got[13 + byte_count :] == 0xEE).all()
                sent.free()
                received.free()
        whole = pair[0].alloc(4000, "test"), pair[1].alloc(4000, "test")
        streams[0].fill(whole[0].address, 0x5A, 4000)
        made.copy(*whole, *streams)
        assert (Array(whole[1], DType.U8, (4000,)).numpy(streams[1]) == 0x5A).all()


def test_copies_that_do_not_fit_are_refused(pair: tuple[Device, Device]) -> None:
    here, there = array(pair[0], np.zeros(64, np.uint8)), array(pair[1], np.zeros(64, np.uint8))
    with two_streams(pair) as (a, b):
        made = opened(pair, PeerAccess.OFF)
        with pytest.raises(ValueError, match="target has 32 B, expected 64 B"):
            made.copy(here, there.slice(0, 32), a, b)
        with pytest.raises(ValueError, match="target_stream is of device 0, expected device 1"):
            made.copy(here, there, a, a)
        with pytest.raises(ValueError, match="from device 0 to device 0, expected the link's devices 0 and 1"):
            made.copy(here, here, a, a)
        with pytest.raises(LifetimeError, match="source_stream captures"), a.capture():
            made.copy(here, there, a, b)
        made.copy(here, there, a, b)
        there.free()
        with pytest.raises(LifetimeError, match=r"target .* after it was freed"):
            made.copy(here, there, a, b)
        made.close()
        made.close()
        with pytest.raises(LifetimeError, match=r"after close\(\)"):
            made.copy(here, here, a, b)


def ping_pong(pair: tuple[Device, Device], made: Link, rounds: int, byte_count: int) -> None:
    """Each round overwrites the source right after the copy and the target right after its use: any order missing shows in the log.

    Two pairs of streams take turns, one buffer a side, so that staging slots pass from streams to streams.
    """
    random = np.random.default_rng(rounds)
    values = random.integers(0, 256, (2, rounds, byte_count), dtype=np.uint8)
    feeds = [array(device, side) for device, side in zip(pair, values, strict=True)]
    out = [Array.empty(device, DType.U8, (2, byte_count), "test") for device in pair]
    into = [Array.empty(device, DType.U8, (2, byte_count), "test") for device in pair]
    logs = [Array.empty(device, DType.U8, (rounds, byte_count), "test") for device in pair]
    streams = [[device.stream() for _ in range(2)] for device in pair]
    for turn in range(rounds):
        lane = turn % 2
        for source, target in ((0, 1), (1, 0)):
            here, there = streams[source][lane], streams[target][lane]
            here.copy(out[source].slice(lane, lane + 1).address, feeds[source].slice(turn, turn + 1).address, byte_count)
            made.copy(out[source].slice(lane, lane + 1), into[target].slice(lane, lane + 1), here, there)
            here.fill(out[source].slice(lane, lane + 1).address, 0xDD, byte_count)
            there.copy(logs[target].slice(turn, turn + 1).address, into[target].slice(lane, lane + 1).address, byte_count)
            there.fill(into[target].slice(lane, lane + 1).address, 0xBB, byte_count)
    for target in range(2):
        for stream in streams[target]:
            stream.close()
    for target in range(2):
        np.testing.assert_array_equal(logs[target].numpy(), values[1 - target])
    for item in (*feeds, *out, *into, *logs):
        item.free()


@pytest.mark.parametrize("mode", [PeerAccess.ON, PeerAccess.OFF])
def test_copies_are_in_order_on_every_schedule(pair: tuple[Device, Device], mode: PeerAccess, control: ctypes.CDLL) -> None:
    for seed in range(20):
        control.glm53_cpu_seed(seed, 1)
        with opened(pair, mode) as made:
            ping_pong(pair, made, 8, 2500)
        control.glm53_cpu_seed(0, 0)
        assert [device.allocated_bytes() for device in pair] == [{}, {}], f"seed {seed}"


# Ends


@pytest.mark.parametrize("mode", PeerAccess)
def test_opened_and_closed_a_hundred_times(pair: tuple[Device, Device], mode: PeerAccess, control: ctypes.CDLL) -> None:
    opened(pair, mode).close()  # loads the code objects
    here, there = array(pair[0], np.zeros(4000, np.uint8)), array(pair[1], np.zeros(4000, np.uint8))
    with two_streams(pair) as streams:
        before, accounts = live(control), [device.allocated_bytes() for device in pair]
        for number in range(100):
            made = opened(pair, mode)
            control.glm53_cpu_seed(number, 1)
            streams[0].fill(here.address, number, 4000)
            made.copy(here, there, *streams)
            if made.peer:  # stores that need the access which closing ends
                litmus.copy_words(streams[0], here.address, there.address, 4000 // 16)
            made.close()  # with all of that under way
            streams[0].synchronize()
            assert (there.numpy(streams[1]) == number).all()
            control.glm53_cpu_seed(0, 0)
        assert live(control) == before and [device.allocated_bytes() for device in pair] == accounts
    assert peer_access_left(pair) == [] and link._granted == {} and not any(device.events for device in pair)


def test_peer_access_ends_with_the_last_link_and_others_keep_theirs(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    first, second = opened(pair, PeerAccess.ON), opened(pair, PeerAccess.ON)
    first.close()
    assert not calls_enable(pair), "peer access ended with the first of two links"
    second.close()
    assert peer_access_left(pair) == []
    assert calls_enable(pair)  # as another user of the process
    opened(pair, PeerAccess.ON).close()
    assert peer_access_left(pair) == [0, 1], "a link ended peer access that it had not enabled"


def test_staging_memory_is_freed_after_the_copies_that_use_it(
    pair: tuple[Device, Device], control: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cpu runtime waits in hipHostFree, others need not: what is freed is overwritten first, as its next owner would."""
    values = np.random.default_rng(2).integers(0, 200, 5000, dtype=np.uint8)
    free_host = HostBuffer.free

    def overwritten(self: HostBuffer) -> None:
        self.array[:] = 0xEE
        free_host(self)

    monkeypatch.setattr(HostBuffer, "free", overwritten)
    here, there = array(pair[0], np.zeros(5000, np.uint8)), array(pair[1], values)
    with two_streams(pair) as streams:
        for seed in range(20):
            here.upload(np.zeros(5000, np.uint8))
            made = opened(pair, PeerAccess.OFF)
            control.glm53_cpu_seed(seed, 1)
            made.copy(there, here, *streams[::-1])  # the way whose memory is freed first
            made.close()
            control.glm53_cpu_seed(0, 0)
            np.testing.assert_array_equal(here.numpy(streams[0]), values, err_msg=f"seed {seed}")


def calls_enable(pair: tuple[Device, Device]) -> bool:
    """True if peer access was not enabled either way."""
    return [device.enable_peer(other) for device, other in (pair, pair[::-1])] == [True, True]


def test_a_link_outlived_by_nothing_but_its_close(pair: tuple[Device, Device]) -> None:
    a, b = Device(0), Device(1)
    made = opened((a, b), PeerAccess.OFF)
    with pytest.raises(LifetimeError, match="link staging"):
        a.close()
    for device in (a, b):
        device.close(free_buffers=True)
    made.close()


# Faults


def reached(control: ctypes.CDLL, api: str, body: Callable[[], Any]) -> int:
    before = count(control, api)
    body()
    return count(control, api) - before


def settled(control: ctypes.CDLL, pair: tuple[Device, Device]) -> dict[str, int]:
    for device in pair:
        device.synchronize()
    return live(control)


@pytest.mark.parametrize("mode", PeerAccess)
@pytest.mark.parametrize("api", PROBE_CALLS)
def test_every_call_of_a_probe_fails_once(
    pair: tuple[Device, Device], mode: PeerAccess, api: str, control: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call of an API, from opening to the end of closing. An error says which call, or the link is staged and says so."""
    monkeypatch.setattr(link, "REPEATS", 1)
    opened(pair, mode).close()
    made = reached(control, api, lambda: opened(pair, mode).close())
    allowed = 1 if api in DESTROYS else 0
    for nth in range(1, made + 1):
        before = settled(control, pair)
        control.glm53_cpu_seed(nth, 1)  # what a failed call leaves on a stream runs late
        control.glm53_cpu_fail(api.encode(), nth, OTHER)
        errors = []
        try:
            with opened(pair, mode) as here:
                assert here.peer == (here.reason == "")
                if mode is PeerAccess.AUTO and not here.peer:
                    errors.append(here.reason)
        except (LinkError, HipError) as error:
            errors.append(str(error))
        control.glm53_cpu_fail(api.encode(), 0, 0)
        control.glm53_cpu_seed(0, 0)
        # How often a stream is asked, whether it is idle, is up to the schedule.
        assert (errors and api in errors[0]) or api == "hipStreamQuery", f"{api} {nth} of {made}: {errors}"
        now = settled(control, pair)
        left = {kind: now[kind] - before[kind] for kind in KINDS if now[kind] != before[kind] and kind != "allocated_bytes"}
        assert sum(left.values()) <= allowed and set(left) <= {DESTROYS.get(api, "")}, f"{api} {nth} of {made} left {left} after {errors}"
        assert [device.allocated_bytes() for device in pair] == [{}, {}] and link._granted == {}
        access = peer_access_left(pair)
        assert len(access) <= (api == "hipDeviceDisablePeerAccess"), f"{api} {nth} of {made} left peer access of {access}"
    opened(pair, mode).close()


@pytest.mark.parametrize("mode", [PeerAccess.ON, PeerAccess.OFF])
@pytest.mark.parametrize("api", COPY_CALLS)
def test_every_call_of_a_copy_fails_once(pair: tuple[Device, Device], mode: PeerAccess, api: str, control: ctypes.CDLL) -> None:
    """The error names the call, nothing is under way after it, and the next copies, in other streams, are right."""
    values = np.random.default_rng(5).integers(0, 256, (2, 5000), dtype=np.uint8)
    with opened(pair, mode) as made, two_streams(pair) as streams, two_streams(pair) as others:
        sent = array(pair[0], values[0])
        received = array(pair[1], np.zeros(5000, np.uint8))
        total = reached(control, api, lambda: made.copy(sent, received, *streams))
        assert total == 0 if (api == "hipMemcpyPeerAsync") != made.peer and "Memcpy" in api else total > 0
        for nth in range(1, total + 1):
            sent.upload(values[0])
            before = settled(control, pair)
            control.glm53_cpu_seed(nth, 1)
            control.glm53_cpu_fail(api.encode(), nth, OTHER)
            with pytest.raises(HipError, match=api):
                made.copy(sent, received, *streams)
            control.glm53_cpu_fail(api.encode(), 0, 0)
            assert live(control) == before, f"{api} {nth} of {total}"
            sent.upload(values[1])
            made.copy(sent, received, *others)
            np.testing.assert_array_equal(received.numpy(others[1]), values[1], err_msg=f"{api} {nth} of {total}")
            control.glm53_cpu_seed(0, 0)


def test_a_failure_that_cannot_be_cleared_up_ends_the_link(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    here, there = array(pair[0], np.zeros(5000, np.uint8)), array(pair[1], np.zeros(5000, np.uint8))
    with opened(pair, PeerAccess.OFF) as made, two_streams(pair) as streams:
        for api in ("hipEventRecord", "hipStreamSynchronize"):
            control.glm53_cpu_fail(api.encode(), 1, OTHER)
        with pytest.raises(HipError, match="hipEventRecord"):
            made.copy(here, there, *streams)
        with pytest.raises(LinkError, match=r"Device\(0, .*Device\(1, .* cannot be used after hipStreamSynchronize .*next: open it again"):
            made.copy(here, there, *streams)


def test_no_memory_for_staging(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    control.glm53_cpu_fail(b"hipHostMalloc", 3, 2)
    with pytest.raises(DeviceMemoryError, match="link staging"):
        opened(pair, PeerAccess.OFF)
    assert [device.allocated_bytes() for device in pair] == [{}, {}]


# The matrix


def test_matrix_has_a_row_for_each_ordered_pair(pair: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = link_matrix()
    assert [(row["source"], row["target"], row["checked"]) for row in rows] == [
        (i, j, True) for i in range(runtime.select().device_count) for j in range(runtime.select().device_count) if i != j
    ]
    monkeypatch.setattr(Device, "can_access", lambda self, peer: False)
    assert link_matrix()[0] | {"bytes_per_s": 0, "latency_us": 0} == {
        "source": 0,
        "target": 1,
        "peer_access": False,
        "checked": True,
        "bytes_per_s": 0,
        "latency_us": 0,
        "reason": "device 0 cannot access the memory of device 1",
    }

    def refuse(self: Device, *_arguments: object, **_named: object) -> None:
        raise Glm53Error("nothing is left")

    monkeypatch.setattr(Device, "alloc", refuse)
    row = link_matrix()[1]
    assert (row["source"], row["target"], row["checked"], row["bytes_per_s"], row["reason"]) == (1, 0, False, None, "nothing is left")


def test_the_command_prints_the_matrix(pair: tuple[Device, Device], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = json.loads(CliRunner().invoke(main, ["devices", "--json"]).output)
    assert shown["links"][0]["target"] == 1 and shown["links"][0]["checked"] and len(shown["links"]) >= 2
    monkeypatch.setattr(Device, "can_access", lambda self, peer: False)
    text = CliRunner().invoke(main, ["devices"]).output
    assert "  1 -> 0: no peer access (device 0 cannot access the memory of device 1), staged through host memory, checked, " in text
    assert " GB/s, " in text
    monkeypatch.setattr(calls, "host_malloc", lambda *_: (_ for _ in ()).throw(HipError("hipHostMalloc", OTHER, "no")))
    assert "hipHostMalloc failed: no" in (text := CliRunner().invoke(main, ["devices"]).output) and text.count(", not checked") >= 2
