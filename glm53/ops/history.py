"""Index keys into the extents of histories. Layout: hipsrc/kernels/history.hip. History rows: glm53/ops/rows.py."""

from __future__ import annotations

from typing import Protocol

from glm53.hip import Array, Stream
from glm53.ops.args import append_args
from glm53.ops.contract import Cost, Dims, launch, variant
from glm53.spec import WHOLE, DType, Shard


class ExtentLayout(Protocol):
    """What a kernel must know of an extent: row r of plane l lies at (l * extent_rows + r) * row_bytes."""

    @property
    def extent_rows(self) -> int: ...

    @property
    def planes(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...


def append(
    stream: Stream, x: Array, tables: Array, sessions: Array, positions: Array, layout: ExtentLayout, plane: int, share: Shard = WHOLE
) -> None:
    """Stores row r of x as row positions[r] of plane `plane` of session sessions[r]; a negative position is padding and is skipped.

    x [rows, width] T (f32 or bf16), width * sizeof(T) <= row_bytes; tables [sessions, extents] u64, the extents of these positions present;
    sessions, positions [rows] i32. The caller has checked that positions and sessions lie inside the tables. share: the side whose tables these
    are, its own extents one after the other; positions of the other side are skipped. Raises ContractError.
    """
    dims = Dims("append")
    dims.match("x", x, "rows", "width", dtype=(DType.F32, DType.BF16))
    dims.match("tables", tables, "session_slots", "extents", dtype=DType.U64)
    dims.match("sessions", sessions, "rows", dtype=DType.I32)
    dims.match("positions", positions, "rows", dtype=DType.I32)
    width_bytes = dims["width"] * x.dtype.item_bytes
    dims.require(width_bytes <= layout.row_bytes, f"a row of x is {width_bytes} bytes, expected at most row_bytes={layout.row_bytes}")
    dims.require(0 <= plane < layout.planes, f"plane is {plane}, expected one of the {layout.planes} planes of the extents")
    args = append_args(
        x.address,
        tables.address,
        sessions.address,
        positions.address,
        dims["width"],
        dims["width"],
        dims["extents"],
        layout.extent_rows,
        plane,
        layout.row_bytes,
        share.index,
        share.count,
    )
    launch(stream, variant("append", ("f32", "bf16"), x.dtype), (dims["rows"], 1, 1), args)


def cost_append(x: Array) -> Cost:
    """Rows read and written, and 16 bytes of session, position and extent address a row."""
    return Cost(2 * x.nbytes + 16 * x.shape[0], 0)
