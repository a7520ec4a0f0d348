"""Products in halves of k by blocks of three teams of waves (hipsrc/kernels/wave_crowd.h): the same bits as the other kernels' for several rows."""

from __future__ import annotations

from glm53.ops.contract import ceil_div
from glm53.ops.step_args import step_gemv_args
from glm53.spec import WeightFormat

KERNEL = "step_halves_crowd_bf16_q8g64"
COLUMNS = 96  # of a block
TEAMS = 3  # of a block, each as large as a block of other kernels


def fits(args: step_gemv_args) -> bool:
    """Whether a RESIDUAL product of bf16 x on sm_90, without mail, whose args are bound but for blocks, is one of those."""
    return bool(args.rows > 1 and args.wide and args.format[0] == WeightFormat.Q8G64)


def bind_blocks(args: step_gemv_args, rows_max: int, units: int) -> None:
    """Equal shares of the rows, a block for each and each set of columns. A compute unit has one block; those of a part have the units left."""
    args.turns = ceil_div(args.rows, rows_max)
    args.blocks[0] = args.turns * ceil_div(args.n[0], COLUMNS)
    if args.part_blocks:
        left = units - 2 * args.blocks[0] % units
        args.part_blocks = min(ceil_div(args.part_blocks, TEAMS), left)
