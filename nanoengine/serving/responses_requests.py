"""Reads the body of /v1/responses, OpenAI's newer API, as a chat. Knows no HTTP.

Answers are not kept, so a request brings its whole conversation. Tools are functions of the client.
What a client may send beyond that is refused, or ignored where it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, shown
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.answer_forms import OWN_FORM, TEXT_FORMAT, form_in, form_key
from nanoengine.serving.openai_keys import (
    IN_KWARGS,
    PARAMS,
    Refused,
    check_refused,
    given_keys,
    unknown_key,
)
from nanoengine.serving.openai_requests import (
    ChatRequest,
    common_keys,
    params_from,
    plain_messages,
    read_flag,
    read_object,
    template_kwargs,
    text_content,
    top_logprobs,
    with_effort,
)
from nanoengine.serving.tool_requests import call_of, responses_tools, result_of
from nanoengine.serving.tool_spaces import Spaces, full_name, without_spaces
from nanoengine.text.checked_json import MAX_DEPTH, is_deep
from nanoengine.text.rendering import Rendering

TEXTS = ("input_text", "output_text", "text")  # types of parts
THOUGHTS = ("reasoning_text", "text")
LOGPROBS = "message.output_text.logprobs"
NOT_KEPT = "answers are not kept; send the whole conversation as input"
# Parameters under the same name as in a chat; a response is one text.
SAME = tuple(name for name in PARAMS if name not in ("n", "logprobs", "max_tokens"))
# Keys that the answer repeats.
REPEATED = ("instructions", "max_output_tokens", "metadata", "reasoning", "user")
KNOWN = (
    *SAME,
    *REPEATED,
    *("input", "model", "stream", "include", "top_logprobs"),
    *("cache_salt", "chat_template_kwargs", "text"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)
PLAIN = {"type": "text"}
VERBOSITY = (("medium",), IN_KWARGS)
CUT = "conversations are not cut or made shorter; send a shorter input"
SUMMARY = (("auto",), "an answer has its thoughts, and no summary of them")
REFUSED: Refused = {
    "previous_response_id": ((), NOT_KEPT),
    "conversation": ((), NOT_KEPT),
    "background": ((False,), "answers are not kept; take a stream, or a connection that waits"),
    "prompt": ((), NOT_KEPT),
    "context_management": ((), CUT),
    "truncation": (("disabled",), CUT),
    "stream_options": (
        ({"include_obfuscation": True}, {"include_obfuscation": False}),
        "the last event has the usage",
    ),
}


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """chat: what to generate. repeated: keys of the body that the answer has, too; format: of its
    text, as the body has it. spaces: of its tools.
    """

    chat: ChatRequest
    repeated: dict[str, Any]
    format: Any
    spaces: Spaces


def read_responses(body: object, defaults: SamplingParams) -> ResponsesRequest:
    """The request in a body; without max_output_tokens the answer may fill the context.

    Raises InvalidParamsError and InvalidPromptError.
    """
    given = given_keys(body, KNOWN, REFUSED)
    params = {name: given[name] for name in SAME if name in given}
    params |= {"max_tokens": given.get("max_output_tokens"), "logprobs": _logprobs(given)}
    text_format = _within(given, "text", "format", "verbosity", VERBOSITY)
    params |= form_in(text_format, TEXT_FORMAT)
    effort = _within(given, "reasoning", "effort", "summary", SUMMARY)
    is_parallel = read_flag(given, "parallel_tool_calls", True)
    tools, spaces = without_spaces(given.get("tools"))
    use = responses_tools(tools, given.get("tool_choice"), is_parallel)
    variables = with_effort(template_kwargs(given), effort, "reasoning.effort")
    chat = ChatRequest(
        _messages(given),
        params_from(
            defaults, params, {"max_tokens": "max_output_tokens", OWN_FORM: form_key(given)}
        ),
        Rendering(kwargs=variables, tools=None if use is None else use.tools),
        **common_keys(given),
        tools=use,
    )
    if not isinstance(user := given.get("user", ""), str):
        raise InvalidParamsError(f"user must be a text, got {shown(user)}")
    read_object(given, "metadata")
    repeated = {name: given.get(name) for name in REPEATED} | {
        "tools": given.get("tools", []),
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": is_parallel,
    }
    for name, value in repeated.items():
        if is_deep([value]):  # it can be read, and not be written from every place
            raise InvalidParamsError(
                f"{name} is nested too deeply for an answer that repeats it: the limit is "
                f"{MAX_DEPTH - 1} levels"
            )
    made = PLAIN if text_format is None else text_format
    return ResponsesRequest(chat, repeated, made, spaces)


def _within(
    given: dict[str, Any], key: str, wanted: str, other: str, row: tuple[tuple[Any, ...], str]
) -> Any:
    """What the object under a key has as `wanted`. It may hold `other`, too, which is refused as
    its row says. Raises InvalidParamsError.
    """
    found = read_object(given, key) or {}
    for name, value in found.items():
        if name not in (wanted, other):
            raise unknown_key(name, (wanted, other), f" of {key}")
        if name == other and value is not None:
            check_refused(f"{key}.{name}", value, row)
    return found.get(wanted)


def _logprobs(given: dict[str, Any]) -> int | None:
    """How many likeliest tokens are wanted beside each; None without log-probabilities. What else
    `include` may name, no answer has.
    """
    include, number = given.get("include", []), top_logprobs(given)
    if not isinstance(include, list):
        raise InvalidParamsError(f"include must be a list of names, got {shown(include)}")
    return number if number or LOGPROBS in include else None


def _messages(given: dict[str, Any]) -> list[Any]:
    instructions, asked = given.get("instructions", ""), given.get("input")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise InvalidPromptError(f"input must be a text or a list of messages, got {shown(asked)}")
    if not isinstance(instructions, str):
        raise InvalidParamsError(f"instructions must be a text, got {shown(instructions)}")
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(asked):
        _add(messages, item, index)
    # Thoughts that nothing follows are no message.
    said = [each for each in messages if each.keys() & {"content", "tool_calls"}]
    return [*system, *plain_messages(said)]


def _add(messages: list[dict[str, Any]], item: Any, index: int) -> None:
    """Add an item to a conversation: thoughts, text and calls of one answer are one message."""
    where = f"input[{index}]"
    kind = item.get("type", "message") if isinstance(item, dict) else item
    if kind == "function_call":
        name = full_name(item.get("namespace"), item.get("name"))
        call = call_of(item.get("call_id"), name, item.get("arguments"), where)
        _last_answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_content(item.get("output"), TEXTS, f"{where}.output")
        messages.append(result_of(item.get("call_id"), content, where))
    elif kind == "reasoning":
        parts = text_content(item.get("content") or "", THOUGHTS, f"{where}.content")
        text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
        messages.append({"role": "assistant", "reasoning_content": text})
    elif kind == "message" and "role" in item:
        if not isinstance(item["role"], str):
            raise InvalidPromptError(f"{where}.role must be a text, got {shown(item['role'])}")
        content = text_content(item.get("content"), TEXTS, f"{where}.content")
        answer = _last_answer(messages) if item["role"] == "assistant" else {}
        if item["role"] == "assistant" and answer.keys() <= {"role", "reasoning_content"}:
            answer["content"] = content
        else:
            messages.append({"role": item["role"], "content": content})
    else:
        raise InvalidPromptError(
            f"{where} must be a message with a role and a content, got {shown(kind)}; it may be a "
            "function_call, a function_call_output or reasoning, too, but no reference"
        )


def _last_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the conversation ends with; a new one if it does not."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]
