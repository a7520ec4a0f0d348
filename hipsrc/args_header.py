"""Writes args.h, the C twins of the argument structs in glm53/ops: python args_header.py OUT.h

A static assertion per offset, and for the host build the offsets of the pointer fields (the cpu runtime checks them before a launch).
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_float, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from glm53.ops import args, history_args, mtp_args, pair_args, step_args

Args = args.Args
SOURCES = [Path(module.__file__ or "") for module in (args, history_args, step_args, pair_args, mtp_args)]
_C_NAME: dict[Any, str] = {c_void_p: "void*", c_int32: "int32_t", c_uint32: "uint32_t", c_uint64: "uint64_t", c_float: "float"}


def structs() -> list[type[args.Args]]:
    """All argument structs, in order of definition."""
    return Args.__subclasses__()


def _declaration(field: str, ctype: Any) -> str:
    if issubclass(ctype, ctypes.Array):
        return f"{_C_NAME[ctype._type_]} {field}[{ctype._length_}]"
    if issubclass(ctype, Args):
        return f"{ctype.__name__} {field}"
    return f"{_C_NAME[ctype]} {field}"


def pointer_offsets(struct: Any) -> list[int]:
    """Byte offsets of all pointers of a struct, those in arrays and nested structs included."""
    offsets = []
    for field, ctype, *_ in struct._fields_:
        start = getattr(struct, field).offset
        if ctype is c_void_p:
            offsets.append(start)
        elif issubclass(ctype, ctypes.Array) and ctype._type_ is c_void_p:
            offsets += [start + 8 * i for i in range(ctype._length_)]
        elif issubclass(ctype, Args):
            offsets += [start + inner for inner in pointer_offsets(ctype)]
    return offsets


def header() -> str:
    """C text of args.h: struct, offset assertions, and for the host build the pointer offsets."""
    out = ["// args.h - written by hipsrc/args_header.py at build time. Do not edit.", "#pragma once", ""]
    for struct in structs():
        name = struct.__name__
        fields = [(f[0], f[1]) for f in struct._fields_]
        out += [f"struct {name} {{"] + [f"  {_declaration(field, ctype)};" for field, ctype in fields] + ["};"]
        out += [f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}: size differs from glm53/ops");']
        for field, _ in fields:
            offset = getattr(struct, field).offset
            out += [f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "{name}.{field}: offset differs from glm53/ops");']
        pointers = [str(offset) for offset in pointer_offsets(struct)]
        out += ["#if defined(GLM53_HOST)"]
        out += [f"static const unsigned short {name}_pointers[] = {{{', '.join(pointers) or '0'}}};"]
        out += [f"enum {{ {name}_pointer_count = {len(pointers)} }};", "#endif", ""]
    return "\n".join(out)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as target:
        target.write(header())
