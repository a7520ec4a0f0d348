"""Which tools a body declares, and whether one has to be called: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm53.serve.fields import ApiError, Fields
from glm53.serve.tools import NAME_LENGTH_MAX, Tool, ToolParser

TOOLS_MAX = 1024
CHOICE = 'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}'


@dataclass(frozen=True)
class ToolUse:
    """given: the tools as the chat template gets them. tools: those that may be called. parsed: calls are looked for in the text. forced: the text
    has to be calls of these; empty: it need not. parallel: it may have more than one."""

    given: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    parsed: bool
    forced: tuple[Tool, ...]
    parallel: bool

    def parser(self) -> ToolParser | None:
        """For one text."""
        return ToolParser(self.tools, self.parallel) if self.parsed else None


def read_tools(fields: Fields) -> ToolUse | None:
    """What a body says of tools; None: it has none. Raises ApiError 400."""
    fields.refuse("functions", "use tools", ([],))
    fields.refuse("function_call", "use tool_choice", ("none", "auto"))
    given = fields.several("tools", dict, f"a list of at most {TOOLS_MAX} tools", TOOLS_MAX)
    tools = tuple(_tool(Fields(one, f"tools[{index}].")) for index, one in enumerate(given))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(f"tools: two of them have the name {twice!r}", param="tools")
    choice = fields.values.get("tool_choice")
    mode, allowed = _choice(fields, choice)
    parallel = fields.flag("parallel_tool_calls", True)
    if not tools:
        if allowed is not None or mode == "required":
            raise ApiError("tool_choice asks for a call and there are no tools", param="tool_choice")
        return None
    missing = next((name for name in allowed or () if name not in names), None)
    if missing is not None:
        raise ApiError(f"tool_choice: no tool has the name {missing[:200]!r}; the tools are {', '.join(names)[:500]}", param="tool_choice")
    usable = tools if allowed is None else tuple(tool for tool in tools if tool.name in allowed)
    only_one = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(list(given), usable, mode != "none", usable if mode == "required" else (), parallel and not only_one)


def _tool(one: Fields) -> Tool:
    if one.text("type") != "function":
        raise one.wrong("type", "function")
    function = one.inner("function")
    name, parameters = function.text("name"), function.inner("parameters").values
    if not name or len(name) > NAME_LENGTH_MAX or name != name.strip() or "<" in name:
        raise function.wrong("name", f"a name of 1 to {NAME_LENGTH_MAX} characters, without < and white space around it")
    function.text("description")
    function.flag("strict")
    return Tool(name, parameters)


def _choice(fields: Fields, choice: object) -> tuple[str, list[str] | None]:
    """none, auto or required, and names of the tools that may be called, None: all."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return str(choice or "auto"), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "required", [_name(fields, choice)]
    inner = choice.get("allowed_tools") if isinstance(choice, dict) and choice.get("type") == "allowed_tools" else None
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 0 < len(tools) <= TOOLS_MAX:
        raise fields.wrong("tool_choice", CHOICE)
    return str(mode), [_name(fields, one) for one in tools]


def _name(fields: Fields, one: object) -> str:
    function = one.get("function") if isinstance(one, Mapping) and one.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise fields.wrong("tool_choice", CHOICE)
    return name
