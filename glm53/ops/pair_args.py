"""Argument structs of what two devices of a pair do together, as `args`."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64, c_void_p

from glm53.ops.args import Args


class exchange_args(Args):
    """y = T(residual + (p0 + p1)): sums of this side and of the other, whose words come through mailboxes"""

    _fields_ = [
        ("sums", c_void_p),  # [count] f32: of this side
        ("outbox", c_void_p),  # [2, capacity] u64 in the other device's uncached memory: number << 32 | value
        ("inbox", c_void_p),  # [2, capacity] u64, uncached: what the other side stores
        ("residual", c_void_p),  # [count] T; may be y
        ("y", c_void_p),  # [count] T
        ("sequence", c_void_p),  # [1] u32: number before the first exchange that counts from here
        ("error", c_void_p),  # [1] u32: number of an exchange that got no answer, or 0
        ("budget", c_uint64),  # polls of one wait
        ("count", c_uint32),
        ("capacity", c_uint32),
        ("index", c_uint32),  # of the exchange after `sequence`, from 1
        ("_pad", c_uint32),
    ]
