"""Which HIP library a process drives: the choice, what can get in its way, and what it leaves behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from hip_fakes import FAKE_HIP, compile_library

SELECT = "from glm53.hip import runtime\ninfo = runtime.select()\nprint(info.name, info.library, info.reason, sep='|')"


@pytest.fixture
def fake_wheel(tmp_path: Path, fake_hip: Path) -> Path:
    """A folder for sys.path with a `rocm_sdk` package, as ROCm's wheels install it, that offers the fake library."""
    package = tmp_path / "wheel" / "rocm_sdk"
    package.mkdir(parents=True)
    text = f"def find_libraries(*names):\n    return [{str(fake_hip)!r}] if 'amdhip64' in names else []\n"
    package.joinpath("__init__.py").write_text(text)
    return package.parent


@pytest.fixture
def fake_bundle(tmp_path: Path, fake_hip: Path) -> Path:
    """A folder for sys.path with hip-python's `rocm` package and the fake library inside it, where hip-python looks first."""
    found = importlib.util.find_spec("rocm.bindings")
    assert found is not None and found.submodule_search_locations
    package = tmp_path / "bundle" / "rocm"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libamdhip64.so").symlink_to(fake_hip)
    installed = Path(next(iter(found.submodule_search_locations)))
    (package / "bindings").symlink_to(installed)
    (package / "version.py").symlink_to(installed.parent / "version.py")
    return package.parent


@pytest.mark.parametrize("place", ["fake_wheel", "fake_bundle"])
def test_cpu_means_cpu_beside_a_rocm_wheel(child: Callable[..., str], fake_hip: Path, place: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(place)
    found = child("from rocm.bindings.util.paths import get_library_path as f\nprint(f('amdhip64').decode())", (folder,))
    assert Path(found).resolve() == fake_hip, "the fake is not where hip-python looks, so this test would prove nothing"
    code = SELECT + "\nprint([line for line in open('/proc/self/maps') if '/fake' in line])"
    name, _, rest = child(code, (folder,), runtime="cpu").partition("|")
    assert name == "cpu"
    assert rest.endswith("[]"), f"the fake library is mapped: {rest}"


def test_rocm_takes_what_hip_python_finds(child: Callable[..., str], fake_wheel: Path, fake_hip: Path) -> None:
    name, library, _ = child(SELECT, (fake_wheel,), runtime="rocm").split("|")
    assert (name, library) == ("rocm", str(fake_hip))


def test_auto_prefers_an_amd_device_that_answers(child: Callable[..., str], fake_wheel: Path, mock_cuda: Path) -> None:
    name, _, reason = child(SELECT, (fake_wheel,), (mock_cuda.parent,)).split("|")
    assert name == "rocm" and "rocm: 1 AMD device(s) answered" in reason


def test_auto_takes_cuda_next(child: Callable[..., str], mock_cuda: Path) -> None:
    name, _, reason = child(SELECT, libraries=(mock_cuda.parent,)).split("|")
    assert name == "cuda" and "rocm: libamdhip64.so not found" in reason and "cuda: 2 CUDA device(s) answered" in reason


@pytest.mark.parametrize("option", ["-DDEVICES=0", "-DDIES"])
def test_auto_survives_a_library_without_devices(child: Callable[..., str], tmp_path: Path, option: str) -> None:
    rocm = tmp_path / "rocm"
    compile_library(FAKE_HIP, rocm / "lib" / "libamdhip64.so", option)
    broken_cuda = compile_library("int cuInit(unsigned f) { return 100; }\n", tmp_path / "nocuda" / "libcuda.so.1").parent
    code = f"import os\nos.environ['ROCM_PATH'] = {str(rocm)!r}\n" + SELECT
    name, library, reason = child(code, libraries=(broken_cuda,)).split("|")
    assert name == "cpu" and library.endswith("cpu/libamdhip64.so")
    assert "rocm: " in reason and "cuda: error 100" in reason


def test_refuses_when_another_hip_is_mapped(child: Callable[..., str], fake_hip: Path) -> None:
    code = f"""
    import ctypes
    ctypes.CDLL({str(fake_hip)!r})
    from glm53.errors import RuntimeUnavailable
    from glm53.hip import runtime
    try:
        runtime.select("cpu")
    except RuntimeUnavailable as error:
        print(error)
    """
    text = child(code)
    assert str(fake_hip) in text and "cpu/libamdhip64.so" in text and "next:" in text


def test_refuses_when_hip_python_was_used_before(child: Callable[..., str], fake_wheel: Path, fake_hip: Path) -> None:
    code = """
    from rocm.bindings import hip
    hip.hipInit(0)
    from glm53.errors import RuntimeUnavailable
    from glm53.hip import runtime
    try:
        runtime.select("cpu")
    except RuntimeUnavailable as error:
        print(error)
    """
    assert str(fake_hip) in child(code, (fake_wheel,))


def test_leaves_environment_and_lookup_as_they_were(child: Callable[..., str]) -> None:
    code = """
    import os
    from rocm.bindings.util import paths
    before, lookup = dict(os.environ), paths.get_library_path
    from glm53.hip import runtime
    runtime.select()
    print(dict(os.environ) == before, paths.get_library_path is lookup, paths.get_library_path("hiprtc").endswith(b"libhiprtc.so"))
    """
    assert child(code, runtime="cpu") == "True True True"


def test_one_runtime_a_process(child: Callable[..., str]) -> None:
    code = """
    from glm53.errors import InputError, RuntimeUnavailable
    from glm53.hip import runtime
    for name in ("gpu", "cpu", "auto", "cpu", "cuda"):
        try:
            print(runtime.select(name).name)
        except (InputError, RuntimeUnavailable) as error:
            print(type(error).__name__, error.exit_code)
    """
    assert child(code).splitlines() == ["InputError 2", "cpu", "cpu", "cpu", "RuntimeUnavailable 3"]


def test_import_loads_no_hip(child: Callable[..., str]) -> None:
    code = """
    import sys
    import glm53, glm53.hip
    print([name for name in sys.modules if name.split(".")[0] in ("rocm", "hip", "numba")], glm53.hip.runtime.mapped_libraries())
    """
    assert child(code) == "[] []"


def test_missing_hip_python_says_what_to_install(child: Callable[..., str]) -> None:
    code = """
    import sys
    sys.modules["rocm"] = sys.modules["hip"] = None
    from glm53.errors import RuntimeUnavailable
    from glm53.hip import runtime
    try:
        runtime.select("cpu")
    except RuntimeUnavailable as error:
        print(error)
    """
    assert "pip install 'hip-python" in child(code)


def test_missing_library_says_how_to_build(child: Callable[..., str], tmp_path: Path) -> None:
    code = f"""
    from pathlib import Path
    from glm53.errors import RuntimeUnavailable
    from glm53.hip import runtime
    runtime.native_directory = lambda: Path({str(tmp_path)!r})
    try:
        runtime.select("cuda")
    except RuntimeUnavailable as error:
        print(error)
    """
    text = child(code)
    assert str(tmp_path / "cuda" / "libamdhip64.so") in text and "pip install ." in text


def test_older_hip_python_is_pointed_at_the_library(child: Callable[..., str], tmp_path: Path) -> None:
    """hip-python 6.x and 7.x open the file named in `hip.chip.DLL` at the first call; a package of that form stands for them."""
    package = tmp_path / "old" / "hip"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("")
    package.joinpath("chip.py").write_text('DLL = b"libamdhip64.so"\n')
    package.joinpath("hip.py").write_text(
        "import ctypes\nfrom . import chip\n"
        "def _out(name):\n    value = ctypes.c_int()\n    return getattr(library, name)(ctypes.byref(value)), value.value\n"
        "def hipInit(flags):\n    global library\n    library = ctypes.CDLL(chip.DLL.decode())\n    return (library.hipInit(flags),)\n"
        "def hipGetDeviceCount():\n    return _out('hipGetDeviceCount')\n"
        "def hipRuntimeGetVersion():\n    return _out('hipRuntimeGetVersion')\n"
        "def hipDriverGetVersion():\n    return _out('hipDriverGetVersion')\n"
    )
    code = "import sys\nsys.modules['rocm'] = None\n" + SELECT + "\nfrom hip import chip\nprint(chip.DLL)"
    first, last = child(code, (package.parent,), runtime="cpu").splitlines()
    assert first.startswith("cpu|") and last == "b'libamdhip64.so'"
