"""Which `libamdhip64.so` this process drives: AMD's, or one of our two stand-ins (`cuda`, `cpu`).

hip-python finds the library by itself, and looks into installed packages before any environment variable, so the choice is made here
before the first HIP call: its path look-up is overridden for that one library while it is opened, then restored. What was really mapped
is checked afterwards (file and marker symbol). One runtime per process; the environment is never changed; nothing of HIP is imported
before `select()`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53.errors import HipError, InputError, RuntimeUnavailable
from glm53.hip import calls

NAMES = ("auto", "rocm", "cuda", "cpu")
VARIABLE = "GLM53_RUNTIME"
LIBRARY = "libamdhip64"
MARKER = "glm53_runtime_name"
PROBE_SECONDS = 60


@dataclass(frozen=True)
class RuntimeInfo:
    """The runtime in use. `reason` says why this one, in words for the user."""

    name: str  # rocm, cuda or cpu
    library: str  # path of the mapped libamdhip64
    reason: str
    binding: str  # module and version of hip-python
    runtime_version: int  # hipRuntimeGetVersion
    driver_version: int  # hipDriverGetVersion
    device_count: int


_lock = threading.Lock()
_selected: RuntimeInfo | None = None


def native_directory() -> Path:
    """Where the built libraries and code objects are: `_native` beside the package. The path may not exist."""
    candidates = [Path(entry) / "_native" for entry in sys.modules["glm53"].__path__]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def select(name: str | None = None) -> RuntimeInfo:
    """Chooses and opens the HIP runtime; later calls return the same, and fail when they ask for another.

    name: "auto", "rocm", "cuda" or "cpu"; None takes $GLM53_RUNTIME, then "auto". auto takes rocm if a device answers, else cuda if libcuda
    and a device answer, else cpu. Raises InputError for another name, RuntimeUnavailable when the runtime cannot be had or another HIP
    library is already mapped.
    """
    global _selected
    wanted = name or os.environ.get(VARIABLE) or "auto"
    if wanted not in NAMES:
        source = "runtime" if name else f"${VARIABLE}"
        raise InputError(f"{source} is {wanted!r}, expected one of {', '.join(NAMES)}")
    with _lock:
        if _selected is not None:
            if name in (None, "auto", _selected.name):
                return _selected
            raise RuntimeUnavailable(
                f"the {wanted} runtime was asked for, but this process already drives {_selected.name} ({_selected.library}); "
                "next: start another process"
            )
        _selected = _open(wanted)
        return _selected


def selected() -> RuntimeInfo | None:
    """The runtime in use, None before `select()`."""
    return _selected


def control() -> ctypes.CDLL:
    """The mapped stand-in library, for the symbols it has beside HIP's (`glm53_cpu_configure`, ...).

    Raises RuntimeUnavailable on AMD's library, which has none.
    """
    info = select()
    if info.name == "rocm":
        raise RuntimeUnavailable(f"{info.library} is AMD's library: it has no control symbols; next: {VARIABLE}=cpu")
    library = ctypes.CDLL(info.library)
    if info.name == "cpu":
        library.glm53_cpu_seed.argtypes = (ctypes.c_uint64, ctypes.c_int)
        library.glm53_cpu_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)
        for counter in (library.glm53_cpu_calls, library.glm53_cpu_live):
            counter.argtypes, counter.restype = (ctypes.c_char_p,), ctypes.c_uint64
    return library


def configure_cpu(devices: int, bytes_per_device: int) -> None:
    """Number (1 to 16) and memory of the cpu runtime's devices; only before `select()`, and it selects nothing. Default: 2 of 4 GiB.

    Raises RuntimeUnavailable if a runtime is in use already or the cpu runtime is not built, InputError for values it refuses.
    """
    if _selected is not None:
        raise RuntimeUnavailable(f"the {_selected.name} runtime is in use already; next: configure_cpu before the first device")
    configure = ctypes.CDLL(_stand_in("cpu")).glm53_cpu_configure
    configure.argtypes = (ctypes.c_uint32, ctypes.c_uint64)
    code = configure(devices, bytes_per_device)
    if code:
        raise InputError(f"configure_cpu: {devices} devices of {bytes_per_device} bytes were refused (hipError {code})")


# Finding the binding


@dataclass(frozen=True)
class _Binding:
    """hip-python as installed: 10 resolves the path in a Python function, 6.x and 7.x hold a file name in a module variable."""

    label: str
    default_path: Callable[[], str]
    overridden: Callable[[str], Any]  # path -> context manager
    module: Callable[[], Any]


def _find_binding() -> _Binding:
    try:
        paths = importlib.import_module("rocm.bindings.util.paths")
    except ImportError:
        paths = None
    if paths is not None:
        return _Binding(
            label=f"rocm.bindings {_version_of('rocm-bindings-hip')}",
            default_path=lambda: os.fsdecode(paths.get_library_path("amdhip64")),
            overridden=lambda path: _override_function(paths, path),
            module=lambda: importlib.import_module("rocm.bindings.hip"),
        )
    try:
        chip = importlib.import_module("hip.chip")
    except ImportError as error:
        raise RuntimeUnavailable(
            f"hip-python is not installed ({error}); it is needed for every runtime, the cpu one too; next: pip install 'hip-python>=6.4'"
        ) from None
    return _Binding(
        label=f"hip-python {_version_of('hip-python')}",
        default_path=lambda: os.fsdecode(chip.DLL),
        overridden=lambda path: _override_variable(chip, path),
        module=lambda: importlib.import_module("hip.hip"),
    )


def _version_of(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


@contextmanager
def _override_function(paths: Any, path: str) -> Iterator[None]:
    original = paths.get_library_path

    def get_library_path(shortname: str, *args: Any, **named: Any) -> bytes:
        if shortname == "amdhip64":
            return os.fsencode(path)
        return original(shortname, *args, **named)

    paths.get_library_path = get_library_path
    try:
        yield
    finally:
        paths.get_library_path = original


@contextmanager
def _override_variable(chip: Any, path: str) -> Iterator[None]:
    original = chip.DLL
    chip.DLL = os.fsencode(path)
    try:
        yield
    finally:
        chip.DLL = original


# What is mapped


def mapped_libraries() -> list[str]:
    """Paths of the HIP runtimes mapped into this process, from /proc/self/maps, in order of address, each once."""
    found: dict[str, None] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith(LIBRARY):
                found[fields[5].removesuffix(" (deleted)")] = None
    return list(found)


def _marker_of(library: str) -> str:
    """The name one of our stand-ins gives itself, or "rocm" for a library without the marker symbol."""
    try:
        function = getattr(ctypes.CDLL(library), MARKER)
    except AttributeError:
        return "rocm"
    function.restype = ctypes.c_char_p
    return function().decode()


def _same_file(left: str, right: str) -> bool:
    return os.path.exists(left) and os.path.exists(right) and os.path.samefile(left, right)


def _refuse_foreign(mapped: list[str], name: str, path: str) -> None:
    """Refuses when a HIP runtime other than `path` is mapped. A bare `path` is left to the loader, which returns AMD's mapped library."""
    for library in mapped:
        bare = os.sep not in path
        if not (_same_file(library, path) or (bare and name == "rocm" and _marker_of(library) == "rocm")):
            raise RuntimeUnavailable(
                f"the {name} runtime is {path}, but another HIP runtime is already loaded: {library}; "
                "next: select the runtime before other HIP users of this process are imported, or use a process of its own"
            )


# Probes run in a child, so that a library which answers badly leaves nothing mapped here.
_PROBE = f"""
import ctypes, json, sys
path, init, count, flavour = json.loads(sys.argv[1])
try:
    library = ctypes.CDLL(path)
    if flavour == "rocm" and hasattr(library, "{MARKER}"):
        raise OSError(path + " is a stand-in of glm53, not AMD's library")
    devices = ctypes.c_int(0)
    error = getattr(library, init)(0)
    error = error or getattr(library, count)(ctypes.byref(devices))
    print(json.dumps([devices.value, "error %d" % error if error else ""]))
except (OSError, AttributeError) as error:
    print(json.dumps([0, str(error)]))
"""


def _probe(path: str, init: str, count: str, flavour: str) -> tuple[int, str]:
    """(devices that answered, why none) of the library at `path`, asked in a child process."""
    if not sys.executable:
        return 0, f"no interpreter to probe with; next: set {VARIABLE}"
    command = [sys.executable, "-I", "-S", "-c", _PROBE, json.dumps([path, init, count, flavour])]
    try:
        child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"the probe failed: {error}"
    if child.returncode != 0:
        return 0, f"the probe died with status {child.returncode}"
    devices, why = json.loads(child.stdout.strip().splitlines()[-1])
    why = why.replace(": cannot open shared object file: No such file or directory", " not found")
    return devices, why or ("" if devices else "no device")


def _probe_rocm(path: str) -> tuple[int, str]:
    return _probe(path, "hipInit", "hipGetDeviceCount", "rocm")


def _probe_cuda() -> tuple[int, str]:
    return _probe("libcuda.so.1", "cuInit", "cuDeviceGetCount", "cuda")


# Opening


def _stand_in(name: str) -> str:
    """Path of our library; raises RuntimeUnavailable with the build command if it was not built."""
    path = native_directory() / name / f"{LIBRARY}.so"
    if not path.is_file():
        raise RuntimeUnavailable(
            f"the {name} runtime is not built: {path} does not exist; next: pip install . in a clone of the source (needs CMake and a C++ compiler)"
        )
    return str(path)


def _choose_auto(binding: _Binding) -> tuple[str, str, str]:
    """(name, path, reason) by the order rocm, cuda, cpu."""
    rocm_path = binding.default_path()
    devices, why_not_rocm = _probe_rocm(rocm_path)
    if devices:
        return "rocm", rocm_path, f"auto; rocm: {devices} AMD device(s) answered"
    devices, why_not_cuda = _probe_cuda()
    if devices:
        try:
            return "cuda", _stand_in("cuda"), f"auto; rocm: {why_not_rocm}; cuda: {devices} CUDA device(s) answered"
        except RuntimeUnavailable as error:
            why_not_cuda = str(error)
    return "cpu", _stand_in("cpu"), f"auto; rocm: {why_not_rocm}; cuda: {why_not_cuda}"


def _open(wanted: str) -> RuntimeInfo:
    binding = _find_binding()
    if wanted == "auto":
        name, path, reason = _choose_auto(binding)
    else:
        path = binding.default_path() if wanted == "rocm" else _stand_in(wanted)
        name, reason = wanted, "asked for"
    _refuse_foreign(mapped_libraries(), name, path)
    with binding.overridden(path):
        hip = binding.module()
        try:
            code = hip.hipInit(0)[0]
        except RuntimeError as error:
            hint = "install ROCm" if name == "rocm" else "build again with pip install ."
            raise RuntimeUnavailable(f"the {name} runtime cannot be opened: {error}; next: {hint}, or set {VARIABLE}=cpu") from None
    library = _verify(name, path)
    message = None
    if name != "rocm":
        message = ctypes.CDLL(library).glm53_runtime_message
        message.restype = ctypes.c_char_p
    calls.bind(hip, message)
    try:
        if code:
            raise calls.failure("hipInit", int(code))
        count = calls.device_count()
        versions = calls.runtime_version(), calls.driver_version()
    except HipError as error:
        raise RuntimeUnavailable(f"the {name} runtime ({library}) does not answer: {error}; next: {VARIABLE}=cpu runs without a GPU") from error
    if count == 0:
        raise RuntimeUnavailable(f"the {name} runtime ({library}) has no device; next: {VARIABLE}=cpu runs without a GPU")
    return RuntimeInfo(name, library, reason, binding.label, versions[0], versions[1], count)


def _verify(name: str, path: str) -> str:
    """The mapped library's path, after checking that it is the one meant; raises RuntimeUnavailable naming both otherwise."""
    mapped = mapped_libraries()
    if not mapped:
        raise RuntimeUnavailable(f"hip-python answered, but no {LIBRARY} is mapped; expected {path}; next: report the hip-python version")
    _refuse_foreign(mapped, name, path)
    library = mapped[0]
    marker = _marker_of(library)
    if marker != name:
        raise RuntimeUnavailable(f"the {name} runtime was asked for, but {library} says it is {marker}; next: check {path}")
    return library
