"""Products of several rows by blocks of more than 8 waves (hipsrc/kernels/wave_crowd.h, wave_held.h): the same bits as the other kernels'."""

from __future__ import annotations

from collections.abc import Mapping

from glm53.hip import Device
from glm53.ops.contract import ceil_div
from glm53.ops.step_args import step_gemv_args
from glm53.spec import WeightFormat

HALVES, HEAD = "step_halves_crowd_bf16_q8g64", "step_gemv_head_bf16_q8g64"
KERNELS = (HALVES, HEAD)
TEAMS = 3  # of a block, each as large as a block of other kernels


def kernel(args: step_gemv_args, device: Device, residual: bool, pairs: bool) -> str | None:
    """The kernel for a launch of bf16 x on sm_90, without mail, whose args are bound but for blocks, or None: it is none of these.

    pairs: several segments, or SILU. HEAD: teams of its blocks have several sets of columns.
    """
    if pairs or args.rows == 1 or not args.wide or args.format[0] != WeightFormat.Q8G64:
        return None
    if residual:
        return HALVES
    if args.part:
        return None
    constants = device.kernel(HEAD).constants
    many = args.n[0] > constants["cols"] * device.properties.compute_units
    return HEAD if many and args.k <= constants["k_max"] else None


def bind_blocks(args: step_gemv_args, constants: Mapping[str, int], units: int) -> None:
    """Equal shares of the rows. HALVES: a block for each and each set of columns; HEAD: as many as run at once. A unit has one block; blocks of
    a part have the units left.
    """
    args.turns = ceil_div(args.rows, constants["rows"])
    sets = ceil_div(args.n[0], constants["cols"])
    args.blocks[0] = args.turns * (sets if args.partial else min(sets, max(1, units // args.turns)))
    if args.part_blocks:
        args.part_blocks = min(ceil_div(args.part_blocks, TEAMS), units - 2 * args.blocks[0] % units)
