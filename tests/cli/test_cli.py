"""The command line as a person types it: output, exit codes, refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = "models/glm53-demo"


def glm53(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs the installed command."""
    command = Path(sys.executable).parent / "glm53"
    return subprocess.run([str(command), *arguments], cwd=ROOT, input=stdin, capture_output=True, timeout=300)


GREEDY = ["--temperature", "0", "--max-tokens", "8", "--context-rows-max", "1024"]


def test_generate_prints_text_and_a_summary() -> None:
    done = glm53("generate", DEMO, "In the beginning", *GREEDY)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().split()) > 3
    summary = done.stderr.decode()
    for part in ("prompt tokens", "new at", "length", "seed", "weights", "history host, q8g64 rows of 656 B", "found on the device", "MiB"):
        assert part in summary, summary


def test_drafts_change_figures_only() -> None:
    plain, drafted = (glm53("generate", DEMO, "In the beginning", *GREEDY, "--mtp", depth) for depth in ("0", "2"))
    assert drafted.returncode == 0, drafted.stderr.decode()
    assert plain.stdout == drafted.stdout and b"drafts" not in plain.stderr.split(b"[device")[0]
    found = re.search(rb"\[drafts: (0\.\d\d) / (0\.\d\d) accepted by depth, (\d\.\d\d) tokens a round over (\d) rounds\]", drafted.stderr)
    assert found and 1.0 <= float(found[3]) <= 3.0, drafted.stderr


def test_generate_json_from_file_and_stdin_agree(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("In the beginning", encoding="utf-8")
    from_file = glm53("generate", DEMO, "--prompt-file", str(prompt), "--json", "--logprobs", "2", *GREEDY)
    from_stdin = glm53("generate", DEMO, "--json", "--logprobs", "2", *GREEDY, stdin=b"In the beginning")
    a, b = json.loads(from_file.stdout), json.loads(from_stdin.stdout)
    assert a["text"] == b["text"] and a["token_ids"] == b["token_ids"] and a["completion_tokens"] == 8
    assert a["memory_bytes"]["weights"] > 20 << 20 and a["runtime"] == "cpu"
    assert len(a["logprobs"]) == 8 and len(a["logprobs"][0]["top"]) == 2


def test_both_tiers_give_equal_output_and_their_memory() -> None:
    found = {}
    for tier in ("host", "resident"):
        done = glm53("generate", DEMO, "word " * 300, "--json", "--logprobs", "5", "--kv-tier", tier, "--hot-rows", "300", *GREEDY)
        assert done.returncode == 0, done.stderr.decode()
        found[tier] = json.loads(done.stdout)
    for key in ("text", "token_ids", "logprobs"):
        assert found["host"][key] == found["resident"][key]
    assert found["host"]["hot_cache"]["hits"] + found["host"]["hot_cache"]["misses"] > 0 and found["resident"]["hot_cache"] == {}
    assert "history" in found["resident"]["memory_bytes"] and "history" not in found["host"]["memory_bytes"]


def test_chat(tmp_path: Path) -> None:
    done = glm53("generate", DEMO, "Who are you?", "--chat", "--reasoning-effort", "low", "--temperature", "0", "--context-rows-max", "1024")
    assert b"model" in done.stdout and done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["generate", DEMO, ""], 2, "empty"),
        (["generate", DEMO, "x", "--prompt-ids", "1"], 2, "wanted one of them"),
        (["generate", DEMO, "x", "--prompt-ids", ""], 2, "wanted one of them"),
        (["generate", DEMO, "x", "--logprobs", "2"], 2, "--json"),
        (["generate", DEMO, "--prompt-ids", "1,x"], 2, "wanted integers"),
        (["generate", DEMO, "--prompt-ids", "4096"], 2, "4096"),
        (["generate", DEMO, "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", DEMO, "x", "--top-p", "nan"], 2, "top_p"),
        (["generate", DEMO, "x", "--system", "s"], 2, "--chat"),
        (["generate", DEMO, "x", "--extent-rows", "100"], 2, "extent"),
        (["generate", "no-such-directory", "x"], 2, "no-such-directory"),
        (["generate", "docs", "x"], 2, "config.json"),
        (["generate", DEMO, "x", "--runtime", "rocm"], 3, "libamdhip64"),
        (["generate", DEMO, "x", "--devices", "99"], 2, "99"),
        (["generate", DEMO, "x", "--no-such-option"], 2, "no-such-option"),
    ],
)
def test_refusals(arguments: list[str], code: int, text: str) -> None:
    done = glm53(*arguments)
    assert done.returncode == code, done.stderr.decode()
    assert text in done.stderr.decode() and b"Traceback" not in done.stderr


def test_invalid_utf8_is_named() -> None:
    done = glm53("generate", DEMO, stdin=b"abc\xff")
    assert done.returncode == 2 and b"byte 3 (0xff)" in done.stderr
    raw = subprocess.run([str(Path(sys.executable).parent / "glm53"), "generate", DEMO, b"abc\xff"], cwd=ROOT, capture_output=True)
    assert raw.returncode == 2 and b"UTF-8" in raw.stderr


def test_prompt_longer_than_the_limit() -> None:
    done = glm53("generate", DEMO, "word " * 100, "--context-rows-max", "64")
    assert done.returncode == 2 and b"at most 63" in done.stderr


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a shell line in which $GLM53 is the installed command with a short, greedy request."""
    line = f"{Path(sys.executable).parent / 'glm53'} generate {DEMO} {' '.join(GREEDY)}"
    return subprocess.run(["bash", "-c", command.replace("$GLM53", line)], cwd=ROOT, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    "command, code, text",
    [
        ("$GLM53 <&-", 2, b"no prompt"),
        ("$GLM53 x >&-", 0, b"new at"),
        ("$GLM53 x 2>&-", 0, b""),
        ("$GLM53 x >/dev/full", 1, b"No space left"),
        ("set -o pipefail; $GLM53 x --max-tokens 90 --ignore-eos | head -c 1", 1, b""),
    ],
)
def test_closed_and_full_streams(command: str, code: int, text: bytes) -> None:
    done = shell(command)
    assert done.returncode == code, done.stderr.decode()
    assert text in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("prompt", ["x", "In the beginning " * 500])
def test_interrupt_ends_at_once_with_130(prompt: str) -> None:
    command = [
        str(Path(sys.executable).parent / "glm53"),
        "generate",
        DEMO,
        prompt,
        "--ignore-eos",
        "--max-tokens",
        "20000",
        "--prefill-chunk-rows",
        "32",
    ]
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=restore)
    time.sleep(2)
    assert child.poll() is None, "ended before the interrupt"
    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and b"Traceback" not in stderr, stderr.decode()
    assert time.monotonic() - started < 5


def test_optimised_python_gives_the_same() -> None:
    """Nothing that matters may hide in an assert."""
    code = "from glm53.cli import main; main()"
    runs = [
        subprocess.run([sys.executable, *flags, "-c", code, "generate", DEMO, "x", *GREEDY, "--quiet"], cwd=ROOT, capture_output=True, timeout=300)
        for flags in ([], ["-O"])
    ]
    assert runs[0].returncode == runs[1].returncode == 0, runs[1].stderr.decode()
    assert runs[0].stdout == runs[1].stdout


def test_inspect_needs_no_device() -> None:
    shown = glm53("inspect", DEMO)
    assert shown.returncode == 0 and b"indexer" in shown.stdout
    assert json.loads(glm53("inspect", DEMO, "--json").stdout)


def test_devices_lists_the_runtime_and_objects() -> None:
    shown = json.loads(glm53("devices", "--json").stdout)
    assert shown["runtime"] == "cpu" and shown["devices"][0]["arch"] == "host" and "host" in shown["objects"]
    assert b"code objects" in glm53("devices").stdout


@pytest.mark.parametrize("command", [[], ["generate"], ["inspect"], ["devices"], ["selftest"]])
def test_help_needs_no_device_and_loads_nothing(command: list[str]) -> None:
    code = f"import sys; from glm53.cli import main; main({[*command, '--help']!r}, standalone_mode=False); print(sorted(m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    text, modules = done.stdout.rsplit("\n[", 1) if "\n[" in done.stdout else (done.stdout, "")
    assert "Exit codes" in text
    for heavy in ("'rocm.bindings", "'numba", "'glm53.hip"):
        assert heavy not in modules, f"--help imports {heavy}"


def test_help_groups_options() -> None:
    text = glm53("generate", "--help").stdout.decode()
    places = [text.index(title) for title in ("Arguments:", "Prompt:", "Sampling:", "Engine:", "Output:", "--help")]
    assert places == sorted(places) and "Example:" in text and "Other:" not in text
    assert "[default: bf16]" in " ".join(text.split()), "a default is not shown"
