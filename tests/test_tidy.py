"""The tree keeps its own rules: import arrows, sizes, no file that nothing uses, no stray settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "glm53"
FILE_LINES_MAX, FUNCTION_LINES_MAX = 600, 80

# A module may import the modules of the layers listed for it and of its own layer. Longest prefix decides.
LAYERS = {
    "glm53": {"engine", "request", "sampling"},  # lazily, for `from glm53 import Engine`
    "glm53.errors": set(),
    "glm53.heap": set(),
    "glm53.spec": set(),
    "glm53.partialfile": {"errors"},
    "glm53.sessionfile": {"partialfile", "errors"},
    "glm53.persist": {"model", "hip", "sessionfile", "sampling", "config", "spec", "errors"},
    "glm53.sampling": {"errors"},
    "glm53.files": {"errors"},
    "glm53.config": {"files", "errors", "spec"},
    "glm53.tokenizer": {"files", "errors"},
    "glm53.grammar": {"tokenizer", "errors"},
    "glm53.mem": {"spec", "errors"},
    "glm53.sched": {"mem", "spec", "errors"},
    "glm53.hip": {"spec", "errors"},
    "glm53.ops": {"hip", "spec", "errors", "mem", "sampling"},
    "glm53.kv": {"ops", "hip", "mem", "spec", "errors"},
    "glm53.model": {"kv", "ops", "hip", "mem", "spec", "errors", "files", "config", "sampling"},
    "glm53.inspect": {"model", "config", "files", "spec", "errors"},
    "glm53.check": {"ops", "hip", "spec", "errors", "mem", "sampling"},
    "glm53.request": {"model", "sched", "sampling", "tokenizer", "errors"},
    "glm53.session": {"request", "persist", "sessionfile", "model", "sched", "hip", "config", "sampling", "spec", "errors"},
    "glm53.prices": {"model", "kv", "mem", "sched", "config", "spec"},
    "glm53.served": {"session", "request", "model", "sched", "errors"},
    "glm53.engine": {
        "session",
        "request",
        "persist",
        "sessionfile",
        "model",
        "kv",
        "hip",
        "mem",
        "sched",
        "config",
        "sampling",
        "spec",
        "errors",
        "tokenizer",
        "paths",
    },
    "glm53.paths": {"check", "hip", "config"},
    "glm53.options": {"config", "tokenizer", "errors"},
    "glm53.report": {"engine", "request", "model", "sampling", "errors"},
    "glm53.cli_session": {"engine", "session", "request", "sessionfile", "options", "report", "config", "sampling", "errors"},
    "glm53.chat": {"engine", "session", "request", "persist", "sampling", "tokenizer", "errors"},
    "glm53.cli_chat": {"chat", "cli_session", "engine", "options", "report", "config", "sampling", "tokenizer", "errors"},
    "glm53.serve": {
        "engine",
        "heap",
        "prices",
        "served",
        "session",
        "sessionfile",
        "request",
        "kv",
        "sched",
        "grammar",
        "sampling",
        "tokenizer",
        "errors",
    },
    "glm53.cli_serve": {"serve", "engine", "options", "report", "config", "errors"},
    "glm53.__main__": {"cli"},
    "glm53.cli": {
        "cli_chat",
        "cli_serve",
        "cli_session",
        "options",
        "report",
        "engine",
        "request",
        "inspect",
        "check",
        "hip",
        "config",
        "sampling",
        "errors",
    },
}
ENVIRONMENT = {"GLM53_RUNTIME", "GLM53_ARCHS"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    return max((name for name in LAYERS if module == name or module.startswith(name + ".")), key=len, default="")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = sorted(
    path
    for top in ("glm53", "hipsrc", "scripts", "tests")
    for path in (ROOT / top).rglob("*")
    if path.suffix in {".py", ".hip", ".h", ".cpp", ".c"} and "_native" not in path.parts and "__pycache__" not in path.parts
)


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else node.module for alias in node.names}
    return {name for name in found if name == "glm53" or name.startswith("glm53.")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    layer = layer_of(module)
    assert layer, f"{module} belongs to no layer in LAYERS"
    allowed = {f"glm53.{name}" for name in LAYERS[layer]} | {layer}
    wrong = sorted(name for name in imported(MODULES[module]) if layer_of(name) not in allowed)
    assert not wrong, f"{module} ({layer}) imports {wrong}; allowed: {sorted(allowed)}"


def test_layers_have_no_cycle() -> None:
    order: list[str] = []
    rest = {name: {f"glm53.{n}" for n in needs} for name, needs in LAYERS.items() if name != "glm53"}
    while rest:
        free = [name for name, needs in rest.items() if not needs & rest.keys()]
        assert free, f"import cycle among {sorted(rest)}"
        order += free
        for name in free:
            del rest[name]


def test_every_module_is_used() -> None:
    # Entry points: the package, the command under two names, the header generator.
    used = {"glm53", "glm53.cli", "glm53.__main__", "glm53.ops.args", "glm53.ops.step_args"}
    for top in ("glm53", "tests", "scripts"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text()
            used |= imported(path) - {module_name(path) if top == "glm53" else ""}
            used |= set(re.findall(r"glm53(?:\.\w+)+", text)) if top == "glm53" and "import_module" in text else set()
    packages = {name.rsplit(".", 1)[0] for name in used}
    cases = {name for name in MODULES if name.startswith("glm53.check.cases_")}  # found by name in check/case.py
    unused = sorted(set(MODULES) - used - packages - cases)
    assert not unused, f"nothing imports {unused}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_and_places(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES_MAX, f"{path.name} has {lines} lines, at most {FILE_LINES_MAX}: is it really two things?"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= FUNCTION_LINES_MAX, f"{path.name}: {node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"
    for name in set(re.findall(r"environ\S*?(GLM53_[A-Z_]+)", text)):
        assert name in ENVIRONMENT, f"{path.name} reads {name}, which is not one of {sorted(ENVIRONMENT)}"
    if path.suffix == ".hip":
        foreign = re.findall(r"0xffffffff|__syncthreads|threadIdx|warpSize|__builtin_amdgcn\w*|__shfl\w*", text)
        assert not foreign, f"{path.name} says {foreign}: spell it as portable.h does"


def test_every_kernel_family_is_built() -> None:
    unit = (ROOT / "hipsrc" / "kernels" / "kernels.hip").read_text()
    families = {path.name for path in (ROOT / "hipsrc" / "kernels").glob("*.hip")} - {"kernels.hip"}
    missing = sorted(name for name in families if f'"{name}"' not in unit)
    assert not missing, f"kernels.hip does not include {missing}"


def test_top_level_stays_small() -> None:
    allowed = {"pyproject.toml", "hipsrc", "glm53", "scripts", "tests", "README.md", "CHANGELOG.md", "docs", "models", ".ci", ".gitignore", "LICENSE"}
    tracked = {p.name for p in ROOT.iterdir() if p.name not in {"build", "dist"} and not p.name.startswith(".")}
    extra = {name for name in tracked - allowed if not name.endswith(".egg-info")}
    assert not extra, f"new top-level entries {sorted(extra)}"


def test_readme_names_every_script() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [p.name for p in (ROOT / "scripts").iterdir() if p.is_file() and p.stat().st_mode & 0o111 and f"scripts/{p.name}" not in readme]
    assert not missing, f"README.md does not name {missing}"
