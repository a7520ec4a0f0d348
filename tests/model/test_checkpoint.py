"""Safetensors directories: what is read, and every damage that is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from glm53.errors import CheckpointError
from glm53.model.checkpoint import Checkpoint

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_views_equal_what_the_reference_library_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {"f": rng.standard_normal((3, 5), np.float32), "h": rng.integers(0, 9, (7,), np.uint8), "empty": np.zeros((0, 4), np.float32)}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(arrays)
        for name, array in arrays.items():
            assert np.array_equal(checkpoint.view(name), array)
        assert not checkpoint.view("f").flags.writeable
        kept = checkpoint.view("f")
    assert np.array_equal(kept, arrays["f"])  # outlives close


def test_stored_types(tmp_path: Path) -> None:
    header = {"a": entry("F8_E4M3", [2, 1], 0, 2), "b": entry("BF16", [1], 2, 4), "c": entry("F32", [1], 4, 8)}
    write_raw(tmp_path / "model.safetensors", header, bytes([1, 2]) + (0x3F80).to_bytes(2, "little") + np.float32(2).tobytes())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.view("a").tolist() == [[1], [2]]
    assert checkpoint.view("b").tolist() == [0x3F80]
    assert checkpoint.view("c").tolist() == [2.0]  # the header's length leaves it unaligned
    assert checkpoint.bytes_of(checkpoint.tensors["a"], 1, 2).tolist() == [2]


def test_released_pages_read_the_same_again(demo_path: Path) -> None:
    checkpoint = Checkpoint.open(demo_path)
    info = checkpoint.tensors["lm_head.weight"]
    before = checkpoint.view(info.name).copy()
    checkpoint.release(info)
    assert np.array_equal(checkpoint.view(info.name), before)


def test_demo_directory(demo_path: Path) -> None:
    checkpoint = Checkpoint.open(demo_path)
    assert len(checkpoint.tensors) == 572
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == 23_455_232
    assert checkpoint.disk_bytes == sum(file.stat().st_size for file in demo_path.glob("*.safetensors"))


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    write_raw(tmp_path / SHARDS[0], {"a": entry("F32", [2], 0, 8)}, bytes(8))
    write_raw(tmp_path / SHARDS[1], {"b": entry("F32", [2], 0, 8)}, bytes(8))
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    return tmp_path


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


def test_missing_shard_is_named(two_shards: Path) -> None:
    assert set(Checkpoint.open(two_shards).tensors) == {"a", "b"}
    (two_shards / SHARDS[1]).unlink()
    refused(two_shards, f"1 of 2 weight files are missing: {SHARDS[1]}")


def test_truncated_shard_gives_bytes_got_and_wanted(two_shards: Path) -> None:
    file = two_shards / SHARDS[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    refused(two_shards, f"{SHARDS[0]} is truncated: {len(whole) - 1} B, expected {len(whole)} B; a is cut off")
    file.write_bytes(whole[:20])
    refused(two_shards, "truncated: 20 B, the header alone has")
    file.write_bytes(whole[:5])
    refused(two_shards, "truncated: 5 bytes, expected at least the 8 of the header")
    file.write_bytes(whole + b"x")
    refused(two_shards, "bytes follow the last tensor")


def test_index_and_shards_must_agree(two_shards: Path) -> None:
    write_index(two_shards, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    refused(two_shards, f"c is said to be in {SHARDS[1]}, which lacks it")
    write_index(two_shards, {"a": SHARDS[1], "b": SHARDS[0]})
    refused(two_shards, f"a is said to be in {SHARDS[1]}, found in {SHARDS[0]}")
    write_raw(two_shards / SHARDS[1], {"a": entry("F32", [2], 0, 8)}, bytes(8))
    refused(two_shards, f"tensor a is in {SHARDS[0]} and again in {SHARDS[1]}")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "a\\x.safetensors", "x.bin", 3, ""])
def test_index_names_only_files_of_its_directory(two_shards: Path, name: object) -> None:
    write_index(two_shards, {"a": name})
    refused(two_shards, "expected the name of a .safetensors file in the same directory")


@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_index_without_map(two_shards: Path, weight_map: object) -> None:
    write_index(two_shards, weight_map)
    refused(two_shards, "weight_map is")


def test_git_lfs_pointers_are_named(two_shards: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000000000\n"
    (two_shards / SHARDS[1]).write_bytes(pointer)
    refused(two_shards, f"{SHARDS[1]} is a git-lfs pointer of {len(pointer)} bytes")
    (two_shards / "model.safetensors.index.json").write_bytes(pointer)
    refused(two_shards, r"index\.json is a git-lfs pointer")


def test_directory_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, r"has neither model\.safetensors nor model\.safetensors\.index\.json")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, r"it holds pytorch_model\.bin")
    refused(tmp_path / "none", "does not exist")


BAD_HEADERS: list[tuple[Any, int, str]] = [
    (b"", 0, "header length is 0 bytes"),
    (b"not json", 0, "the header is not usable JSON"),
    (b"[]", 0, "the header is a JSON list"),
    (b'{"a": 1, "a": 2}', 0, "key 'a' appears twice"),
    ({"a": 1}, 0, "the entry of a is 1"),
    ({"a": {"dtype": "F32", "shape": [1]}}, 4, "expected dtype, shape and data_offsets"),
    ({"a": entry("F31", [1], 0, 4)}, 4, "a has dtype 'F31', expected one of F32, BF16"),
    ({"a": entry("F32", [-1], 0, 4)}, 4, "a has shape"),
    ({"a": entry("F32", [True], 0, 4)}, 4, "a has shape"),
    ({"a": entry("F32", [1], 4, 0)}, 4, "a has data_offsets"),
    ({"a": entry("F32", [1], -4, 0)}, 4, "a has data_offsets"),
    ({"a": entry("F32", [2], 0, 4)}, 4, "a spans 4 bytes, expected 8"),
    ({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, 4, "a spans 4 bytes, expected"),
    ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "a and b overlap: b starts at byte 0 of the data, expected 4"),
    ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, 8, "a and b overlap"),
    ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, "a and b leave a hole"),
    ({"a": entry("F32", [1], 4, 8)}, 8, "the header and a leave a hole"),
    ({"a": entry("F32", [2], 0, 8)}, 4, "is truncated"),
]


@pytest.mark.parametrize(("header", "data_bytes", "message"), BAD_HEADERS, ids=[m for _, _, m in BAD_HEADERS])
def test_bad_header(tmp_path: Path, header: Any, data_bytes: int, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(data_bytes))
    refused(tmp_path, message)


def test_absurd_header_length(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    refused(tmp_path, f"header length is {1 << 60} bytes")


def test_single_file_wins_over_an_index(two_shards: Path, write_safetensors: Callable[..., None]) -> None:
    write_safetensors(two_shards / "model.safetensors", {"only": ("F32", np.zeros(1, np.float32))})
    assert set(Checkpoint.open(two_shards).tensors) == {"only"}


def test_symlinked_shards_are_followed(demo_path: Path, tmp_path: Path) -> None:
    for file in demo_path.glob("*.safetensors"):  # as the hub's cache lays them out
        (tmp_path / file.name).symlink_to(file)
    shutil.copy(demo_path / "model.safetensors.index.json", tmp_path)
    assert len(Checkpoint.open(tmp_path).tensors) == 572
