"""A conversation on sessions: questions, replies, undo points, branches. Knows no terminal.

Invariant: a history only grows by what is new, or is cut back to a row that it had. Templates may render earlier turns otherwise once a later one
stands behind them (thinking left out, ends stripped); the history stays as it was drawn all the same, since another beginning would mean computing
every row anew, and since it is what the model said. Only a reply that ended inside its thinking gets the mark that closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53.errors import CheckpointError, InputError
from glm53.persist import Format
from glm53.request import fresh_seed
from glm53.tokenizer import Tokenizer

if TYPE_CHECKING:
    from glm53.engine import Engine
    from glm53.session import Session

Progress = Callable[[int, int, str], None]
Message = Mapping[str, str]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
PASSES_A_PART = 8  # of prefill_chunk_rows, between two places where a question can be taken back
TURN_SEEDS = "chat turn seeds"  # among the notes of a session: [row at which the turn begins, seed]
MAIN = "main"  # the branch that a chat begins with


class ChatFormat:
    """What the turns of a checkpoint's chat template add to a history, as token ids. settings: variables of the template, e.g. reasoning_effort.

    A turn is the difference between the template's text with and without it. What the template writes is encoded with special tokens, what a person
    wrote without them, so that no text forges a role; where a template alters a text (strips it), its whole turn is encoded as the template gave it.
    Raises CheckpointError without a template, or for one whose later turns rewrite what stands before them even without thinking.
    """

    def __init__(self, tokenizer: Tokenizer, **settings: str):
        self.tokenizer, self._settings = tokenizer, settings
        user, system = _user("A"), *_system(["A"])
        before, after = self._parts([user], self._base())
        self._user_open, self._reply_open = self._special(before), self._special(after)
        self.reply_thinks = after.endswith(THINK_OPEN)
        self.close = self._special(THINK_CLOSE) if self.reply_thinks else []
        try:
            self._system_open = self._special(self._parts([system, user], self._base())[0])
        except InputError:  # a template that takes system messages in front alone
            self._system_open = []
        if not self._user_open or not self._reply_open:
            raise CheckpointError(f"{tokenizer.path.parent}: its chat template marks no turns; next: glm53 generate, with a prompt of your own")

    def head(self, systems: Sequence[str]) -> list[int]:
        """What stands in front of the first question; empty if the template has no text for that alone."""
        try:
            return self._encode(_system(systems), "", question=False)
        except InputError:
            return []

    def first(self, systems: Sequence[str], question: str) -> list[int]:
        """A whole prompt: head with system messages, question, opening of the reply. Raises InputError for what the template or encoding refuses."""
        return self._encode([*_system(systems), _user(question)], "")

    def turn(self, systems: Sequence[str], question: str, thinks: bool) -> list[int]:
        """What follows a reply: system messages, question, opening of the next reply; with `thinks` the mark that ends the reply's thinking first."""
        return [*(self.close if thinks else ()), *self._encode([*_system(systems), _user(question)], self._base())]

    def thinks(self, reply: list[int]) -> bool:
        """Whether a reply of these ids is still inside its thinking."""
        return self.reply_thinks and _find(reply, self.close) < 0

    def turns(self, tokens: list[int], seed: int) -> list[Turn]:
        """The turns that a history shows. seed: of each, which it does not show."""
        found: list[Turn] = []
        at = 0  # behind the opening of the reply before
        while (opening := _find(tokens, self._reply_open, at)) >= 0:
            between = tokens[at:opening]  # that reply, system messages, a question
            user = _find_last(between, self._user_open)
            if user >= 0:
                start = _find(between[:user], self._system_open) if found else -1  # the head's system messages stay when its question goes
                start = user if start < 0 else start
                systems, closed = self._systems(between[start:user]), start - len(self.close)
                if found and closed >= 0 and _find(between, self.close) == closed:
                    start = closed  # as `turn` gives it; a model that closes its thinking and says nothing looks alike
                ids = tokens[at + start : opening + len(self._reply_open)]
                found.append(Turn(at + start, tuple(ids), self.tokenizer.decode(between[user + len(self._user_open) :]), systems, seed))
            at = opening + len(self._reply_open)
        return found

    def head_systems(self, head: list[int]) -> tuple[str, ...]:
        """System messages in what stands in front of the first question."""
        own = self.head(())
        return self._systems(head[len(own) :]) if head[: len(own)] == own else ()

    def _systems(self, ids: list[int]) -> tuple[str, ...]:
        texts, at = [], _find(ids, self._system_open)
        while at >= 0:
            at += len(self._system_open)
            end = _find(ids, self._system_open, at)
            texts.append(self.tokenizer.decode(ids[at : end if end >= 0 else None]))
            at = end
        return tuple(texts)

    def _base(self) -> str:
        """The text of a short conversation that a turn can follow. Without thinking: some templates drop that from earlier turns."""
        return self._render(_BEFORE, question=False)

    def _render(self, messages: Sequence[Message], question: bool = True) -> str:
        return self.tokenizer.render_chat(messages, add_generation_prompt=question, **self._settings)

    def _added(self, messages: Sequence[Message], base: str, question: bool = True) -> str:
        """What the template writes for messages behind `base`, "" for those that begin a conversation."""
        text = self._render([*_BEFORE, *messages] if base else messages, question)
        if not text.startswith(base):
            raise CheckpointError(
                f"{self.tokenizer.path.parent}: its chat template rewrites earlier turns when one follows, so that a session cannot go on; "
                "next: glm53 generate --chat, a question at a time"
            )
        return text[len(base) :]

    def _parts(self, messages: Sequence[Message], base: str, question: bool = True) -> list[str]:
        """The template's own text around the contents of the messages."""
        marks = [f"\ue000{index}\ue001" for index in range(len(messages))]  # private use: no template has them
        rest = self._added([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)], base, question)
        parts = []
        for mark in marks:
            part, _, rest = rest.partition(mark)
            parts.append(part)
        return [*parts, rest]

    def _encode(self, messages: Sequence[Message], base: str, question: bool = True) -> list[int]:
        contents = [message["content"] for message in messages]
        text, parts = self._added(messages, base, question), self._parts(messages, base, question)
        if text != "".join(part + content for part, content in zip(parts, [*contents, ""], strict=True)):
            return self._special(text)
        ids = self._special(parts[0])
        for content, part in zip(contents, parts[1:], strict=True):
            ids += self.tokenizer.encode(content) + self._special(part)
        return ids

    def _special(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, parse_special=True) if text else []


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(texts: Sequence[str]) -> list[Message]:
    return [{"role": "system", "content": text} for text in texts]


_BEFORE = (_user("A"), {"role": "assistant", "content": "B"})  # a conversation that a turn can follow


def _find(ids: list[int], part: list[int], start: int = 0) -> int:
    """Where `part` begins in `ids` at or behind `start`; -1: nowhere, and for an empty part."""
    try:
        while part:
            start = ids.index(part[0], start)
            if ids[start : start + len(part)] == part:
                return start
            start += 1
    except ValueError:
        pass
    return -1


def _find_last(ids: list[int], part: list[int]) -> int:
    at = found = _find(ids, part)
    while at >= 0:
        found, at = at, _find(ids, part, at + 1)
    return found


def _turn_seeds(notes: Mapping[str, Any]) -> dict[int, int]:
    """The seed of each turn by the row at which it begins, as far as a file says."""
    kept = notes.get(TURN_SEEDS)
    pairs = [pair for pair in kept if isinstance(pair, list) and len(pair) == 2] if isinstance(kept, list) else []
    return {start: seed for start, seed in pairs if type(start) is int and type(seed) is int and 0 <= seed < 2**64}


@dataclass(frozen=True)
class Turn:
    """A question in a history. start: rows that stay without it. ids: tokens from there to where its reply begins."""

    start: int
    ids: tuple[int, ...]
    question: str
    systems: tuple[str, ...]  # system messages among `ids`
    seed: int  # of the branch before it

    @property
    def reply(self) -> int:
        """Row at which the reply begins."""
        return self.start + len(self.ids)


@dataclass
class Branch:
    """A history and what its next question has to know. seed: of its draws; they depend on the position too, so that no two replies repeat."""

    name: str
    session: Session
    seed: int
    system: str | None = None  # the last system message, sent or not
    systems: list[str] = field(default_factory=list)  # those that go before the next question
    turns: list[Turn] = field(default_factory=list)
    own_head: bool = False  # what stands in front of the first question can be written again

    @property
    def rows(self) -> int:
        """Of the history, with the token drawn last, which gets its row with what follows it."""
        return self.session.rows + len(self.session.pending)

    def tokens(self, start: int = 0) -> list[int]:
        """Token ids of those rows from `start` on."""
        return [*self.session.tokens, *self.session.pending][start:]


@dataclass(frozen=True)
class Piece:
    """Text of a reply as it is drawn; empty while a character or a stop string is not decided."""

    text: str
    thinking: bool


@dataclass
class Figures:
    """Of one reply, or of several added up. prefill_s: to the first token; decode_s: from it to the last one."""

    prompt_tokens: int = 0
    tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    replies: int = 0
    finish_reason: str | None = None  # None: ended by the caller or an error

    @property
    def tokens_per_s(self) -> float:
        """Of decode; the first token of a reply comes with its prompt."""
        return (self.tokens - self.replies) / self.decode_s if self.decode_s > 0 and self.tokens > self.replies else 0.0

    def add(self, other: Figures) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.replies += other.replies


class ThinkingSplit:
    """Tells the thinking of a reply from its answer while it is drawn."""

    def __init__(self, form: ChatFormat):
        self.thinking = form.reply_thinks
        self._close = tuple(form.close)
        self._is_text = form.tokenizer.decode(form.close) == THINK_CLOSE  # else a special token, which texts leave out
        self._held = ""  # may be the beginning of the mark

    def push(self, text: str, token_ids: tuple[int, ...]) -> Iterator[Piece]:
        """At least one piece."""
        if not self.thinking:
            yield Piece(text, False)
            return
        before, mark, after = (self._held + text).partition(THINK_CLOSE) if self._is_text else (text, token_ids == self._close, "")
        self._held = ""
        if mark:
            self.thinking = False
            yield Piece(before, True)
            yield Piece(after, False)
            return
        kept = next((n for n in range(len(THINK_CLOSE) - 1, 0, -1) if self._is_text and before.endswith(THINK_CLOSE[:n])), 0)
        self._held = before[len(before) - kept :]
        yield Piece(before[: len(before) - kept], True)

    def finish(self) -> Piece:
        """What was held back."""
        held, self._held = self._held, ""
        return Piece(held, self.thinking)


class Chat:
    """A conversation in an engine: the branch in use has a session on the devices, the others are parked in host RAM.

    A fork needs a second session of the engine (sessions_max) while it is made. given: sampling parameters that hold whatever a file says. The engine
    closes its sessions.
    """

    def __init__(self, engine: Engine, form: ChatFormat, given: Mapping[str, Any], system: str | None = None):
        self.engine, self.form, self._given = engine, form, dict(given)
        defaults = replace(engine.default_params(), max_tokens=engine.context_rows_max)  # a reply ends itself, or fills the context
        self.params = replace(defaults, **given)
        self.branch = Branch(MAIN, engine.session(), self._seed(), system, [system] if system else [])
        self.branches = {MAIN: self.branch}
        self.last, self.total = Figures(), Figures()

    def _seed(self) -> int:
        return fresh_seed() if self.params.seed is None else self.params.seed

    @property
    def full(self) -> bool:
        """Whether no further row fits."""
        return self.branch.rows >= self.engine.context_rows_max

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Appends a question and draws the reply. Closing the iterator ends the reply after the last piece it gave; that stays in the history. Closed
        before anything was drawn (a long question gives empty pieces while it is computed), the question is taken back.

        Raises InputError before anything runs if the question does not fit or cannot be encoded, and what `Session.prefill` and `stream` raise; what
        was drawn by then stays.
        """
        branch, systems = self.branch, tuple(self.branch.systems)
        start = branch.rows
        if start:
            thinks = bool(branch.turns) and self.form.thinks(branch.tokens(branch.turns[-1].reply))
            ids = self.form.turn(systems, question, thinks)
        else:
            ids, head = self.form.first(systems, question), self.form.head(systems)
            start = len(head) if ids[: len(head)] == head else 0
        stays = () if not branch.rows and start else systems  # undone, the head keeps its system messages
        turn = Turn(start, tuple(ids[start - branch.rows :]), question, stays, branch.seed)
        self._check_room(len(ids))
        own_head = branch.own_head or not branch.rows
        return self._draw(turn, ids, [], own_head)

    def _check_room(self, count: int) -> None:
        """count: tokens to append; one more is for the reply."""
        rows, limit = self.branch.rows, self.engine.context_rows_max
        if rows + count + 1 > limit:
            following = "/undo N takes the last exchanges back, /clear all of them" if self.branch.turns else "shorten the question"
            raise InputError(
                f"the context is full: {rows} of {limit} rows are in use and this question needs {count + 1}; next: {following}, "
                "or start with a larger --context-rows-max"
            )

    def retry(self) -> Generator[Piece, None, None]:
        """The last question again, its reply drawn with the next seed. Raises InputError if there is none."""
        branch, seed, waiting = self.branch, self.branch.seed, self.branch.systems
        turn = self.undo()[0]
        branch.seed = (seed + 1) % 2**64
        return self._draw(turn, list(turn.ids), waiting, branch.own_head)

    def _draw(self, turn: Turn, ids: list[int], waiting: list[str], own_head: bool) -> Generator[Piece, None, None]:
        """ids: tokens to append. waiting: system messages for the question after this one."""
        branch, split, figures = self.branch, ThinkingSplit(self.form), Figures()
        self.last, rows, prompt_tokens = figures, branch.rows, len(ids)
        started = now = time.perf_counter()
        try:
            # Parts have the bits of one call. 8 passes of 512 rows select 8 M rows, more than a history has, so that they stream it as one call does
            # rather than fetch row by row.
            lead, part_rows = branch.session.pending, PASSES_A_PART * self.engine.config.prefill_chunk_rows
            while len(lead) + len(ids) > part_rows:
                cut = part_rows - len(lead)
                branch.session.prefill([*lead, *ids[:cut]])
                lead, ids = (), ids[cut:]
                yield Piece("", split.thinking)
            for chunk in branch.session.stream(ids, replace(self.params, seed=branch.seed)):
                figures.tokens += len(chunk.token_ids)
                figures.finish_reason = chunk.finish_reason
                before, now = now, time.perf_counter()
                if figures.prefill_s:
                    figures.decode_s += now - before
                else:
                    figures.prompt_tokens, figures.prefill_s, figures.replies = prompt_tokens, now - started, 1
                yield from split.push(chunk.text, chunk.token_ids)
            yield split.finish()
        finally:
            if figures.replies:
                branch.turns.append(turn)
                branch.systems, branch.own_head = waiting, own_head
                branch.system = self._last_system()
            elif branch.rows > rows:
                branch.session.truncate(rows)
            self.total.add(figures)

    def undo(self, exchanges: int = 1) -> list[Turn]:
        """Takes the last exchanges back and gives them; the next reply is what it would have been. Raises InputError for more than there are."""
        branch = self.branch
        if not 1 <= exchanges <= len(branch.turns):
            raise InputError(
                f"undo: got {exchanges}, wanted 1 to {len(branch.turns)}, the exchanges so far" if branch.turns else "there is no exchange yet"
            )
        gone = branch.turns[-exchanges:]
        branch.session.truncate(gone[0].start)
        del branch.turns[-exchanges:]
        branch.seed = gone[0].seed
        branch.systems = list(gone[0].systems) or branch.systems
        branch.system = self._last_system()
        return gone

    def _last_system(self) -> str | None:
        """The last system message of the branch, sent or not."""
        branch = self.branch
        head = branch.tokens()[: branch.turns[0].start if branch.turns else None]
        sent = [*self.form.head_systems(head), *(text for turn in branch.turns for text in turn.systems)]
        return next(reversed([*sent, *branch.systems]), None)

    def clear(self) -> None:
        """A new conversation on this branch, with its last system message."""
        branch = self.branch
        branch.session.truncate(0)
        branch.seed = branch.turns[0].seed if branch.turns else branch.seed
        branch.systems = [branch.system] if branch.system else []
        branch.turns, branch.own_head = [], False

    def set_system(self, text: str) -> None:
        """The system message that goes before the next question. Raises InputError if the template takes none there."""
        branch = self.branch
        if branch.own_head and not branch.turns:  # another head than the one that stands there
            branch.session.truncate(0)
            branch.own_head = False
        if branch.rows:
            self.form.turn([text], "", False)
        else:
            self.form.first([text], "")
        branch.system, branch.systems = text, [text]

    def fork(self, name: str | None = None) -> Branch:
        """Goes on in a new branch that has everything so far; gives the one it left, which stays as it is. Raises InputError for a name in use."""
        name = name or next(one for one in (f"branch-{n}" for n in count(1)) if one not in self.branches)
        if name in self.branches:
            raise InputError(f"a branch {name!r} exists; next: another name, or /switch {name}")
        if self.engine.sessions_max < 2:
            raise InputError("a fork needs a second session; next: start with --sessions-max 2")
        left = self.branch
        session = left.session.fork()
        try:
            left.session.park()
        except BaseException:
            session.close()
            raise
        self.branch = self.branches[name] = replace(left, name=name, session=session, systems=list(left.systems), turns=list(left.turns))
        return left

    def switch(self, name: str) -> None:
        """Goes on in another branch. Raises InputError if there is none of that name; a failure leaves this one in use."""
        if name not in self.branches:
            raise InputError(f"there is no branch {name!r}; branches: {', '.join(self.branches)}")
        if name == self.branch.name:
            return
        with self._parked():
            self.branches[name].session.resume()
        self.branch = self.branches[name]

    def save(self, path: Path, progress: Progress | None = None) -> int:
        """The history to a file; its bytes. A system message not sent yet is no part of it. Raises SessionFileError, InputError for an empty one."""
        if not self.branch.rows:
            raise InputError("there is nothing to save yet")
        session = self.branch.session
        session.sampling = replace(self.params, seed=self.branch.seed)
        session.notes = {**session.notes, TURN_SEEDS: [[turn.start, turn.seed] for turn in self.branch.turns]}
        return session.save(path, progress)

    def load(self, path: Path, progress: Progress | None = None) -> None:
        """A file's history in place of this branch's, with its sampling but for what was given and the length of replies. Raises what
        `Engine.restore` raises, with nothing changed."""
        with self._parked():
            session = self.engine.restore(path, progress)
        self.branch.session.close()
        self.params = replace(session.sampling or self.params, **({"max_tokens": self.params.max_tokens} | self._given))
        self.branch = Branch(self.branch.name, session, self._seed())
        self.branches[self.branch.name] = self.branch
        tokens = self.branch.tokens()
        seeds = {} if "seed" in self._given else _turn_seeds(session.notes)
        self.branch.turns = [replace(turn, seed=seeds.get(turn.start, turn.seed)) for turn in self.form.turns(tokens, self.branch.seed)]
        self.branch.system = self._last_system() if self.branch.turns else None

    def history_bytes(self) -> dict[str, int]:
        """Bytes of this branch's history by kind: rows, keys, and what else a session file would hold of it."""
        form = Format(self.engine.config, self.engine.spec, self.engine.fingerprint, self.engine.stage)
        return {section.name: section.nbytes for section in form.sections(self.branch.session.rows, form.mtp)}

    @contextmanager
    def _parked(self) -> Iterator[None]:
        """This branch gives its place on the devices to another one; it has it again if the inside raises."""
        session = self.branch.session
        session.park()
        try:
            yield
        except BaseException:
            session.resume()
            raise
