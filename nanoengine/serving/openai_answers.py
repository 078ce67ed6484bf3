"""What bodies of OpenAI's answers share, and errors as such bodies. Knows no HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
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
NAMES = {
    *(*PARAMS, *COMMON, *OWN[CHAT], *OWN[COMPLETIONS], "max_output_tokens", "text", TEXT_FORMAT),
    "reasoning",
    *("include", "instructions", "metadata", "user"),
    "return_token_strs",
}
TOKENS_OF = ("prompt", "messages", "tokens")  # keys of /tokenize and /detokenize


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


def token_counts(num_in: int, num_out: int) -> dict[str, Any]:
    """Usage without its details."""
    return {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}


def error_body(error: RequestError, endpoint: str = "") -> tuple[int, dict[str, Any]]:
    """HTTP's status and the body of the answer to a request that failed. endpoint: to which it
    came; with it, errors about prompts name their key.
    """
    if isinstance(error, TransferError | LogitsError):
        return 500, error_object(str(error), SERVER, SERVER)
    code = next(code for kind, code in CODES if isinstance(error, kind))
    if isinstance(error, KeyRefusedError):
        code = error.code
    message = f"{TOO_LONG}{error}" if isinstance(error, PromptTooLongError) else str(error)
    param = _param(error, endpoint)
    return 400, error_object(message, INVALID, code, param)


def error_object(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error as all endpoints of OpenAI write it. param: the key of the body that it is about."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _param(error: RequestError, endpoint: str) -> str | None:
    """The key that the error is about, where it is known."""
    if isinstance(error, KeyRefusedError):
        return error.key
    # The text of an error about a parameter begins with its name, or with that of a part of it.
    name = str(re.findall("^[a-z_.]*", str(error))[0])
    if isinstance(error, InvalidPromptError | PromptTooLongError) and name != "cache_salt":
        return PROMPTS.get(endpoint, name if name in TOKENS_OF else None)
    while name and name not in NAMES:
        name = name.rpartition(".")[0]
    return name or None
