"""Which tools a body declares, and whether one has to be called: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm53.serve.fields import ApiError, Fields
from glm53.serve.tools import NAME_LENGTH_MAX, Tool, ToolParser

TOOLS_MAX = 1024


@dataclass(frozen=True)
class ToolUse:
    """given: the tools as the chat template gets them. parsed: calls are looked for in the text. forced: the text has to be calls of these; empty: it
    need not. parallel: it may have more than one."""

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
    named = _named(fields, choice) if isinstance(choice, dict) else None
    if named is None and choice not in (None, "none", "auto", "required"):
        raise fields.wrong("tool_choice", 'none, auto, required or {"type": "function", "function": {"name": ...}}')
    parallel = fields.flag("parallel_tool_calls", True)
    if not tools:
        if named is not None or choice == "required":
            raise ApiError("tool_choice asks for a call and there are no tools", param="tool_choice")
        return None
    if named is not None and named not in names:
        raise ApiError(f"tool_choice: no tool has the name {named[:200]!r}; the tools are {', '.join(names)[:500]}", param="tool_choice")
    forced = tools if choice == "required" else tuple(tool for tool in tools if tool.name == named)
    return ToolUse(list(given), tools, choice != "none", forced, parallel and named is None)


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


def _named(fields: Fields, choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise fields.wrong("tool_choice", 'none, auto, required or {"type": "function", "function": {"name": ...}}')
    return name
