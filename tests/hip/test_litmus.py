"""The litmus loops pass where promises are kept, and report where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from glm53.check import litmus
from glm53.hip import Buffer, Device, MemoryKind, runtime


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close(free_buffers=True)


@pytest.mark.parametrize(
    "loop",
    [
        litmus.streams_events,
        litmus.copy_2d,
        litmus.registered_memory,
        lambda device: litmus.host_mailbox(device, 50),
        lambda device: litmus.graph_replay(device, 100, 20),
    ],
    ids=["streams", "copy_2d", "registered", "host", "graph"],
)
def test_holds_and_frees_everything(device: Device, loop: Callable[[Device], litmus.Result]) -> None:
    result = loop(device)
    assert result.passed, result
    assert device.allocated_bytes() == {}


def test_peers_exchange_messages(device: Device) -> None:
    if runtime.select().device_count < 2:
        pytest.skip("needs two devices")
    with Device(1) as other:
        result = litmus.peer_mailbox(device, other, 50)
        assert result.passed, result


def test_cached_mailboxes_are_caught(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cpu runtime stores to ordinary memory of a peer become visible when the kernel ends, as on gfx1100: no message arrives."""
    if device.runtime.name != "cpu":
        pytest.skip("other runtimes may keep more than they promise")
    alloc = Device.alloc

    def cached(self: Device, byte_count: int, category: str = "", kind: MemoryKind = MemoryKind.DEVICE) -> Buffer:
        return alloc(self, byte_count, category, MemoryKind.DEVICE)

    monkeypatch.setattr(Device, "alloc", cached)
    with Device(1) as other:
        result = litmus.peer_mailbox(device, other, 5, budget=2000)
        assert not result.passed and "0 of 5 messages" in result.detail
        assert device.allocated_bytes() == {} and other.allocated_bytes() == {}


def test_a_wrong_count_is_caught(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = litmus._replayed
    monkeypatch.setattr(litmus, "_replayed", lambda nodes, slots, steps: replayed(nodes[:-1], slots, steps))
    result = litmus.graph_replay(device, 50, 3)
    assert not result.passed and "expected" in result.detail


def test_replayed_is_the_plain_loop() -> None:
    nodes, steps = [(0, 0), (1, 1), (0, 1), (0, 0)], np.array([[3, 5], [2**63 - 1, 9]], np.uint64)
    state = [0, 0]
    for row in steps.tolist():
        for slot, which in nodes:
            state[slot] = (state[slot] * litmus.MULTIPLIER + row[which]) % (1 << 64)
    assert litmus._replayed(nodes, 2, steps) == state
