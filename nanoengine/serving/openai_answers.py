"""Writes outputs and errors as the bodies of OpenAI's answers. Knows no HTTP."""

from __future__ import annotations

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
from nanoengine.outputs import RequestOutput
from nanoengine.serving.openai_logprobs import TokenBytes, chat_logprobs, completion_logprobs

# The error's code in OpenAI's words, for the first class that fits.
CODES: tuple[tuple[type[RequestError], str], ...] = (
    (PromptTooLongError, "context_length_exceeded"),
    (InvalidParamsError, "invalid_value"),
    (InvalidPromptError, "invalid_prompt"),
    (RequestError, "invalid_request"),
)
BAD_REQUEST, SERVER_ERROR = 400, 500


def chat_body(
    request_id: str,
    model: str,
    output: RequestOutput,
    token_bytes: TokenBytes,
    num_likeliest: int | None,
) -> dict[str, Any]:
    """The answer to a chat. num_likeliest: tokens beside each of its own, if it wants logprobs."""
    choices = [
        {
            "index": made.index,
            "message": {"role": "assistant", "content": made.text, "refusal": None},
            "logprobs": chat_logprobs(made, token_bytes, num_likeliest or 0),
            "finish_reason": made.finish_reason,
        }
        for made in output.outputs
    ]
    return _body(f"chatcmpl-{request_id}", "chat.completion", model, choices, [output])


def completion_body(
    request_id: str, model: str, outputs: Sequence[RequestOutput], token_bytes: TokenBytes
) -> dict[str, Any]:
    """The answer to a completion; outputs: of each prompt, in order."""
    texts = [made for output in outputs for made in output.outputs]
    choices = [
        {
            "index": index,
            "text": made.text,
            "logprobs": completion_logprobs(made, token_bytes),
            "finish_reason": made.finish_reason,
        }
        for index, made in enumerate(texts)
    ]
    return _body(f"cmpl-{request_id}", "text_completion", model, choices, outputs)


def _body(
    name: str, kind: str, model: str, choices: list[Any], outputs: Iterable[RequestOutput]
) -> dict[str, Any]:
    outputs = list(outputs)
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(made.token_ids) for output in outputs for made in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_in,
            "completion_tokens": num_out,
            "total_tokens": num_in + num_out,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "system_fingerprint": None,
    }


def error_body(error: RequestError) -> tuple[int, dict[str, Any]]:
    """HTTP's status and the body of the answer to a request that failed."""
    is_ours = isinstance(error, TransferError | LogitsError)
    code = next(code for kind, code in CODES if isinstance(error, kind))
    content = {
        "message": str(error),
        "type": "server_error" if is_ours else "invalid_request_error",
        "param": None,
        "code": "server_error" if is_ours else code,
    }
    return SERVER_ERROR if is_ours else BAD_REQUEST, {"error": content}
