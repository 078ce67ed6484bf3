"""Spaces of tools in /v1/responses, as Codex sends them: {"type": "namespace", "name": ...,
"tools": [functions]}. A model sees each function by one name, space and function; clients see both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import InvalidParamsError, shown

SEPARATOR = "__"
# A search that may not look at the web: a model without it answers as one that does not search.
OFFLINE_SEARCH = {"type": "web_search", "external_web_access": False}

Spaces = Mapping[str, tuple[str, str]]  # the name that the model sees -> space and function


def full_name(space: Any, name: Any) -> Any:
    """What the model calls a function of a space; the name itself where there is none."""
    are_texts = isinstance(space, str) and isinstance(name, str)
    return f"{space}{SEPARATOR}{name}" if are_texts else name


def without_spaces(tools: Any) -> tuple[Any, Spaces]:
    """The tools with the functions of spaces among them. Raises InvalidParamsError."""
    if not isinstance(tools, list):
        return tools, {}
    made, spaces = [], dict[str, tuple[str, str]]()
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace":
            for function in _functions(tool, f"tools[{index}]"):
                named = full_name(tool["name"], function["name"])
                spaces[named] = tool["name"], function["name"]
                made.append({**function, "name": named})
        elif kind != OFFLINE_SEARCH["type"] or not OFFLINE_SEARCH.items() <= tool.items():
            made.append(tool)
    return made, spaces


def _functions(space: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    name, functions = space.get("name"), space.get("tools")
    if not isinstance(name, str) or not isinstance(functions, list):
        raise InvalidParamsError(
            f"{where} must have a name and a list of tools, got {shown(space)}"
        )
    for each in functions:
        is_function = isinstance(each, Mapping) and each.get("type") == "function"
        if not is_function or not isinstance(each.get("name"), str):
            raise InvalidParamsError(
                f"{where}.tools must be functions with a name each, got {shown(each)}"
            )
    return functions
