"""The ids of calls in the messages of a chat, for models that read a tool's name in them.

Kimi K2's template writes ids and no names: functions.NAME:NUMBER, counted over the conversation, as
the model itself writes them and vLLM gives them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIGN = "<|tool_calls_section_begin|>"  # in the chat templates of such models


def with_names_in_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with such ids, whatever the ids of their calls are."""
    renamed: dict[str, str] = {}
    made, number = [], 0
    for message in messages:
        calls, answered = message.get("tool_calls"), message.get("tool_call_id")
        if isinstance(calls, list):
            named = []
            for call in calls:
                own = _own_id(call, number)
                number += own is not None
                if own is not None and isinstance(call.get("id"), str):
                    renamed[call["id"]] = own
                named.append(call if own is None else {**call, "id": own})
            message = {**message, "tool_calls": named}
        elif isinstance(answered, str) and answered in renamed:
            message = {**message, "tool_call_id": renamed[answered]}
        made.append(message)
    return made


def with_names_of_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, of which those with a tool's answer have the name that its call had."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            name = _name_of(call)
            if name is not None and isinstance(call.get("id"), str):
                names[call["id"]] = name
        name = names.get(str(message.get("tool_call_id")))
        made.append(message if name is None else {"name": name, **message})
    return made


def _own_id(call: object, number: int) -> str | None:
    """None: it is no call of a function."""
    name = _name_of(call)
    return None if name is None else f"functions.{name}:{number}"


def _name_of(call: object) -> str | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
