"""Tools that a model may call: reads them as OpenAI's bodies have them, and writes the grammar of
an answer that must call one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidParamsError, shown
from nanoengine.sampling_params import StructuredOutputsParams
from nanoengine.text.tool_syntax import MAX_NAME, Frame

MAX_TOOLS = 128
NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}")
NONE, AUTO, REQUIRED = "none", "auto", "required"
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
# Between the parts of JSON; without a limit, a model can write spaces without end.
WHITESPACE = r"[ \n\t]{0,16}"
GUIDANCE = {"whitespace_pattern": WHITESPACE, "lenient": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: as OpenAI's chats have them, which the chat template shows to the model. choice: AUTO,
    REQUIRED or the name of the tool that must be called. is_parallel: an answer may have several
    calls.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: str = AUTO
    is_parallel: bool = True

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != AUTO

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schemas of the tools' arguments, by name."""
        functions = (tool["function"] for tool in self.tools)
        return {each["name"]: each.get("parameters") or NO_ARGUMENTS for each in functions}


def read_tools(tools: object, choice: object = None, is_parallel: bool = True) -> ToolUse | None:
    """The tools of a request with OpenAI's `tool_choice`; None if the model may call none.

    Raises InvalidParamsError.
    """
    if tools is None or tools == []:
        if choice not in (None, NONE, AUTO):
            raise InvalidParamsError(f"tool_choice={shown(choice)} needs tools")
        return None
    if not isinstance(tools, list | tuple) or len(tools) > MAX_TOOLS:
        what = f"{len(tools)} of them" if isinstance(tools, list | tuple) else shown(tools)
        raise InvalidParamsError(f"tools must be a list of at most {MAX_TOOLS}, got {what}")
    read = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in read]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidParamsError(f"tools holds {twice!r} twice; give each its own name")
    chosen = _choice(choice, names)
    return None if chosen == NONE else ToolUse(read, chosen, is_parallel)


def _tool(tool: object, where: str) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        raise InvalidParamsError(
            f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": '
            f"...}}}}, got {shown(tool if kind in (None, 'function') else kind)}; the server runs "
            "no tools of its own"
        )
    check_name(function.get("name"), f"{where}.function.name")
    _check_text(function.get("description"), f"{where}.function.description")
    check_schema(function.get("parameters"), f"{where}.function.parameters")
    return {"type": kind, "function": {k: v for k, v in function.items() if v is not None}}


def check_name(name: object, where: str) -> str:
    """The name of a tool. Raises InvalidParamsError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidParamsError(
            f"{where} must be 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, _ and -, got "
            f"{shown(name)}"
        )
    return name


def check_schema(schema: object, where: str) -> None:
    """Raise InvalidParamsError unless it may be the schema of an object, or None."""
    if schema is None or schema == {}:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidParamsError(
            f"{where} must be the JSON schema of an object, got {shown(schema)}"
        )


def _check_text(text: object, where: str) -> None:
    if text is not None and not isinstance(text, str):
        raise InvalidParamsError(f"{where} must be a text, got {shown(text)}")


def _choice(choice: object, names: list[str]) -> str:
    """AUTO, NONE, REQUIRED or a name. Raises InvalidParamsError."""
    if choice is None:
        return AUTO
    if isinstance(choice, str) and choice in (NONE, AUTO, REQUIRED):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or name is None:
        raise InvalidParamsError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": ...}}}}, got {shown(choice)}'
        )
    if name not in names:
        raise InvalidParamsError(
            f"tool_choice names {shown(name)}, which is not one of tools: {', '.join(names)}"
        )
    return str(name)


def form_of_calls(use: ToolUse, frame: Frame, answer: str | None = None) -> StructuredOutputsParams:
    """The form of an answer that calls what `use` says, as `frame` writes it; or that is JSON of
    the schema `answer`, where the model may choose. Raises InvalidParamsError if the schemas are
    too large.
    """
    chosen = {n: s for n, s in use.schemas.items() if use.choice in (AUTO, REQUIRED, n)}
    lines = ["start: calls" + ("" if answer is None else " | answer")]
    lines.append(f"calls: {_joined(frame.before, _calls(use, frame), frame.after)}")
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
    try:
        if answer is not None:
            lines.append(f"answer: %json {json.dumps(_guided(json.loads(answer)))}")
        for index, (name, schema) in enumerate(chosen.items()):
            arguments = json.dumps(_guided({"type": "object", **schema}))
            body = _joined(frame.begin + name + frame.middle, f"%json {arguments}", frame.end)
            lines.append(f"call_{index}: {body}")
        return StructuredOutputsParams(grammar="\n".join(lines))
    except (InvalidParamsError, RecursionError, TypeError, ValueError) as error:
        raise InvalidParamsError(f"tools with tool_choice={shown(use.choice)}: {error}") from error


def _guided(schema: object) -> dict[str, Any]:
    """A schema as a grammar holds it. Raises TypeError if it is no object."""
    if not isinstance(schema, dict):
        raise TypeError(f"a JSON schema must be an object here, got {shown(schema)}")
    return {**schema, "x-guidance": GUIDANCE}


def _calls(use: ToolUse, frame: Frame) -> str:
    """One call, or several if the model may choose."""
    if use.choice in (AUTO, REQUIRED) and use.is_parallel and frame.between:
        return f"call ({json.dumps(frame.between)} call)*"
    return "call"


def _joined(before: str, rule: str, after: str) -> str:
    """A rule of Lark between two texts, each of which may be empty."""
    first, last = (json.dumps(text) if text else "" for text in (before, after))
    return " ".join(part for part in (first, rule, last) if part)
