"""Text to token ids and back: tokenizer.json, the chat template, text while it is generated, stop strings.

Invariant: `StreamDecoder`'s pieces put together equal `Tokenizer.decode` of the same ids, and no piece ends inside a character. The
checkpoint's own files decide everything; nothing of the vocabulary is written down here. Knows no model.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from glm53.errors import CheckpointError, InputError
from glm53.files import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, read_json_object, read_text

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_alphabet() -> dict[str, int]:
    """Printable character -> byte, the alphabet of byte-level BPE (GPT-2's bytes_to_unicode): 188 bytes stand for themselves, the others
    are U+0100 and up in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Tokenizer:
    """A checkpoint's tokenizer. Special tokens written out in a text (`<|user|>`) are plain text unless `parse_special` is set: a prompt
    cannot forge a role. Chat templates are encoded with it set, as transformers and vLLM do."""

    def __init__(self, path: Path, text: str, config: Mapping[str, Any], template: str | Mapping[str, str] | None):
        self.path = path
        self._text = text
        self._parsing = _load(path, text)
        self._template = template
        decoder = json.loads(text).get("decoder")
        kind = decoder.get("type") if isinstance(decoder, dict) else None
        if kind != "ByteLevel":
            raise CheckpointError(f"{path}: the decoder is {kind}, expected ByteLevel: GLM-5.x tokenizers are byte-level")
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._vocabulary = {i: token for token, i in self._parsing.get_vocab(with_added_tokens=True).items()}
        self._alphabet = _byte_alphabet()
        self.special_tokens = {n: _token_text(config[n]) for n in _SPECIAL_NAMES if config.get(n) is not None}

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model directory. Raises `CheckpointError`; a checkpoint without one can still generate from token ids."""
        path = Path(path)
        file = path / TOKENIZER_FILE
        if not file.exists():
            raise CheckpointError(f"{file} does not exist: text needs a tokenizer; copy it from the release, or give token ids")
        text = read_text(file)
        config_file = path / TOKENIZER_CONFIG_FILE
        config = read_json_object(config_file) if config_file.exists() else {}
        return cls(file, text, config, _read_template(path, config))

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second instance that reads special tokens as text: the switch is a property of the object, not of a call."""
        plain = _load(self.path, self._text)
        plain.encode_special_tokens = True
        return plain

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of a text, with no token added in front or behind. Raises `InputError` if it holds lone surrogates (invalid UTF-8)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}, which UTF-8 cannot hold; next: leave it out"
            ) from None
        return (self._parsing if parse_special else self._plain).encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id of the padding beyond the tokenizer's vocabulary."""
        token = self._vocabulary.get(token_id, "")
        try:
            return bytes(self._alphabet[c] for c in token)
        except KeyError:  # an added token, spelled as its own text
            return token.encode("utf-8")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. Equal to `tokenizers`' own decode."""
        hidden: frozenset[int] = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", errors="replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **settings: Any
    ) -> str:
        """The prompt text of a conversation by the checkpoint's own template, rendered as transformers renders it. `settings` are the
        template's variables, e.g. reasoning_effort="low". Raises `InputError` if the template refuses the messages."""
        template = self._template
        if isinstance(template, Mapping):
            template = template.get("tool_use") if tools and "tool_use" in template else template.get("default")
        if template is None:
            where = f"{TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG_FILE}"
            raise CheckpointError(f"{self.path.parent} has no {where}: give a plain prompt")
        values = self.special_tokens | {"documents": None} | settings
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return _render(self.path.parent, template, values)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **settings: Any) -> list[int]:
        """Token ids of `render_chat`, its special tokens parsed."""
        return self.encode(self.render_chat(messages, tools, **settings), parse_special=True)


def _load(path: Path, text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise CheckpointError(f"{path}: not a usable tokenizer ({error}); fetch the file again") from None


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)


def _read_template(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja if there is one, else chat_template of tokenizer_config.json: a text, or texts by name."""
    file = path / TEMPLATE_FILE
    if file.exists():
        return read_text(file)
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        return {str(item["name"]): str(item["template"]) for item in template}
    except (TypeError, KeyError):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template is neither text nor a list of named texts") from None


def _render(path: Path, template: str, values: Mapping[str, Any]) -> str:
    """jinja2 as transformers sets it up: sandboxed and immutable, blocks trimmed, `tojson` without HTML escapes, `raise_exception`,
    `strftime_now`, loop controls, and `generation` blocks passed through. Imported here: most uses never see a template."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{path}: the chat template cannot be read: {error.message} (line {error.lineno})") from None
    try:
        return compiled.render(**values)
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"the chat template of {path} refuses these messages: {error}") from None


class StreamDecoder:
    """Ids to text one at a time. `push` gives the text that is certain, `finish` what a cut-off character leaves (U+FFFD)."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token, often empty inside a character."""
        return "" if token_id in self._hidden else self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """The end of the text. Call once, after the last `push`."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Ends a text at its first stop string. Text that may be the beginning of one is held back until that is decided.

    First means: the stop string whose last character comes first; among those that end there, the longest. The result does not depend on
    how the text is split over `push` calls. Raises `InputError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()):
        if isinstance(stops, str) or any(not isinstance(s, str) or not s for s in stops):
            raise InputError(f"stop strings are {stops!r}, expected a list of non-empty texts")
        self._stops = tuple(stops)
        self._held = ""  # shorter than the longest stop string
        self.stopped: str | None = None  # the stop string met

    def push(self, text: str) -> str:
        """Text that may be shown now: nothing of a stop string, nothing that may become one, nothing after one."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back at the end: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`, not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
