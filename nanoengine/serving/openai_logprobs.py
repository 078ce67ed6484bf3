"""Writes log-probabilities as the answers of OpenAI's two endpoints have them.

A token is shown as its text; one that is a part of a character as its bytes, as in "\\xf0\\x9f".
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from itertools import islice
from typing import Any

from nanoengine.outputs import CompletionOutput

LOWEST = -9999.0  # JSON has no infinity; OpenAI's number for a token that is very unlikely

TokenBytes = Callable[[int], bytes]  # what a token adds to a text, in UTF-8


def chat_logprobs(
    made: CompletionOutput, token_bytes: TokenBytes, num_likeliest: int
) -> dict[str, Any] | None:
    """An entry for each token of the text, the token that ended it among them; None if they were
    not asked for. num_likeliest: tokens beside each, likeliest first.
    """
    if made.logprobs is None:
        return None
    content = []
    for token_id, position in zip(made.token_ids, made.logprobs, strict=True):
        # In order: likeliest first, the token itself last unless it is one of them.
        written = {i: _entry(token_bytes(i), each.logprob) for i, each in position.items()}
        likeliest = list(islice(written.values(), num_likeliest))
        content.append(written[token_id] | {"top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def completion_logprobs(made: CompletionOutput, token_bytes: TokenBytes) -> dict[str, Any] | None:
    """Parallel lists over the tokens of the text, the token that ended it among them; None if they
    were not asked for. text_offset: where each begins in this text, in characters.
    """
    if made.logprobs is None:
        return None
    tokens, offsets, begin = [], [], 0
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id in made.token_ids:
        data = token_bytes(token_id)
        tokens.append(_text(data))
        offsets.append(min(begin, len(made.text)))
        begin += len(characters.decode(data))
    scored = zip(made.token_ids, made.logprobs, strict=True)
    return {
        "tokens": tokens,
        "token_logprobs": [max(position[i].logprob, LOWEST) for i, position in scored],
        "top_logprobs": [
            {_text(token_bytes(i)): max(each.logprob, LOWEST) for i, each in position.items()}
            for position in made.logprobs
        ],
        "text_offset": offsets,
    }


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
