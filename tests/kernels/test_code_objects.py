"""What the built code objects say about themselves: metadata of the AMD ones, table of the host one, manifest, reproducibility."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm53.hip.module import manifest
from glm53.hip.runtime import native_directory
from glm53.ops import mtp_args, pair_args, step_args
from glm53.ops.args import Args

ROOT = Path(__file__).resolve().parents[2]
LDS_BYTES_MAX = 65_536  # of a gfx11 workgroup
READELF_NAMES = ("llvm-readelf", *(f"llvm-readelf-{version}" for version in range(22, 14, -1)))
READELF = next((found for name in READELF_NAMES if (found := shutil.which(name))), None)
AMD_ARCHS = ("gfx1100", "gfx1201", "gfx90a", "gfx942")


def built_path(arch: str) -> Path:
    objects = manifest()["objects"]
    if arch not in objects:
        pytest.skip(f"no code object for {arch} was built here (built: {', '.join(objects)})")
    return native_directory() / objects[arch]["file"]


def pointers_of(struct: type[ctypes.Structure]) -> list[int]:
    """Byte offsets of the pointers; those of arrays and nested structs included."""
    found = []
    for name, ctype, *_ in struct._fields_:
        start = getattr(struct, name).offset
        if issubclass(ctype, ctypes.Structure):
            found += [start + offset for offset in pointers_of(ctype)]
        elif ctype is ctypes.c_void_p or getattr(ctype, "_type_", None) is ctypes.c_void_p:
            found += range(start, start + ctypes.sizeof(ctype), 8)
    return found


@functools.cache
def metadata(path: Path) -> dict[str, dict[str, Any]]:
    """Kernel metadata of an AMD code object by kernel name."""
    if READELF is None:
        pytest.skip("llvm-readelf is not installed")
    text = subprocess.run([READELF, "--notes", str(path)], capture_output=True, text=True, check=True).stdout
    document = yaml.safe_load(text[text.index("---") : text.rindex("...")])
    return {kernel[".name"]: kernel for kernel in document["amdhsa.kernels"]}


def struct_of(entry: dict[str, Any]) -> type[ctypes.Structure]:
    return next(struct for struct in Args.__subclasses__() if struct.__name__ == entry["args"])


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_amd_object_has_exactly_the_kernels_of_the_manifest(arch: str) -> None:
    assert set(metadata(built_path(arch))) == set(manifest()["kernels"])


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_amd_kernels_neither_spill_nor_use_scratch(arch: str) -> None:
    """gfx9 has fewer scalar registers to spare and may keep a few in lanes of a vector register, which is no memory; nothing else spills anywhere."""
    scalar_spills_max = 8 if arch.startswith("gfx9") else 0
    keys = (".vgpr_spill_count", ".private_segment_fixed_size")
    kept = {name: k[".sgpr_spill_count"] for name, k in metadata(built_path(arch)).items() if k[".sgpr_spill_count"] > scalar_spills_max}
    assert not kept
    bad = {name: {key: k[key] for key in keys if k[key]} for name, k in metadata(built_path(arch)).items() if any(k[key] for key in keys)}
    assert not bad
    dynamic = [name for name, k in metadata(built_path(arch)).items() if k.get(".uses_dynamic_stack")]
    assert not dynamic, f"kernels with calls or a dynamic stack: {dynamic}"


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_amd_kernels_fit_the_hardware(arch: str) -> None:
    wave = 64 if arch.startswith("gfx9") else 32
    for name, kernel in metadata(built_path(arch)).items():
        assert kernel[".group_segment_fixed_size"] <= LDS_BYTES_MAX, name
        assert kernel[".wavefront_size"] == wave, name
        assert kernel[".max_flat_workgroup_size"] == manifest()["kernels"][name]["block"], name


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_amd_kernels_take_one_struct_and_nothing_hidden(arch: str) -> None:
    for name, kernel in metadata(built_path(arch)).items():
        size = ctypes.sizeof(struct_of(manifest()["kernels"][name]))
        found = [(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel[".args"]]
        assert found == [(0, size, "by_value")], f"{name}: {found}"
        assert kernel[".kernarg_segment_size"] == size, name


def test_cubin_has_every_kernel() -> None:
    path = built_path("sm_90")
    if READELF is None:
        pytest.skip("llvm-readelf is not installed")
    sections = subprocess.run([READELF, "-SW", str(path)], capture_output=True, text=True, check=True).stdout
    found = {word.removeprefix(".text.") for word in sections.split() if word.startswith(".text.")}
    assert found == set(manifest()["kernels"])


class HostKernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("args_bytes", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pointer_count", ctypes.c_uint32),
        ("pointer_offsets", ctypes.POINTER(ctypes.c_uint16)),
        ("fast", ctypes.c_void_p),
    ]


class HostModule(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("kernel_count", ctypes.c_uint32),
        ("kernels", ctypes.POINTER(HostKernel)),
        ("run_blocks", ctypes.c_void_p),
    ]


def test_host_table_agrees_with_the_manifest_and_the_structs() -> None:
    library = ctypes.CDLL(str(built_path("host")))
    library.glm53_host_module_get.restype = ctypes.POINTER(HostModule)
    module = library.glm53_host_module_get().contents
    assert module.abi == 2
    found = {module.kernels[i].name.decode(): module.kernels[i] for i in range(module.kernel_count)}
    assert set(found) == set(manifest()["kernels"])
    for name, kernel in found.items():
        entry = manifest()["kernels"][name]
        struct = struct_of(entry)
        pointers = pointers_of(struct)
        assert kernel.args_bytes == entry["args_bytes"] == ctypes.sizeof(struct), name
        waiting = getattr(struct, "waiting_blocks", None)  # its first blocks may wait, as many as this field says
        flags = int(entry["spins"]) if waiting is None else 2 | waiting.offset << 16
        assert (kernel.block_size, kernel.flags) == (entry["block"], flags), name
        assert kernel.pointer_offsets[: kernel.pointer_count] == pointers, name


def test_argument_structs_have_no_gaps() -> None:
    assert {step_args.step_gemv_args, pair_args.exchange_args, mtp_args.accept_args} <= set(Args.__subclasses__())
    for struct in Args.__subclasses__():
        fields = [getattr(struct, field[0]) for field in struct._fields_]
        ends = [field.offset + field.size for field in fields]
        assert [field.offset for field in fields] == [0, *ends[:-1]], struct.__name__


def test_manifest_hashes_are_those_of_the_files() -> None:
    content = manifest()
    for arch, entry in content["objects"].items():
        path = native_directory() / entry["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"], arch
        assert entry["source_sha256"] == content["source_sha256"], arch
    stale = []
    for name, digest in content["sources"].items():
        path = ROOT / (f"hipsrc/{name}" if "/" in name else f"glm53/ops/{name}")
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            stale.append(name)
    assert not stale, f"the build is older than {stale}; next: pip install . again"


def test_objects_are_the_same_bytes_when_built_in_another_directory(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not on the PATH")
    copy = tmp_path / "another place with spaces"
    shutil.copytree(ROOT / "hipsrc", copy / "hipsrc")
    (copy / "glm53" / "ops").mkdir(parents=True)
    for name in ("__init__.py", "ops/__init__.py", "ops/args.py", "ops/history_args.py", "ops/step_args.py", "ops/pair_args.py", "ops/mtp_args.py"):
        shutil.copy(ROOT / "glm53" / name, copy / "glm53" / name)
    archs = [arch for arch in ("gfx1100", "sm_90") if arch in manifest()["objects"]][:1]  # a minute each; all are built by the same rules
    environment = os.environ | {"GLM53_ARCHS": ",".join(archs) or "none"}
    for command in ([cmake, "-S", copy / "hipsrc", "-B", copy / "build"], [cmake, "--build", copy / "build", "--target", "code_objects"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for arch in ("host", *archs):
        file = manifest()["objects"][arch]["file"]
        assert (copy / "build" / "native" / file).read_bytes() == (native_directory() / file).read_bytes(), f"{file} differs"
