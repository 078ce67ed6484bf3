"""Reads the body of /v1/messages, Anthropic's API, as a chat. Knows no HTTP.

There are texts, calls of the client's tools and their results; no images or documents. Every body
has max_tokens, so an answer that reaches beyond the context is cut, and says so.
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import Any

from nanoengine.errors import InvalidParamsError, InvalidPromptError, number, shown
from nanoengine.sampling_params import SamplingParams
from nanoengine.serving.answer_forms import OUTPUT_FORMAT, OWN_FORM, form_in
from nanoengine.serving.messages_answers import THREAD
from nanoengine.serving.openai_keys import EMPTY, Refused, given_keys
from nanoengine.serving.openai_requests import (
    ChatRequest,
    common_keys,
    params_from,
    read_text,
    template_kwargs,
    text_content,
    text_part,
    with_effort,
)
from nanoengine.serving.tool_requests import call_of, messages_tools, result_of
from nanoengine.text.rendering import Rendering

NO_OTHERS = "no images or files are read, and calls and results only from who makes them"
ROLES = ("user", "assistant", "system")
KEEPS_THOUGHTS = ("clear_thinking_20251015", "all")
THINKING = ("enabled", "disabled", "adaptive")
# What errors about parameters call them.
NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    OWN_FORM: OUTPUT_FORMAT,
}
SAME = ("temperature", "top_p", "top_k", "max_tokens")
KNOWN = (
    *SAME,
    *("messages", "model", "system", "stop_sequences", "stream"),
    *("cache_salt", "chat_template_kwargs", "output_config"),
    *("tools", "tool_choice", "thinking"),
)
REFUSED: Refused = {
    "mcp_servers": ((), "tools are the client's"),
    "container": ((), "tools are the client's"),
    "output_format": ((), "here it is output_config={'format': ...}"),
    "context_management": ((), "conversations are not cut or made shorter"),
    THREAD: ((), "answers are not kept; send the whole conversation as messages"),
}


def read_messages(body: object, defaults: SamplingParams) -> ChatRequest:
    """The request in a body of /v1/messages. defaults: for temperature, top_p and top_k.

    Raises InvalidParamsError and InvalidPromptError.
    """
    given = _given_keys(body)
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
    params |= form_in(_output_config(given).get("format"), OUTPUT_FORMAT)
    budget, variables = _thinking(given)
    params |= {} if budget is None else {"thinking_token_budget": budget}
    return _chat(given, params_from(defaults, params, NAMES), variables, common_keys(given))


def _chat(
    given: dict[str, Any],
    params: SamplingParams,
    variables: dict[str, Any] | None,
    others: dict[str, Any],
) -> ChatRequest:
    """The request in a body. variables: of the template; others: more fields of it. An assistant's
    message at the end is what the answer begins with.
    """
    messages = _messages(given)
    use = messages_tools(given.get("tools"), given.get("tool_choice"))
    goes_on = messages[-1]["role"] == "assistant"
    rendering = Rendering(not goes_on, variables, None if use is None else use.tools, goes_on)
    return ChatRequest(messages, params, rendering, may_be_cut=True, tools=use, **others)


def _given_keys(body: object) -> dict[str, Any]:
    """As given_keys. To keep all thoughts is what is done anyway."""
    if isinstance(body, dict) and isinstance(managed := body.get("context_management"), dict):
        edits = managed.get("edits", []) if managed.keys() <= {"edits"} else ""
        if edits is None or (isinstance(edits, list) and all(map(_keeps_all, edits))):
            body = {key: value for key, value in body.items() if key != "context_management"}
    return given_keys(body, KNOWN, REFUSED)


def _keeps_all(edit: object) -> bool:
    return isinstance(edit, dict) and (edit.get("type"), edit.get("keep")) == KEEPS_THOUGHTS


def _thinking(given: dict[str, Any]) -> tuple[int | None, dict[str, Any] | None]:
    """The budget of the thoughts, and the template's variables, which say whether to think."""
    asked, effort = given.get("thinking"), _output_config(given).get("effort")
    variables = with_effort(template_kwargs(given), effort, "output_config.effort")
    if asked is None:
        return None, variables
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind not in THINKING:
        raise InvalidParamsError(
            f"thinking must be an object whose type is {' or '.join(THINKING)}, got {shown(asked)}"
        )
    budget = asked.get("budget_tokens")
    if (kind == "enabled") != (budget is not None):
        says = "needs budget_tokens" if budget is None else "takes no budget_tokens"
        raise InvalidParamsError(f"thinking {says}, got {shown(asked)}; only enabled has them")
    if isinstance(budget, int) and budget < 0:  # -1 is no limit of SamplingParams alone
        raise InvalidParamsError(
            f"thinking.budget_tokens must be at least 0, got {shown(budget)}; adaptive has no limit"
        )
    thinks = {"enable_thinking": kind != "disabled"}
    return budget, (variables or {}) | thinks | (template_kwargs(given) or {})


def _output_config(given: dict[str, Any]) -> dict[str, Any]:
    config = given.get("output_config")
    if config is None:
        return {}
    if not isinstance(config, dict) or config.keys() - {"format", "effort"}:
        raise InvalidParamsError(
            f"output_config may hold a format and an effort, got {shown(config)}"
        )
    return config


def read_count(body: object, defaults: SamplingParams) -> ChatRequest:
    """The request in a body of /v1/messages/count_tokens: one whose prompt is to be counted."""
    given = _given_keys(body)
    return _chat(given, defaults, _thinking(given)[1], {"model": read_text(given, "model")})


def _messages(given: dict[str, Any]) -> list[Any]:
    asked = given.get("messages")
    if not isinstance(asked, list) or not asked:
        raise InvalidPromptError(f"messages must be a list of messages, got {shown(asked)}")
    messages: list[dict[str, Any]] = []
    for _, turns in groupby(enumerate(asked), lambda numbered: _role_of(numbered[1])):
        messages += _one_turn([made for index, item in turns for made in _of(item, index)])
    if messages[-1].get("tool_calls"):
        raise InvalidPromptError(
            "the last message calls tools: send their results after it, or a message of the user"
        )
    if given.get("system", "") in EMPTY:
        return messages
    system = text_content(given["system"], ("text",), "system")
    return [{"role": "system", "content": system}, *messages]


def _role_of(item: Any) -> Any:
    return item.get("role") if isinstance(item, dict) else None


def _one_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a user or an assistant that follow each other, as Anthropic takes them: as one.
    Results of tools come first.
    """
    results = [each for each in messages if each["role"] == "tool"]
    said = [each for each in messages if each["role"] != "tool"]
    if len(said) < 2 or said[0]["role"] == "system":
        return [*results, *said]
    found: dict[str, list[Any]] = {}  # joined at once: there may be a million
    for message in said:
        for name in message.keys() - {"role"}:
            value = message[name]
            if name == "content" and isinstance(value, str):
                value = [{"type": "text", "text": value}] if value else []
            found.setdefault(name, []).append(value)
    whole: dict[str, Any] = {"role": said[0]["role"]}
    for name, values in found.items():
        is_text = isinstance(values[0], str)
        whole[name] = "".join(values) if is_text else [*chain.from_iterable(values)]
    if whole.get("content") == []:
        whole["content"] = ""
    return [*results, whole]


def _of(item: Any, index: int) -> list[dict[str, Any]]:
    """The messages of a chat that a message is: results of tools are messages of their own."""
    where = f"messages[{index}]"
    role = item.get("role") if isinstance(item, dict) else item
    if not isinstance(item, dict) or role not in ROLES:
        raise InvalidPromptError(f"{where} must have a role, user or assistant, got {shown(role)}")
    content = item.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_content(content, ("text",), f"{where}.content")}]
    message: dict[str, Any] = {"role": role}
    texts, thoughts, results = [], [], []
    for place, block in enumerate(content):
        here = f"{where}.content[{place}]"
        kind = (role, block.get("type")) if isinstance(block, dict) else None
        if kind == ("assistant", "tool_use"):
            call = call_of(block.get("id"), block.get("name"), block.get("input", {}), here)
            message.setdefault("tool_calls", []).append(call)
        elif kind == ("assistant", "thinking") and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == ("user", "tool_result"):
            given = block.get("content") or ""
            said = text_content(given, ("text",), f"{here}.content")
            results.append(result_of(block.get("tool_use_id"), said, here))
        elif kind != ("assistant", "redacted_thinking"):
            texts.append(text_part(block, ("text",), here, NO_OTHERS))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if texts:
        message["content"] = texts
    elif role == "assistant" and content and "tool_calls" not in message:
        message["content"] = ""  # it was thoughts alone
    elif not (results or len(message) > 1):
        message["content"] = text_content(content, ("text",), f"{where}.content")
    return [*results, *([message] if len(message) > 1 else [])]
