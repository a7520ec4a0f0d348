"""The API through the official client: the same texts as the engine gives, in the shapes that the client knows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_scene import NAME, Served

from glm53 import SamplingParams

MESSAGES: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
PROMPT = "In the beginning"


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def chat_ids(served: Served, **settings: Any) -> list[int]:
    assert served.engine.tokenizer is not None
    return served.engine.tokenizer.encode_chat(MESSAGES, **settings)


def test_chat_is_what_the_engine_gives(served: Served, client: Any) -> None:
    ids = chat_ids(served)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 11, "top_p": 0.8}):
        alone = served.engine.generate(ids, SamplingParams(**{"top_p": 0.95, **sampling}, max_tokens=60))
        reply = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=60, **sampling)
        choice = reply.choices[0]
        thinking, closed, answer = alone.text.partition("</think>")
        assert (choice.message.reasoning_content or "") == thinking and choice.message.role == "assistant"
        assert choice.message.content == (answer if closed else None)
        assert choice.finish_reason == alone.finish_reason
        used = reply.usage
        drawn = len(alone.token_ids) + (alone.finish_reason == "stop")  # the end-of-sequence token counts too
        assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (len(ids), drawn, len(ids) + drawn)
        assert used.prompt_tokens_details.cached_tokens == 0 and 0 < used.completion_tokens_details.reasoning_tokens <= used.completion_tokens


def test_streamed_chat_adds_up(client: Any) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices and chunk.choices[0].delta.role] == ["assistant"]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.choices[0].message.reasoning_content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5


def test_the_wire_ends_with_done_and_has_usage_only_when_asked(served: Served) -> None:
    events = served.events("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 3})
    assert events.pop() == "[DONE]" and not any("usage" in event for event in events)
    assert '"role":"assistant"' in events[0] and not any('"role"' in event for event in events[1:])


def test_chat_logprobs(served: Served, client: Any) -> None:
    alone = served.engine.generate(chat_ids(served), SamplingParams(temperature=0.0, top_p=0.95, max_tokens=60, logprobs=3))
    asked: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 60, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [c.choices[0].logprobs for c in client.chat.completions.create(**asked, stream=True) if c.choices and c.choices[0].logprobs]
    assert [one for part in streamed for one in part.content] == whole and len(whole) > 3
    assert "".join(one.token for one in whole) == alone.text.partition("</think>")[2]  # of the content, not of the thinking
    for one, wanted in zip(whole, alone.logprobs[-len(whole) :], strict=True):
        assert one.logprob == pytest.approx(wanted.logprob, abs=1e-6) and len(one.top_logprobs) == 3
        assert bytes(one.bytes) == served.engine.tokenizer.token_bytes(wanted.token_id)  # type: ignore[union-attr]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx([value for _, value in wanted.top], abs=1e-6)
        assert math.exp(one.logprob) <= 1.0 + 1e-6


def test_completions_of_several_prompts_and_choices(served: Served, client: Any) -> None:
    ids = served.engine.encode("Once upon")
    reply = client.completions.create(model=NAME, prompt=[PROMPT, "Once upon"], n=2, seed=5, max_tokens=6)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(reply.choices):
        params = SamplingParams(top_p=0.95, seed=5 + index % 2, max_tokens=6)
        assert choice.text == served.engine.generate([PROMPT, "Once upon"][index // 2], params).text
    by_ids = client.completions.create(model=NAME, prompt=ids, seed=5, max_tokens=6)
    assert by_ids.choices[0].text == reply.choices[2].text
    assert reply.usage.prompt_tokens == len(ids) + len(served.engine.encode(PROMPT))
    pieces: dict[int, str] = {}
    for chunk in client.completions.create(model=NAME, prompt=[PROMPT, "Once upon"], n=2, seed=5, max_tokens=6, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    assert [pieces[index] for index in range(4)] == [choice.text for choice in reply.choices]


def test_stop_ignore_eos_and_the_filters(served: Served, client: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    text = served.engine.generate(PROMPT, greedy).text
    stop = text.split()[3]
    reply = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=12, stop=[stop, "never"])
    assert reply.choices[0].text == text[: text.index(stop)] and reply.choices[0].finish_reason == "stop"
    ids = chat_ids(served, reasoning_effort="low")
    extra = {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.2, "ignore_eos": True, "chat_template_kwargs": {"reasoning_effort": "low"}}
    params = SamplingParams(top_p=0.95, seed=3, top_k=5, min_p=0.02, repetition_penalty=1.2, ignore_eos=True, max_tokens=40)
    alone = served.engine.generate(ids, params)
    reply = client.chat.completions.create(model=NAME, messages=MESSAGES, seed=3, max_tokens=40, extra_body=extra)
    message = reply.choices[0].message
    found = (message.reasoning_content or "") + ("</think>" if message.content is not None else "") + (message.content or "")
    assert found == alone.text and reply.usage.completion_tokens == 40 and reply.choices[0].finish_reason == "length"


def test_reasoning_efforts_are_those_of_the_template(served: Served, client: Any) -> None:
    words = {"none": "Low", "minimal": "Low", "low": "Low", "medium": "High", "high": "High", "xhigh": "Max", "max": "Max"}
    for effort, word in words.items():
        _, _, told = served.request("POST", "/tokenize", {"messages": MESSAGES, "reasoning_effort": effort})
        assert told["tokens"] == chat_ids(served, reasoning_effort=word.lower())
    off = {"chat_template_kwargs": {"enable_thinking": False}}  # vLLM's way to say none
    assert served.request("POST", "/tokenize", {"messages": MESSAGES} | off)[2]["tokens"] == chat_ids(served, reasoning_effort="low")
    replies = [
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, max_tokens=8, **asked)
        for asked in ({"reasoning_effort": "none"}, {"extra_body": off}, {"reasoning_effort": "high", "extra_body": off})
    ]
    assert replies[0].choices == replies[1].choices == replies[2].choices
    with pytest.raises(openai.BadRequestError, match="none, minimal, low, medium, high, xhigh, max"):
        client.chat.completions.create(model=NAME, messages=MESSAGES, reasoning_effort="some")


def test_completion_logprobs(client: Any) -> None:
    reply = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2)
    found = reply.choices[0].logprobs
    assert "".join(found.tokens) == reply.choices[0].text and found.text_offset[0] == 0 and found.text_offset[1] == len(found.tokens[0])
    assert all(
        len(top) == 2 and top[token] == value for token, top, value in zip(found.tokens, found.top_logprobs, found.token_logprobs, strict=True)
    )


def test_completion_logprobs_of_any_token(served: Served, client: Any) -> None:
    """The drawn token is among the top ones wherever it ranks; tokens that are parts of characters have names of their own and begin where their
    character does."""
    word = "é€😀x"
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 1, "seed": 3, "max_tokens": 40}
    parts: list[Any] = []
    for stream in (False, True):
        extra = {"guided_choice": [word]}
        reply = client.completions.create(**asked, logprobs=1, stream=stream, extra_body=extra)
        found = [one.choices[0].logprobs for one in reply if one.choices and one.choices[0].logprobs] if stream else [reply.choices[0].logprobs]
        parts.append(
            [[entry for one in found for entry in getattr(one, name)] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
        )
    tokens, values, tops, offsets = parts[0]
    assert parts[1] == parts[0]
    raw = [bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:\\x") else token.encode() for token in tokens]
    assert b"".join(raw) == word.encode() and len(set(tokens)) > 3 and any(token.startswith("bytes:") for token in tokens)
    assert all(top[token] == value and len(top) <= 2 for token, value, top in zip(tokens, values, tops, strict=True))
    assert any(len(top) == 2 for top in tops)  # nothing makes this text probable
    for index, offset in enumerate(offsets):
        before = b"".join(raw[:index])
        assert offset == len(before.decode(errors="ignore"))
    for one in client.completions.create(**asked, logprobs=0).choices[0].logprobs.top_logprobs:
        assert len(one) == 1


def test_rows_of_an_open_session_count_as_cached(served: Served, client: Any) -> None:
    ids = served.engine.encode(PROMPT + " there was a man, and there was a woman; " * 12)
    assert 130 < len(ids) < 480
    alone = client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=8)
    with served.engine.session() as session:
        session.prefill(ids[:100])
        reply = client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=8)
    assert reply.choices[0].text == alone.choices[0].text
    assert (alone.usage.prompt_tokens_details.cached_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (0, 100)


def test_a_kept_prompt_and_its_choices_count_as_cached(serve_with: Any) -> None:
    """The conversation of a client that sends it whole each time is computed once; another key's is another one."""
    with serve_with(keeps_prompts=True, api_keys=("one", "two")) as served:
        ids = served.engine.encode(PROMPT + " there was a man, and there was a woman; " * 12)
        alone = served.engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=8))
        with openai.OpenAI(base_url=served.url, api_key="one", max_retries=0) as client:
            made = [client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=8) for _ in range(2)]
            several = client.completions.create(model=NAME, prompt=[*ids[:100], 5], n=3, seed=1, max_tokens=4)
        assert [reply.choices[0].text for reply in made] == [alone.text] * 2  # type: ignore[union-attr]
        assert [reply.usage.prompt_tokens_details.cached_tokens for reply in made] == [0, len(ids) - 1]
        assert several.usage.prompt_tokens_details.cached_tokens == 100 and len(several.choices) == 3
        with openai.OpenAI(base_url=served.url, api_key="two", max_retries=0) as client:
            other = client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=8)
        assert other.usage.prompt_tokens_details.cached_tokens == 0 and other.choices[0].text == made[0].choices[0].text


def test_models_and_errors_as_the_client_knows_them(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model=NAME, prompt=[1] * 600)
