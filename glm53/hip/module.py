"""Code objects and kernels.

`glm53/_native/manifest.json` names one code object per architecture and, per kernel, what a launch needs: block size, argument struct,
launch constants. A code object is loaded once per device, after its hash was compared with the manifest.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53.errors import DeviceLost, HipError, RuntimeUnavailable
from glm53.hip import calls, runtime

if TYPE_CHECKING:
    from glm53.hip.device import Device
    from glm53.hip.stream import Stream

MANIFEST_FORMAT = 1
_KERNEL_KEYS = ("block", "args", "args_bytes", "spins")


@functools.cache
def manifest(directory: Path | None = None) -> dict[str, Any]:
    """The parsed manifest of `directory` (default: the package's `_native`). Raises RuntimeUnavailable if absent, damaged or of another
    format."""
    path = (directory or runtime.native_directory()) / "manifest.json"
    if not path.is_file():
        raise RuntimeUnavailable(f"no code objects are built: {path} does not exist; next: pip install . in a clone of the source")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RuntimeUnavailable(f"{path} cannot be read: {error}; next: pip install . again") from None
    if content.get("format") != MANIFEST_FORMAT:
        raise RuntimeUnavailable(f"{path} has format {content.get('format')}, expected {MANIFEST_FORMAT}; next: pip install . again")
    return content


def code_objects() -> dict[str, dict[str, Any]]:
    """The built code objects by architecture: file, sha256, compiler, bytes. Empty if nothing is built."""
    if not (runtime.native_directory() / "manifest.json").is_file():
        return {}
    return manifest()["objects"]


def object_path(arch: str, directory: Path | None = None) -> Path:
    """Path of the code object for `arch` ("gfx1100", "sm_90", "host"), its hash checked.

    Raises RuntimeUnavailable: no such architecture (names those that exist and the build command), file missing, or changed since the
    build.
    """
    directory = directory or runtime.native_directory()
    objects = manifest(directory)["objects"]
    if arch not in objects:
        built = ", ".join(sorted(objects)) or "none"
        raise RuntimeUnavailable(
            f"no code object for {arch}; built: {built}; next: GLM53_ARCHS={arch} pip install . in a clone of the source "
            f'(or -DGLM53_ARCHS="{arch}" with CMake)'
        )
    entry = objects[arch]
    path = directory / entry["file"]
    if not path.is_file():
        raise RuntimeUnavailable(f"{path} is in the manifest but does not exist; next: pip install . again")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != entry["sha256"]:
        raise RuntimeUnavailable(f"{path} has sha256 {digest}, expected {entry['sha256']}; next: pip install . again")
    return path


class Module:
    """The code object of one device's architecture, loaded there."""

    def __init__(self, device: Device):
        self.device = device
        self.path = object_path(device.arch)
        self._kernels: dict[str, Kernel] = {}
        with device.current():
            self._handle: Any = calls.module_load(str(self.path))

    def kernel(self, name: str) -> Kernel:
        """The kernel `name`. Raises RuntimeUnavailable if the build has none of this name."""
        found = self._kernels.get(name)
        if found is None:
            entry = manifest()["kernels"].get(name)
            if entry is None:
                raise RuntimeUnavailable(f"no kernel {name!r} in {self.path.name}; next: pip install . again if the code is newer than the build")
            with self.device.current():
                function = calls.module_function(self._handle, name)
            found = self._kernels[name] = Kernel(self.device, name, function, entry)
        return found

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._kernels.clear()
            with self.device.current():
                calls.module_unload(handle)


class Kernel:
    """A kernel of a device. block: its own block size (x). spins: it may wait for another device or the host. constants: launch constants
    declared beside its source, e.g. `tile_n`."""

    def __init__(self, device: Device, name: str, function: Any, entry: dict[str, Any]):
        self.device = device
        self.name = name
        self.block: int = entry["block"]
        self.args_name: str = entry["args"]
        self.args_bytes: int = entry["args_bytes"]
        self.spins: bool = entry["spins"]
        self.constants: dict[str, int] = {key: value for key, value in entry.items() if key not in _KERNEL_KEYS}
        self._function = function
        self._args_type: type | None = None
        self._slots = threading.local()

    def _check_args(self, args: ctypes.Structure) -> None:
        kind = type(args)
        if kind.__name__ != self.args_name or ctypes.sizeof(kind) != self.args_bytes:
            raise TypeError(
                f"{self.name}: args is {kind.__name__} of {ctypes.sizeof(kind)} B, expected {self.args_name} of {self.args_bytes} B "
                "(a different size means that the build is older than glm53/ops/args.py)"
            )
        self._args_type = kind

    def _slot(self) -> tuple[int, Any, calls.LaunchSlot]:
        slot = calls.LaunchSlot(self.args_bytes)
        self._slots.value = (slot.struct_address, calls.prepare_params(slot), slot)
        return self._slots.value

    def launch(self, stream: Stream, grid: tuple[int, int, int], args: ctypes.Structure) -> None:
        """Enqueues the kernel with `grid` blocks; `args` is copied by the call and may be changed after it.

        Raises TypeError for another struct, HipError from the runtime (e.g. a grid over its limits), DeviceLost after a fault.
        """
        if type(args) is not self._args_type:
            self._check_args(args)
        try:
            address, params, _ = self._slots.value
        except AttributeError:
            address, params, _ = self._slot()
        ctypes.memmove(address, ctypes.byref(args), self.args_bytes)
        index = self.device.index
        previous = calls.current_device()
        if previous != index:
            calls.set_device(index)
        try:
            calls.launch(self._function, grid, self.block, stream.handle, params)
        except DeviceLost:
            raise
        except HipError as error:
            detail = f"kernel {self.name}, grid {grid}, block {self.block}; {error.detail}"
            raise HipError(error.call, error.code, error.text, detail) from None
        finally:
            if previous != index:
                calls.set_device(previous)
        if stream.capturing is not None:
            stream.capturing.kernel_count += 1
