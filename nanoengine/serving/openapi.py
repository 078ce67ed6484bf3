"""What /openapi.json says of bodies: for people and for programs that make requests of it.

The readers check bodies by themselves, so FastAPI knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from nanoengine.sampling_params import SamplingParams
from nanoengine.serving import messages_requests, responses_requests
from nanoengine.serving.answer_forms import TYPES
from nanoengine.serving.messages_requests import ROLES as ROLES_OF_MESSAGES
from nanoengine.serving.openai_keys import (
    CHAT,
    COMMON,
    COMPLETIONS,
    MESSAGES,
    OWN,
    PARAMS,
    RESPONSES,
)
from nanoengine.serving.openai_requests import EFFORTS

Schema = dict[str, Any]


def record(properties: Schema, *required: str) -> Schema:
    """An object with these keys, some of which every one has."""
    made = {"type": "object", "properties": properties}
    return made | {"required": [*required]} if required else made


def list_of(items: Schema) -> Schema:
    """A list whose elements are like this."""
    return {"type": "array", "items": items}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS, TEXTS, OBJECTS = list_of(WHOLE), list_of(TEXT), list_of(OBJECT)
FORM = {"json": OBJECT, "regex": TEXT, "choice": TEXTS, "grammar": TEXT}
# A part of a field's type, as the dataclass writes it.
PARTS: dict[str, Schema] = {
    "int": WHOLE,
    "float": NUMBER,
    "bool": FLAG,
    "str": TEXT,
    "None": {"type": "null"},
    "list[int]": IDS,
    "list[str]": TEXTS,
    "StructuredOutputsParams": record(FORM | {"json_object": FLAG, "after_thinking": FLAG}),
    "Mapping[int, float]": {"type": "object", "additionalProperties": NUMBER},
}
PART = record({"type": {"const": "text"}, "text": TEXT}, "type", "text")
PARTED: Schema = {"anyOf": [TEXT, list_of(PART)]}
ROLES = ["system", "developer", "user", "assistant", "tool"]
MESSAGE = record({"role": {"enum": ROLES}, "content": PARTED}, "role", "content")
CONVERSATION = list_of(MESSAGE) | {"minItems": 1}
FUNCTION = record({"name": TEXT, "description": TEXT, "parameters": OBJECT}, "name")
TOOL = record({"type": {"const": "function"}, "function": FUNCTION}, "type", "function")
ALLOWED = record(
    {"mode": {"enum": ["auto", "required"]}, "tools": list_of(TOOL) | {"minItems": 1}},
    *("mode", "tools"),
)
ALLOWED_TOOLS = record(
    {"type": {"const": "allowed_tools"}, "allowed_tools": ALLOWED}, "type", "allowed_tools"
)
CHOICE: Schema = {"enum": ["none", "auto", "required"]}
FORMAT = record(
    {"type": {"enum": [*TYPES]}, "json_schema": record({"name": TEXT, "schema": OBJECT})}, "type"
)
OTHERS: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": record({"include_usage": FLAG, "continuous_usage_stats": FLAG}),
    "cache_salt": TEXT,
    "max_completion_tokens": WHOLE,
    "response_format": FORMAT,
    "messages": CONVERSATION,
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": {"enum": [None, *EFFORTS]},
    "top_logprobs": WHOLE,
    "tools": list_of(TOOL),
    "tool_choice": {"anyOf": [CHOICE, TOOL, ALLOWED_TOOLS]},
    "parallel_tool_calls": FLAG,
    "include_reasoning": FLAG,
    "return_token_ids": FLAG,
    "add_special_tokens": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "prompt": {"anyOf": [TEXT, IDS, TEXTS, list_of(IDS)]},
    "echo": FLAG,
}
TOKENIZE = record(
    {
        "model": TEXT,
        "prompt": TEXT,
        "messages": CONVERSATION,
        "add_special_tokens": FLAG,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "tools": list_of(TOOL),
        "chat_template_kwargs": OBJECT,
        "return_token_strs": FLAG,
    }
)
DETOKENIZE = record({"model": TEXT, "tokens": IDS}, "tokens")
# Other types than in a chat, by the keys of the other two APIs.
OBJECTS_OR_TEXT: Schema = {"anyOf": [TEXT, OBJECTS]}
FLAT_FORMAT = record({"type": {"enum": [*TYPES]}, "name": TEXT, "schema": OBJECT}, "type")
OF_RESPONSES: dict[str, Schema] = {
    "input": OBJECTS_OR_TEXT,
    "include": TEXTS,
    "instructions": TEXT,
    "max_output_tokens": WHOLE,
    "metadata": OBJECT,
    "reasoning": OBJECT,
    "text": record({"format": FLAT_FORMAT}),
    "tools": OBJECTS,
    "tool_choice": {"anyOf": [CHOICE, OBJECT]},
    "user": TEXT,
}
SAID = record(
    {"role": {"enum": [*ROLES_OF_MESSAGES]}, "content": OBJECTS_OR_TEXT}, "role", "content"
)
OF_MESSAGES: dict[str, Schema] = {
    "messages": list_of(SAID) | {"minItems": 1},
    "output_config": OBJECT,
    "stop_sequences": TEXTS,
    "system": OBJECTS_OR_TEXT,
    "thinking": OBJECT,
    "tools": OBJECTS,
    "tool_choice": OBJECT,
}


ERROR = record({"error": OBJECT}, "error")
# What every path may answer beside its status 200.
RESPONSES_OF_ALL: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error", "content": {"application/json": {"schema": ERROR}}}
}


def body_of(schema: Schema, may_stream: bool = False) -> dict[str, Any]:
    """What FastAPI's openapi_extra takes for a body of this schema. may_stream: whether the answer
    may be events.
    """
    content = {"application/json": {"schema": schema}}
    made: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if may_stream:
        made["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return made


def request_schema(endpoint: str) -> Schema:
    """The schema of a body of a path that generates."""
    if endpoint == RESPONSES:
        return _body(responses_requests.KNOWN, OF_RESPONSES, "input")
    if endpoint == MESSAGES:
        return _body(messages_requests.KNOWN, OF_MESSAGES, "messages", "max_tokens")
    own = {"logprobs": FLAG} if endpoint == CHAT else {}
    needed = {CHAT: "messages", COMPLETIONS: "prompt"}[endpoint]
    return _body((*PARAMS, *COMMON, *OWN[endpoint]), own, needed)


def count_schema() -> Schema:
    """Of a body of /v1/messages/count_tokens."""
    return _body(messages_requests.KNOWN, OF_MESSAGES, "messages")


def _body(known: Iterable[str], own: dict[str, Schema], *required: str) -> Schema:
    """Of these keys. own: those that are not as in a chat."""
    types = {field.name: str(field.type) for field in fields(SamplingParams)}
    chats = {name: _schema(kind) for name, kind in types.items()} | OTHERS | own
    return record({name: chats[name] for name in known}, *required)


def _schema(kind: str) -> Schema:
    """The schema of a field of this type; forms that JSON lacks are left out."""
    found = [PARTS[part] for part in kind.split(" | ") if part in PARTS]
    return found[0] if len(found) == 1 else {"anyOf": found}
