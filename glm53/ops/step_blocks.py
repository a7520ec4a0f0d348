"""How many blocks a launch of products of a decode step has, and which kernel where several have the same bits (step.hip)."""

from __future__ import annotations

from collections.abc import Sequence

from glm53.hip import Stream
from glm53.ops import crowd
from glm53.ops.contract import ceil_div, on_sm
from glm53.ops.step_args import step_gemv_args
from glm53.ops.step_parts import PART_ROUTER

MANY, _FEW = "_many", "_few"  # kernels whose blocks take more rows of x; at most 4, three a multiprocessor
ROUTER_COLUMNS = 2  # rows of the router's weights a block, beside bf16 x
_RESIDENT = 3  # blocks of a kernel for one row, and of the one for few rows, that share a multiprocessor on sm_90
_RESIDENT_ROWS = 2  # of the others for several rows
_KEPT_K = 2048  # blocks can keep the x of as many k from one set of columns to the next


def product_blocks(args: step_gemv_args, stream: Stream, kernel: str, rows: Sequence[int], at_once: int = 0) -> int:
    """Blocks of the products of one batch, those of each segment in args.blocks. rows: of the weights of each segment.

    at_once: a launch of wide blocks gets blocks of half the columns instead (args.narrow) where no more than so many come of it.
    """
    constants = stream.device.kernel(kernel).constants
    router = args.part == PART_ROUTER
    scalar = "rows" not in constants
    columns = constants["cols" if args.wide else "cols_short"]
    fixed = ceil_div(args.n[0], ROUTER_COLUMNS) if router else 0
    if args.wide and fixed + sum(ceil_div(n, columns // 2) for n in rows[router:]) <= at_once:
        args.narrow, columns = 1, columns // 2
    args.turns = 1 if scalar else ceil_div(args.rows, constants["rows"])
    for index, n in enumerate(rows):
        args.blocks[index] = ceil_div(n, columns) * (args.rows if scalar else args.turns)
    if not scalar and router:
        args.blocks[0] = fixed
    if kernel in crowd.KERNELS:
        crowd.bind_blocks(args, constants, stream.device.properties.compute_units)
    return (2 if args.partial else 1) * sum(args.blocks)


def shared_rows(args: step_gemv_args, stream: Stream, kernel: str, rows: Sequence[int], blocks: int) -> tuple[str, int]:
    """The kernel and blocks of a wide launch of several rows on sm_90.

    Blocks of at most 4 rows, where all run at once, so that no multiprocessor idles and each makes the x of fewer rows; or, of one segment, no more
    blocks than run at once, which make x once for several sets of columns.
    """
    units, few = stream.device.properties.compute_units, kernel.replace(MANY, "").replace("step_gemv", "step_gemv" + _FEW)
    shares = ceil_div(args.rows, stream.device.kernel(few).constants["rows"])
    if shares > 1 and args.part_blocks + shares * (blocks // args.turns) <= _RESIDENT * units:
        return few, product_blocks(args, stream, few, rows)
    places = max(_RESIDENT_ROWS * units - args.part_blocks, units) // args.turns
    if len(rows) == 1 and args.k <= _KEPT_K and blocks // args.turns > places:
        args.blocks[0] = blocks = args.turns * places
    return kernel, blocks


def blocks_at_once(stream: Stream) -> int:
    """How many blocks of a kernel for one row the device runs at once, where these kernels can have narrow blocks, else 0."""
    return _RESIDENT * stream.device.properties.compute_units if on_sm(stream) else 0
