"""The embedding API: what it refuses, how memory and streams of others are treated, and that a program around it notices nothing."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53.check.case import Bench
from glm53.errors import InputError, LifetimeError
from glm53.hip import Array, Device, Stream, calls, runtime
from glm53.hip.array import bf16_from_f32, f32_from_bf16
from glm53.kv import KvCache, dlpack
from glm53.kv.inputs import distinct
from glm53.ops import rows
from glm53.ops.contract import ContractError
from glm53.spec import DType, RowFormat

ROOT = Path(__file__).resolve().parents[2]
LAYERS, GROUPS, LATENT, ROPE = 4, ((0, 1, 2), (3,)), 64, 16
WIDTH = LATENT + ROPE
on_cpu = pytest.mark.skipif("runtime.select().name != 'cpu'", reason="live counts exist on the cpu runtime only")


def make_cache(**change: Any) -> KvCache:
    sizes: dict[str, Any] = {
        "layers": LAYERS,
        "groups": GROUPS,
        "latent": LATENT,
        "rope": ROPE,
        "row_format": "f32",
        "hot_rows": 256,
        "topk_max": 32,
        "rows_max": 1024,
        "extent_rows": 64,
        "host_chunk_mib": 2,
        "sessions_max": 2,
    }
    return KvCache(**(sizes | change))


def made(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, LAYERS, WIDTH)).astype(np.float32)


def expected(rows: np.ndarray, group: int, positions: np.ndarray) -> np.ndarray:
    return rows[positions][:, :, list(GROUPS[group])].transpose(2, 0, 1, 3)


@pytest.fixture
def cache() -> Iterator[KvCache]:
    with make_cache() as cache:
        yield cache


# Values


@pytest.mark.parametrize("tier", ["host", "resident"])
def test_append_and_gather(tier: str) -> None:
    rows, rng = made(700), np.random.default_rng(1)
    with make_cache(tier=tier) as cache, cache.open() as session:
        done = 0
        for count in (1, 8, 300, 3, 9, 250, 129):
            session.append(rows[done : done + count])
            done += count
            positions = rng.integers(0, done, (3, 32))
            for group in (0, 1):
                np.testing.assert_array_equal(session.gather(group, positions).numpy(), expected(rows, group, positions))
        assert session.rows == 700
        session.settle()
        assert session.committed_rows == 700
        session.truncate(10)
        session.append(rows[100:120])
        joined = np.concatenate([rows[:10], rows[100:120]])
        every = np.arange(30)[None, :]
        np.testing.assert_array_equal(session.gather(0, every).numpy(), expected(joined, 0, every))


def test_bf16_comes_as_values_and_as_bits() -> None:
    rows = made(20)
    bits = bf16_from_f32(rows)
    with make_cache(row_format="bf16") as cache:
        one, two = cache.open(), cache.open()
        one.append(rows)
        two.append(bits)
        positions = np.array([[19, 0, 5, 5]])
        for session in (one, two):
            got = session.gather(0, positions)
            assert got.dtype is DType.BF16
            np.testing.assert_array_equal(got.bits(), expected(bits, 0, positions))
            np.testing.assert_array_equal(session.gather(0, positions, dtype="f32").numpy(), f32_from_bf16(expected(bits, 0, positions)))


def test_distinct_keeps_order_and_maps_back() -> None:
    positions = np.array([[7, 3, 7, 7, 1], [2, 1, 0, 4, 3]], np.int32)
    selected, counts, index = distinct(positions)
    assert selected.tolist() == [[7, 3, 1, 0, 0], [2, 1, 0, 4, 3]] and counts.tolist() == [3, 5] and index is not None
    np.testing.assert_array_equal(np.take_along_axis(selected, index, 1), positions)
    assert distinct(positions[1:])[2] is None


def test_counters_and_ledger(cache: KvCache) -> None:
    session = cache.open()
    session.append(made(100))
    session.gather(0, np.arange(32)[None, :])
    counters = session.counters()
    assert counters["recent_hits"] == [32, 0] and counters["bytes_from_host"] == [0, 0]
    ledger = cache.ledger()
    assert ledger["device 0"]["hot cache"] == 256 * LAYERS * WIDTH * 4
    assert ledger["host"]["host history"] >= 2 * 64 * LAYERS * WIDTH * 4
    session.close()
    assert "hot cache" not in cache.ledger()["device 0"]


# Refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda s: s.append(np.zeros((3, LAYERS, WIDTH + 1), np.float32)),
            r"rows: got shape \[3, 4, 81\], expected \[n, layers=4, latent \+ rope=80\]",
        ),
        (lambda s: s.append(np.zeros((LAYERS, WIDTH), np.float32)), "rows: got shape"),
        (lambda s: s.append(np.zeros((3, LAYERS, WIDTH), np.float64)), "rows: got float64, expected float32"),
        (lambda s: s.append("rows"), "rows: got str, expected a numpy array"),
        (lambda s: s.append(np.zeros((1020, LAYERS, WIDTH), np.float32)), "rows: got 1020 behind 10, expected at most rows_max=1024"),
        (lambda s: s.gather(0, [[0, 10]]), "positions: got 10, expected positions of the history, 0 to 9"),
        (lambda s: s.gather(0, [[-1, 2]]), "positions: got -1, expected"),
        (lambda s: s.gather(0, [0, 1]), r"positions: got shape \[2\], expected \[rows, k\]"),
        (lambda s: s.gather(0, [list(range(33))]), "topk_max=32"),
        (lambda s: s.gather(0, [[0]] * 9), "query_rows_max=8"),
        (lambda s: s.gather(0, [[0.5]]), "positions: got float64, expected integers"),
        (lambda s: s.gather(2, [[0]]), "group: got 2, expected 0 to 1"),
        (lambda s: s.gather(0, [[0]], dtype="f16"), "dtype: got 'f16', expected f32 or bf16"),
        (lambda s: s.gather(0, [[0]], stream="main"), "stream: got 'main', expected a stream handle"),
        (lambda s: s.truncate(11), "truncate: got 11 rows, expected 0 to 10"),
    ],
)
def test_wrong_inputs(cache: KvCache, call: Callable[[Any], object], text: str) -> None:
    session = cache.open()
    rows = made(10)
    session.append(rows)
    with pytest.raises(InputError, match=text):
        call(session)
    assert session.rows == 10
    every = np.arange(10)[None, :]
    np.testing.assert_array_equal(session.gather(1, every).numpy(), expected(rows, 1, every))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tier": "disk"}, "tier: got 'disk'"),
        ({"row_format": "f16"}, "row_format: got 'f16'"),
        ({"row_format": "q8g64"}, "multiple of 16"),
        ({"groups": ((0, 1), (3,))}, "groups: got"),
        ({"extent_rows": 65}, "extent_rows: got 65"),
        ({"hot_rows": 192}, "hot_rows: got 192"),
        ({"device": 99}, "device 99 does not exist"),
        ({"topk_max": 0}, "topk_max: got 0"),
    ],
)
def test_wrong_sizes(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_cache(**change)


def test_ended_objects(cache: KvCache) -> None:
    session = cache.open()
    session.close()
    session.close()
    for call in (lambda: session.rows, lambda: session.append(made(1)), lambda: session.gather(0, [[0]]), session.settle):
        with pytest.raises(LifetimeError, match="close"):
            call()
    other = cache.open()
    cache.close()
    for use in (cache.open, lambda: other.rows):
        with pytest.raises(LifetimeError, match="close"):
            use()
    other.close()


def test_all_sessions_in_use(cache: KvCache) -> None:
    kept = [cache.open() for _ in range(2)]
    with pytest.raises(InputError, match="all 2 sessions are in use"):
        cache.open()
    assert len(kept) == 2


def test_q8_refuses_what_it_cannot_store() -> None:
    with make_cache(row_format="q8g64", rope=23) as cache, cache.open() as session:
        rows = np.full((300, LAYERS, LATENT + 23), np.float32(-127))  # a scale of 1: exact
        session.append(rows)
        for count in (2, 40):
            bad = rows[:count].copy()
            bad[count - 1, 2, 5] = np.nan
            with pytest.raises(InputError, match="cannot store"):
                session.append(bad)
            assert session.rows == 300
        session.append(rows[:5])
        np.testing.assert_array_equal(session.gather(0, [[304, 0]], dtype="f32").numpy(), np.full((3, 1, 2, LATENT + 23), np.float32(-127)))


@pytest.mark.parametrize(
    ("shape", "index", "latent", "text"),
    [
        ((2, 3, 64), None, 64, "out dim 1 is 3, expected plan_k=4"),
        ((3, 4, 64), None, 64, "plan dim 0 is 2, expected rows=3"),
        ((2, 3, 64), (2, 4), 64, "index dim 1 is 4, expected k=3"),
        ((2, 4, 64), None, 65, "rope -1"),
        ((2, 4, 65), None, 64, "wanted a multiple of 16"),
    ],
)
def test_reading_kernels_refuse(shape: tuple[int, ...], index: tuple[int, int] | None, latent: int, text: str) -> None:
    with Device(0) as device, Bench(device) as bench:
        places = None if index is None else bench.poison(DType.I32, index)
        plan, out = bench.poison(DType.U64, (2, 4)), bench.poison(DType.F32, shape)
        with pytest.raises(ContractError, match=text):
            rows.read_rows(bench.stream, plan, places, out, offsets=(0, 0, 0, 0), row_format=RowFormat.F32, latent=latent)
        with pytest.raises(ContractError, match="copy_rows: out dim 2 is 24"):
            rows.copy_rows(bench.stream, plan, None, bench.poison(DType.U8, (2, 4, 24)), offsets=(0, 0, 0, 0))


# DLPack and foreign memory


class Producer:
    """A tensor library of another program: numpy memory behind DLPack, versioned or not."""

    def __init__(self, values: np.ndarray, dtype: DType, versioned: bool, device: tuple[int, int] = (dlpack.CPU, 0)):
        self.values, self.dtype, self.versioned, self.device = values, dtype, versioned, device
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        if not self.versioned and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append(arguments)
        return dlpack.export(self.values.ctypes.data, self.dtype, self.values.shape, self.device, self.values, self.versioned)


@pytest.mark.parametrize("versioned", [True, False])
def test_producers(versioned: bool) -> None:
    rows = made(30)
    with make_cache(row_format="bf16") as cache, cache.open() as session:
        live = dlpack.live_exports()
        session.append(Producer(bf16_from_f32(rows), DType.BF16, versioned))
        session.append(Producer(rows, DType.F32, versioned))
        positions = Producer(np.array([[3, 33, 3]], np.int64), DType.I64, versioned)
        got = session.gather(0, positions).bits()
        np.testing.assert_array_equal(got, expected(bf16_from_f32(rows), 0, np.array([[3, 3, 3]])))
        gc.collect()
        assert dlpack.live_exports() == live, "the deleters of the producers were called"
        with pytest.raises(InputError, match="lies on kDLCUDA 3"):
            session.append(Producer(rows, DType.F32, versioned, (dlpack.CUDA, 3)))


def test_numpy_takes_the_array_on_the_cpu_runtime(cache: KvCache) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("numpy reads host memory only")
    rows, session = made(20), cache.open()
    session.append(rows)
    gathered = session.gather(0, [[1, 2]])
    taken = np.from_dlpack(gathered)
    assert gathered.__dlpack_device__() == (dlpack.CPU, 0) and taken.ctypes.data == gathered.address
    del gathered
    for _ in range(20):  # would be given the same memory if it were free
        session.gather(0, [[5, 6]])
    np.testing.assert_array_equal(taken, expected(rows, 0, np.array([[1, 2]])))
    cache.close()
    np.testing.assert_array_equal(taken, expected(rows, 0, np.array([[1, 2]])))
    assert cache.ledger()["device 0"] == {"outputs": taken.nbytes}
    del taken
    gc.collect()
    assert cache.device.closed and not cache.device.live


@pytest.mark.parametrize("max_version", [None, (1, 1), (0, 8)])
def test_capsules(cache: KvCache, max_version: tuple[int, int] | None) -> None:
    """Versioned where the consumer takes 1.0; an unconsumed capsule lets its memory go."""
    session = cache.open()
    session.append(made(4))
    gathered, live = session.gather(0, [[0]]), dlpack.live_exports()
    consumer_stream = None if gathered.__dlpack_device__()[0] == dlpack.CPU else -1
    capsule = gathered.__dlpack__(stream=consumer_stream, max_version=max_version)
    assert ("dltensor_versioned" in repr(capsule)) == (max_version == (1, 1))
    assert dlpack.live_exports() == live + 1
    del capsule
    assert dlpack.live_exports() == live
    with pytest.raises(BufferError, match="copy"):
        gathered.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="device"):
        gathered.__dlpack__(dl_device=(dlpack.CUDA, 7))


def test_device_arrays_are_read_where_they_lie() -> None:
    rows = made(300)
    device = Device(0)
    with make_cache(device=device) as cache, cache.open() as session:
        array = Array.from_numpy(device, rows, category="caller")
        copied = lambda: cache.ledger()["device 0"]["caller"]
        before = copied()
        session.append(array)
        assert copied() == before
        positions = np.arange(268, 300)[None, :]
        np.testing.assert_array_equal(session.gather(0, positions).numpy(), expected(rows, 0, positions))
        planes = cache.inputs._device_rows(Array(array.buffer, DType.F32, rows.shape), (WIDTH, 300 * WIDTH, 1))
        assert planes(2, 5, 9)[0].address == array.address + (2 * 300 + 5) * WIDTH * 4
        with pytest.raises(InputError, match="next: contiguous"):
            cache.inputs._device_rows(Array(array.buffer, DType.F32, (100, LAYERS, WIDTH)), (LAYERS * WIDTH + 8, WIDTH, 1))
        with pytest.raises(InputError, match="got i32 for f32 rows, expected f32"):
            session.append(Array(array.buffer, DType.I32, rows.shape))
        array.free()
    assert not device.closed and not device.live
    device.close()


def test_trusted_device_positions_need_no_host() -> None:
    rows = made(400)
    device = Device(0)
    with make_cache(device=device) as cache, cache.open() as session:
        session.append(rows)
        positions = np.stack([np.random.default_rng(i).permutation(400)[:32] for i in range(3)]).astype(np.int32)
        with_array = Array.from_numpy(device, positions, category="caller")
        for _ in range(3):
            np.testing.assert_array_equal(session.gather(0, with_array, trusted=True).numpy(), expected(rows, 0, positions))
            np.testing.assert_array_equal(session.gather(0, with_array).numpy(), expected(rows, 0, positions))
        wide = Array.from_numpy(device, positions.astype(np.int64), category="caller")
        np.testing.assert_array_equal(session.gather(1, wide).numpy(), expected(rows, 1, positions))
        with pytest.raises(InputError, match="expected contiguous i32"):
            session.gather(1, wide, trusted=True)
        wide.free()
        with_array.free()
    device.close()


@pytest.mark.skipif("runtime.select().device_count < 2", reason="needs two devices")
def test_memory_of_another_device_is_refused(cache: KvCache) -> None:
    with Device(1) as other:
        array = Array.from_numpy(other, made(3))
        with pytest.raises(InputError, match="rows: lies on device 1, expected device 0"):
            cache.open().append(array)
        array.free()


# Foreign streams


class Foreign:
    """A stream of another library, by the attribute or the protocol that says its handle."""

    def __init__(self, handle: int, how: str):
        if how == "cuda_stream":
            self.cuda_stream = handle
        else:
            self.__cuda_stream__ = lambda: (0, handle)


@on_cpu
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("how", ["number", "cuda_stream", "protocol"])
def test_order_with_a_foreign_stream(seed: int, how: str) -> None:
    """Under seeded schedules: the caller's stream fills the rows just before the append and overwrites them just after; it reads what was gathered
    and nothing is waited for on the host in between."""
    device = Device(0)
    rows = made(40)
    with make_cache(device=device, query_rows_max=8) as cache, cache.open() as session:
        runtime.control().glm53_cpu_seed(ctypes.c_uint64(seed), 1)
        try:
            stream = device.stream()
            foreign: Any = stream.address if how == "number" else Foreign(stream.address, how)
            array = Array.from_numpy(device, np.zeros_like(rows[:8]), category="caller")
            copy = Array.empty(device, DType.F32, (3, 1, 8, WIDTH), category="caller")
            for first in range(0, 40, 8):
                array.upload(rows[first : first + 8], stream)
                session.append(array, stream=foreign)
                stream.fill(array.address, 0xFF, array.nbytes)
                positions = np.arange(first, first + 8)[None, :]
                gathered = session.gather(0, positions, stream=foreign)
                stream.copy(copy.address, gathered.address, copy.nbytes)
                del gathered  # its memory is used again by the next gather, in order
                np.testing.assert_array_equal(copy.numpy(stream), expected(rows, 0, positions))
            stream.close()
            array.free()
            copy.free()
        finally:
            runtime.control().glm53_cpu_seed(ctypes.c_uint64(0), 0)
    device.close()


@on_cpu
def test_adopted_streams_are_not_destroyed() -> None:
    with Device(0) as device:
        stream = device.stream()
        adopted = Stream.adopt(device, stream.address)
        live = runtime.control().glm53_cpu_live(b"streams")
        adopted.close()
        with pytest.raises(LifetimeError):
            _ = adopted.handle
        assert runtime.control().glm53_cpu_live(b"streams") == live
        stream.synchronize()
        stream.close()


# The program around it


@pytest.mark.skipif("runtime.select().device_count < 2", reason="needs two devices")
@pytest.mark.parametrize("tier", ["host", "resident"])
def test_current_device_and_process_stay_as_they_are(tier: str) -> None:
    calls.set_device(1)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    loggers, level, environment = list(logging.getLogger().handlers), logging.getLogger().level, dict(os.environ)

    def step(result: Any) -> Any:
        assert calls.current_device() == 1, "the caller's device"
        return result

    try:
        cache = step(make_cache(device=0, tier=tier))
        session = step(cache.open())
        step(session.append(made(300)))
        step(session.append(made(3)))
        gathered = step(session.gather(0, [[1, 300]]))
        step(gathered.numpy())
        step(gathered.__dlpack__(stream=None if gathered.__dlpack_device__()[0] == dlpack.CPU else -1))
        step(session.gather_bytes(1, [[7, 7]]))
        with pytest.raises(InputError):
            session.gather(0, [[999]])
        step(session.truncate(5))
        step(session.settle())
        step(session.counters())
        step(cache.ledger())
        step(session.close())
        step(cache.close())
        del gathered
        gc.collect()
        step(None)
    finally:
        calls.set_device(0)
    assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert (loggers, level) == (logging.getLogger().handlers, logging.getLogger().level) and environment == dict(os.environ)
    assert not logging.getLogger("glm53").handlers


@on_cpu
@pytest.mark.parametrize("tier", ["host", "resident"])
def test_everything_is_given_back(tier: str) -> None:
    kinds = (b"allocations", b"host_allocations", b"registrations", b"streams", b"events", b"modules")
    live = lambda: [int(runtime.control().glm53_cpu_live(kind)) for kind in kinds]
    device = Device(0)
    device.kernel("copy_rows")
    before = live()
    for own in (0, device):
        with make_cache(tier=tier, device=own) as cache:
            session = cache.open()
            session.append(made(400))
            kept = session.gather(0, [[1, 399]])
            session.append(made(2))
        del kept
        gc.collect()
        assert live() == before
    device.close()


def test_readme_example_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example: glm53\.kv -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None, "README.md has no example of glm53.kv behind its marker"
    exec(compile(found[1], "README.md", "exec"), {"__name__": "__example__"})
    printed = capsys.readouterr().out
    assert "hot cache" in printed and "misses" in printed
