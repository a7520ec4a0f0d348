"""The launches of a decode step (docs/decisions/0004-step-graph.md) and a few of prefill, at the widths of a model, for `bench_kernels`.

What a launch reads from memory in a step (weights, history, index keys) it reads from memory here: copies of it take turns, together larger than any
L2. What the launch before has just written in a step (activations, scores, partial results, logits) is the same memory each time and stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from glm53.errors import Glm53Error
from glm53.hip import Array, Device, Stream
from glm53.mem.extents import ExtentShape, GroupPlace
from glm53.ops import attention, hotcache, matmul, rows, sampling, step, step_attention, step_experts, step_parts, step_select, step_state
from glm53.ops.contract import Cost
from glm53.ops.halves import Halves
from glm53.ops.hotcache import FetchList, SlotTables
from glm53.ops.matrix import Matrix
from glm53.ops.step import Epilogue, Rope, Segment
from glm53.ops.step_attention import Partials
from glm53.ops.step_parts import RowsPart
from glm53.ops.step_select import Drawn, ExtentPlace, HotPlace, Selector
from glm53.ops.weights import random_array, random_matrix
from glm53.sampling import SamplingParams
from glm53.spec import DType, RowFormat, Space, WeightFormat

T = DType.BF16
ITEM = T.item_bytes
Q8, Q4 = WeightFormat.Q8G64, WeightFormat.Q4G64
ROW_FORMAT = RowFormat.Q8G64
OFFSETS = (0, 0, 0, 0)  # references hold whole addresses
COPIES_MAX = 512
EXPERT_DRAWS = 8  # selections of experts that take turns
EPS = 1e-5
HOT_ROWS, RING_ROWS = 32_768, 192  # of a hot buffer
NOWHERE = 1 << 20  # an address that is written into references, and that nothing follows


@dataclass(frozen=True)
class Shapes:
    """Widths of a model, in elements; prefill_rows: of a prefill chunk."""

    hidden: int = 6144
    heads: int = 64
    q_lora: int = 2048
    latent: int = 512
    nope: int = 192
    rope: int = 64
    v: int = 256
    dense: int = 12288
    width: int = 2048  # of a routed expert and of the shared one
    experts: int = 256
    slots: int = 8
    index_heads: int = 32
    index_dim: int = 128
    topk: int = 2048
    vocab: int = 154_880
    extent_rows: int = 256
    prefill_rows: int = 512

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    @property
    def row_width(self) -> int:
        return self.latent + self.rope

    @property
    def row_bytes(self) -> int:
        return ROW_FORMAT.row_bytes(self.latent, self.rope)

    @property
    def key_bytes(self) -> int:
        return self.index_dim * ITEM


RELEASED = Shapes()
_TINY_WIDTHS = {"hidden": 128, "heads": 2, "q_lora": 64, "nope": 64, "v": 32, "dense": 128, "width": 64, "experts": 8, "slots": 2, "vocab": 640}
_TINY_INDEX = {"index_heads": 4, "index_dim": 64, "topk": 64, "extent_rows": 64, "prefill_rows": 4}
TINY = replace(RELEASED, **_TINY_WIDTHS, **_TINY_INDEX)


@dataclass(frozen=True)
class Point:
    """One row of the table: `launches` in turn, one kernel each. cost: of a launch, the mean of them. history: positions, None where it does not
    matter. prepare: enqueued before each sample, outside of the time."""

    op: str
    kernel: str
    shape: str
    rows: int
    launches: tuple[Callable[[], object], ...]
    cost: Cost
    history: int | None = None
    prepare: Callable[[], object] = lambda: None


class Maker:
    """Makes the arrays of the points, and owns them until `free`. cold_bytes: what the copies of a point hold together at least."""

    def __init__(self, device: Device, stream: Stream, shapes: Shapes, row_counts: tuple[int, ...], histories: tuple[int, ...], cold_bytes: int):
        self.device, self.stream, self.shapes, self.row_counts, self.histories = device, stream, shapes, row_counts, histories
        self._cold_bytes, self._owned, self._seed = cold_bytes, ExitStack(), 0

    def copies(self, byte_count: int) -> int:
        return max(1, min(COPIES_MAX, -(-self._cold_bytes // byte_count)))

    def keep(self, array: Array) -> Array:
        self._owned.callback(array.free)
        return array

    def draw(self, *shape: int, dtype: DType = T, std: float = 1.0, mean: float = 0.0) -> Array:
        """A random array."""
        self._seed += 1
        return self.keep(random_array(self.stream, dtype, shape, self._seed, std, mean, "bench"))

    def norm(self, width: int) -> Array:
        return self.draw(width, std=0.05, mean=1.0)

    def matrix(self, format: WeightFormat, *shape: int) -> Matrix:
        """Random weights that keep unit mean squares."""
        self._seed += 1
        matrix = random_matrix(self.stream, format, shape, self._seed, shape[-1] ** -0.5, "bench")
        for array in matrix.arrays:
            self.keep(array)
        return matrix

    def empty(self, dtype: DType, *shape: int) -> Array:
        return self.keep(Array.empty(self.device, dtype, shape, "bench"))

    def put(self, values: np.ndarray) -> Array:
        return self.keep(Array.from_numpy(self.device, values, category="bench"))

    def i32(self, values: Sequence[int] | np.ndarray) -> Array:
        return self.put(np.asarray(values, np.int32))

    def owns(self, free: Callable[[], object]) -> None:
        self._owned.callback(free)

    def free(self) -> None:
        self._owned.close()


def mean_cost(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.bytes for cost in costs) // len(costs), sum(cost.flops for cost in costs) // len(costs))


# Products


@dataclass(frozen=True)
class Product:
    """One segment of step_gemv with n columns."""

    n: int
    epilogue: Epilogue = Epilogue.STORE
    rope: Rope | None = None
    format: WeightFormat = Q8

    @property
    def weight_rows(self) -> int:
        return self.n * (2 if self.epilogue is Epilogue.SILU else 1)


PartOf = Callable[[Maker, int], tuple[step.Part, int]]  # the part of a launch of so many rows, and its bytes


def products(m: Maker, op: str, k: int, every: Sequence[Product], normed: bool = True, h: bool = False, part_of: PartOf | None = None) -> list[Point]:
    """Points of a step_gemv for each number of rows; the copies of the weights are the same for all of them."""
    one = [m.matrix(p.format, p.weight_rows, k) for p in every]
    copies = m.copies(sum(w.nbytes for w in one))
    weights = [one, *([m.matrix(p.format, p.weight_rows, k) for p in every] for _ in range(copies - 1))]
    norm = m.norm(k) if normed else None
    inv_freq = m.put((8e6 ** -(np.arange(0, m.shapes.rope, 2) / m.shapes.rope)).astype(np.float32))
    shape = f"{k} -> " + " + ".join(str(p.n) + (" x 2" if p.epilogue is Epilogue.SILU else "") for p in every)
    points = []
    for count in m.row_counts:
        x = m.draw(count, k)
        ys = [m.empty(DType.F32 if p.epilogue is Epilogue.STORE_F32 else T, count, p.n) for p in every]
        residual = m.draw(count, every[0].n) if every[0].epilogue is Epilogue.RESIDUAL else None
        normed_rows = m.empty(T, count, k) if h else None
        halves = Halves.make(m.stream.device, count, every[0].n) if residual is not None else None
        part, part_bytes = part_of(m, count) if part_of else (None, 0)
        positions = m.i32(range(count))
        launches = []
        for copy in weights:
            segments = [Segment(w, y, p.epilogue, p.rope) for w, y, p in zip(copy, ys, every, strict=True)]
            arrays: dict[str, Any] = {"norm": norm, "h": normed_rows, "residual": residual}
            more: dict[str, Any] = {"eps": EPS if normed else 0.0, "positions": positions, "inv_freq": inv_freq, "part": part, "halves": halves}
            launches.append(partial(step.gemv, m.stream, x, segments, **arrays, **more))
        cost = step.cost_gemv(x, segments, **arrays) + Cost(part_bytes, 0)
        kind = "gemv_router" if isinstance(part, step_parts.RouterPart) else "gemv" if halves is None else "halves"
        points.append(Point(op, step.kernel_for(f"step_{kind}", T, Q8, count), shape, count, tuple(launches), cost))
    return points


def rows_part(with_key: bool) -> PartOf:
    """Part ROWS: history rows in q8g64 and, on full layers, index keys."""

    def part_of(m: Maker, count: int) -> tuple[RowsPart, int]:
        s = m.shapes
        store = m.empty(DType.U8, count, s.row_bytes)
        refs = np.uint64(store.address) + np.arange(count, dtype=np.uint64) * np.uint64(s.row_bytes) + np.uint64(Space.EXTENT)
        base = RowsPart(
            m.draw(count, s.row_width), m.norm(s.latent), EPS, m.put(refs), OFFSETS, ROW_FORMAT, s.latent, error=m.put(np.zeros(1, np.uint32))
        )
        byte_count = rows.cost_store_rows(count, s.row_width, ITEM, s.row_bytes).bytes
        if not with_key:
            return base, byte_count
        shape = ExtentShape(64, 1, s.key_bytes)
        extent = m.empty(DType.U8, shape.extent_bytes)
        key_arrays: dict[str, Any] = {"key": m.draw(count, s.index_dim), "key_norm": m.norm(s.index_dim), "key_bias": m.draw(s.index_dim, std=0.01)}
        tables: dict[str, Any] = {"key_tables": m.put(np.array([[extent.address]], np.uint64)), "sessions": m.i32([0] * count)}
        return replace(base, **key_arrays, **tables, key_eps=EPS, key_shape=shape), byte_count + 2 * count * s.key_bytes

    return part_of


def router_part(m: Maker, count: int) -> tuple[step_parts.RouterPart, int]:
    s = m.shapes
    ids, weights = m.empty(DType.I32, count, s.slots), m.empty(DType.F32, count, s.slots)
    bias, arrivals = m.draw(s.experts, dtype=DType.F32, std=0.01), m.put(np.zeros(1, np.uint32))
    return step_parts.RouterPart(bias, ids, weights, arrivals, 1, 1, True, 2.5), bias.nbytes + ids.nbytes + weights.nbytes


def query_input(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    shared = [Product(s.q_lora), Product(s.row_width)]
    yield products(m, "q_a, kv_a", s.hidden, shared)
    yield products(m, "q_a, kv_a, index key, gates", s.hidden, [*shared, Product(s.index_dim), Product(s.index_heads, Epilogue.STORE_F32)])


def query_product(s: Shapes) -> Product:
    return Product(s.heads * s.head_dim, Epilogue.ROPE, Rope(s.head_dim, s.nope, s.rope))


def query(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    q_b = [query_product(s)]
    wq_b = [Product(s.index_heads * s.index_dim, Epilogue.ROPE, Rope(s.index_dim, 0, s.rope))]
    yield products(m, "index query, rows, key", s.q_lora, wq_b, part_of=rows_part(with_key=True))
    yield products(m, "q_b", s.q_lora, q_b)
    yield products(m, "q_b, rows", s.q_lora, q_b, part_of=rows_part(with_key=False))


def per_head(m: Maker, op: str, part_of: PartOf | None = None) -> list[Point]:
    """Points of the absorption, one product a head."""
    s, points = m.shapes, []
    one = m.matrix(Q8, s.heads, s.latent, s.nope)
    weights = [one, *(m.matrix(Q8, s.heads, s.latent, s.nope) for _ in range(m.copies(one.nbytes) - 1))]
    for count in m.row_counts:
        q, y = m.draw(count, s.heads, s.head_dim), m.empty(T, count, s.heads, s.latent)
        part, part_bytes = part_of(m, count) if part_of else (None, 0)
        launches = tuple(partial(step.per_head, m.stream, q, w, y, part) for w in weights)
        shape = f"{s.heads} x ({s.nope} -> {s.latent})"
        kernel = step.kernel_for("step_gemv", T, Q8, count)
        points.append(Point(op, kernel, shape, count, launches, step.cost_per_head(q, one, y) + Cost(part_bytes, 0)))
    return points


def absorb(m: Maker) -> Iterator[list[Point]]:
    yield per_head(m, "absorb")


def output(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    yield products(m, "o", s.heads * s.v, [Product(s.hidden, Epilogue.RESIDUAL)], normed=False)


def mlp_input(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    router, shared = Product(s.experts, Epilogue.STORE_F32, format=WeightFormat.F32), Product(s.width, Epilogue.SILU)
    yield products(m, "router, shared gate and up", s.hidden, [router, shared], h=True, part_of=router_part)


def dense(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    yield products(m, "dense gate and up", s.hidden, [Product(s.dense, Epilogue.SILU)])
    yield products(m, "dense down", s.dense, [Product(s.hidden, Epilogue.RESIDUAL)], normed=False)


def head(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    yield products(m, "head", s.hidden, [Product(s.vocab, Epilogue.STORE_F32)])


# Experts


def expert_draws(m: Maker, count: int) -> list[np.ndarray]:
    """Selections [count, slots] that take turns: those of one row are disjoint as long as the experts last, rows draw independently."""
    s, rng = m.shapes, np.random.default_rng(5)
    order = np.resize(rng.permutation(s.experts), EXPERT_DRAWS * s.slots).reshape(EXPERT_DRAWS, 1, s.slots)
    if count == 1:
        return list(order.astype(np.int32))
    return [np.stack([rng.permutation(s.experts)[: s.slots] for _ in range(count)]).astype(np.int32) for _ in range(EXPERT_DRAWS)]


def routed_in(m: Maker) -> Iterator[list[Point]]:
    s, points = m.shapes, []
    weight = m.matrix(Q4, s.experts, 2 * s.width, s.hidden)
    for count in m.row_counts:
        x, act, draws = m.draw(count, s.hidden), m.empty(T, count, s.slots, s.width), expert_draws(m, count)
        launches = tuple(partial(step_experts.experts, m.stream, x, m.i32(ids), weight, act) for ids in draws)
        cost = mean_cost([step_experts.cost_experts(count, s.slots, len(np.unique(ids)), s.width, s.hidden, ITEM, Q4) for ids in draws])
        shape = f"{s.slots} of {s.experts} x ({s.hidden} -> {s.width} x 2)"
        points.append(Point("routed gate and up", step.kernel_for("step_experts", T, Q4, count), shape, count, launches, cost))
    yield points


def routed_out(m: Maker) -> Iterator[list[Point]]:
    s, points = m.shapes, []
    weight = m.matrix(Q4, s.experts, s.hidden, s.width)
    shared = [m.matrix(Q8, s.hidden, s.width) for _ in range(EXPERT_DRAWS)]
    for count in m.row_counts:
        act, shared_act, draws = m.draw(count, s.slots, s.width), m.draw(count, s.width), expert_draws(m, count)
        mix, residual, y = m.draw(count, s.slots, dtype=DType.F32), m.draw(count, s.hidden), m.empty(T, count, s.hidden)
        down, halves = partial(step_experts.down, m.stream, act), Halves.make(m.stream.device, count, s.hidden)
        launches = tuple(partial(down, m.i32(ids), mix, weight, shared_act, w, residual, y, halves) for ids, w in zip(draws, shared, strict=True))
        costs = [step_experts.cost_down(count, s.slots, len(np.unique(ids)), s.hidden, s.width, s.width, ITEM, Q4, Q8) for ids in draws]
        shape = f"{s.slots} of {s.experts} + 1 x ({s.width} -> {s.hidden})"
        points.append(Point("routed and shared down", "step_down_bf16_q4g64", shape, count, launches, mean_cost(costs)))
    yield points


# Attention


def history_rows(m: Maker, count: int) -> Array:
    """[count, row_bytes] u8: q8g64 rows, a block of random ones over and over."""
    s, block = m.shapes, min(count, 4096)
    store = m.empty(DType.U8, count, s.row_bytes)
    refs = np.uint64(store.address) + np.arange(block, dtype=np.uint64) * np.uint64(s.row_bytes) + np.uint64(Space.EXTENT)
    error = m.put(np.zeros(1, np.uint32))
    rows.store_rows(m.stream, m.draw(block, s.row_width), m.put(refs), offsets=OFFSETS, row_format=ROW_FORMAT, latent=s.latent, error=error)
    for first in range(block, count, block):
        m.stream.copy(store.address + first * s.row_bytes, store.address, min(block, count - first) * s.row_bytes)
    return store


def drawn_plans(m: Maker, store: Array, count: int, copies: int) -> list[Array]:
    """Plans [count, topk] of ascending references into `store`, drawn for each row."""
    s, rng = m.shapes, np.random.default_rng(6)
    plans = []
    for _ in range(copies):
        chosen = np.sort(np.stack([rng.choice(len(store), s.topk, replace=False, shuffle=False) for _ in range(count)]), axis=1)
        plans.append(m.put(np.uint64(store.address + Space.EXTENT) + chosen.astype(np.uint64) * np.uint64(s.row_bytes)))
    return plans


def attend(m: Maker) -> Iterator[list[Point]]:
    s, points = m.shapes, []
    store = history_rows(m, max(2 * s.topk, m.copies(s.row_bytes * s.topk) * s.topk))
    for count in m.row_counts:
        partials = Partials.make(m.device, count, s.heads, s.topk, s.latent, "bench")
        m.owns(partials.free)
        q, q_latent, counts = m.draw(count, s.heads, s.head_dim), m.draw(count, s.heads, s.latent), m.i32([s.topk] * count)
        options = {"offsets": OFFSETS, "row_format": ROW_FORMAT, "rope_offset": s.nope, "scale": s.head_dim**-0.5}
        plans = drawn_plans(m, store, count, m.copies(count * s.topk * s.row_bytes))
        launches = tuple(partial(step_attention.attend, m.stream, q_latent, q, plan, counts, partials, **options) for plan in plans)
        kernel = step_attention.kernel_for("step_attend_bf16_q8g64", count)
        cost = step_attention.cost_attend(count, s.heads, s.latent, s.rope, s.topk, ITEM, s.row_bytes)
        points.append(Point("attend", kernel, f"{s.heads} heads x {s.topk} rows of {s.row_bytes} B", count, launches, cost))
    yield points


def expand(m: Maker) -> Iterator[list[Point]]:
    s, points = m.shapes, []
    one = m.matrix(Q8, s.heads, s.v, s.latent)
    weights = [one, *(m.matrix(Q8, s.heads, s.v, s.latent) for _ in range(m.copies(one.nbytes) - 1))]
    for count in m.row_counts:
        splits = -(-s.topk // step_attention.SPLIT)
        shape = (count, s.heads, splits)
        partials = Partials(*(m.draw(*of, dtype=DType.F32, mean=4.0) for of in ((*shape, s.latent), shape, shape)))
        counts, o = m.i32([s.topk] * count), m.empty(T, count, s.heads, s.v)
        launches = tuple(partial(step_attention.expand, m.stream, partials, counts, w, o) for w in weights)
        cost = step_attention.cost_expand(count, s.heads, s.latent, s.v, s.topk, ITEM, Q8)
        kernel = step_attention.kernel_for("step_expand_bf16", count)
        points.append(Point("expand", kernel, f"{s.heads} x ({s.latent} -> {s.v}), {splits} splits", count, launches, cost))
    yield points


# Selection


def select(m: Maker) -> Iterator[list[Point]]:
    """Scores and top-k of rows of one session; top-k on the scores that a step_score of random keys has left."""
    s = m.shapes
    for history in m.histories:
        shape = ExtentShape(s.extent_rows, 1, s.key_bytes)
        extents = shape.extents_for(history)
        copies = m.copies(extents * shape.extent_bytes)
        keys = m.draw(copies * extents * s.extent_rows, s.index_dim)
        tables = m.put(
            np.uint64(keys.address) + np.arange(copies * extents, dtype=np.uint64).reshape(copies, extents) * np.uint64(shape.extent_bytes)
        )
        points = []
        for count in m.row_counts:
            score, top = (Selector.make(m.device, count, history, s.topk, "bench") for _ in range(2))
            m.owns(score.free)
            m.owns(top.free)
            query, gate = m.draw(count, s.index_heads, s.index_dim), m.draw(count, s.index_heads, dtype=DType.F32)
            positions, sessions = m.i32([history - 1] * count), [m.i32([copy] * count) for copy in range(copies)]
            launches = tuple(partial(score.score, m.stream, query, gate, tables, of, positions, shape, 0) for of in sessions)
            cost = step_select.cost_score(count, s.index_heads, s.index_dim, history, ITEM)
            name = f"{s.index_heads} x {s.index_dim}, {history} keys"
            reset = partial(score.reset, m.stream)  # its histogram is cleared by the top-k that follows in a step
            points.append(Point("score", "step_score_bf16", name, count, launches, cost, history, reset))
            top.score(m.stream, query, gate, tables, sessions[0], positions, shape, 0)
            out = (m.empty(DType.I32, count, s.topk), m.empty(DType.I32, count))
            choose = partial(top.topk, m.stream, positions, *out, cleared=score.histogram)  # its own stays, for the next launch
            cost = step_select.cost_topk(count, s.topk, history)
            points.append(Point("top-k", "step_topk", f"{s.topk} of {history}", count, (choose,), cost, history))
        yield points


# The host tier, without misses


class HotRound:
    """A round of one session whose selections, drawn, all lie in cache slots: a launch may be repeated, and nothing is fetched."""

    def __init__(self, m: Maker, count: int):
        s, history = m.shapes, m.histories[0]
        self.m, self.count = m, count
        tables = SlotTables.make(m.device, 1, 1, history, min(HOT_ROWS - RING_ROWS, history), "bench")
        self.fetch = FetchList.make(m.device, count, s.topk, 1, "bench")
        self.selector = Selector.make(m.device, count, history, s.topk, "bench")
        for owner in (tables, self.fetch, self.selector):
            m.owns(owner.free)
        states = m.put(hotcache.pack_states([(NOWHERE, False, history, 7)]))
        tables.reset(m.stream, 0)
        slots = tables.used.shape[-1]
        hotcache.seed(m.stream, states, tables, 0, 0, slots, 0)
        rng = np.random.default_rng(8)
        chosen = np.stack([rng.choice(slots, s.topk, replace=False) for _ in range(count)])
        self.drawn = Drawn(m.i32(np.sort(chosen, axis=1)), m.put(np.zeros(1, np.uint32)))
        self.place = HotPlace(states, tables, 0, RING_ROWS, s.row_bytes)
        self.positions, self.sessions, self.starts = m.i32([history - 1] * count), m.i32([0] * count), m.i32([0, count])
        self.selected, self.counts = m.empty(DType.I32, count, s.topk), m.empty(DType.I32, count)
        self.plan = m.empty(DType.U64, count, s.topk)
        shape = ExtentShape(s.extent_rows, 1, s.row_bytes)
        extents = m.put(np.full((1, shape.extents_for(history)), NOWHERE, np.uint64))  # of rows that are never fetched
        lists = (self.selected, self.counts, self.sessions, self.starts, extents, self.place, self.plan, self.fetch)
        arrivals = m.put(np.zeros((1, step_select.ARRIVAL_WORDS), np.uint32))
        self.give = step_parts.GivePart(step_select.give_args(*lists, GroupPlace(s.extent_rows, s.row_bytes, 0, s.row_bytes), arrivals), count)
        resident = step_select.place_args(self.selected, self.counts, self.sessions, ExtentPlace(extents, shape), self.plan)
        self.resident = step_parts.PlacePart(resident, count)
        self._check()

    def _check(self) -> None:
        """One round: scores of random keys, top-k, GIVE beside a small product. Raises Glm53Error if a row was missed."""
        m, s, history = self.m, self.m.shapes, self.m.histories[0]
        keys = ExtentShape(s.extent_rows, 1, s.key_bytes)
        extents = keys.extents_for(history)
        store = m.draw(extents * s.extent_rows, s.index_dim)
        table = m.put(np.uint64(store.address) + np.arange(extents, dtype=np.uint64)[None] * np.uint64(keys.extent_bytes))
        query, gate = m.draw(self.count, s.index_heads, s.index_dim), m.draw(self.count, s.index_heads, dtype=DType.F32)
        self.selector.score(m.stream, query, gate, table, self.sessions, self.positions, keys, 0)
        self.selector.topk(m.stream, self.positions, self.selected, self.counts, self.drawn)
        step.gemv(m.stream, m.draw(1, 64), [Segment(m.matrix(Q8, 16, 64), m.empty(T, 1, 16))], part=self.give)
        missed, plan = self.fetch.counts.numpy(m.stream), self.plan.numpy(m.stream)
        if missed.any() or (plan % 4 != Space.HOT).any() or not plan.all():
            raise Glm53Error(f"a round of {self.count} rows missed {missed.tolist()} of its rows, wanted none: the cache was seeded with them")

    def fetch_part(self) -> step_parts.FetchPart:
        """A fetch of no rows, with as many blocks as rows.fetch would take."""
        s, words = self.m.shapes, self.m.device.kernel("fetch_rows").constants["words"]
        blocks = rows.copy_blocks(self.m.device, self.count * s.topk * s.row_bytes // 16, 1, words)
        places = rows.FetchPlanes(None, 0, 0, 0, s.row_bytes)
        return step_parts.FetchPart(rows.fetch_list_args(self.fetch, self.starts, range(1), places, s.topk, blocks), blocks, 1)


def host_tier(m: Maker) -> Iterator[list[Point]]:
    """The launches that carry a tier's parts: PLACE of the resident tier; GIVE and FETCH of the host tier where every selected row is found."""
    s = m.shapes
    rounds = {count: HotRound(m, count) for count in m.row_counts}
    entries = {count: 12 * count * s.topk for count in rounds}
    yield products(m, "q_b, place", s.q_lora, [query_product(s)], part_of=lambda _, count: (rounds[count].resident, entries[count]))
    yield products(m, "q_b, give", s.q_lora, [query_product(s)], part_of=lambda _, count: (rounds[count].give, 2 * entries[count]))
    yield per_head(m, "absorb, fetch", part_of=lambda _, count: (rounds[count].fetch_part(), 0))


# First and last kernels of a step


def state(m: Maker) -> Iterator[list[Point]]:
    s, points = m.shapes, []
    vocab = max(m.row_counts) * m.copies(max(m.row_counts) * s.hidden * ITEM)
    embed = m.draw(vocab, s.hidden)
    place = step_state.RowPlace(ExtentShape(64, 1, s.row_bytes), tables=m.put(np.full((1, 1), NOWHERE, np.uint64)))
    rng = np.random.default_rng(7)
    for count in m.row_counts:
        x, positions, sessions, refs = m.empty(T, count, s.hidden), m.i32(range(count)), m.i32([0] * count), m.empty(DType.U64, count)
        draws = [m.i32(tokens) for tokens in np.split(rng.permutation(vocab)[: vocab // count * count], vocab // count)[:COPIES_MAX]]
        rest = (positions, sessions, refs, place)
        launches = tuple(partial(step_state.begin, m.stream, tokens, embed, x, *rest) for tokens in draws)
        points.append(Point("begin", "step_begin_bf16_bf16", f"{s.hidden}", count, launches, Cost(count * (2 * s.hidden * ITEM + 20), 0)))
    yield points
    yield [end_point(m, count) for count in m.row_counts]


def end_point(m: Maker, count: int) -> Point:
    """step_end with the record of a step, written to host memory."""
    words = step_state.record_words(count, 0)
    host = m.device.host_alloc(16 * words * 4)
    m.owns(host.free)
    ring = step_state.Ring(host.array.view(np.uint32).reshape(16, words), host.device_address)
    params = m.put(sampling.pack_rows([(SamplingParams(), 1, 0, -1)] * count))
    draws = step_state.Draws(m.i32(range(count)), m.draw(count, dtype=DType.F32), None, m.i32(range(count)), params, ring)
    counter, error, rounds = m.put(np.zeros(1, np.uint32)), m.put(np.zeros(1, np.uint32)), m.i32(range(count))
    run = partial(step_state.end, m.stream, counter, error, rounds, None, draws)
    return Point("end", "step_end", f"record of {words} words", count, (run,), Cost(4 * words + 16 * count, 0))


def sample(m: Maker) -> Iterator[list[Point]]:
    s = m.shapes
    for label, settings in (("greedy", SamplingParams(temperature=0.0)), ("top-p 0.95", SamplingParams(temperature=1.0, top_p=0.95))):
        points = []
        for count in m.row_counts:
            logits, params = m.draw(count, s.vocab, dtype=DType.F32, std=2.0), m.put(sampling.pack_rows([(settings, r, 9, -1) for r in range(count)]))
            scratch, stage = sampling.SampleScratch.make(m.device, count, s.vocab, "bench"), sampling.Stage.of([settings])
            m.owns(scratch.free)
            arrays = (logits, params, None, m.empty(DType.I32, count), m.empty(DType.F32, count), None)
            run = partial(sampling.sample, m.stream, scratch, *arrays, stage)
            kernel = "sample_best" if stage is sampling.Stage.BEST else "sample_draw"
            points.append(Point(f"sample, {label}", kernel, f"{s.vocab}", count, (run,), sampling.cost_sample(count, s.vocab)))
        yield points


# Prefill


def prefill(m: Maker) -> Iterator[list[Point]]:
    """Products and attention of a chunk of prompt rows."""
    s, count = m.shapes, m.shapes.prefill_rows
    for op, n, k in (("q_a", s.q_lora, s.hidden), ("q_b", s.heads * s.head_dim, s.q_lora), ("o", s.hidden, s.heads * s.v)):
        x, y, one = m.draw(count, k), m.empty(T, count, n), m.matrix(Q8, n, k)
        weights = [one, *(m.matrix(Q8, n, k) for _ in range(min(8, m.copies(one.nbytes)) - 1))]
        launches = tuple(partial(matmul.matmul, m.stream, x, w, y) for w in weights)
        yield [Point(op, "matmul_tile_bf16_q8g64_bf16", f"{k} -> {n}", count, launches, matmul.cost_matmul(x, one, y))]
    store = history_rows(m, max(2 * s.topk, m.copies(s.row_bytes * s.topk) * s.topk))
    q, q_latent, out = m.draw(count, s.heads, s.head_dim), m.draw(count, s.heads, s.latent), m.empty(T, count, s.heads, s.latent)
    counts, (plan,) = m.i32([s.topk] * count), drawn_plans(m, store, count, 1)
    options = {"offsets": OFFSETS, "row_format": ROW_FORMAT, "rope_offset": s.nope, "scale": s.head_dim**-0.5}
    run = partial(attention.attend, m.stream, q_latent, q, plan, counts, out, **options)
    cost = attention.cost_attend(count, s.heads, s.latent, s.rope, s.topk, ITEM, s.row_bytes)
    yield [Point("attend", "attend_bf16_q8g64", f"{s.heads} heads x {s.topk} rows of {s.row_bytes} B", count, (run,), cost)]


# A builder gives lists of points that are timed in turn; what a list needs is freed after the builder's last list.
BUILDERS: dict[str, tuple[Callable[[Maker], Iterator[list[Point]]], ...]] = {
    "products": (query_input, query, absorb, output, mlp_input, dense),
    "select": (select,),
    "attention": (attend, expand),
    "experts": (routed_in, routed_out),
    "host": (host_tier,),
    "ends": (state, head, sample),
    "prefill": (prefill,),
}
