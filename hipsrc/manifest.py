"""Writes manifest.json: what each code object is, the sources it came from, and what a launch of each kernel needs. Runs at build time.

    python manifest.py --listing kernels.i --source-dir hipsrc --native DIR
                       --object host=kernels.so="g++ 12.2.0" --object gfx1100=kernels.gfx1100.hsaco="clang 19.1.7"

The listing is kernels.hip after `-E -DGLM53_LIST` (see portable_list.h); launch constants come from the lines
`// LAUNCH name block=256 key=value`. The output holds no path and no time, so equal inputs give equal bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import args_header

FORMAT = 1
_KERNEL = re.compile(r"GLM53_KERNEL_LINE\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*,\s*([01])\s*\)")
_LAUNCH = re.compile(r"^// LAUNCH (\w+)((?: \w+=\d+)*)\s*$", re.MULTILINE)


class ManifestError(Exception):
    """The sources contradict each other; the text names the kernel."""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_files(source_dir: Path) -> list[Path]:
    """Every file that decides the bytes of a code object, in order of name, those of glm53/ops apart."""
    return sorted([*source_dir.glob("include/*.h"), *source_dir.glob("kernels/*.h"), *source_dir.glob("kernels/*.hip"), *source_dir.glob("host/*.h")])


def launch_constants(source_dir: Path) -> dict[str, dict[str, int]]:
    """Constants of each kernel's LAUNCH line."""
    constants: dict[str, dict[str, int]] = {}
    for path in sorted(source_dir.glob("kernels/*.hip")):
        for name, pairs in _LAUNCH.findall(path.read_text()):
            if name in constants:
                raise ManifestError(f"{path.name}: second LAUNCH line of {name}")
            constants[name] = {key: int(value) for key, value in (pair.split("=") for pair in pairs.split())}
    return constants


def kernels(listing: str, constants: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """The manifest's `kernels`: block, args, args_bytes, spins, then launch constants. Every kernel has a LAUNCH line and the reverse."""
    found: dict[str, dict[str, Any]] = {}
    structs = {struct.__name__: struct for struct in args_header.structs()}
    for name, args, threads, spins in _KERNEL.findall(listing):
        if name in found:
            raise ManifestError(f"two kernels are called {name}")
        if name not in constants:
            raise ManifestError(f"kernel {name} has no line `// LAUNCH {name} block={threads}`")
        if constants[name].get("block") != int(threads):
            raise ManifestError(f"kernel {name} has {threads} work-items, its LAUNCH line says block={constants[name].get('block')}")
        struct = structs.get(args)
        if struct is None:
            raise ManifestError(f"kernel {name} takes {args}, which glm53/ops does not define")
        found[name] = {"block": int(threads), "args": args, "args_bytes": ctypes.sizeof(struct), "spins": spins == "1", **constants[name]}
    unused = sorted(set(constants) - set(found))
    if unused:
        raise ManifestError(f"LAUNCH lines without a kernel: {', '.join(unused)}")
    return dict(sorted(found.items()))


def build(listing: Path, source_dir: Path, native: Path, objects: list[str]) -> dict[str, Any]:
    """The whole manifest as a dictionary."""
    sources = {path.relative_to(source_dir).as_posix(): sha256(path) for path in source_files(source_dir)}
    sources |= {path.name: sha256(path) for path in args_header.SOURCES}
    source_hash = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in sorted(sources.items())).encode()).hexdigest()
    entries = {}
    for text in objects:
        arch, file, compiler = text.split("=", 2)
        path = native / file
        size = path.stat().st_size
        entries[arch] = {"file": file, "sha256": sha256(path), "bytes": size, "compiler": compiler, "source_sha256": source_hash}
    return {
        "format": FORMAT,
        "source_sha256": source_hash,
        "sources": dict(sorted(sources.items())),
        "objects": dict(sorted(entries.items())),
        "kernels": kernels(listing.read_text(), launch_constants(source_dir)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listing", type=Path, required=True, help="kernels.hip preprocessed with -DGLM53_LIST")
    parser.add_argument("--source-dir", type=Path, required=True, help="directory with include/ and kernels/")
    parser.add_argument("--native", type=Path, required=True, help="directory with the code objects; manifest.json is written there")
    parser.add_argument("--object", action="append", default=[], dest="objects", metavar="ARCH=FILE=COMPILER")
    given = parser.parse_args()
    try:
        manifest = build(given.listing, given.source_dir, given.native, given.objects)
    except ManifestError as error:
        sys.exit(f"manifest: {error}")
    (given.native / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
