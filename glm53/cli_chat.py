"""`glm53 chat`: a conversation in a terminal, or with lines from a pipe. glm53/chat.py holds it; here are lines, keys, commands, figures."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from glm53.cli_session import take_formats
from glm53.config import EngineConfig
from glm53.errors import DeviceLost, Glm53Error, InputError, short_bytes
from glm53.options import EXIT_CODES, Command, engine_options, model_argument, option, reasoning_effort_option, sampling_options
from glm53.report import ProgressLine, history_line, progress_line
from glm53.sampling import SamplingParams

if TYPE_CHECKING:
    from glm53.chat import Chat, Figures, Piece

DIM, ERASE, PLAIN = "\x1b[2m", "\r\x1b[K", "\x1b[0m"
PROMPT, MORE = "> ", ". "  # of a question, and of its further lines
QUOTES = '"""'
# A model's text moves no cursor and sets no colour: control characters other than tab and newline are shown as U+FFFD.
_CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}


class Leave(Exception):
    """/bye."""


class Lines:
    """Questions as they are typed: a line, several behind a backslash each, or all between triple quotes. Lines of a pipe have no prompt."""

    def __init__(self) -> None:
        self.terminal = sys.stdin is not None and sys.stdin.isatty()
        if self.terminal:
            try:
                import readline  # from here on `input` edits lines and keeps those of this chat; not every Python has it
            except ImportError:
                return
            readline.set_completer_delims(" ")
            readline.set_completer(_completed)
            readline.parse_and_bind("tab: complete")

    def read(self) -> tuple[str, bool]:
        """The next text, and whether it may be a command: not between quotes. Raises EOFError at the end, InputError for a line that is not UTF-8."""
        text = self._line(PROMPT)
        quoted = text.lstrip().startswith(QUOTES)
        if quoted:
            text = text.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES) if quoted else text.endswith("\\"):
            try:
                line = self._line(MORE)
            except EOFError:
                if self.terminal:
                    raise
                return text, False  # the end of a pipe ends the text too
            text = (text if quoted else text[:-1]) + "\n" + line
        return (text.rstrip()[: -len(QUOTES)].strip("\n"), False) if quoted else (text, True)

    def _line(self, prompt: str) -> str:
        if self.terminal:
            try:
                return input(prompt)
            except UnicodeDecodeError as error:
                raise InputError(f"the line is not valid UTF-8 ({error.reason}); next: set the terminal to UTF-8") from None
        line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: byte {error.start} of a line is not valid UTF-8; the line is left out") from None


class Screen:
    """What is printed, and how: replies and what commands answer on standard output, the rest on standard error. Escape sequences go to terminals
    alone, and to none if NO_COLOR is set."""

    def __init__(self, quiet: bool, show_thinking: bool):
        self.quiet, self.show_thinking = quiet, show_thinking
        self._out, self._err = _escapes(sys.stdout), _escapes(sys.stderr)
        self._part: bool | None = None  # thinking or answer, of what stands there of a reply
        self._waiting = False  # a mark stands there for thinking that is hidden

    def say(self, text: str) -> None:
        """What a command answers."""
        click.echo(text)

    def note(self, text: str) -> None:
        """A line beside the conversation."""
        if not self.quiet:
            click.echo(f"{DIM}[{text}]{PLAIN}" if self._err else f"[{text}]", err=True, color=True)

    def progress(self, verb: str) -> ProgressLine | None:
        return progress_line(verb, self._err and not self.quiet)

    def error(self, error: BaseException) -> None:
        click.echo(f"{error}", err=True)

    def piece(self, piece: Piece) -> None:
        """More of a reply: its thinking dimmed, then the answer on a line of its own. Space in front of either is left out."""
        if piece.thinking and not self.show_thinking:
            if self._out and not self._waiting:
                self._waiting = True
                click.echo(f"{DIM}thinking{PLAIN}", nl=False, color=True)
            return
        text = (piece.text if self._part is piece.thinking else piece.text.lstrip()).translate(_CONTROLS)
        if not text:
            return
        if self._part is not piece.thinking:
            mark = (DIM if self._out else "[thinking] ") if piece.thinking else ""
            text = self._end_of_part() + ("" if self._part is None else "\n") + mark + text
            self._part = piece.thinking
        click.echo(text, nl=False, color=self._out)

    def _end_of_part(self) -> str:
        erase, self._waiting = ERASE if self._waiting else "", False
        return erase + (PLAIN if self._part and self._out else "")

    def end(self) -> None:
        """The reply has ended."""
        click.echo(self._end_of_part(), color=self._out)
        self._part = None


def _escapes(stream: Any) -> bool:
    return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Stop:
    """Ctrl-C at places of our choice. While something runs (`work`), the first one sets `asked`, so that no call of the engine is cut in the middle;
    a second one raises KeyboardInterrupt, as any does at the prompt: the chat ends."""

    def __init__(self) -> None:
        self.asked = False
        self._working = False
        self.hint = ""  # said at the first one, if what runs cannot end at once

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def work(self) -> Iterator[None]:
        self._working, self.asked, self.hint = True, False, ""
        try:
            yield
        finally:
            self._working = False

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._working:
            raise KeyboardInterrupt
        self.asked = True
        if self.hint and sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"\n[{self.hint}]\n".encode())  # a buffered stream may be in use just now

    def check(self, outcome: str) -> None:
        """Raises Glm53Error if it was asked for. outcome: for the message."""
        if self.asked:
            raise Glm53Error(f"interrupted: {outcome}")


class Talk:
    """The loop of a chat and its commands, listed in COMMANDS: a method takes what stands behind the command's name."""

    def __init__(self, chat: Chat, screen: Screen, lines: Lines):
        self._chat, self._screen, self._lines, self._stop = chat, screen, lines, Stop()
        self.exit_code = 0  # of the first line of a pipe that failed

    def run(self) -> None:
        """Until the end of the lines, or /bye. Raises KeyboardInterrupt for Ctrl-C at the prompt, DeviceLost."""
        with self._stop.watching():
            while True:
                try:
                    text, free = self._lines.read()
                    with self._stop.work():
                        if free and text.startswith("/"):
                            self._command(text)
                        elif text.strip():
                            self._reply(partial(self._chat.ask, text))
                except (EOFError, KeyboardInterrupt) as end:
                    if self._lines.terminal:
                        click.echo()  # the shell's prompt begins a line
                    if isinstance(end, EOFError):
                        return
                    raise
                except Leave:
                    return
                except (DeviceLost, BrokenPipeError):
                    raise
                except (Glm53Error, OSError) as error:
                    self._screen.error(error)
                    if not self._lines.terminal:
                        self.exit_code = self.exit_code or (error.exit_code if isinstance(error, Glm53Error) else 1)

    def _reply(self, begin: Callable[[], Generator[Piece, None, None]]) -> None:
        """Shows a reply while it is drawn. begin: appends the question."""
        pieces = begin()
        self._stop.hint = "stops after this part of the question; Ctrl-C again leaves"
        try:
            for piece in pieces:
                self._screen.piece(piece)
                if self._chat.last.tokens:
                    self._stop.hint = ""
                if self._stop.asked:
                    break
        finally:
            pieces.close()
            self._screen.end()
        self._screen.note(self._figures(self._chat.last))

    def _figures(self, figures: Figures) -> str:
        chat = self._chat
        rows = f"{chat.branch.rows} of {chat.engine.context_rows_max} rows"
        if not figures.replies:
            return f"stopped; the question was taken back; {rows}"
        line = f"{figures.tokens} token{'' if figures.tokens == 1 else 's'}, {figures.tokens_per_s:.1f}/s; {rows}"
        if figures.finish_reason is None:
            return "stopped; " + line
        if chat.full:
            return line + "; the context is full: /undo N takes the last exchanges back, /clear all of them"
        return line + ("; cut at --max-tokens" if figures.finish_reason == "length" else "")

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        name = {"?": "help", "quit": "bye", "exit": "bye"}.get(name.strip(), name.strip())
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)
            raise InputError(f"/{name} is no command; the closest one is /{near[0]}, /help shows all; a space in front makes it a question")
        COMMANDS[name][2](self, rest.strip())

    def _help(self, rest: str) -> None:
        usages = [(f"/{name} {arguments}".rstrip(), what) for name, (arguments, what, _) in COMMANDS.items()]
        width = max(len(usage) for usage, _ in usages)
        keys = 'End a line with \\ for another one, or begin and end with """. Ctrl-C ends a reply; at the prompt it leaves, as Ctrl-D does.'
        self._screen.say("\n".join([*(f"{usage:<{width}}  {what}" for usage, what in usages), keys]))

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        size = self._chat.save(path, self._progress("saving", "nothing was saved"))
        self._screen.say(f"saved {path}: {self._chat.branch.rows} rows, {short_bytes(size)}")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        self._chat.load(path, self._progress("restoring", "the chat is as it was"))
        self._loaded(path)

    def begin(self, path: Path, system: str | None) -> None:
        """Goes on with a file before the first question, before which goes `system` unless it is the file's last one. Raises what the engine raises,
        InputError if the template takes no system message there."""
        self._chat.load(path, self._screen.progress("restoring"))
        self._loaded(path)
        if system and system != self._chat.branch.system:
            self._chat.set_system(system)

    def _loaded(self, path: Path) -> None:
        branch = self._chat.branch
        params = self._chat.params
        exchanges = _exchanges(len(branch.turns))
        self._screen.say(f"loaded {path}: {branch.rows} rows, {exchanges}; temperature {params.temperature:g}, top-p {params.top_p:g}")
        if branch.turns:
            last = branch.turns[-1]
            reply = self._chat.form.tokenizer.decode(branch.tokens(last.reply))
            self._screen.note(f"last question: {_one_line(last.question)}; reply: {_one_line(reply.rpartition('</think>')[2])}")

    def _fork(self, rest: str) -> None:
        left = self._chat.fork(_word(rest, "/fork"))
        self._screen.say(f"in branch {self._chat.branch.name}; /switch {left.name} goes back")

    def _branches(self, rest: str) -> None:
        for name, branch in self._chat.branches.items():
            mark = "*" if branch is self._chat.branch else " "
            self._screen.say(f"{mark} {name}: {branch.rows} rows, {_exchanges(len(branch.turns))}")

    def _switch(self, rest: str) -> None:
        name = _word(rest, "/switch")
        if name is None:
            raise InputError("/switch: no branch was given; /branches lists them")
        self._chat.switch(name)
        self._screen.say(f"in branch {self._chat.branch.name}: {self._chat.branch.rows} rows")

    def _undo(self, rest: str) -> None:
        try:
            count = int(rest or 1)
        except ValueError:
            raise InputError(f"/undo: got {rest!r}, wanted a number of exchanges") from None
        gone = self._chat.undo(count)
        self._screen.say(f"took {_exchanges(count)} back, from: {_one_line(gone[0].question)}")

    def _retry(self, rest: str) -> None:
        if self._chat.params.temperature == 0 and self._chat.branch.turns:
            self._screen.note("temperature 0: the reply will be the same")
        self._reply(self._chat.retry)

    def _system(self, rest: str) -> None:
        if rest:
            self._chat.set_system(rest)
        self._screen.say(
            f"system message: {self._chat.branch.system or 'none'}" + (" (goes with the next question)" if self._chat.branch.systems else "")
        )

    def _think(self, rest: str) -> None:
        if rest not in ("", "on", "off"):
            raise InputError(f"/think: got {rest!r}, wanted on or off")
        self._screen.show_thinking = rest == "on" if rest else self._screen.show_thinking
        self._screen.say(f"thinking is {'shown' if self._screen.show_thinking else 'hidden'}")

    def _stats(self, rest: str) -> None:
        self._screen.say("\n".join(f"{name:<9} {value}" for name, value in _stats(self._chat)))

    def _clear(self, rest: str) -> None:
        self._chat.clear()
        self._screen.say("cleared")

    def _bye(self, rest: str) -> NoReturn:
        raise Leave

    def _progress(self, verb: str, outcome: str) -> Callable[[int, int, str], None]:
        line = self._screen.progress(verb)

        def progress(done_bytes: int, total_bytes: int, name: str) -> None:
            self._stop.check(outcome)
            if line is not None:
                line(done_bytes, total_bytes, name)

        return progress


COMMANDS: dict[str, tuple[str, str, Callable[[Talk, str], None]]] = {
    "help": ("", "this list", Talk._help),
    "save": ("FILE", "save the history; /load and glm53 chat --load go on with it", Talk._save),
    "load": ("FILE", "go on with a saved history in place of this one", Talk._load),
    "fork": ("[NAME]", "go on in a new branch; the one it leaves stays as it is", Talk._fork),
    "branches": ("", "list the branches", Talk._branches),
    "switch": ("NAME", "go on in another branch", Talk._switch),
    "undo": ("[N]", "take the last exchange back, or the last N", Talk._undo),
    "retry": ("", "draw the last reply anew, with another seed", Talk._retry),
    "system": ("[TEXT]", "put a system message before the next question, or show the last one", Talk._system),
    "think": ("[on|off]", "show the thinking, or hide it", Talk._think),
    "stats": ("", "rows, memory, hit rate, drafts, speed", Talk._stats),
    "clear": ("", "begin anew on this branch", Talk._clear),
    "bye": ("", "leave", Talk._bye),
}


def _completed(text: str, state: int) -> str | None:
    found = [f"/{name}" for name in COMMANDS if text.startswith("/") and f"/{name}".startswith(text)]
    return found[state] if state < len(found) else None


def _path(text: str, command: str) -> Path:
    if not text:
        raise InputError(f"{command}: no file was given; next: {command} FILE")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    try:
        return Path(text[1:-1] if quoted else text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{command}: {text!r} begins with a home directory that cannot be found ({error}); next: write it out") from error


def _word(text: str, command: str) -> str | None:
    if len(text.split()) > 1:
        raise InputError(f"{command}: got {text!r}, wanted one word")
    return text or None


def _exchanges(count: int) -> str:
    return f"{count} exchange{'' if count == 1 else 's'}"


def _one_line(text: str) -> str:
    line = " ".join(text.split()).translate(_CONTROLS)
    return line if len(line) <= 60 else line[:57] + "..."


def _figures(of: Figures) -> str:
    return f"{of.prompt_tokens} tokens read in {of.prefill_s:.2f} s, {of.tokens} drawn at {of.tokens_per_s:.1f}/s"


def _stats(chat: Chat) -> list[tuple[str, str]]:
    engine, branch, last, total = chat.engine, chat.branch, chat.last, chat.total
    kinds, drafts = chat.history_bytes(), engine.draft_counts()
    place = "host RAM" if engine.config.kv_tier == "host" else "device memory"
    rate = f"{drafts.tokens / drafts.rounds:.2f} tokens a round" if drafts.rounds else "no round yet"
    depths = ", ".join(f"{a} of {o}" for a, o in zip(drafts.accepted, drafts.offered, strict=True) if o)
    lines = [
        ("rows", f"{branch.rows} of {engine.context_rows_max}, {_exchanges(len(branch.turns))}, branch {branch.name} of {len(chat.branches)}"),
        ("bytes", f"{short_bytes(kinds['rows'])} of rows in {place}, {short_bytes(kinds['keys'])} of index keys on the device"),
        ("history", history_line(engine, engine.cache_counters()).removeprefix("history ")),
        ("drafts", f"{rate}; accepted by depth: {depths}" if depths else "none (--mtp N)"),
        ("last", _figures(last)),
        ("all", f"{_exchanges(total.replies)}: {_figures(total)}"),
        ("seed", f"{branch.seed}"),
    ]
    for where, categories in engine.memory_by_place().items():
        lines.append((where, ", ".join(f"{name} {short_bytes(value)}" for name, value in categories.items() if value)))
    return lines


@click.command(
    cls=Command,
    short_help="Talk with a model.",
    epilog="Example: glm53 chat models/glm53-demo --reasoning-effort low --load talk.glm53\n\n" + EXIT_CODES,
)
@model_argument
@option("--system", group="Prompt", help="System message before the first question, with --load before the next one.")
@reasoning_effort_option("How much the model thinks.")
@option("--load", "load_from", group="Prompt", type=click.Path(path_type=Path), help="Go on with the history of this session file.")
@sampling_options(max_tokens="none: until the reply or the context ends", seed="that of the file, else a fresh one", logprobs=False)
@engine_options
@option("--hide-thinking", group="Output", is_flag=True, help="Show answers only; /think on|off changes it.")
@option("--quiet", group="Output", is_flag=True, help="No progress and no figures on standard error.")
@click.pass_context
def chat(context: click.Context, model: Path, **options: Any) -> None:
    """Talk with MODEL in the terminal. The history stays on one session: a question costs its own tokens and those of its reply.

    /help lists the commands: save and load, branches, undo. Lines from a pipe work too. --sessions-max is 2 if it is not given, the least for /fork;
    with --load, --dtype, --weights and --kv-format are those of the file.
    """
    from glm53.chat import Chat, ChatFormat
    from glm53.engine import Engine
    from glm53.tokenizer import Tokenizer

    settings = {f.name: options.pop(f.name) for f in fields(EngineConfig)}
    system, effort, load_from = options.pop("system"), options.pop("reasoning_effort"), options.pop("load_from")
    hide_thinking, quiet = options.pop("hide_thinking"), options.pop("quiet")
    sampling = {name: value for name, value in options.items() if value is not None and value is not False and value != ()}
    SamplingParams(**sampling)  # refuses bad values before a device is touched
    form = ChatFormat(Tokenizer.open(model), reasoning_effort=effort)
    if context.get_parameter_source("sessions_max") is not click.core.ParameterSource.COMMANDLINE:
        settings["sessions_max"] = 2
    if load_from is not None:
        take_formats(context, load_from, settings)
    screen = Screen(quiet, not hide_thinking)
    with Engine.open(model, EngineConfig(**settings), progress=screen.progress("loading")) as engine:
        talk = Talk(Chat(engine, form, sampling, system), screen, Lines())
        screen.note(f"{model}, {engine.context_rows_max} rows of context, {engine.device.runtime.name}; /help lists the commands")
        if load_from is not None:
            talk.begin(load_from, system)
        talk.run()
    context.exit(talk.exit_code)
