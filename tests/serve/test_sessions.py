"""Sessions over HTTP: each its owner's alone, continued by requests, forked, cut, saved and restored with the same bits as if nothing had been."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from serve_scene import NAME, Served

from glm53.serve.access import owner_name
from glm53.serve.loop import Load
from glm53.serve.session_files import SessionFiles

ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
SESSIONS, COMPLETIONS = "/v1/sessions", "/v1/completions"
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form"


@pytest.fixture(scope="module")
def keyed(serve_with: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sessions")
    with serve_with(api_keys=("one", "two"), sessions_per_key=6, session_files=SessionFiles(folder, 64 << 20)) as served:
        yield served


@pytest.fixture
def ask(keyed: Served) -> Iterator[Callable[..., Any]]:
    """JSON of an answer with the given status; what a test leaves behind is deleted."""

    def call(method: str, path: str, body: Any = None, status: int = 200, key: dict[str, str] = ONE) -> Any:
        found, _, answer = keyed.request(method, path, body, key)
        assert found == status, answer
        return answer if status == 200 else answer["error"]

    yield call
    for key in (ONE, TWO):
        for session in call("GET", SESSIONS, key=key)["data"]:
            call("DELETE", f"{SESSIONS}/{session['id']}", key=key)
        for file in call("GET", f"{SESSIONS}/files", key=key)["data"]:
            call("DELETE", f"{SESSIONS}/files/{file['name']}", key=key)
    engine = keyed.engine
    keyed.loop.call(engine.stage.check).result(10)
    assert engine.tier.pool.used == engine.keys.pool.used == 0  # nothing is held any more


def turn(ask: Callable[..., Any], session: str | None, prompt: Any, key: dict[str, str] = ONE, **more: Any) -> Any:
    """A completion with log-probabilities, which show the bits of the rows before."""
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 1, "seed": 9, "ignore_eos": True, "logprobs": 5} | more
    answer = ask("POST", COMPLETIONS, asked | ({} if session is None else {"session_id": session}), key=key)
    return answer["choices"][0], answer["usage"]


def test_a_session_from_its_making_to_its_end(keyed: Served, ask: Callable[..., Any]) -> None:
    made = ask("POST", SESSIONS, {"id": "tale"})
    assert (
        made.items() >= {"id": "tale", "object": "session", "model": NAME, "rows": 0, "prompt_rows": 0, "host_bytes": 0, "state": "at rest"}.items()
    )
    assert abs(made["created"] - time.time()) < 60
    other = ask("POST", SESSIONS)  # an empty body will do
    assert other["id"].startswith("session-") and [one["id"] for one in ask("GET", SESSIONS)["data"]] == ["tale", other["id"]]
    ids = keyed.engine.encode(PROMPT)
    choice, used = turn(ask, "tale", ids)
    assert used["prompt_tokens_details"]["cached_tokens"] == 0 and choice == turn(ask, None, ids)[0]
    held = ask("GET", f"{SESSIONS}/tale")
    assert (held["rows"], held["prompt_rows"]) == (len(ids) + 5, len(ids)) and held["host_bytes"] >= held["rows"] * 656
    tokens = keyed.api._sessions.find(owner_name("one"), "tale").session  # type: ignore[union-attr]
    _, used = turn(ask, "tale", [*tokens.tokens, *tokens.pending, *ids[:20]])
    assert used["prompt_tokens_details"]["cached_tokens"] == len(ids) + 5  # every row that there was
    assert ask("DELETE", f"{SESSIONS}/tale") == {"id": "tale", "object": "session", "deleted": True}
    assert ask("GET", f"{SESSIONS}/tale", status=404)["code"] == "session_not_found"
    assert [one["id"] for one in ask("GET", SESSIONS)["data"]] == [other["id"]]


def test_another_key_sees_what_does_not_exist(ask: Callable[..., Any]) -> None:
    ask("POST", SESSIONS, {"id": "mine"})
    turn(ask, "mine", PROMPT)
    ask("POST", f"{SESSIONS}/mine/save", {"name": "kept"})
    calls: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/fork", {}),
        ("POST", "/truncate", {"rows": 0}),
        ("POST", "/save", {"name": "x"}),
    ]
    for method, path, body in calls:
        mine, none = (ask(method, f"{SESSIONS}/{name}{path}", body, 404, TWO) for name in ("mine", "none"))
        assert mine == {**none, "message": none["message"].replace("none", "mine")}
    for name in ("mine", "none"):
        assert ask("POST", COMPLETIONS, {"prompt": "x", "session_id": name}, 404, TWO)["code"] == "session_not_found"
    assert ask("GET", SESSIONS, key=TWO)["data"] == ask("GET", f"{SESSIONS}/files", key=TWO)["data"] == []
    assert ask("POST", f"{SESSIONS}/restore", {"name": "kept"}, 404, TWO)["code"] == "file_not_found"
    assert ask("DELETE", f"{SESSIONS}/files/kept", None, 404, TWO)["code"] == "file_not_found"
    assert ask("POST", SESSIONS, {"id": "mine"}, key=TWO)["rows"] == 0  # names are each owner's
    assert ask("GET", f"{SESSIONS}/mine")["rows"] > 0
    _, used = turn(ask, None, PROMPT * 3, key=TWO)  # nor do rows of other owners show in what is cached
    assert used["prompt_tokens_details"]["cached_tokens"] == 0


def test_saved_deleted_and_restored_is_as_if_nothing_had_been(keyed: Served, ask: Callable[..., Any]) -> None:
    ids = keyed.engine.encode(PROMPT)
    for name in ("plain", "moved"):
        ask("POST", SESSIONS, {"id": name})
        turn(ask, name, ids)
    saved = ask("POST", f"{SESSIONS}/moved/save", {"name": "story"})
    path = keyed.api.config.session_files.path(owner_name("one"), "story")  # type: ignore[union-attr]
    assert saved == {"object": "session.file", "name": "story", "bytes": path.stat().st_size, "rows": len(ids) + 5}
    ask("DELETE", f"{SESSIONS}/moved")
    assert ask("POST", f"{SESSIONS}/restore", {"name": "story", "id": "back"})["rows"] == len(ids) + 5
    files = ask("GET", f"{SESSIONS}/files")["data"]
    assert [(one["name"], one["bytes"]) for one in files] == [("story", saved["bytes"])]
    plain = keyed.api._sessions.find(owner_name("one"), "plain").session  # type: ignore[union-attr]
    following = [*plain.tokens, *plain.pending, *ids[:10]]
    expected, got = (turn(ask, name, following) for name in ("plain", "back"))
    assert got == expected and got[1]["prompt_tokens_details"]["cached_tokens"] == len(ids) + 5
    assert path.parent.stat().st_mode & 0o077 == 0


def test_forks_and_cuts(keyed: Served, ask: Callable[..., Any]) -> None:
    ids = keyed.engine.encode(PROMPT)
    ask("POST", SESSIONS, {"id": "root"})
    turn(ask, "root", ids)
    branch = ask("POST", f"{SESSIONS}/root/fork", {"rows": 10, "id": "branch"})
    assert (branch["id"], branch["rows"], branch["prompt_rows"]) == ("branch", 10, 10)
    whole = ask("POST", f"{SESSIONS}/root/fork")
    assert whole["rows"] == len(ids) + 5 and whole["id"] not in ("root", "branch")
    assert turn(ask, "branch", [*ids[:10], 7, 8])[1]["prompt_tokens_details"]["cached_tokens"] == 10
    expected = turn(ask, None, [*ids[:10], 7, 8])[0]
    assert turn(ask, "branch", [*ids[:10], 7, 8])[0] == expected
    assert ask("POST", f"{SESSIONS}/root/truncate", {"rows": 4})["rows"] == 4
    assert turn(ask, "root", [*ids[:4], 7])[0] == turn(ask, None, [*ids[:4], 7])[0]
    assert ask("GET", f"{SESSIONS}/{whole['id']}")["rows"] == len(ids) + 5


def test_a_prompt_is_the_whole_text(keyed: Served, ask: Callable[..., Any]) -> None:
    """What would cut the rows of earlier prompts is refused and changes nothing, unless it is permitted; drawn rows go where the prompt differs."""
    ids = keyed.engine.encode(PROMPT * 3)
    ask("POST", SESSIONS, {"id": "tale"})
    first = turn(ask, "tale", ids)[0]
    before = ask("GET", f"{SESSIONS}/tale")
    for prompt, shared in (([5, 6, 7], 0), ([*ids[:12], 5, 6], 12), (ids[:12], 12)):
        error = ask("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "session_id": "tale"}, 409)
        assert (error["code"], error["param"]) == ("session_would_be_cut", "session_cut")
        assert f"{len(ids) + 5} rows" in error["message"] and f"shares {shared}" in error["message"] and "whole text" in error["message"]
    assert {**ask("GET", f"{SESSIONS}/tale"), "last_used": 0} == {**before, "last_used": 0}
    assert turn(ask, "tale", ids)[0] == first  # drawn again
    assert turn(ask, "tale", [*ids, 5, 6])[1]["prompt_tokens_details"]["cached_tokens"] == len(ids)
    choice, used = turn(ask, "tale", [*ids[:12], 5, 6], session_cut=True)
    assert used["prompt_tokens_details"]["cached_tokens"] == 12 and choice == turn(ask, None, [*ids[:12], 5, 6])[0]
    assert ask("GET", f"{SESSIONS}/tale")["prompt_rows"] == 14
    ask("POST", SESSIONS, {"id": "words"})
    for text in (
        "In the beginn",
        "In the beginning God created the heav",
        "In the beginning God created the heaven",
    ):  # its last tokens become others
        turn(ask, "words", text)
    assert ask("POST", COMPLETIONS, {"prompt": "And", "session_id": "words"}, 409)["code"] == "session_would_be_cut"


def test_a_chat_whose_thinking_is_dropped_goes_on(keyed: Served, ask: Callable[..., Any]) -> None:
    ask("POST", SESSIONS, {"id": "talk"})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    last = 0
    for seed in range(3):
        body = {"messages": messages, "seed": seed, "max_tokens": 12, "session_id": "talk"}
        answer = ask("POST", "/v1/chat/completions", body)
        alone = ask("POST", "/v1/chat/completions", {**body, "session_id": None})
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= last - 1
        last = answer["usage"]["prompt_tokens"]
        messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "And?"}]


def test_an_empty_session_begins_with_what_is_there(serve_with: Callable[..., Any]) -> None:
    """With a kept prompt, which leaves another owner's alone, and with another session's; the bits are those of a text alone."""
    with serve_with(keeps_prompts=True, api_keys=("one", "two")) as served:

        def post(path: str, body: Any, key: dict[str, str] = ONE) -> Any:
            status, _, answer = served.request("POST", path, body, key)
            assert status == 200, answer
            return answer

        ids = served.engine.encode(PROMPT * 8)
        asked = {"max_tokens": 6, "seed": 9, "ignore_eos": True, "logprobs": 5}
        alone = post(COMPLETIONS, asked | {"prompt": [*ids, 5, 6]}, TWO)
        post(COMPLETIONS, asked | {"prompt": ids})
        for name, cached in (("first", len(ids)), ("second", len(ids) + 1)):
            post(SESSIONS, {"id": name})
            answer = post(COMPLETIONS, asked | {"prompt": [*ids, 5, 6], "session_id": name})
            assert answer["choices"] == alone["choices"] and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            held = served.request("GET", f"{SESSIONS}/{name}", None, ONE)[2]
            assert (held["rows"], held["prompt_rows"]) == (len(ids) + 7, len(ids) + 2)
        post(SESSIONS, {"id": "other"}, TWO)
        other = post(COMPLETIONS, asked | {"prompt": ids, "session_id": "other"}, TWO)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1  # of its own text before
        served.loop.call(served.engine.stage.check).result(10)
        for name, key in (("first", ONE), ("second", ONE), ("other", TWO)):
            assert served.request("DELETE", f"{SESSIONS}/{name}", None, key)[0] == 200
    assert served.engine.tier.pool.used == served.engine.keys.pool.used == 0


def test_nobody_begins_with_rows_that_a_session_drew(keyed: Served, ask: Callable[..., Any]) -> None:
    """While a request continues a session, others begin with its first prompt rows, and with no drawn ones, whose bits are others."""
    ids = keyed.engine.encode(PROMPT * 6)
    ask("POST", SESSIONS, {"id": "tale"})
    turn(ask, "tale", ids, max_tokens=40)
    session = keyed.api._sessions.find(owner_name("one"), "tale").session  # type: ignore[union-attr]
    whole = [*session.tokens, *session.pending]
    alone = turn(ask, None, [*whole, 7, 8], key=TWO)[0]
    more = {"prompt": [*whole, 5, 6], "max_tokens": 250, "ignore_eos": True, "stream": True, "session_id": "tale"}
    stream = keyed.open(COMPLETIONS, more, ONE)
    while b"data:" not in stream.recv(4096):
        pass
    choice, used = turn(ask, None, [*whole, 7, 8])
    assert keyed.loop.load() == Load(1, 0)
    assert used["prompt_tokens_details"]["cached_tokens"] == len(ids) and choice == alone
    stream.close()
    keyed.wait_for(Load(0, 0))
    while ask("GET", f"{SESSIONS}/tale")["state"] != "at rest":
        pass


WRONG: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "", {"id": "a/b"}, 400, "id"),
    ("POST", "", {"id": ""}, 400, "id"),
    ("POST", "", {"id": "x" * 65}, 400, "id"),
    ("POST", "", {"id": "files"}, 400, "id"),
    ("POST", "", {"id": "s\n"}, 400, "id"),
    ("POST", "", {"id": 3}, 400, "id"),
    ("POST", "", {"id": "s"}, 409, "id"),
    ("POST", "", b"[", 400, None),
    ("POST", "/s/fork", {"rows": 1}, 400, "rows"),
    ("POST", "/s/fork", {"rows": -1}, 400, "rows"),
    ("POST", "/s/fork", {"id": "s"}, 409, "id"),
    ("POST", "/s/truncate", {}, 400, "rows"),
    ("POST", "/s/truncate", {"rows": 10**12}, 400, "rows"),
    ("POST", "/s/save", {}, 400, "name"),
    ("POST", "/s/save", {"name": "../x"}, 400, "name"),
    ("POST", "/s/save", {"name": ".x"}, 400, "name"),
    ("POST", "/s/save", {"name": "x" * 65}, 400, "name"),
    ("POST", "/s/save", {"name": "é"}, 400, "name"),
    ("POST", "/restore", {"name": "none"}, 404, "name"),
    ("POST", "/restore", {"name": "none/../none"}, 400, "name"),
    ("DELETE", "/files/..", None, 400, "name"),
    ("DELETE", "/files/none", None, 404, "name"),
    ("PUT", "/s", {}, 405, None),
    ("PUT", "", {}, 405, None),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "param"), WRONG, ids=range(len(WRONG)))
def test_what_is_refused(ask: Callable[..., Any], method: str, path: str, body: Any, status: int, param: str | None) -> None:
    ask("POST", SESSIONS, {"id": "s"})
    error = ask(method, SESSIONS + path, body, status)
    assert error["param"] == param and error["message"]


def test_a_405_names_every_method(keyed: Served) -> None:
    assert {one.strip() for one in keyed.request("PUT", SESSIONS, {}, ONE)[1]["allow"].split(",")} == {"GET", "HEAD", "POST"}
    status, headers, body = keyed.request("HEAD", SESSIONS, None, ONE)
    assert (status, body) == (200, b"") and headers["content-type"] == "application/json"
    assert keyed.request("OPTIONS", SESSIONS, None, ONE)[0] == 405


def test_numbers_and_bytes_are_bounded(serve_with: Callable[..., Any], keyed: Served, ask: Callable[..., Any], tmp_path: Path) -> None:
    for _ in range(6):
        ask("POST", SESSIONS)
    status, headers, answer = keyed.request("POST", SESSIONS, None, ONE)
    assert (status, answer["error"]["code"]) == (429, "too_many_sessions") and "at most 6" in answer["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    ask("POST", SESSIONS, key=TWO)  # each owner has room of its own
    with serve_with(session_files=SessionFiles(tmp_path, 10_000)) as served:
        served.request("POST", SESSIONS, {"id": "s"})
        assert served.request("POST", f"{SESSIONS}/s/save", {"name": "small"})[0] == 200
        served.request("POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, "session_id": "s"})
        status, _, answer = served.request("POST", f"{SESSIONS}/s/save", {"name": "big"})
        assert (status, answer["error"]["code"]) == (507, "insufficient_storage") and "10000 B" in answer["error"]["message"]
        assert [one["name"] for one in served.request("GET", f"{SESSIONS}/files")[2]["data"]] == ["small"]
        assert served.request("DELETE", f"{SESSIONS}/s")[0] == 200
    with serve_with() as served:
        served.request("POST", SESSIONS, {"id": "s"})
        for path, body in (("/s/save", {"name": "x"}), ("/restore", {"name": "x"})):
            status, _, answer = served.request("POST", SESSIONS + path, body)
            assert status == 400 and "--session-dir" in answer["error"]["message"]
        assert served.request("GET", f"{SESSIONS}/files")[0] == 400
        assert served.request("DELETE", f"{SESSIONS}/s")[0] == 200


def test_one_thing_at_a_time(keyed: Served, ask: Callable[..., Any]) -> None:
    """While a request continues a session every other use of it is refused; after the client has left it is free again."""
    ask("POST", SESSIONS, {"id": "busy"})
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "seed": 1, "stream": True, "session_id": "busy"}
    stream = keyed.open(COMPLETIONS, body, ONE)
    keyed.wait_for(Load(1, 0))
    assert ask("GET", f"{SESSIONS}/busy")["state"] == "continued by a request"
    for method, path, more in (("DELETE", "", None), ("POST", "/fork", {}), ("POST", "/truncate", {"rows": 0}), ("POST", "/save", {"name": "x"})):
        assert ask(method, f"{SESSIONS}/busy{path}", more, 409)["code"] == "session_in_use"
    assert ask("POST", COMPLETIONS, body, 409)["code"] == "session_in_use"
    assert ask("POST", COMPLETIONS, body | {"n": 2}, 400)["param"] == "session_id"
    stream.close()
    keyed.wait_for(Load(0, 0))
    while ask("GET", f"{SESSIONS}/busy")["state"] != "at rest":
        pass
    assert ask("GET", f"{SESSIONS}/busy")["rows"] > len(keyed.engine.encode(PROMPT))


def test_a_save_goes_on_beside_requests_and_without_its_client(keyed: Served, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is held in its first piece: requests of others run, this session is taken; its client leaves, and the file is complete."""
    ask("POST", SESSIONS, {"id": "slow"})
    turn(ask, "slow", PROMPT)
    begun, go_on = threading.Event(), threading.Event()
    sessions = keyed.api._sessions
    assert sessions is not None

    def held(done: int, total: int, name: str) -> None:
        begun.set()
        assert go_on.wait(20)

    monkeypatch.setattr(sessions, "_watched", held)
    client = keyed.open(f"{SESSIONS}/slow/save", {"name": "whole"}, ONE)
    assert begun.wait(10)
    assert ask("GET", f"{SESSIONS}/slow")["state"] == "being saved"
    assert ask("POST", COMPLETIONS, {"prompt": "x", "session_id": "slow"}, 409)["code"] == "session_in_use"
    assert turn(ask, None, PROMPT, max_tokens=3)[1]["completion_tokens"] == 3
    client.close()
    go_on.set()
    while ask("GET", f"{SESSIONS}/slow")["state"] != "at rest":
        pass
    rows = ask("GET", f"{SESSIONS}/slow")["rows"]
    assert ask("POST", f"{SESSIONS}/restore", {"name": "whole"})["rows"] == rows > 0


def test_more_sessions_than_slots_and_the_official_client(keyed: Served, ask: Callable[..., Any]) -> None:
    """Five chats take turns on three slots, at once; each is what it would be alone."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=keyed.url, api_key="one", max_retries=0) as client:
        names = [f"chat-{index}" for index in range(5)]
        for name in names:
            ask("POST", SESSIONS, {"id": name})
        texts: dict[str, str] = {}

        def chat(name: str, seed: int) -> None:
            reply = client.chat.completions.create(model=NAME, messages=messages, seed=seed, max_tokens=12, extra_body={"session_id": name})
            texts[name] = reply.choices[0].message.model_dump_json()

        threads = [threading.Thread(target=chat, args=(name, seed)) for seed, name in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for seed, name in enumerate(names):
            alone = client.chat.completions.create(model=NAME, messages=messages, seed=seed, max_tokens=12)
            assert texts[name] == alone.choices[0].message.model_dump_json()
        assert turn(ask, None, PROMPT)[1]["completion_tokens"] == 6  # every slot is free again
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=NAME, messages=messages, extra_body={"session_id": "none"})


def test_forks_and_files_need_no_slot(keyed: Served, ask: Callable[..., Any]) -> None:
    """While requests hold every slot, sessions are made, forked, cut, saved and restored all the same."""
    ask("POST", SESSIONS, {"id": "quiet"})
    turn(ask, "quiet", PROMPT)
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "seed": 1, "stream": True}
    streams = [keyed.open(COMPLETIONS, body, TWO) for _ in range(3)]
    keyed.wait_for(Load(3, 0))
    ask("POST", SESSIONS, {"id": "new"})
    assert ask("POST", f"{SESSIONS}/quiet/fork", {"id": "branch", "rows": 9})["rows"] == 9
    assert ask("POST", f"{SESSIONS}/branch/truncate", {"rows": 7})["rows"] == 7
    ask("POST", f"{SESSIONS}/quiet/save", {"name": "story"})
    assert ask("POST", f"{SESSIONS}/restore", {"name": "story"})["rows"] == ask("GET", f"{SESSIONS}/quiet")["rows"]
    assert keyed.loop.load() == Load(3, 0)
    for stream in streams:
        stream.close()
    keyed.wait_for(Load(0, 0))


def test_a_server_that_ends_gives_up_its_saves(serve_with: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a file that is being written, and nothing of it is left."""
    with serve_with(session_files=SessionFiles(tmp_path, 64 << 20)) as served:
        served.request("POST", SESSIONS, {"id": "s"})
        served.request("POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3, "session_id": "s"})
        sessions = served.api._sessions
        begun, go_on, watched = threading.Event(), threading.Event(), sessions._watched

        def held(*progress: Any) -> None:
            begun.set()
            assert go_on.wait(20)
            watched(*progress)

        monkeypatch.setattr(sessions, "_watched", held)
        answers: list[Any] = []
        client = threading.Thread(target=lambda: answers.append(served.request("POST", f"{SESSIONS}/s/save", {"name": "x"})))
        client.start()
        assert begun.wait(10)
        assert list(tmp_path.glob("*/*.partial"))
        closing = threading.Thread(target=sessions.close)
        closing.start()
        while not sessions._closing:
            pass
        go_on.set()
        for thread in (closing, client):
            thread.join(20)
        assert answers[0][0] == 503 and answers[0][2]["error"]["code"] == "unavailable"
        assert not list(tmp_path.glob("*/*"))
        assert served.request("POST", f"{SESSIONS}/s/save", {"name": "x"})[0] == 503
        assert served.request("DELETE", f"{SESSIONS}/s")[0] == 200


def test_what_the_disk_refuses(keyed: Served, ask: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of files have a code and no path of the server, and the session goes on."""
    files = keyed.api.config.session_files
    assert files is not None
    ask("POST", SESSIONS, {"id": "s"})
    turn(ask, "s", PROMPT)
    ask("POST", f"{SESSIONS}/s/save", {"name": "good"})
    path = files.path(owner_name("one"), "good")
    whole = path.read_bytes()

    def refused(status: int, code: str, calls: list[tuple[str, str, Any]]) -> None:
        for method, where, body in calls:
            error = ask(method, SESSIONS + where, body, status)
            assert error["code"] == code and "next:" in error["message"], error
            assert str(files.directory) not in error["message"] and owner_name("one") not in error["message"]  # type: ignore[union-attr]

    save, restore = ("POST", "/s/save", {"name": "good"}), ("POST", "/restore", {"name": "good"})
    for damaged in (whole[:200], whole[:-100], whole[:-100] + bytes(100), b"text" * 100):
        path.write_bytes(damaged)
        refused(400, "session_file_error", [restore])
    refused(400, "session_file_error", [save])  # somebody's text is not replaced
    path.write_bytes(whole)

    def fails(number: int) -> Callable[..., None]:
        def fail(*given: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        refused(507, "insufficient_storage", [save])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=1, f_frsize=512))
        refused(507, "insufficient_storage", [save])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails(errno.EIO))
        refused(500, "session_file_error", [save])
    assert path.read_bytes() == whole
    folder, aside = path.parent, tmp_path / "aside"
    folder.rename(aside)
    folder.write_text("no directory")
    refused(500, "session_file_error", [save, ("GET", "/files", None), ("DELETE", "/files/good", None)])
    folder.unlink()
    aside.rename(folder)
    path.unlink()
    path.symlink_to(path)
    refused(500, "session_file_error", [save])
    path.unlink()
    ask(*(save[0], SESSIONS + save[1], save[2]))
    assert ask("POST", f"{SESSIONS}/restore", {"name": "good"})["rows"] == ask("GET", f"{SESSIONS}/s")["rows"] > 0
