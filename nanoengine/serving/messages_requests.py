"""Reads the body of /v1/messages, Anthropic's API, as a chat. Knows no HTTP.

There are texts alone: no tools, images or documents, and no thinking apart from the text. Every
body has max_tokens, so an answer that reaches beyond the context is cut, and says so.
"""

from __future__ import annotations

from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, number, shown
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.answer_forms import OUTPUT_FORMAT, form_in
from nanoengine.serving.openai_keys import (
    IN_KWARGS,
    NO_CALLS,
    OWN_MESSAGE,
    Refused,
    given_keys,
)
from nanoengine.serving.openai_requests import (
    ChatRequest,
    common_keys,
    params_from,
    read_text,
    template_kwargs,
    text_content,
)

ROLES = ("user", "assistant", "system")
SAME = ("temperature", "top_p", "top_k", "max_tokens")
KNOWN = (
    *SAME,
    *("messages", "model", "system", "stop_sequences", "stream"),
    *("cache_salt", "chat_template_kwargs", "output_config"),
)
REFUSED: Refused = {
    "tools": ((), NO_CALLS),
    "tool_choice": (({"type": "none"}, {"type": "auto"}), NO_CALLS),
    "mcp_servers": ((), NO_CALLS),
    "container": ((), NO_CALLS),
    "thinking": (({"type": "disabled"},), IN_KWARGS),
    "output_format": ((), "here it is output_config={'format': ...}"),
    "context_management": ((), "conversations are not cut or made shorter"),
}


def read_messages(body: object, defaults: SamplingParams) -> ChatRequest:
    """The request in a body of /v1/messages. defaults: for temperature, top_p and top_k.

    Raises InvalidParamsError and InvalidPromptError.
    """
    given = given_keys(body, KNOWN, REFUSED)
    if "max_tokens" not in given:
        raise InvalidParamsError("max_tokens is required: the most tokens of the answer")
    params = {name: given[name] for name in SAME if name in given}
    temperature = params.get("temperature")
    if temperature is not None and (number(temperature) is None or not 0 <= temperature <= 1):
        raise InvalidParamsError(
            f"temperature must be a number from 0 to 1, got {shown(temperature)}; /v1/chat/"
            "completions takes higher ones"
        )
    if "stop_sequences" in given:
        params["stop"] = given["stop_sequences"]
    params |= _form(given)
    return ChatRequest(
        _messages(given),
        params_from(defaults, params, {"stop": "stop_sequences"}),
        template_kwargs(given),
        may_be_cut=True,
        **common_keys(given),
    )


def _form(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams for the format in output_config, whose effort is not obeyed."""
    config = given.get("output_config", {})
    if not isinstance(config, dict) or config.keys() - {"format"}:
        raise InvalidParamsError(f"output_config may hold a format alone, got {shown(config)}")
    asked = config.get("format")
    form = None if asked is None else form_in(asked, OUTPUT_FORMAT)
    return {} if form is None else {"structured_outputs": form}


def read_count(body: object, defaults: SamplingParams) -> ChatRequest:
    """The request in a body of /v1/messages/count_tokens: one whose prompt is to be counted."""
    given = given_keys(body, KNOWN, REFUSED)
    return ChatRequest(
        _messages(given),
        defaults,
        template_kwargs(given),
        may_be_cut=True,
        model=read_text(given, "model"),
    )


def _messages(given: dict[str, Any]) -> list[Any]:
    asked = given.get("messages")
    if not isinstance(asked, list) or not asked:
        raise InvalidPromptError(f"messages must be a list of messages, got {shown(asked)}")
    messages = [_message(item, index) for index, item in enumerate(asked)]
    if messages[-1]["role"] == "assistant":
        raise InvalidPromptError(
            f"the last message must be the user's, got the assistant's: {OWN_MESSAGE}"
        )
    if not given.get("system"):
        return messages
    system = text_content(given["system"], ("text",), "system")
    return [{"role": "system", "content": system}, *messages]


def _message(item: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = item.get("role") if isinstance(item, dict) else item
    if role not in ROLES:
        raise InvalidPromptError(f"{where} must have a role, user or assistant, got {shown(role)}")
    return {
        "role": role,
        "content": text_content(item.get("content"), ("text",), f"{where}.content"),
    }
