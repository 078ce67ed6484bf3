"""Writes log-probabilities as the answers of OpenAI's endpoints have them.

A token is shown as its text; one that is a part of a character as its bytes, as in "\\xf0\\x9f".
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from nanoengine.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    StreamDelta,
    TokenLogprobs,
)
from nanoengine.text.answer_pieces import Kind, Piece
from nanoengine.text.byte_tokens import REPLACEMENT

LOWEST = -9999.0  # JSON has no infinity; OpenAI's number for a token that is very unlikely
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

TokenBytes = Callable[[int], bytes]  # what a token adds to a text, in UTF-8


def chat_logprobs(
    made: CompletionOutput | StreamDelta, token_bytes: TokenBytes, num_likeliest: int
) -> dict[str, Any] | None:
    """An entry for each token of the text, the token that ended it among them; None if they were
    not asked for. num_likeliest: tokens beside each, likeliest first.
    """
    if made.logprobs is None:
        return None
    content = []
    for token_id, position in zip(made.token_ids, made.logprobs, strict=True):
        ranked = _likeliest_first(position)
        written = {i: _entry(token_bytes(i), each.logprob) for i, each in ranked}
        likeliest = list(islice(written.values(), num_likeliest))
        content.append(written[token_id] | {"top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _likeliest_first(position: TokenLogprobs) -> list[tuple[int, Logprob]]:
    """In order of rank; the position's own token goes after others of the same one."""
    own, *others = position.items()
    return sorted([*others, own], key=lambda entry: entry[1].rank)


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": max(logprob, LOWEST), "bytes": list(data)}


class ContentLogprobs:
    """Finds the entries of those tokens of an answer that its content has: of each of its texts,
    which are asked for in order. Not of thoughts, of calls, of marks, or of the end.
    """

    def __init__(self, token_bytes: TokenBytes, hidden: Collection[int] = ()) -> None:
        """hidden: tokens that the answer does not show."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0  # where the next token begins in the text
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()

    def add(self, made: CompletionOutput | StreamDelta, entries: Iterable[dict[str, Any]]) -> None:
        """More of an answer, and the entries of its tokens."""
        self._text += made.text
        self._waiting += zip(made.token_ids, entries, strict=True)

    def of(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """The entries of the tokens that have a part of the contents among some pieces."""
        contents = (piece for piece in pieces if piece.kind is Kind.CONTENT)
        return [e for each in contents for e in self.between(each.end - len(each.text), each.end)]

    def between(self, start: int, end: int) -> list[dict[str, Any]]:
        """The entries of the tokens that have a part of this text."""
        found = []
        while self._waiting and self._at < end:
            token_id, entry = self._waiting.popleft()
            begin = self._at
            if token_id not in self._hidden:
                self._at += self._length(self._characters.decode(self._token_bytes(token_id)))
            if self._at > start or begin == self._at == start:
                found.append(entry)
        return found

    def _length(self, text: str) -> int:
        """How many characters a token has in the answer: none if it is not shown there, one less
        if the answer begins without its space. Before it a broken character may have ended, of
        which the answer shows as many signs as it had bytes, or fewer.
        """
        begin = self._at
        if text.startswith(REPLACEMENT):
            text = text.lstrip(REPLACEMENT)
            while self._text.startswith(REPLACEMENT, begin):
                begin += 1
        shown = self._text[begin : begin + len(text)]
        if not begin and text[:1] == " " != shown[:1]:
            text = text[1:]
        return begin - self._at + (len(text) if text.startswith(shown[: len(text)]) else 0)


class CompletionLogprobs:
    """Writes the parallel lists of a completion, which may come in parts.

    text_offset: where a token begins in the text, in characters; one that a stop cut off begins
    past its end.
    """

    def __init__(self, token_bytes: TokenBytes, offset: int = 0) -> None:
        """offset: of the first token; one below 0 counts as 0."""
        self._token_bytes = token_bytes
        self._offset = offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The lists over the next tokens, the token that ended the text among them. positions: what
        is known of each; None for the first token of a prompt.
        """
        tokens, offsets = [], []
        for token_id in token_ids:
            data = self._token_bytes(token_id)
            tokens.append(_text(data))
            offsets.append(max(self._offset, 0))
            self._offset += len(self._characters.decode(data))
        own = [
            None if position is None else max(position[token_id].logprob, LOWEST)
            for token_id, position in zip(token_ids, positions, strict=True)
        ]
        likeliest = [
            None if position is None else self._by_text(position) for position in positions
        ]
        return dict(zip(LISTS, (tokens, own, likeliest, offsets), strict=True))

    def _by_text(self, position: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities by the texts of tokens; the likeliest of those that look the same."""
        found: dict[str, float] = {}
        for token_id, each in _likeliest_first(position):
            found.setdefault(_text(self._token_bytes(token_id)), max(each.logprob, LOWEST))
        return found


def prompt_text(output: RequestOutput, token_bytes: TokenBytes) -> str:
    """The prompt as an answer repeats it: as it was given, or the text of its ids."""
    if output.prompt is not None:
        return output.prompt
    return _joined(output.prompt_token_ids, token_bytes)


def prompt_lists(
    output: RequestOutput, text: str, token_bytes: TokenBytes
) -> dict[str, list[Any]] | None:
    """The lists over a prompt's tokens; None if they were not asked for. text: its prompt_text."""
    if output.prompt_logprobs is None:
        return None
    # A tokenizer may add tokens and a space before the text: they begin where it begins.
    offset = len(text) - len(_joined(output.prompt_token_ids, token_bytes))
    writer = CompletionLogprobs(token_bytes, offset)
    return writer.lists(output.prompt_token_ids, output.prompt_logprobs)


def _joined(token_ids: Iterable[int], token_bytes: TokenBytes) -> str:
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
