"""What /openapi.json says of bodies: for people and for programs that make requests of it.

The readers check bodies by themselves, so FastAPI knows nothing of them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.answer_forms import TYPES
from nanoengine.serving.openai_keys import CHAT, COMMON, COMPLETIONS, OWN, PARAMS
from nanoengine.serving.openai_requests import EFFORTS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": WHOLE}
TEXTS: Schema = {"type": "array", "items": TEXT}
# A part of a field's type, as the dataclass writes it.
PARTS: dict[str, Schema] = {
    "int": WHOLE,
    "float": NUMBER,
    "bool": FLAG,
    "str": TEXT,
    "None": {"type": "null"},
    "list[int]": IDS,
    "list[str]": TEXTS,
    "StructuredOutputsParams": {
        "type": "object",
        "properties": {
            "json": OBJECT,
            "regex": TEXT,
            "choice": TEXTS,
            "grammar": TEXT,
            "json_object": FLAG,
            "after_thinking": FLAG,
        },
    },
    "Mapping[int, float]": {"type": "object", "additionalProperties": NUMBER},
}
PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, {"type": "array", "items": PART}]},
    },
    "required": ["role", "content"],
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": TEXT, "description": TEXT, "parameters": OBJECT},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
ALLOWED_TOOLS: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": TOOL, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
MESSAGES: Schema = {"type": "array", "items": MESSAGE, "minItems": 1}
PROMPT: Schema = {"anyOf": [TEXT, IDS, TEXTS, {"type": "array", "items": IDS}]}
FORMAT: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": [*TYPES]},
        "json_schema": {"type": "object", "properties": {"name": TEXT, "schema": OBJECT}},
    },
    "required": ["type"],
}
OTHERS: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG},
    },
    "cache_salt": TEXT,
    "max_completion_tokens": WHOLE,
    "response_format": FORMAT,
    "messages": MESSAGES,
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": {"enum": [None, *EFFORTS]},
    "top_logprobs": WHOLE,
    "tools": {"type": "array", "items": TOOL},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, TOOL, ALLOWED_TOOLS]},
    "parallel_tool_calls": FLAG,
    "include_reasoning": FLAG,
    "prompt": PROMPT,
    "echo": FLAG,
}
TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "prompt": TEXT,
        "messages": MESSAGES,
        "add_special_tokens": FLAG,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "tools": {"type": "array", "items": TOOL},
        "chat_template_kwargs": OBJECT,
        "return_token_strs": FLAG,
    },
}
DETOKENIZE: Schema = {
    "type": "object",
    "properties": {"model": TEXT, "tokens": IDS},
    "required": ["tokens"],
}
RESPONSES: Schema = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "input": {"anyOf": [TEXT, MESSAGES]},
        "instructions": TEXT,
        "max_output_tokens": WHOLE,
        "text": {"type": "object", "properties": {"format": FORMAT}},
        "reasoning": OBJECT,
        "tools": {"type": "array", "items": OBJECT},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
        "parallel_tool_calls": FLAG,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "stream": FLAG,
        "store": FLAG,
        "metadata": OBJECT,
    },
    "required": ["input"],
}
MESSAGES_BODY: Schema = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "messages": MESSAGES,
        "system": {"anyOf": [TEXT, {"type": "array", "items": PART}]},
        "max_tokens": WHOLE,
        "stop_sequences": TEXTS,
        "tools": {"type": "array", "items": OBJECT},
        "tool_choice": OBJECT,
        "thinking": OBJECT,
        "output_config": OBJECT,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "top_k": WHOLE,
        "stream": FLAG,
    },
    "required": ["messages", "max_tokens"],
}
COUNT_BODY: Schema = MESSAGES_BODY | {"required": ["messages"]}
ERROR: Schema = {"type": "object", "properties": {"error": OBJECT}, "required": ["error"]}
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
    """The schema of a body of /v1/chat/completions or /v1/completions."""
    types = {field.name: str(field.type) for field in fields(SamplingParams)}
    properties = {name: _schema(types[name]) for name in PARAMS}
    if endpoint == CHAT:
        properties["logprobs"] = FLAG
    properties |= {name: OTHERS[name] for name in (*COMMON, *OWN[endpoint])}
    needed = {CHAT: "messages", COMPLETIONS: "prompt"}[endpoint]
    return {"type": "object", "properties": properties, "required": [needed]}


def _schema(kind: str) -> Schema:
    """The schema of a field of this type; forms that JSON lacks are left out."""
    found = [PARTS[part] for part in kind.split(" | ") if part in PARTS]
    return found[0] if len(found) == 1 else {"anyOf": found}
