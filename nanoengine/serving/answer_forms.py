"""Reads the form that an answer must have: response_format, the format of a response's text, and
Anthropic's output_config. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import InvalidParamsError, shown

# Where each kind of body has its form; in a chat the schema is one level deeper.
CHAT_FORMAT, TEXT_FORMAT = "response_format", "text.format"
OUTPUT_FORMAT = "output_config.format"
OWN_FORM = "structured_outputs"
TYPES = ("text", "json_object", "json_schema")


def form_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams for the form in a body of a chat or a completion; none without one.

    Raises InvalidParamsError.
    """
    form = form_in(given.get(CHAT_FORMAT), CHAT_FORMAT)
    if form and given.get(OWN_FORM) is not None:
        raise InvalidParamsError(
            f"{CHAT_FORMAT} and {OWN_FORM} are two forms of one answer; give one of them"
        )
    return form


def form_key(given: Mapping[str, Any]) -> str:
    """What a body calls the form of its answer, or tools, whose calls have a form."""
    keys = (CHAT_FORMAT,), TEXT_FORMAT.split("."), OUTPUT_FORMAT.split(".")
    for path in keys:
        asked: Any = given
        for name in path:
            asked = asked.get(name) if isinstance(asked, Mapping) else None
        if isinstance(asked, Mapping) and asked.get("type") != "text":
            return ".".join(path)
    return OWN_FORM if given.get(OWN_FORM) is not None or not given.get("tools") else "tools"


def form_in(asked: object, where: str) -> dict[str, Any]:
    """Fields of SamplingParams for a format; none for None and for any text. where: its place in
    the body. Raises InvalidParamsError.
    """
    if asked is None:
        return {}
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if not isinstance(asked, Mapping) or kind not in TYPES:
        raise InvalidParamsError(
            f"{where} must be an object whose type is {', '.join(TYPES[:2])} or {TYPES[2]}, got "
            f"{shown(asked if kind is None else kind)}; structured_outputs takes a regex, choices "
            "and grammars"
        )
    if kind == "text":
        return {}
    if kind == "json_object":
        return {OWN_FORM: {"json_object": True}}
    holder = asked.get("json_schema") if where == CHAT_FORMAT else asked
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        place = f"{where}.json_schema" if where == CHAT_FORMAT else where
        raise InvalidParamsError(f"{place}.schema must be a JSON schema, got {shown(schema)}")
    return {OWN_FORM: {"json": schema}}
