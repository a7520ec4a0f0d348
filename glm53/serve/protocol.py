"""What the bodies of the API ask for: `Call`s, with messages and prompts as they were given and sampling as the engine takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from glm53.errors import InputError
from glm53.sampling import LOGPROBS_MAX, SamplingParams
from glm53.serve.fields import ApiError, Fields, Span, whole
from glm53.serve.formats import Format, read_format
from glm53.serve.tool_grammar import calls_grammar
from glm53.serve.tool_use import ToolUse, read_tools

CHOICES_MAX = 128  # n
STOPS_MAX, STOP_LENGTH_MAX, STOP_IDS_MAX = 16, 1024, 1024
PROMPTS_MAX = 1024
COMPLETION_TOKENS = 16  # max_tokens of /v1/completions if not given, as in OpenAI's API
SAMPLING = {
    "temperature": Span(0.0, 1e3),
    "top_p": Span(0.0, 1.0, low_open=True),
    "top_k": Span(-1, 2**31 - 1, whole=True),
    "min_p": Span(0.0, 1.0),
    "repetition_penalty": Span(0.0, 1e3, low_open=True),
    "seed": Span(-(2**63), 2**64 - 1, whole=True),
}
TIMEOUT_S = Span(0.0, 7 * 86400.0, low_open=True)
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that ask for what the server cannot do: why it refuses them, and values that ask for nothing.
REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "frequency_penalty": ("use repetition_penalty", (0, 0.0)),
    "presence_penalty": ("use repetition_penalty", (0, 0.0)),
    "logit_bias": ("token ids are drawn as the model weighs them", ({},)),
    "allowed_token_ids": ("use guided_regex or guided_choice, which bound the text", ()),
    "bad_words": ("use guided_regex, which bounds the text, or stop", ([],)),
    "min_tokens": ("use ignore_eos", (0,)),
    "use_beam_search": ("tokens are drawn", (False,)),
    "prompt_logprobs": ("logprobs are those of the new tokens", ()),
    "truncate_prompt_tokens": ("send the prompt as it is to be read", ()),
    "echo": ("the answer holds the new text alone", (False,)),
}
CHAT_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "continue_final_message": ("a reply begins anew; render the text and use /v1/completions", (False,)),
    "add_generation_prompt": ("a reply is always asked for; render the text and use /v1/completions", (True,)),
    "include_reasoning": ("leave reasoning_content unread, or ask for reasoning_effort none", (True,)),
    "modalities": ("the model writes text alone", (["text"], [])),
}
COMPLETION_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {"suffix": ("the model continues texts, it does not fill gaps", ("",))}
# reasoning_effort of the OpenAI API to the template's variables: GLM-5.3 knows low, high and max, earlier ones enable_thinking.
EFFORTS: dict[str, dict[str, Any]] = {
    "none": {"reasoning_effort": "low", "enable_thinking": False},
    "minimal": {"reasoning_effort": "low"},
    "low": {"reasoning_effort": "low"},
    "medium": {"reasoning_effort": "high"},
    "high": {"reasoning_effort": "high"},
    "xhigh": {"reasoning_effort": "max"},
    "max": {"reasoning_effort": "max"},
}
Prompt = str | list[int]


@dataclass(frozen=True)
class Call:
    """A request for generated text. max_tokens: None if not given. logprobs: most probable tokens to report, None: nothing. format: that the text
    must have, None: any."""

    model: str | None
    params: SamplingParams
    max_tokens: int | None
    max_tokens_name: str  # the field that it came from
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    timeout_s: float | None  # from the arrival on; None: the server's
    session_id: str | None  # the session to continue
    session_cut: bool  # its prompt rows may be cut
    format: Format | None

    def choice_params(self, index: int, max_tokens: int) -> SamplingParams:
        """Of the index-th choice for a prompt: with a seed, the n choices draw from seeds that follow each other."""
        seed = None if self.params.seed is None else (self.params.seed + index) % 2**64
        return replace(self.params, seed=seed, max_tokens=max_tokens, logprobs=self.logprobs)


@dataclass(frozen=True)
class ChatCall(Call):
    """`/v1/chat/completions`. settings: variables of the chat template, `tools` among them."""

    messages: list[dict[str, Any]]
    settings: dict[str, Any]
    tools: ToolUse | None


@dataclass(frozen=True)
class CompletionCall(Call):
    """`/v1/completions`."""

    prompts: list[Prompt]


def chat_call(body: Mapping[str, Any], defaults: SamplingParams, choices_max: int = CHOICES_MAX) -> ChatCall:
    """Reads a body of `/v1/chat/completions`. defaults: for what is absent. choices_max: n at most. Raises ApiError 400."""
    fields = Fields(body)
    use = read_tools(fields)
    with_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, LOGPROBS_MAX)
    if top and not with_logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    common = _common(fields, defaults, "max_completion_tokens", choices_max)
    _refuse(fields, CHAT_REFUSED)
    messages = [_message(fields, index, one) for index, one in enumerate(_list(fields, "messages"))]
    common["format"] = _with_tools(common["format"], use)
    settings = _template_settings(fields) | ({} if use is None else {"tools": use.given})
    fields.note_ignored()
    return ChatCall(**common, logprobs=(top or 0) if with_logprobs else None, messages=messages, settings=settings, tools=use)


def _with_tools(asked: Format | None, use: ToolUse | None) -> Format | None:
    """The form of a text that has to be calls, or may be."""
    try:
        if use is not None and use.forced:
            return Format(calls_grammar(use.forced, use.parallel), None, "tools")
        if asked is None or asked.expression is None or use is None or not use.parsed:
            return asked
        return Format(calls_grammar(use.tools, use.parallel, asked.expression), None, asked.param)
    except InputError as error:
        raise ApiError(f"tools: {error}", param="tools") from None


def completion_call(body: Mapping[str, Any], defaults: SamplingParams, choices_max: int = CHOICES_MAX) -> CompletionCall:
    """Reads a body of `/v1/completions`. Raises ApiError 400."""
    fields = Fields(body)
    _refuse(fields, COMPLETION_REFUSED)
    logprobs = fields.integer("logprobs", 0, LOGPROBS_MAX)
    common = _common(fields, defaults, "max_tokens", choices_max)
    fields.refuse("best_of", "give n", (common["n"], 1))
    prompts = _prompts(fields)
    fields.note_ignored()
    return CompletionCall(**common, logprobs=logprobs, prompts=prompts)


def tokenize_call(body: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None, dict[str, Any]]:
    """Reads a body of `/tokenize`: text, or messages, and settings of the template. Raises ApiError 400."""
    fields = Fields(body)
    if fields.has("prompt") == fields.has("messages"):
        raise ApiError("give either prompt or messages", param="prompt")
    if fields.has("prompt"):
        return fields.text("prompt"), None, {}
    fields.refuse("continue_final_message", *CHAT_REFUSED["continue_final_message"])
    messages = [_message(fields, index, one) for index, one in enumerate(_list(fields, "messages"))]
    settings = _template_settings(fields) | {"add_generation_prompt": fields.flag("add_generation_prompt", True)}
    use = read_tools(fields)
    settings |= {} if use is None else {"tools": use.given}
    return None, messages, settings


def _common(fields: Fields, defaults: SamplingParams, newer: str, choices_max: int) -> dict[str, Any]:
    """What chat and completions share. newer: of the two names of max_tokens the one that wins."""
    _refuse(fields, REFUSED)
    options = fields.inner("stream_options")
    stream = fields.flag("stream")
    if options.values and not stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    other = "max_tokens" if newer != "max_tokens" else "max_completion_tokens"
    name = newer if fields.has(newer) else other
    return {
        "model": fields.text("model"),
        "params": _sampling(fields, defaults),
        "max_tokens": fields.integer(name, 1, 1 << 30),
        "max_tokens_name": name,
        "n": fields.integer("n", 1, choices_max) or 1,
        "timeout_s": fields.spanned("timeout_s", TIMEOUT_S),
        "stream": stream,
        "include_usage": options.flag("include_usage"),
        "session_id": fields.text("session_id"),
        "session_cut": fields.flag("session_cut"),
        "format": read_format(fields),
    }


def _refuse(fields: Fields, refused: Mapping[str, tuple[str, tuple[object, ...]]]) -> None:
    for name, (why, harmless) in refused.items():
        fields.refuse(name, why, harmless)


def _sampling(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {name: value for name, span in SAMPLING.items() if (value := fields.spanned(name, span)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # off, as vLLM has it
    if "seed" in given:
        given["seed"] %= 2**64
    stop_ids = fields.integers("stop_token_ids", f"a list of at most {STOP_IDS_MAX} token ids", STOP_IDS_MAX)
    try:
        return replace(defaults, **given, stop=_stops(fields), stop_token_ids=tuple(stop_ids), ignore_eos=fields.flag("ignore_eos"))
    except InputError as error:
        raise ApiError(str(error), param=str(error).partition(":")[0]) from None


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and len(stops) <= STOPS_MAX
    if not fits or any(not isinstance(one, str) or not 0 < len(one) <= STOP_LENGTH_MAX for one in stops):
        raise fields.wrong("stop", f"a text, or at most {STOPS_MAX} texts, none empty or longer than {STOP_LENGTH_MAX} characters")
    return tuple(stops)


def _template_settings(fields: Fields) -> dict[str, Any]:
    """Variables of the chat template: chat_template_kwargs, and what reasoning_effort stands for if it is given. `"enable_thinking": false` there, as
    users of vLLM switch thinking off, is the effort none, whatever else is asked."""
    given = dict(fields.inner("chat_template_kwargs").values)
    taken = {"self", "messages", "tools", "add_generation_prompt"} & given.keys()
    if taken:
        raise ApiError(f"chat_template_kwargs: {sorted(taken)[0]} is not to be set there", param="chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise fields.wrong("reasoning_effort", "one of " + ", ".join(EFFORTS))
    if given.get("enable_thinking") is False:
        effort = "none"
    return given | ({} if effort is None else EFFORTS[effort])


def _list(fields: Fields, name: str) -> list[Any]:
    value = fields.values.get(name)
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "a list of at least one")
    return value


def _message(fields: Fields, index: int, given: object) -> dict[str, Any]:
    """A message as chat templates take it: text contents, arguments of earlier tool calls as objects."""
    if not isinstance(given, dict):
        raise ApiError(f"messages[{index}]: wanted an object with role and content", param="messages")
    one = Fields(given, f"messages[{index}].")
    role = one.text("role")
    if role not in ROLES:
        raise one.wrong("role", "one of " + ", ".join(ROLES))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(one, role == "assistant")}
    reasoning = one.text("reasoning_content") or one.text("reasoning")
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = reasoning
    if role == "assistant" and one.has("tool_calls"):
        message["tool_calls"] = [_tool_call(one, call) for call in one.several("tool_calls", dict, "a list of objects", 1024)]
    if role == "tool" and one.has("tool_call_id"):
        message["tool_call_id"] = one.text("tool_call_id")
    return message


def _content(one: Fields, may_be_absent: bool) -> str | None:
    value = one.values.get("content")
    if value is None and may_be_absent:
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or any(not isinstance(part, dict) for part in value):
        raise one.wrong("content", "a text or a list of text parts")
    texts = []
    for part in value:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise one.wrong("content", 'parts of {"type": "text", "text": ...}: the model reads text alone')
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(one: Fields, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise one.wrong("tool_calls", "calls with function.name and function.arguments, an object in JSON")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _prompts(fields: Fields) -> list[Prompt]:
    """One prompt or several, each a text or token ids."""
    value: Any = fields.values.get("prompt")
    if (one := _prompt(value)) is not None:
        return [one]
    if isinstance(value, list) and 0 < len(value) <= PROMPTS_MAX:
        prompts = [prompt for prompt in map(_prompt, value) if prompt is not None]
        if len(prompts) == len(value):
            return prompts
    raise fields.wrong("prompt", f"a text, a list of token ids, or at most {PROMPTS_MAX} of them")


def _prompt(value: object) -> Prompt | None:
    if isinstance(value, str):
        return value
    ids = [whole(one) for one in value] if isinstance(value, list) and value else [None]
    return None if None in ids else [i for i in ids if i is not None]
