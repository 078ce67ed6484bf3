"""Tools that a model may call: reads them as OpenAI's bodies have them, and writes the grammar of
an answer that must call one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidParamsError, shown
from nanoengine.sampling_params import StructuredOutputsParams
from nanoengine.text.closed_schemas import closed
from nanoengine.text.schema_formats import readable
from nanoengine.text.tool_syntax import MAX_NAME, Frame, head_of

MAX_TOOLS = 1024
NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}")
NONE, AUTO, REQUIRED = "none", "auto", "required"
ALLOWED = "allowed_tools"
A_TOOL = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
# Between the parts of JSON: nothing, a space, or a new line and what it is indented by. Were more
# allowed, a small model would spend its tokens on blank lines.
WHITESPACE = r"( ?|\n[ \t]{0,32})"
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
        return self._schemas_of(tool["function"] for tool in self.tools)

    @property
    def strict_schemas(self) -> dict[str, Mapping[str, Any]]:
        """Those of tools whose calls must fit them wherever the engine can see to it."""
        functions = (tool["function"] for tool in self.tools)
        return self._schemas_of(each for each in functions if each.get("strict"))

    def _schemas_of(self, functions: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
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
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise InvalidParamsError(f"tools holds {twice!r} twice; give each its own name")
    if isinstance(choice, Mapping) and choice.get("type") == ALLOWED:
        choice, allowed = _allowed(choice.get(ALLOWED), names)
        read = tuple(tool for tool in read if tool["function"]["name"] in allowed)
    chosen = _choice(choice, names)
    return None if chosen == NONE else ToolUse(read, chosen, is_parallel)


def _tool(tool: object, where: str) -> Mapping[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        got = shown(tool if kind in (None, "function") else kind)
        raise InvalidParamsError(
            f"{where} must be {A_TOOL}, got {got}; the server runs no tools of its own"
        )
    _check_name(function.get("name"), f"{where}.function.name")
    for key, type_, words in (("description", str, "a text"), ("strict", bool, "true or false")):
        value = function.get(key)
        if value is not None and not isinstance(value, type_):
            raise InvalidParamsError(f"{where}.function.{key} must be {words}, got {shown(value)}")
    _check_schema(function.get("parameters"), f"{where}.function.parameters")
    return {"type": kind, "function": {k: v for k, v in function.items() if v is not None}}


def _check_name(name: object, where: str) -> None:
    """Raise InvalidParamsError unless it may be the name of a tool."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidParamsError(
            f"{where} must be 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, _ and -, got "
            f"{shown(name)}"
        )


def _check_schema(schema: object, where: str) -> None:
    """Raise InvalidParamsError unless it may be the schema of an object, or None."""
    if schema is None or schema == {}:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidParamsError(
            f"{where} must be the JSON schema of an object, got {shown(schema)}"
        )


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
    return _known(name, names)


def _allowed(given: object, names: list[str]) -> tuple[str, list[str]]:
    """The choice among some of the tools, and their names. Raises InvalidParamsError."""
    asked = given if isinstance(given, Mapping) else {}
    mode, tools = asked.get("mode"), asked.get("tools")
    if mode not in (AUTO, REQUIRED) or not isinstance(tools, list | tuple) or not tools:
        raise InvalidParamsError(
            f"tool_choice: {ALLOWED} must be an object with a mode, {AUTO} or {REQUIRED}, and "
            f"tools, got {shown(given)}"
        )
    allowed = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        allowed.append(_known(name, names))
    return str(mode), allowed


def _known(name: object, names: list[str]) -> str:
    """A name of a tool. Raises InvalidParamsError if there is none of this name."""
    if name not in names:
        raise InvalidParamsError(
            f"tool_choice names {shown(name)}, which is not one of tools: {', '.join(names)}"
        )
    return str(name)


def form_of_calls(
    use: ToolUse, frame: Frame, special: Mapping[str, int], answer: str | None = None
) -> StructuredOutputsParams:
    """The form of an answer that calls what `use` says, as `frame` writes it; or that is JSON of
    the schema `answer`, where the model may choose. special: the ids of special tokens by their
    texts. Raises InvalidParamsError if the schemas are too large.
    """
    return _form(use, _lines_of_calls(use, _FrameRules(frame, special), answer))


def form_of_text(use: ToolUse) -> StructuredOutputsParams:
    """The form of any text in which calls of strict tools, once their names are there, fit their
    schemas; calls as objects with name and arguments in this order. Raises InvalidParamsError if
    the schemas are too large.
    """
    return _form(use, _lines_of_text(use))


def _form(use: ToolUse, lines: Iterator[str]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(grammar="\n".join(lines))
    except (InvalidParamsError, RecursionError, TypeError, ValueError) as error:
        raise InvalidParamsError(f"tools with tool_choice={shown(use.choice)}: {error}") from error


def _lines_of_calls(use: ToolUse, rules: _FrameRules, answer: str | None) -> Iterator[str]:
    chosen = {n: s for n, s in use.schemas.items() if use.choice in (AUTO, REQUIRED, n)}
    yield "start: calls" + ("" if answer is None else " | answer")
    yield f"calls: {rules.calls(may_be_several=use.is_parallel and use.choice not in chosen)}"
    yield "call: " + " | ".join(f"call_{i}" for i in range(len(chosen)))
    if answer is not None:
        yield f"answer: %json {json.dumps(_guided(json.loads(answer)))}"
    for index, (name, schema) in enumerate(chosen.items()):
        yield f"call_{index}: {rules.call(name, _arguments(schema))}"


@dataclass(frozen=True, slots=True)
class _FrameRules:
    """A frame as rules of Lark. special: the ids of special tokens by their texts; such a token is
    no text to a grammar.
    """

    frame: Frame
    special: Mapping[str, int]

    def calls(self, may_be_several: bool) -> str:
        """The rule of all calls, by the rule `call`."""
        frame, calls = self.frame, "call"
        if may_be_several and frame.between is not None:
            calls = f"call ({self._text(frame.between)} call)*"
        return " ".join((self._text(frame.before), calls, self._text(frame.after)))

    def call(self, name: str, arguments: str) -> str:
        """The rule of a call of one tool. arguments: their rule."""
        frame = self.frame
        return (
            f"{self._text(frame.begin + name + frame.middle)} {arguments} {self._text(frame.end)}"
        )

    def _text(self, text: str) -> str:
        """A text that may be empty."""
        marks = "|".join(re.escape(mark) for mark in self.special if mark and mark in text)
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        return f"<[{self.special[part]}]>" if part in self.special else json.dumps(part)


def _lines_of_text(use: ToolUse) -> Iterator[str]:
    """A lazy lexeme ends where its expression first matches, and no other goes on there."""
    strict = use.strict_schemas
    yield f"start: ({' | '.join(f'call_{i}' for i in range(len(strict)))})* TEXT"
    yield r"TEXT: /(.|\n)*/"
    yield r"SPACE: /[ \n\t]{1,16}/"
    for index, (name, schema) in enumerate(strict.items()):
        yield rf"head_{index}[lazy]: /(.|\n)*{head_of(name)}/"
        yield f"call_{index}: head_{index} SPACE? {_arguments(schema)}"


def _arguments(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(_guided({'type': 'object'} | dict(schema)))}"


def _guided(schema: object) -> dict[str, Any]:
    """A schema as a grammar holds it. Raises TypeError if it is no object."""
    if not isinstance(schema, dict):
        raise TypeError(f"a JSON schema must be an object here, got {shown(schema)}")
    return {**closed(readable(schema)), "x-guidance": GUIDANCE}
