"""`glm53 serve` as a process: it says where it listens, answers while it loads, ends with 0 at a signal, and refuses bad settings before that."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53.config import read_config

pytest.importorskip("uvicorn")

COMMAND = [sys.executable, "-c", "from glm53.cli import main; main()", "serve"]
SMALL = ["--context-rows-max", "256", "--hot-rows", "512", "--port", "0"]


def run(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_ends_at_a_signal(demo_path: Path, number: signal.Signals) -> None:
    settings = {"GLM53_SERVE_API_KEY": "secret", "GLM53_SERVE_MAX_NUM_SEQS": "2", "GLM53_SERVE_SERVED_MODEL_NAME": "mine"}
    process = subprocess.Popen([*COMMAND, str(demo_path), *SMALL], env=os.environ | settings, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said: list[str] = []
        while not said or "ready on" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        assert any("mine: 2 requests at once, 256 tokens each" in line for line in said), said
        found = re.search(r"ready on (http://127\.0\.0\.1:\d+/v1)", said[-1])
        assert found is not None
        body = json.dumps({"prompt": "In the beginning", "max_tokens": 4}).encode()
        asked = urllib.request.Request(found[1] + "/completions", body, {"Authorization": "Bearer secret", "Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert json.load(answer)["model"] == "mine"
        process.send_signal(number)
        assert process.wait(30) == 0
        rest = process.stderr.read()
        assert "Traceback" not in rest
        assert "maximum concurrency for 256 tokens: " in "".join(said)
        assert re.search(r"1 requests in \d+ s \(stop \d, length \d, abort 0, error 0\); \d+ prompt tokens, [1-4] drawn", rest), rest
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_bad_settings_are_refused_at_once(demo_path: Path, tmp_path: Path) -> None:
    done = run([str(demo_path), "--max-model-len", "100", "--context-rows-max", "200"])
    assert done.returncode == 2 and "--max-model-len 100 and --context-rows-max 200 are the same setting" in done.stderr
    done = run([str(tmp_path), "--port", "0"])
    assert done.returncode == 2 and "config.json" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run([str(demo_path), "--port", port])
    assert done.returncode == 2 and f"--port {port}" in done.stderr and "next:" in done.stderr


def test_a_server_that_could_serve_nothing_does_not_start(demo_path: Path) -> None:
    """Nor one that would have less context than it was asked for."""
    arguments = ["--port", "0", "--gpu-memory-utilization", "0.01", "--kv-tier", "resident", "--max-num-seqs", "64"]
    done = run([str(demo_path), *arguments])
    assert done.returncode == 4 and "Traceback" not in done.stderr and "ready on" not in done.stderr, done.stderr
    for part in ("no request would fit: a history of 256 rows needs ", "--gpu-memory-utilization 0.01 of ", "next: raise --gpu-memory-utilization"):
        assert part in done.stderr, done.stderr
    most = read_config(demo_path).max_position_embeddings
    for flag, name in (("--max-model-len", "max_model_len"), ("--context-rows-max", "context_rows_max")):
        done = run([str(demo_path), "--port", "0", flag, str(most + 1)])
        assert done.returncode == 2 and f"{name} is {most + 1}, expected at most {most}" in done.stderr, done.stderr


def test_the_help_has_one_name_and_one_default_of_a_setting() -> None:
    said = run(["--help"]).stdout
    assert "--max-num-seqs" in said and "--sessions-max INTEGER" not in said and "--context-rows-max INTEGER" not in said
    assert "--host-kv-gib" in said and "for each device of a pair" in " ".join(said.split())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("PORT", "99999", "'--port'"), ("HOT_ROWS", "3", "hot_rows is 3"), ("DEVICES", "0,0", "glm53 devices")],
)
def test_a_bad_variable_is_named(demo_path: Path, name: str, value: str, said: str) -> None:
    done = run([str(demo_path), "--port", "0"][: None if name != "PORT" else 1], **{f"GLM53_SERVE_{name}": value})
    assert done.returncode == 2 and said in done.stderr and f"GLM53_SERVE_{name}" in done.stderr, done.stderr


def test_keys_of_a_file_and_a_directory_for_sessions(demo_path: Path, tmp_path: Path) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "sessions"
    for text, said in (("\n\n", "has no key"), ("a b\n", "has spaces")):
        keys.write_text(text)
        done = run([str(demo_path), "--port", "0", "--api-key-file", str(keys)])
        assert done.returncode == 2 and said in done.stderr and "next:" in done.stderr and "a b" not in done.stderr
    keys.write_text("first\n\nsecond\n")
    done = run([str(demo_path), "--port", "0", "--session-dir", str(folder)])
    assert done.returncode == 2 and "--session-dir" in done.stderr and "next:" in done.stderr
    folder.mkdir()
    arguments = [*SMALL, "--api-key-file", str(keys), "--session-dir", str(folder), "--disable-log-stats"]
    process = subprocess.Popen([*COMMAND, str(demo_path), *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line
            found = re.search(r"ready on (http://127\.0\.0\.1:\d+/v1)", line)
        for path, body in (("/sessions", {"id": "s"}), ("/sessions/s/save", {"name": "kept"})):
            headers = {"Authorization": "Bearer second", "Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(found[1] + path, json.dumps(body).encode(), headers), timeout=30) as answer:
                assert answer.status == 200
        assert [path.name for path in folder.glob("*/*")] == ["kept.glm53s"]
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_an_engine_that_cannot_open_ends_the_server(demo_path: Path) -> None:
    done = run([str(demo_path), *SMALL, "--hot-rows", "70"])
    assert done.returncode == 2 and "hot_rows: got 70" in done.stderr and "Traceback" not in done.stderr
