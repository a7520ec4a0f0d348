"""Checks glm53.kv inside a torch process: torch's CUDA context, streams and tensors on both sides. Needs torch and a CUDA device; no arguments.

Prints a table of what was compared and `N passed, N failed`; exits with 1 if anything failed.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from glm53.kv import KvCache, KvSession  # noqa: E402

LAYERS, GROUPS, LATENT, ROPE = 6, ((0, 1, 2, 3), (4, 5)), 512, 64
WIDTH = LATENT + ROPE
TOPK, QUERY_ROWS, ROUNDS, ROWS_MAX = 512, 8, 200, 12000
HOT_ROWS = 2048


def quantised(rows: torch.Tensor) -> torch.Tensor:
    """What q8g64 keeps of bf16 rows, as f32: per 64 latent values a scale f16(amax / 127) and integers round(x / scale); the rope part as it is."""
    latent = rows[..., :LATENT].float()
    groups = latent.reshape(*latent.shape[:-1], LATENT // 64, 64)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).to(torch.float16).float()
    kept = torch.round(groups / scale).clamp(-127, 127) * scale
    return torch.cat([kept.reshape(latent.shape), rows[..., LATENT:].float()], -1)


class Surroundings:
    """What a library must leave alone. `same()` raises naming what changed."""

    def __init__(self) -> None:
        self.seen = self.look()

    def look(self) -> dict[str, Any]:
        return {
            "current device": torch.cuda.current_device(),
            "current stream": torch.cuda.current_stream().cuda_stream,
            "environment": dict(os.environ),
            "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "log handlers": (list(logging.getLogger().handlers), logging.getLogger().level, list(logging.getLogger("glm53").handlers)),
        }

    def same(self) -> None:
        for name, value in self.look().items():
            assert value == self.seen[name], f"{name} changed from {self.seen[name]} to {value}"


class Torch:
    """A call between two looks at torch's allocator and at the surroundings."""

    def __init__(self) -> None:
        self.around = Surroundings()

    def __call__(self, call: Callable[[], Any]) -> Any:
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        result = call()
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        # It may fall: a call lets go of inputs of earlier ones whose work has ended.
        grew = after[0] > before[0] or after[1] != before[1]
        assert not grew, f"torch's allocator went from {before} to {after} bytes (allocated, reserved)"
        self.around.same()
        return result


def cache_of(row_format: str, tier: str, device: int = 0) -> KvCache:
    return KvCache(
        device,
        runtime="cuda",
        tier=tier,
        layers=LAYERS,
        groups=GROUPS,
        latent=LATENT,
        rope=ROPE,
        row_format=row_format,
        hot_rows=HOT_ROWS,
        topk_max=TOPK,
        query_rows_max=QUERY_ROWS,
        rows_max=ROWS_MAX,
        extent_rows=512,
        host_chunk_mib=64,
    )


def busy(matrix: torch.Tensor) -> torch.Tensor:
    """Work of some milliseconds on the current stream, so that what follows is late. Returns a zero."""
    for _ in range(8):
        matrix = torch.tanh(matrix @ matrix)
    return matrix.sum() * 0


def one_round(
    guarded: Torch, session: KvSession, history: torch.Tensor, rows: int, stream: torch.cuda.Stream, matrix: torch.Tensor, generator: Any
) -> int:
    """Appends or rolls back, then gathers into torch and compares. Returns the rows of the session."""
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    quantise = session.cache.layout.row_format.value == "q8g64"
    if rows > 100 and draw(0, 10) == 0:
        rows = draw(rows // 2, rows)
        guarded(lambda: session.truncate(rows))
    count = min(draw(1, QUERY_ROWS + 1) if draw(0, 4) else draw(20, 400), ROWS_MAX - rows)
    if count:
        new = torch.randn(count, LAYERS, WIDTH, device="cuda", dtype=torch.bfloat16)
        history[rows : rows + count] = new
        late = new + busy(matrix).to(torch.bfloat16)
        given = late.float() if session.cache.layout.row_format.value == "f32" else late
        guarded(lambda: session.append(given, stream=stream))
        given.fill_(float("nan"))  # after the append in stream order: must not be seen
        rows += count
    group, queries, k = draw(0, len(GROUPS)), draw(1, QUERY_ROWS + 1), draw(1, TOPK + 1)
    positions = torch.randint(max(0, rows - 3000) if draw(0, 2) else 0, rows, (queries, k), device="cuda")
    trusted = draw(0, 3) == 0 and k <= rows
    if trusted:
        positions = torch.rand(queries, rows, device="cuda").argsort(1)[:, :k].to(torch.int32).contiguous()
    dtype = "f32" if session.cache.layout.row_format.value != "bf16" else "bf16"
    gathered = torch.from_dlpack(guarded(lambda: session.gather(group, positions, dtype=dtype, stream=stream, trusted=trusted)))
    layers = torch.tensor(GROUPS[group], device="cuda")
    wanted = history[positions.long()][:, :, layers].permute(2, 0, 1, 3)
    wanted = quantised(wanted) if quantise else wanted.to(gathered.dtype)
    assert gathered.shape == wanted.shape and gathered.is_cuda, f"{gathered.shape} on {gathered.device}"
    assert torch.equal(gathered, wanted), f"{int((gathered != wanted).sum())} of {wanted.numel()} values differ"
    return rows


def rounds(row_format: str, tier: str) -> str:
    """Random appends, rollbacks and gathers on a stream of torch's."""
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        history = torch.zeros(ROWS_MAX, LAYERS, WIDTH, device="cuda", dtype=torch.bfloat16)
        matrix = torch.randn(2048, 2048, device="cuda") * 0.01
        guarded = Torch()
        cache = guarded(lambda: cache_of(row_format, tier))
        session = guarded(cache.open)
        started, rows = time.perf_counter(), 0
        for _ in range(ROUNDS):
            rows = one_round(guarded, session, history, rows, stream, matrix, generator)
        counters = guarded(session.counters)
        guarded(cache.check)
        guarded(cache.close)
    seconds = time.perf_counter() - started
    hits, misses = sum(counters["hits"]) + sum(counters["recent_hits"]), sum(counters["misses"]) + sum(counters["uncached"])
    if tier == "host":
        assert misses > 0, "nothing was ever missed: the rounds prove little"
    return f"{ROUNDS} rounds, {rows} rows, {hits} hits, {misses} misses, {seconds:.1f} s"


def lifetime() -> str:
    """A tensor outlives the array, later gathers and the cache."""
    rows = torch.randn(300, LAYERS, WIDTH, device="cuda", dtype=torch.bfloat16)
    cache = cache_of("bf16", "host")
    session = cache.open()
    session.append(rows)
    tensor = torch.from_dlpack(session.gather(0, [[5, 299, 5]]))
    for start in range(20):
        session.gather(0, [[start, start + 1, start + 2]])
    wanted = rows[torch.tensor([[5, 299, 5]], device="cuda")][:, :, :4].permute(2, 0, 1, 3)
    assert torch.equal(tensor, wanted), "later gathers"
    cache.close()
    torch.cuda.synchronize()
    assert torch.equal(tensor, wanted), "after close"
    assert not cache.device.closed, "the device is closed under a tensor"
    del tensor
    gc.collect()
    assert cache.device.closed and not cache.device.live, "memory is left"
    return "tensor right after 20 gathers and close; all given back"


def default_stream() -> str:
    """Without a stream argument, on torch's default stream: inputs by DLPack's rule, outputs too."""
    with cache_of("bf16", "host") as cache, cache.open() as session:
        history = torch.randn(2000, LAYERS, WIDTH, device="cuda", dtype=torch.bfloat16)
        matrix = torch.randn(2048, 2048, device="cuda") * 0.01
        for first in range(0, 2000, 100):
            late = history[first : first + 100] + busy(matrix).to(torch.bfloat16)
            session.append(late)
            late.fill_(float("nan"))
            positions = torch.randint(0, first + 100, (2, 64), device="cuda")
            gathered = torch.from_dlpack(session.gather(1, positions))
            wanted = history[positions][:, :, 4:].permute(2, 0, 1, 3)
            assert torch.equal(gathered, wanted), f"{int((gathered != wanted).sum())} values differ behind row {first}"
        # Layer by layer instead of row by row, from the host, and refused.
        planes = torch.randn(LAYERS, 20, WIDTH, device="cuda", dtype=torch.bfloat16)
        session.append(planes.transpose(0, 1))
        session.append(history[:3].cpu())
        got = torch.from_dlpack(session.gather(0, [list(range(2000, 2023))]))
        both = torch.cat([planes.transpose(0, 1), history[:3]])
        assert torch.equal(got[:, 0], both[:, :4].transpose(0, 1)), "layer-major or host rows differ"
        try:
            session.append(history[:10, :, ::2].repeat(1, 1, 2)[:, :, :WIDTH].transpose(1, 2).contiguous().transpose(1, 2))
        except Exception as error:
            assert "contiguous()" in str(error), error
        else:
            raise AssertionError("rows with strides across a value were accepted")
    return "20 rounds; layer-major, host and strided rows"


class Context:
    """A call after which the thread's CUDA context, as the driver has it, must be the one of before, or none as before."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.before = self.look()

    def look(self) -> int | None:
        handle = ctypes.c_void_p()
        code = self.driver.cuCtxGetCurrent(ctypes.byref(handle))
        assert code == 0, f"cuCtxGetCurrent: {code}"
        return handle.value

    def __call__(self, call: Callable[[], Any]) -> Any:
        result = call()
        now = self.look()
        assert now == self.before, f"the current context changed from {self.before} to {now}"
        return result


def one_life(device: int) -> None:
    """A cache on `device` from start to end, in whatever context this thread has."""
    guarded = Context()
    rows = np.random.default_rng(device).standard_normal((3000, LAYERS, WIDTH)).astype(np.float32)
    cache = guarded(lambda: cache_of("f32", "host", device))
    session = guarded(cache.open)
    for first, last in ((0, 100), (100, 104), (104, 3000)):
        guarded(lambda a=first, b=last: session.append(rows[a:b]))
    for positions in ([[0, 2999, 17]], [[5, 6, 7]] * QUERY_ROWS):
        got = guarded(guarded(lambda p=positions: session.gather(1, p)).numpy)
        assert np.array_equal(got, rows[np.array(positions)][:, :, 4:].transpose(2, 0, 1, 3)), f"device {device} gathers other rows"
    guarded(lambda: session.truncate(1000))
    guarded(session.counters)
    guarded(session.close)
    guarded(cache.close)


def contexts() -> str:
    """torch's current device and the thread's CUDA context, with caches on every device: torch on either device, and a thread without a context."""
    count, home = torch.cuda.device_count(), torch.cuda.current_device()
    failures: list[BaseException] = []

    def bare(device: int) -> None:
        try:
            assert Context().before is None, "a new thread has a context"
            one_life(device)
        except BaseException as error:
            failures.append(error)

    try:
        for caller in range(count):
            torch.cuda.set_device(caller)
            torch.zeros(1, device="cuda")
            for device in range(count):
                one_life(device)
                assert torch.cuda.current_device() == caller, f"torch was on device {caller} and is on {torch.cuda.current_device()}"
                assert torch.zeros(1, device="cuda").device.index == caller, "torch allocates on another device"
    finally:
        torch.cuda.set_device(home)
    for device in range(count):
        thread = threading.Thread(target=bare, args=(device,))
        thread.start()
        thread.join()
    if failures:
        raise failures[0]
    return f"{count} device(s): torch on each and a bare thread, caches on each"


def main() -> int:
    if not torch.cuda.is_available():
        print("check_torch: torch sees no CUDA device; next: run it on one")
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # torch makes the context
    checks: list[tuple[str, Callable[[], str]]] = [
        *(
            (f"{row_format} {tier}", lambda f=row_format, t=tier: rounds(f, t))
            for row_format in ("bf16", "q8g64", "f32")
            for tier in ("host", "resident")
        ),
        ("lifetime", lifetime),
        ("default stream", default_stream),
        ("contexts", contexts),
    ]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = 0
    for name, check in checks:
        try:
            print(f"{name:16} passed  {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"{name:16} FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
