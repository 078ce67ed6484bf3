"""Writer: how an endpoint writes the texts of a request, whole or as events.

Those of OpenAI's two first endpoints are here, over openai_answers.py and openai_chunks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.serving.openai_answers import Event, chat_body, completion_body
from nanoengine.serving.openai_chunks import ChatChunks, CompletionChunks
from nanoengine.serving.openai_logprobs import TokenBytes
from nanoengine.serving.openai_requests import ChatRequest, CompletionRequest
from nanoengine.text.answer_parser import ChatParsers


class Writer(Protocol):
    """Writes the texts of one request; prompts are counted from 0."""

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        """Before the first delta of a prompt; output: without texts."""

    def of(self, deltas: Sequence[StreamDelta], prompt_index: int) -> list[Event]:
        """For new deltas of a prompt."""

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """After the last delta; outputs: of all prompts, as for whole()."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is no stream."""

    def failed(self, body: dict[str, Any]) -> list[Event]:
        """For an error in the middle of a stream; body: OpenAI's error object."""


class _ChunkWriter:
    """What the writers of OpenAI's two first endpoints share: events without names."""

    def __init__(self, chunks: ChatChunks | CompletionChunks) -> None:
        self._chunks = chunks

    def begin(self, output: RequestOutput, prompt_index: int) -> list[Event]:
        return _unnamed(self._chunks.begin(output, prompt_index))

    def of(self, deltas: Sequence[StreamDelta], prompt_index: int) -> list[Event]:
        return _unnamed(self._chunks.of(deltas, prompt_index))

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        return _unnamed(self._chunks.end(outputs))

    def failed(self, body: dict[str, Any]) -> list[Event]:
        return _unnamed([body])


class ChatWriter(_ChunkWriter):
    """Of /v1/chat/completions."""

    def __init__(
        self,
        request: ChatRequest,
        answer_id: str,
        model: str,
        token_bytes: TokenBytes,
        parsers: ChatParsers,
    ) -> None:
        self._given = request, answer_id, model, token_bytes
        self._parsers = parsers
        super().__init__(ChatChunks(*self._given, parsers))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return chat_body(*self._given, outputs[0], self._parsers)


class CompletionWriter(_ChunkWriter):
    """Of /v1/completions."""

    def __init__(
        self, request: CompletionRequest, answer_id: str, model: str, token_bytes: TokenBytes
    ) -> None:
        self._given = request, answer_id, model, token_bytes
        super().__init__(CompletionChunks(*self._given))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return completion_body(*self._given, outputs)


def _unnamed(chunks: list[dict[str, Any]]) -> list[Event]:
    return [(None, chunk) for chunk in chunks]
