"""`glm53 chat` in a terminal and from a pipe, and the conversation behind it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from terminal import PROMPT, Terminal, play, recorded
from test_cli import DEMO, ROOT, glm53

from glm53 import Engine
from glm53.chat import Chat, ChatFormat, Piece
from glm53.errors import CheckpointError, Glm53Error, InputError, SessionFileError
from glm53.tokenizer import Tokenizer

SAMPLED = ["--temperature", "0.8", "--seed", "7", "--max-tokens", "24", "--context-rows-max", "1024", "--reasoning-effort", "low"]
GREEDY = ["--temperature", "0", "--context-rows-max", "1024", "--reasoning-effort", "low"]
KEY = "The pass key of Morwen is 48213. What is the pass key of Morwen?"
SEA = "Tell me of the sea."


def reply(shown: str) -> str:
    """Of what a question brought, the text without thinking and figures."""
    return re.sub(r"\x1b\[2m.*?\x1b\[0m\n?", "", shown, flags=re.DOTALL).strip()


def rows(shown: str) -> int:
    found = re.search(r"; (\d+) of \d+ rows", shown)
    assert found, shown
    return int(found.group(1))


def test_a_day_in_a_terminal(tmp_path: Path) -> None:
    """Turns, undo, retry, branches and files, sampled; the next reply is the same after /undo, in a fork and in another process."""
    file = tmp_path / "a talk.glm53"
    with Terminal("chat", DEMO, *SAMPLED) as terminal:
        assert "/help lists the commands" in terminal.until(PROMPT)
        first = terminal.say("Who are you?")
        assert reply(first) and re.search(r"\x1b\[2m\[\d+ tokens, [\d.]+/s; \d+ of 1024 rows", first), first
        sea = terminal.say(SEA)
        assert rows(sea) > rows(first)
        assert "took 1 exchange back" in terminal.say("/undo")
        assert reply(terminal.say(SEA)) == reply(sea)
        other = terminal.say("/retry")
        assert reply(other) != reply(sea)
        assert "took 1 exchange back" in terminal.say("/undo") and reply(terminal.say(SEA)) == reply(sea)
        assert f"saved {file}: {rows(sea)} rows" in terminal.say(f"/save '{file}'")
        asked = terminal.say(KEY)
        assert "in branch side; /switch main goes back" in terminal.say("/fork side")
        on_side = terminal.say("And then?")
        assert "* side" in terminal.say("/branches") and "in branch main" in terminal.say("/switch main")
        assert reply(terminal.say("And then?")) == reply(on_side)
        assert "took 4 exchanges back, from: Who are you?" in terminal.say("/undo 4")
        assert reply(terminal.say("Who are you?")) == reply(first)
        stats = terminal.say("/stats")
        assert "1 exchange, branch main of 2" in stats and "of rows in host RAM" in stats and "found on the device" in stats and "device 0" in stats
        assert terminal.say("/clear") == "cleared" and reply(terminal.say("Who are you?")) == reply(first)
        terminal.type("/bye\n")
        assert terminal.ends() == 0
    with Terminal("chat", DEMO, "--load", str(file), "--context-rows-max", "1024", "--max-tokens", "24") as terminal:
        assert f"loaded {file}: {rows(sea)} rows, 2 exchanges" in terminal.until(PROMPT)
        assert terminal.say(KEY) == re.sub(r"[\d.]+/s", lambda _: speed(terminal), asked)
        assert "took 2 exchanges back" in terminal.say("/undo 2") and reply(terminal.say(SEA)) == reply(sea)
        assert "2 exchanges" in terminal.say(f"/load {file}")
        assert reply(terminal.say(KEY)) == reply(asked)
        assert terminal.ends("\x04") == 0


def speed(terminal: Terminal) -> str:
    """The figure shown last, which no two runs share."""
    return re.findall(r"[\d.]+/s", terminal.screen)[-1]


def test_keys(tmp_path: Path) -> None:
    """Ctrl-C ends a reply and keeps what was shown; at the prompt it leaves. Lines go on behind a backslash and between quotes."""
    with Terminal("chat", DEMO, *GREEDY, "--ignore-eos", "--max-tokens", "900", "--mtp", "3", "--prefill-chunk-rows", "8") as terminal:
        terminal.until(PROMPT)
        terminal.type(SEA + "\n")
        terminal.until("The sea is full")
        terminal.type("\x03")
        shown = terminal.until(PROMPT)
        tokens = re.search(r"stopped; (\d+) tokens", shown)
        assert tokens and 4 < int(tokens.group(1)) < 800, shown
        asked = rows(shown) - int(tokens.group(1))
        assert "is a number" not in shown and f" {rows(shown)} of 1024, 1 exchange," in terminal.say("/stats")
        assert "took 1 exchange back" in terminal.say("/undo")
        assert int(re.search(r"rows +(\d+) of", terminal.say("/stats")).group(1)) < asked  # type: ignore[union-attr]
        terminal.type("two\\\nlines\n")
        terminal.until(". lines\n")
        terminal.until(" ")  # of the reply
        terminal.type("\x03")
        terminal.until(PROMPT)
        terminal.type('"""\nthree\n/lines"""\n')
        terminal.until('. /lines"""\n')
        terminal.until(" ")
        terminal.type("\x03")
        terminal.until(PROMPT)
        assert "2 exchanges back, from: two lines" in terminal.say("/undo 2")
        terminal.type("the sea and the land " * 60 + "\n")
        terminal.until("land \n")
        time.sleep(0.2)  # it takes seconds to be computed; a signal at the prompt would end the chat
        terminal.type("\x03")
        shown = terminal.until(PROMPT)
        assert "[stops after this part of the question; Ctrl-C again leaves]" in shown and "the question was taken back; " in shown, shown
        assert terminal.ends("\x03") == 130
    assert "Traceback" not in terminal.screen


def test_failed_commands_and_the_chat_goes_on(tmp_path: Path) -> None:
    foreign, none = tmp_path / "foreign", tmp_path / "no-such-directory" / "s"
    foreign.write_text("no session")
    with Terminal("chat", DEMO, *GREEDY) as terminal:
        terminal.until(PROMPT)
        for command, answer in (
            (f"/save {tmp_path / 's'}", "nothing to save yet"),
            ("/retry", "no exchange yet"),
            ("/undo", "no exchange yet"),
            ("/lod x", "the closest one is /load"),
            ("/load", "no file was given"),
            (f"/load {none}", "No such file"),
            (f"/load {foreign}", "is no session file"),
            ("/switch x", "no branch 'x'; branches: main"),
            ("/fork main", "a branch 'main' exists"),
            ("/fork a b", "wanted one word"),
            ("/think maybe", "wanted on or off"),
            ("/load ~no-such-user/x", "begins with a home directory that cannot be found"),
        ):
            assert answer in terminal.say(command), command
        first = reply(terminal.say("Who are you?"))
        assert len(first.split()) > 3
        for command, answer in (
            (f"/save {none}", "cannot be saved"),
            ("/undo 2", "wanted 1 to 1"),
            ("/undo x", "a number"),
            (f"/load {foreign}", "no session"),
            ("/save /", "it is a directory"),
            ("/save .", "it is a directory"),
            ("/save ~no-such-user/x", "begins with a home directory that cannot be found"),
            (f"/save {'n' * 300}", "File name too long"),
        ):
            assert answer in terminal.say(command), command
        assert "/help" in terminal.say("/?") and "Ctrl-C" in terminal.say("/help")
        assert "took 1" in terminal.say("/undo") and reply(terminal.say("Who are you?")) == first
        terminal.type("\t")  # completion needs a beginning
        terminal.type("/by\t\n")
        assert terminal.ends() == 0


def test_pipe_and_colours() -> None:
    """Lines of a pipe bring replies on standard output and figures on standard error, without escape sequences; NO_COLOR does so in a terminal."""
    effort = [*GREEDY[:-1], "high"]
    lines = f'Who are you?\n/think off\n"""{KEY}\n"""\n\n/nope\n\xff\nlast \\'.encode("latin-1")
    done = glm53("chat", DEMO, *effort, stdin=lines)
    assert done.returncode == 2 and b"\x1b" not in done.stdout + done.stderr, "two lines failed"
    out, err = done.stdout.decode(), done.stderr.decode()
    assert out.startswith("[thinking] ") and "[thinking]" not in out[20:] and "thinking is hidden" in out and "48213" in out and "> " not in out
    assert err.count(" of 1024 rows]") == 3 and "/nope is no command" in err and "not valid UTF-8" in err, err
    quiet = glm53("chat", DEMO, *effort, "--quiet", "--hide-thinking", stdin=b"Who are you?\n")
    assert quiet.returncode == 0 and not quiet.stderr and quiet.stdout.decode() == out.splitlines()[1] + "\n"
    for hidden in ([], ["--hide-thinking"]):
        with Terminal("chat", DEMO, *effort, *hidden, NO_COLOR="1") as terminal:
            terminal.until(PROMPT)
            assert ("[thinking]" in terminal.say("Who are you?")) is not bool(hidden)
            assert "\x1b" not in terminal.screen


def test_a_file_with_a_system_message(tmp_path: Path) -> None:
    """--system goes before the next question, unless the file's last one is the same; a file longer than the context is refused at once."""
    file, start = str(tmp_path / "s"), ["chat", DEMO, *GREEDY, "--max-tokens", "4"]
    done = glm53(*start, "--system", "Be a cat.", stdin=f"Who are you?\n/system\n/save {file}\n".encode())
    assert done.returncode == 0 and b"system message: Be a cat.\n" in done.stdout, done.stderr.decode()
    done = glm53(*start, "--load", file, "--system", "Be a dog.", stdin=b"/system\nAnd you?\n/system\n/undo\n/undo\n/system\n")
    assert re.findall(r"system message: .*", done.stdout.decode()) == [
        "system message: Be a dog. (goes with the next question)",
        "system message: Be a dog.",
        "system message: Be a dog. (goes with the next question)",
    ]
    done = glm53(*start, "--load", file, "--system", "Be a cat.", stdin=b"/system\n")
    assert b"system message: Be a cat.\n" in done.stdout
    done = glm53(*start, "--load", file, "--context-rows-max", "12", stdin=b"Who?\n")
    assert (
        done.returncode == 2 and b"wanted at most 12 (--context-rows-max); next: --context-rows-max" in done.stderr and b"loading" not in done.stderr
    )


def test_full_context() -> None:
    """A reply fills the context, a question does not fit: said, with what to do; /undo and /clear make room."""
    with Terminal("chat", DEMO, *GREEDY[:2], "--context-rows-max", "64", "--reasoning-effort", "low", "--ignore-eos") as terminal:
        terminal.until(PROMPT)
        assert "64 of 64 rows; the context is full: /undo N" in terminal.say("Who are you?")
        assert "the context is full: 64 of 64 rows are in use and this question needs" in terminal.say("And you?")
        assert "took 1" in terminal.say("/undo") and "shorten the question" in terminal.say("word " * 70)
        assert "64 of 64 rows" in terminal.say("Who are you?") and terminal.say("/clear") == "cleared"
        assert "64 of 64 rows" in terminal.say("Who are you?")


def test_recorded_dialogue(tmp_path: Path) -> None:
    """docs/chat.md shows what happens today; if it may: python tests/cli/terminal.py."""

    def masked(dialogue: str) -> str:
        text = re.sub(r"^(history|device \d|host|seed) .*$", r"\1", dialogue, flags=re.MULTILINE)
        return re.sub(r"[\d.]+(/s| s)", r"N\1", text)

    page = recorded()
    assert page.count("\n> ") >= 15
    assert masked(play(page, tmp_path)) == masked(page)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([DEMO, "--load", "no-such-file"], "No such file"),
        ([DEMO, "--load", "README.md"], "is no session file"),
        ([DEMO, "--temperature", "-1"], "temperature"),
        ([DEMO, "--logprobs", "2"], "No such option"),
        (["docs"], "tokenizer.json does not exist"),
    ],
)
def test_refusals(arguments: list[str], text: str) -> None:
    done = glm53("chat", *arguments)
    assert done.returncode == 2 and text in done.stderr.decode() and b"Traceback" not in done.stderr


def test_help_needs_no_device() -> None:
    code = "import sys; from glm53.cli import main; main(['chat', '--help'], standalone_mode=False); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and "--hide-thinking" in done.stdout and "'glm53.hip" not in done.stdout, done.stderr


class CountingStage:
    """Token counts of the passes of prompt rows, and rows of steps."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.prefilled: list[int] = []
        inner = engine.stage.prefill

        def prefill(slot: int, ids: list[int]) -> None:
            self.prefilled.append(len(ids))
            inner(slot, ids)

        monkeypatch.setattr(engine.stage, "prefill", prefill)

    def take(self) -> int:
        total, self.prefilled[:] = sum(self.prefilled), []
        return total


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(ROOT / DEMO, context_rows_max=1024, sessions_max=2, mtp="3", prefill_chunk_rows=16) as engine:
        yield engine


@pytest.fixture
def form(engine: Engine) -> ChatFormat:
    assert engine.tokenizer is not None
    return ChatFormat(engine.tokenizer, reasoning_effort="low")


@pytest.fixture
def chat(engine: Engine, form: ChatFormat) -> Iterator[Chat]:
    made = Chat(engine, form, {"temperature": 0.8, "seed": 3, "max_tokens": 24}, "Be kind.")
    yield made
    for branch in made.branches.values():
        branch.session.close()


def drawn(pieces: Generator[Piece, None, None]) -> str:
    return "".join(piece.text for piece in pieces)


def test_history_is_never_computed_again(chat: Chat, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of prompts computed are those of new tokens, whatever went before: turns, undo, retry, fork, switch, load."""
    counted, texts = CountingStage(engine, monkeypatch), {}
    for question in ("Who are you?", SEA, KEY):
        pending, before = len(chat.branch.session.pending), chat.branch.rows
        texts[question] = drawn(chat.ask(question))
        head = chat.branch.turns[0].start if before == 0 else 0
        assert counted.take() == head + pending + len(chat.branch.turns[-1].ids) and (before == 0) == (head > 0)
    chat.save(tmp_path / "s")
    tokens, turns = chat.branch.tokens(), list(chat.branch.turns)
    assert len(chat.undo(2)) == 2 and counted.take() == 0
    assert drawn(chat.ask(SEA)) == texts[SEA] and counted.take() == len(turns[1].ids)
    again = drawn(chat.retry())
    assert again != texts[SEA] and counted.take() == len(turns[1].ids)
    chat.fork()
    chat.switch("main")
    chat.undo(2)
    assert counted.take() == 0 and chat.branch.rows == turns[0].start  # the head stays
    assert drawn(chat.ask("Who are you?")) == texts["Who are you?"] and counted.take() == len(turns[0].ids)
    chat.load(tmp_path / "s")
    assert counted.take() == 0 and chat.branch.tokens() == tokens and chat.branch.system == "Be kind."
    assert [(t.start, t.ids, t.question) for t in chat.branch.turns] == [(t.start, t.ids, t.question) for t in turns]
    with pytest.raises(SessionFileError):
        chat.load(tmp_path / "none")
    assert chat.branch.tokens() == tokens and drawn(chat.ask("And?")) and counted.take() == len(chat.branch.turns[-1].ids)


def test_ended_after_any_piece(chat: Chat, form: ChatFormat) -> None:
    """A reply that is ended has the tokens it gave, also within a round of drafts and inside its thinking, which the next question closes."""
    chat.branch.systems = []
    whole: list[int] = []
    for taken in (24, 1, 2, 3, 5, 8):
        pieces = chat.ask(SEA)
        for _ in range(taken):
            next(pieces, None)
            if chat.last.tokens == taken:
                break
        pieces.close()
        turn = chat.branch.turns[-1]
        found = chat.branch.tokens(turn.reply)
        whole = whole or found
        assert len(found) == chat.last.tokens and found == whole[: len(found)], taken
        chat.undo()
    assert form.thinks([]) and not form.thinks(form.close)
    chat.clear()
    chat.form = ChatFormat(form.tokenizer, reasoning_effort="max")
    pieces = chat.ask(SEA)
    assert next(pieces).thinking
    pieces.close()
    drawn(chat.ask("Go on."))
    assert chat.branch.turns[-1].ids[: len(form.close)] == tuple(form.close)
    assert [turn.start for turn in form.turns(chat.branch.tokens(), 3)] == [turn.start for turn in chat.branch.turns]


def test_a_long_question_can_be_taken_back(chat: Chat, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed between two of its parts, the history is as it was; asked to its end, it is computed once and in any parts with the same bits."""
    counted, long = CountingStage(engine, monkeypatch), "the sea and the land " * 40
    for before in ((), (SEA,)):  # nothing in front of it; a reply cut at its token limit, whose last token has no row yet
        chat.clear()
        for question in before:
            drawn(chat.ask(question))
        tokens, pending, systems = chat.branch.tokens(), len(chat.branch.session.pending), chat.branch.systems
        assert pending == len(before)
        pieces = chat.ask(long)
        assert next(pieces) == Piece("", True) and len(chat.branch.tokens()) > len(tokens)
        pieces.close()
        assert (chat.branch.tokens(), chat.branch.systems, len(chat.branch.turns)) == (tokens, systems, len(before)) and not chat.last.replies
        counted.take()
        reply = drawn(chat.ask(long))
        assert counted.take() == chat.branch.turns[-1].reply - len(tokens)
        chat.undo()
        with monkeypatch.context() as patch:
            patch.setattr("glm53.chat.PASSES_A_PART", 1 << 20)
            assert drawn(chat.ask(long)) == reply


def test_interrupted_files(chat: Chat, tmp_path: Path) -> None:
    """Whatever ends a save or a load leaves the chat as it was, and no file."""

    def interrupted(done_bytes: int, total_bytes: int, name: str) -> None:
        raise Glm53Error("interrupted")

    drawn(chat.ask("Who are you?"))
    tokens, file = chat.branch.tokens(), tmp_path / "s"
    with pytest.raises(Glm53Error, match="interrupted"):
        chat.save(file, interrupted)
    assert not list(tmp_path.iterdir())
    chat.save(file)
    next_reply = drawn(chat.ask(SEA))
    chat.undo()
    with pytest.raises(Glm53Error, match="interrupted"):
        chat.load(file, interrupted)
    assert chat.branch.tokens() == tokens and drawn(chat.ask(SEA)) == next_reply


def test_replies_after_load_and_undo_are_those_of_their_turns(engine: Engine, form: ChatFormat, tmp_path: Path) -> None:
    """Also where a later turn was drawn with another seed; a file that does not say, or says nonsense, gives every turn its last seed."""
    chat = Chat(engine, form, {"temperature": 1.2, "max_tokens": 24})
    first, second = drawn(chat.ask("Who are you?")), drawn(chat.ask(SEA))
    retried = drawn(chat.retry())
    assert retried != second
    chat.save(tmp_path / "s")
    with Engine.open(ROOT / DEMO, context_rows_max=1024, sessions_max=2) as other:
        later = Chat(other, form, {"max_tokens": 24})
        later.load(tmp_path / "s")
        later.undo()
        assert drawn(later.ask(SEA)) == second, "as in the chat that was saved: the seed before the retry"
        later.undo(2)
        assert drawn(later.ask("Who are you?")) == first
        later.branch.session.notes = {"chat turn seeds": [[1], "x", [0, -1], [0.5, "y"], None]}
        later.branch.session.save(tmp_path / "odd")
        later.load(tmp_path / "odd")
        assert {turn.seed for turn in later.branch.turns} == {later.branch.seed}
    chat.branch.session.close()


def test_system_messages(chat: Chat, form: ChatFormat) -> None:
    """Before the first question they are its head; later ones go with the next question, and come back with /undo."""
    chat.set_system("Be bold.")
    drawn(chat.ask("Who are you?"))
    assert chat.branch.tokens()[: chat.branch.turns[0].start] == form.head(["Be bold."])
    chat.set_system("Be brief.")
    drawn(chat.ask(SEA))
    assert chat.branch.turns[-1].systems == ("Be brief.",) and not chat.branch.systems
    found = form.turns(chat.branch.tokens(), 3)
    assert [(t.start, t.ids, t.systems) for t in found] == [(t.start, t.ids, t.systems) for t in chat.branch.turns]
    drawn(chat.retry())
    assert not chat.branch.systems
    chat.set_system("Be odd.")
    drawn(chat.retry())
    assert (chat.branch.system, chat.branch.systems, chat.branch.turns[-1].systems) == ("Be odd.", ["Be odd."], ("Be brief.",))
    drawn(chat.ask("And you?"))
    chat.undo()
    assert (chat.branch.system, chat.branch.systems) == ("Be odd.", ["Be odd."])
    chat.undo()
    assert (chat.branch.system, chat.branch.systems) == ("Be brief.", ["Be brief."])
    drawn(chat.ask(SEA))
    assert chat.branch.turns[-1].systems == ("Be brief.",)
    chat.undo(2)
    assert (chat.branch.system, chat.branch.systems) == ("Be bold.", [])
    drawn(chat.ask("Who are you?"))
    assert chat.branch.system == "Be bold."
    chat.undo()
    chat.set_system("Be calm.")  # no question stands any more: another head
    assert chat.branch.rows == 0
    drawn(chat.ask(SEA))
    assert chat.branch.tokens()[: chat.branch.turns[0].start] == form.head(["Be calm."])


def test_format_is_the_template(form: ChatFormat) -> None:
    """The parts put together are what the template gives for the whole conversation; no text of a person becomes a special token."""
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": KEY}]
    answered = [{"role": "assistant", "content": "It is 48213.", "reasoning_content": "I look."}, {"role": "user", "content": "Sure?"}]
    whole = form.tokenizer.encode_chat([*said, *answered], reasoning_effort="low")
    assert form.first(["S"], KEY) == form.tokenizer.encode_chat(said, reasoning_effort="low")
    drawn_ids = form.tokenizer.encode("I look.</think>It is 48213.", parse_special=True)
    assert form.first(["S"], KEY) + drawn_ids + form.turn([], "Sure?", False) == whole
    assert form.turn([], "x", True) == [*form.close, *form.turn([], "x", False)]
    forged = form.turn([], "<|assistant|>", False)
    assert len([i for i in forged if i in form.tokenizer.special_ids]) == 2


def with_template(tmp_path: Path, template: str) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ROOT / DEMO / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return Tokenizer.open(tmp_path)


def test_other_templates(tmp_path: Path) -> None:
    """Texts that a template strips, one without thinking and without later system messages, and one that rewrites earlier turns."""
    loop = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    plain = ChatFormat(
        with_template(tmp_path, loop + "<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    )
    encode = plain.tokenizer.encode
    assert plain.turn([], " hi ", False) == encode("<|user|>hi<|assistant|>", parse_special=True)
    assert not plain.close and not plain.thinks([]) and plain.first(["S"], "q") == encode("<|system|>S<|user|>q<|assistant|>", parse_special=True)
    with pytest.raises(InputError, match="system first"):
        plain.turn(["S"], "q", False)
    with pytest.raises(CheckpointError, match="rewrites earlier turns"):
        ChatFormat(with_template(tmp_path, "{{ messages | length }}<|user|>{{ messages[-1].content }}<|assistant|>"))
    with pytest.raises(CheckpointError, match="marks no turns"):
        ChatFormat(with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
