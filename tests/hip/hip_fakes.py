"""A fake HIP library, and the compiler call that makes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

# A HIP library with `DEVICES` devices and just enough to be selected. Compiled with -DDIES it kills the process that opens it.
FAKE_HIP = """
#include <stdlib.h>
#ifndef DEVICES
#define DEVICES 1
#endif
#ifdef DIES
__attribute__((constructor)) static void die(void) { abort(); }
#endif
int hipInit(unsigned flags) { return flags; }
int hipGetDeviceCount(int* count) { *count = DEVICES; return DEVICES ? 0 : 100; }
int hipRuntimeGetVersion(int* version) { *version = 60443483; return 0; }
int hipDriverGetVersion(int* version) { *version = 60443483; return 0; }
int hipGetLastError(void) { return 0; }
"""


def compile_library(source: str | Path, target: Path, *options: str) -> Path:
    """Compiles C text or a C file into a shared library at `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file = source if isinstance(source, Path) else target.with_suffix(".c")
    if isinstance(source, str):
        file.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", str(target), str(file)], check=True)
    return target
