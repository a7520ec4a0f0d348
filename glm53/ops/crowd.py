"""Launches of step_gemv whose blocks are three teams of waves (hipsrc/kernels/wave_crowd.h): the same bits as the other kernels' for several rows."""

from __future__ import annotations

from glm53.ops.contract import ceil_div
from glm53.ops.step_args import step_gemv_args
from glm53.spec import WeightFormat

ROWS_LEAST = 5  # but for halves of k: of fewer rows x is made in less time than is lost by one block a multiprocessor
COLUMNS = 96  # of a block


def kernel(args: step_gemv_args, segments: int, residual: bool, silu: bool, units: int) -> str | None:
    """The kernel for a launch of bf16 x on sm_90, without mail, whose args are bound but for blocks, or None: others are faster."""
    if segments > 1 or args.rows == 1 or not args.wide or args.format[0] != WeightFormat.Q8G64 or args.part:
        return None
    if residual:
        return "step_halves_crowd_bf16_q8g64"
    many = args.rows >= ROWS_LEAST and args.n[0] > COLUMNS * units and not silu
    return "step_gemv_crowd_bf16_q8g64" if many else None


def bind_blocks(args: step_gemv_args, rows_max: int, units: int) -> None:
    """Equal shares of the rows, and blocks: one a set of columns in halves of k, else as many as run at once, which take several sets."""
    args.turns, sets = ceil_div(args.rows, rows_max), ceil_div(args.n[0], COLUMNS)
    args.blocks[0] = args.turns * (sets if args.partial else min(sets, max(1, units // args.turns)))
