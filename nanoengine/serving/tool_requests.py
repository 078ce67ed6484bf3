"""Reads the tools of the APIs that do not write them as OpenAI's chats do, and the calls and
results in their conversations, as those of a chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, shown
from nanoengine.serving.tool_spaces import full_name
from nanoengine.text.tools import A_TOOL, ALLOWED, AUTO, NONE, REQUIRED, ToolUse, read_tools

# Anthropic's choices: what they are in a chat, where the last one is a name.
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": ""}


def responses_tools(tools: Any, choice: Any, is_parallel: bool) -> ToolUse | None:
    """The tools of /v1/responses: a function's keys are the tool's own. Raises
    InvalidParamsError.
    """
    if isinstance(choice, Mapping) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": _named(choice)["name"]}}
    elif isinstance(choice, Mapping) and choice.get("type") == ALLOWED:
        allowed = _each(_each(choice.get("tools"), _named), _of_response)
        some = {"mode": choice.get("mode"), "tools": allowed}
        choice = {"type": ALLOWED, ALLOWED: some}
    names = {A_TOOL: '{"type": "function", "name": ..., "parameters": ...}', ".function": ""}
    return _read(_each(tools, _of_response), choice, is_parallel, names)


def messages_tools(tools: Any, choice: Any) -> ToolUse | None:
    """The tools of /v1/messages. Raises InvalidParamsError."""
    is_parallel, meant = True, None
    if choice is not None:
        is_parallel, meant = _choice(choice)
    names = {
        A_TOOL: '{"name": ..., "input_schema": ...}',
        ".function.parameters": ".input_schema",
        ".function": "",
    }
    return _read(_each(tools, _of_message), meant, is_parallel, names)


def _choice(choice: Any) -> tuple[bool, Any]:
    """Whether calls may be parallel, and the choice of a chat that Anthropic's means."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str) or kind not in CHOICES:
        raise InvalidParamsError(
            f"tool_choice must be an object whose type is {', '.join(CHOICES)}, got {shown(choice)}"
        )
    alone = choice.get("disable_parallel_tool_use", False)
    if not isinstance(alone, bool):
        raise InvalidParamsError(
            f"tool_choice.disable_parallel_tool_use must be true or false, got {shown(alone)}"
        )
    if kind == "tool":
        return not alone, {"type": "function", "function": {"name": choice.get("name", "")}}
    return not alone, CHOICES[kind]


def call_of(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A call in an assistant's message. Raises InvalidPromptError."""
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise InvalidPromptError(f"{where} needs the id and the name of a call")
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except RecursionError as error:
        raise InvalidPromptError(f"{where}: the arguments are nested too deeply") from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def result_of(call_id: Any, content: Any, where: str) -> dict[str, Any]:
    """The message of a call's result. Raises InvalidPromptError."""
    if not isinstance(call_id, str):
        raise InvalidPromptError(f"{where} needs the id of the call that it answers")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _read(tools: Any, choice: Any, is_parallel: bool, names: Mapping[str, str]) -> ToolUse | None:
    """The tools; names: what errors call their parts."""
    try:
        return read_tools(tools, choice, is_parallel)
    except InvalidParamsError as error:
        text = str(error)
        if text.startswith("tools["):
            for chats, own in names.items():
                text = text.replace(chats, own, 1)
        raise InvalidParamsError(text) from None


def _each(tools: Any, chats: Any) -> Any:
    return [chats(tool) for tool in tools] if isinstance(tools, list) else tools


def _named(tool: Any) -> Any:
    """A function of a space by the name that the model sees."""
    if not isinstance(tool, Mapping) or "namespace" not in tool:
        return tool
    own = {key: value for key, value in tool.items() if key != "namespace"}
    return own | {"name": full_name(tool["namespace"], tool.get("name"))}


def _of_response(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _of_message(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        return tool
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}
