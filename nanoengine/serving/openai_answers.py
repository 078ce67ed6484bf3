"""Writes outputs and errors as the bodies of OpenAI's answers. Knows no HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from nanoengine.errors import (
    InvalidParamsError,
    InvalidPromptError,
    LogitsError,
    PromptTooLongError,
    RequestError,
    TransferError,
)
from nanoengine.outputs import ChatMessage, CompletionOutput, RequestOutput
from nanoengine.serving.answer_forms import TEXT_FORMAT
from nanoengine.serving.openai_keys import (
    CHAT,
    COMMON,
    COMPLETIONS,
    OWN,
    PARAMS,
    PROMPTS,
    KeyRefusedError,
)
from nanoengine.serving.openai_logprobs import (
    CompletionLogprobs,
    ContentLogprobs,
    TokenBytes,
    chat_logprobs,
    prompt_lists,
    prompt_text,
)
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest
from nanoengine.text.answer_parser import ChatParsers, message_of
from nanoengine.text.tools import ToolUse

Event = tuple[str | None, dict[str, Any]]  # of a stream: its name, if it has one, and its data
# The types of errors: the client's and the server's.
INVALID, SERVER = "invalid_request_error", "server_error"
# The error's code in OpenAI's words, for the first class that fits.
CODES: tuple[tuple[type[RequestError], str], ...] = (
    (PromptTooLongError, "context_length_exceeded"),
    (InvalidParamsError, "invalid_value"),
    (InvalidPromptError, "invalid_prompt"),
    (RequestError, "invalid_request"),
)
# LangChain and LiteLLM know this error by words of its message, not by its code.
TOO_LONG = "the prompt is too long, this model's maximum context length is exceeded: "
BAD_REQUEST, SERVER_ERROR = 400, 500
NAMES = {
    *(*PARAMS, *COMMON, *OWN[CHAT], *OWN[COMPLETIONS], "max_output_tokens", "text", TEXT_FORMAT),
    *("include", "instructions", "metadata", "user"),
    *("continue_final_message", "add_generation_prompt"),
    *("add_special_tokens", "return_token_strs"),
}
TOKENS_OF = ("prompt", "messages", "tokens")  # keys of /tokenize and /detokenize


def chat_body(
    request: ChatRequest,
    answer_id: str,
    model: str,
    token_bytes: TokenBytes,
    output: RequestOutput,
    parsers: ChatParsers,
) -> dict[str, Any]:
    """The answer to a chat. parsers: of its model's answers."""
    num_likeliest = request.params.logprobs or 0
    choices = []
    for made in output.outputs:
        parser = parsers.parser(output.prompt or "", request.tools)
        pieces = parser.read(made.text, is_last=True)
        message = message_of(pieces)
        logprobs = chat_logprobs(made, token_bytes, num_likeliest)
        if logprobs is not None and hides_thoughts(request, parsers):
            scores = ContentLogprobs(token_bytes, parsers.hidden(request.params, request.tools))
            scores.add(made, logprobs["content"])
            logprobs["content"] = scores.of(pieces)
        choice = {
            "index": made.index,
            "message": _message_body(message, request.shows_reasoning),
            "logprobs": logprobs,
            "finish_reason": finish_reason(made.finish_reason, bool(message.tool_calls)),
        }
        choices.append(choice)
    head = answer_head("chatcmpl", answer_id, "chat.completion", model)
    return head | {"choices": choices, "usage": chat_usage(output, parsers, request.tools)}


def hides_thoughts(request: ChatRequest, parsers: ChatParsers) -> bool:
    """Whether an answer may have thoughts that are not wanted: then log-probabilities are those of
    its content alone.
    """
    return parsers.reasoning is not None and not request.shows_reasoning


def _message_body(message: ChatMessage, shows_reasoning: bool) -> dict[str, Any]:
    body = message.as_dict() | {"refusal": None}
    return body | reasoning_body(message.reasoning) if shows_reasoning else body


def reasoning_body(text: str) -> dict[str, str]:
    """Thoughts under the name that most clients read, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Why a text ended, as OpenAI's chats say it."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def completion_body(
    request: CompletionRequest,
    answer_id: str,
    model: str,
    token_bytes: TokenBytes,
    outputs: Sequence[RequestOutput],
) -> dict[str, Any]:
    """The answer to a completion; outputs: of each prompt, in order."""
    choices = [
        {"index": index} | choice
        for index, choice in enumerate(
            _choice(request, token_bytes, output, made)
            for output in outputs
            for made in output.outputs
        )
    ]
    head = answer_head("cmpl", answer_id, "text_completion", model)
    return head | {"choices": choices, "usage": usage(outputs, request.echo_only)}


def _choice(
    request: CompletionRequest,
    token_bytes: TokenBytes,
    output: RequestOutput,
    made: CompletionOutput,
) -> dict[str, Any]:
    text, parts = "", []
    if request.echo:
        text = prompt_text(output, token_bytes)
        parts.append(prompt_lists(output, text, token_bytes))
    if not request.echo_only:
        if made.logprobs is not None:
            writer = CompletionLogprobs(token_bytes, len(text))
            parts.append(writer.lists(made.token_ids, made.logprobs))
        text += made.text
    return {
        "text": text,
        "logprobs": _joined_lists([part for part in parts if part is not None]),
        "finish_reason": made.finish_reason,
    }


def _joined_lists(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    if not parts:
        return None
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}


def answer_head(prefix: str, answer_id: str, kind: str, model: str) -> dict[str, Any]:
    """What all answers and their chunks begin with."""
    return {
        "id": f"{prefix}-{answer_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }


def usage(outputs: Iterable[RequestOutput], echo_only: bool = False) -> dict[str, Any]:
    """How many tokens were read, found in the prefix cache and made."""
    outputs = list(outputs)
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(made.token_ids) for output in outputs for made in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return token_counts(num_in, 0 if echo_only else num_out) | {
        "prompt_tokens_details": {"cached_tokens": cached}
    }


def chat_usage(
    output: RequestOutput, parsers: ChatParsers, tools: ToolUse | None
) -> dict[str, Any]:
    """The usage of a chat: with the tokens of its thoughts."""
    details = {"reasoning_tokens": parsers.num_thoughts(output, tools)}
    return usage([output]) | {"completion_tokens_details": details}


def token_counts(num_in: int, num_out: int) -> dict[str, Any]:
    """Usage without its details."""
    return {
        "prompt_tokens": num_in,
        "completion_tokens": num_out,
        "total_tokens": num_in + num_out,
    }


def error_body(error: RequestError, endpoint: str | None = None) -> tuple[int, dict[str, Any]]:
    """HTTP's status and the body of the answer to a request that failed. endpoint: to which it
    came; with it, errors about prompts name their key.
    """
    if isinstance(error, TransferError | LogitsError):
        return SERVER_ERROR, error_object(str(error), SERVER, SERVER)
    code = next(code for kind, code in CODES if isinstance(error, kind))
    if isinstance(error, KeyRefusedError):
        code = error.code
    message = f"{TOO_LONG}{error}" if isinstance(error, PromptTooLongError) else str(error)
    param = _param(error, endpoint)
    return BAD_REQUEST, error_object(message, INVALID, code, param)


def error_object(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error as all endpoints of OpenAI write it. param: the key of the body that it is about."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _param(error: RequestError, endpoint: str | None) -> str | None:
    """The key that the error is about, where it is known."""
    if isinstance(error, KeyRefusedError):
        return error.key
    # The text of an error about a parameter begins with its name, or with that of a part of it.
    name = str(re.findall("^[a-z_.]*", str(error))[0])
    if isinstance(error, InvalidPromptError | PromptTooLongError) and name != "cache_salt":
        return PROMPTS.get(endpoint or "", name if name in TOKENS_OF else None)
    while name and name not in NAMES:
        name = name.rpartition(".")[0]
    return name or None
