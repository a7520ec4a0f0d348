"""Text and ids: the demo model's tokenizer against the `tokenizers` library, streaming, stop strings, the chat template."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from glm53.errors import CheckpointError, InputError
from glm53.tokenizer import StopMatcher, StreamDecoder, Tokenizer

TEXTS = ["", "Hello world", "In the beginning  God\n\ncreated\t", "naïve Übermut 漢字 🙂👩‍👩‍👧", "\x00\x7f\ufffd", " leading", "a" * 300]


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.open(demo_path)


@pytest.fixture(scope="module")
def library(demo_path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_path / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_text_unless_asked_for(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    text = "a<|user|>b"
    parsed = library.token_to_id("<|user|>")
    assert parsed not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, parse_special=True)
    assert parsed in ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == text
    assert parsed in tokenizer.special_ids and library.token_to_id("<think>") not in tokenizer.special_ids


@pytest.mark.parametrize("skip", [True, False])
def test_decode_equals_the_library_on_any_ids(tokenizer: Tokenizer, library: tokenizers.Tokenizer, skip: bool) -> None:
    for start in range(0, 4096, 64):
        ids = [(start * 7 + i * 613) % 4096 for i in range(200)]
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode([4096]) == ""  # padding of the vocabulary


def test_streamed_text_equals_decode_and_never_splits_a_character(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.push(i) for i in tokenizer.encode(text)]
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == text and decoder.finish() == ""


def test_streamed_garbage_equals_decode(tokenizer: Tokenizer) -> None:
    for start in range(40):
        ids = [(start * 131 + i * 977) % 4096 for i in range(100)] + tokenizer.encode("🙂")[:-1]
        decoder = StreamDecoder(tokenizer)
        text = "".join(decoder.push(i) for i in ids) + decoder.finish()
        assert text == tokenizer.decode(ids)
        assert text.endswith("\ufffd")


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800c")


STOP_CASES = [
    ("hello STOP there", ["STOP"], "hello ", "STOP"),
    ("ababac", ["abac"], "ab", "abac"),
    ("aaab", ["aab"], "a", "aab"),
    ("xabcx", ["b", "abc"], "xa", "b"),  # the one whose end comes first
    ("xabcx", ["c", "abc", "bc"], "x", "abc"),  # same end: the longest
    ("nothing here", ["her!", "zz"], "nothing here", None),
    ("ends with ST", ["STOP"], "ends with ST", None),
    ("STOP", ["STOP"], "", "STOP"),
    ("one\n\ntwo", ["\n\n"], "one", "\n\n"),
    ("plain", [], "plain", None),
]


@pytest.mark.parametrize(("text", "stops", "shown", "stop"), STOP_CASES)
def test_stop_strings_at_every_split(text: str, stops: list[str], shown: str, stop: str | None) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        matcher = StopMatcher(stops)
        out = ""
        for piece in (text[:first], text[first:second], text[second:]):
            out += matcher.push(piece)
            assert shown.startswith(out)
        out += matcher.finish() if matcher.stopped is None else ""
        assert (out, matcher.stopped) == (shown, stop)
        assert matcher.stopped is None or matcher.push("more") == ""
    matcher = StopMatcher(stops)
    assert "".join(matcher.push(c) for c in text) + matcher.finish() == shown


def test_text_is_held_back_no_longer_than_needed() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(c) for c in "aSTxSS"] == ["a", "", "", "STx", "", "S"]


@pytest.mark.parametrize("stops", ["STOP", [""], [3]])
def test_bad_stop_strings(stops: object) -> None:
    with pytest.raises(InputError, match="non-empty texts"):
        StopMatcher(stops)  # type: ignore[arg-type]


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello. ", "reasoning_content": "greet"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    text = "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Hi<|assistant|><think>greet</think>Hello.<|user|>Bye"
    assert tokenizer.render_chat(messages, reasoning_effort="low") == text + "<|assistant|><think>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False, reasoning_effort="low") == text
    ids = tokenizer.encode_chat(messages, reasoning_effort="low")
    assert tokenizer.decode(ids, skip_special=False) == text + "<|assistant|><think>"
    roles = tokenizer.encode("[gMASK]<sop><|system|><|user|><|assistant|>", parse_special=True)
    assert {i for i in ids if i in tokenizer.special_ids} == set(roles)
    tools = [{"name": "f", "description": "größer <b>"}]
    assert '{"name": "f", "description": "größer <b>"}' in tokenizer.render_chat(messages, tools=tools)


def copy_with(demo_path: Path, target: Path, template: str | None, config: dict[str, object] | None = None) -> Tokenizer:
    shutil.copy(demo_path / "tokenizer.json", target)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    if config is not None:
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.open(target)


def test_template_environment_is_that_of_transformers(demo_path: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}"
    )
    tokenizer = copy_with(demo_path, tmp_path, template, {"eos_token": {"content": "<end>"}, "pad_token": None})
    assert tokenizer.render_chat([{}, {"a": "<é>"}]) == '{"a": "<é>"}<end>'
    refusing = copy_with(demo_path, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        refusing.render_chat([])
    with pytest.raises(InputError, match="unsafe"):
        copy_with(demo_path, tmp_path, "{{ messages.__class__.__mro__ }}").render_chat([])
    with pytest.raises(InputError, match="refuses"):
        copy_with(demo_path, tmp_path, "{{ messages.append(1) }}").render_chat([])
    with pytest.raises(CheckpointError, match=r"cannot be read: .*line 1"):
        copy_with(demo_path, tmp_path, "{% if %}").render_chat([])


def test_template_inside_tokenizer_config(demo_path: Path, tmp_path: Path) -> None:
    assert copy_with(demo_path, tmp_path, None, {"chat_template": "plain"}).render_chat([]) == "plain"
    named = [{"name": "default", "template": "no tools"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = copy_with(demo_path, tmp_path, None, {"chat_template": named})
    assert tokenizer.render_chat([]) == "no tools"
    assert tokenizer.render_chat([], tools=[{}]) == "tools"
    with pytest.raises(CheckpointError, match="nor chat_template"):
        copy_with(demo_path, tmp_path, None, {}).render_chat([])


def test_missing_and_damaged_files(demo_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist: text needs a tokenizer"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a usable tokenizer"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        Tokenizer.open(tmp_path)
    values = json.loads((demo_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"decoder": None}))
    with pytest.raises(CheckpointError, match="the decoder is None, expected ByteLevel"):
        Tokenizer.open(tmp_path)
