"""`glm53 session` as a person types it: files, text, figures, exit codes, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import DEMO, ROOT, glm53

GREEDY = ["--temperature", "0", "--context-rows-max", "1024"]
PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of a prompt and eight tokens."""
    file = tmp_path_factory.mktemp("sessions") / "story.glm53"
    done = glm53("session", "save", DEMO, str(file), PROMPT, "--max-tokens", "8", *GREEDY)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().split()) > 3 and f"saved {file}: 10 rows" in done.stderr.decode()
    return file


def test_restored_text_goes_on(story: Path, tmp_path: Path) -> None:
    """Saved after 8 tokens and continued by 8, on the other tier and on a pair, it is the text of 16; and again from what is saved then."""
    whole = json.loads(glm53("generate", DEMO, PROMPT, "--max-tokens", "16", "--json", *GREEDY).stdout)
    further = tmp_path / "further"
    for settings in (["--kv-tier", "resident"], ["--devices", "0,1"]):
        done = glm53("session", "restore", DEMO, str(story), "--json", "--save", str(further), "--context-rows-max", "1024", *settings)
        found = json.loads(done.stdout)
        assert found["token_ids"] == whole["token_ids"][8:] and found["restored_rows"] == 10 and found["rows"] == 18, done.stderr.decode()
        assert found["file"] == str(further) and found["file_bytes"] == further.stat().st_size
    text = glm53("session", "restore", DEMO, str(further), " And", "--max-tokens", "4", "--quiet", "--context-rows-max", "1024")
    assert text.returncode == 0 and text.stdout.strip() and not text.stderr


def test_prompt_alone(tmp_path: Path) -> None:
    """Without --max-tokens the prompt is saved, and the session waits for the next one."""
    file = tmp_path / "s"
    done = glm53("session", "save", DEMO, str(file), PROMPT, "--json", "--seed", "3", *GREEDY)
    assert json.loads(done.stdout) | {"save_seconds": 0} == {"file": str(file), "rows": 3, "file_bytes": file.stat().st_size, "save_seconds": 0}
    held = json.loads(glm53("session", "info", str(file), "--json").stdout)
    assert held["rows"] == 3 and held["pending"] == [] and held["sampling"]["seed"] == 3 and held["bytes"] == held["bytes_wanted"]
    refused = glm53("session", "restore", DEMO, str(file))
    assert refused.returncode == 2 and b"nothing to go on from" in refused.stderr
    again = json.loads(glm53("session", "restore", DEMO, str(file), " God", "--max-tokens", "4", "--json").stdout)
    assert again["seed"] == 3 and len(again["token_ids"]) == 4


def test_info_and_verify(story: Path, tmp_path: Path) -> None:
    shown = glm53("session", "info", str(story)).stdout.decode()
    for part in ("10 tokens, and one drawn", "8 layers of width 256", "--kv-format q8g64", "temperature 0.0", "8 x 656 B a row", "mtp "):
        assert part in shown, shown
    good = glm53("session", "verify", str(story))
    assert good.returncode == 0 and b"every checksum holds" in good.stdout
    assert json.loads(glm53("session", "verify", str(story), "--json").stdout)["rows"] == 10
    bad = tmp_path / "bad"
    data = bytearray(story.read_bytes())
    data[-5000] ^= 1
    bad.write_bytes(data)
    refused = glm53("session", "verify", str(bad))
    assert refused.returncode == 2 and b"glm53 session verify: " in refused.stderr and b"damaged" in refused.stderr
    bad.write_bytes(data[:-1])
    assert b"not complete" in glm53("session", "info", str(bad)).stdout
    assert glm53("session", "restore", DEMO, str(bad)).returncode == 2


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["save", DEMO, "no-such-directory/s", "x"], "cannot be saved"),
        (["save", DEMO, "docs", "x"], "it is a directory"),
        (["save", DEMO, "s", "x", "--max-tokens", "0"], "max_tokens"),
        (["save", DEMO, "s", ""], "empty"),
        (["restore", DEMO, "no-such-file"], "No such file"),
        (["restore", DEMO, "README.md"], "is no session file"),
        (["restore", DEMO, "STORY", "--kv-format", "bf16"], "kv_format q8g64"),
        (["restore", DEMO, "STORY", "x", "--prompt-ids", "1"], "wanted one of them"),
        (["restore", DEMO, "STORY", "--save", "no-such-directory/s"], "cannot be saved"),
        (["restore", DEMO, "STORY", "--context-rows-max", "9"], "at most 9 (--context-rows-max)"),
        (["save", DEMO, "/", "x"], "it is a directory"),
        (["restore", DEMO, "STORY", "--save", "/"], "it is a directory"),
        (["restore", DEMO, "STORY", "--logprobs", "2"], "--json"),
        (["info", "README.md"], "is no session file"),
        (["verify", "docs"], "cannot be read"),
    ],
)
def test_refusals(arguments: list[str], text: str, story: Path) -> None:
    done = glm53("session", *(str(story) if argument == "STORY" else argument for argument in arguments))
    assert done.returncode == 2, done.stderr.decode()
    assert text in done.stderr.decode() and b"Traceback" not in done.stderr
    assert not (ROOT / "s").exists()


def test_another_checkpoint(story: Path, tmp_path: Path) -> None:
    """The same shape with other weights: refused before a row is read."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / DEMO, other)
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = glm53("session", "restore", str(other), str(story), "--context-rows-max", "1024")
    assert done.returncode == 2 and b"weights with fingerprint" in done.stderr


@pytest.mark.parametrize("command", [[], ["save"], ["restore"], ["info"], ["verify"]])
def test_help_needs_no_device_and_loads_nothing(command: list[str]) -> None:
    arguments = ["session", *command, "--help"]
    code = f"import sys; from glm53.cli import main; main({arguments!r}, standalone_mode=False); print(sorted(m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and "Exit codes" in done.stdout, done.stderr
    for heavy in ("'rocm.bindings", "'numba", "'glm53.hip"):
        assert heavy not in done.stdout, f"--help imports {heavy}"
