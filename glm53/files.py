"""Files of a model directory: their names, and reading small ones with errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm53.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"


def check_directory(path: Path) -> None:
    """Raises `CheckpointError` unless `path` is a directory."""
    if not path.is_dir():
        state = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {state}, expected a model directory with {CONFIG_FILE} and *.safetensors")


def check_not_lfs_pointer(path: Path, head: bytes) -> None:
    """Raises `CheckpointError` if `head`, the first bytes of `path`, is a git-lfs pointer instead of the file's content."""
    if head.startswith(LFS_PREFIX):
        size = path.stat().st_size
        raise CheckpointError(f"{path} is a git-lfs pointer of {size} bytes, not the file itself; run `git lfs pull` in {path.parent}")


def read_text(path: Path) -> str:
    """The UTF-8 text of a model's file. Raises `CheckpointError` naming it when it is absent, unreadable, a git-lfs pointer or no text."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; copy {path.name} from the release") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    check_not_lfs_pointer(path, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte {error.start} (0x{data[error.start]:02x})"
        raise CheckpointError(f"{path}: {bad} is not UTF-8 ({error.reason}), expected text; fetch the file again") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `CheckpointError` as `read_text`, or when it is no JSON or no object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{path}: not JSON ({error.msg} at {where}); fetch the file again") from None
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{path}: not usable JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value
