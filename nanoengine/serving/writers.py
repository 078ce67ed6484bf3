"""Writer: how an endpoint writes the texts of a request, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.serving.openai_answers import Event


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

    def failed(self, status: int, body: dict[str, Any]) -> list[Event]:
        """For an error in the middle of a stream; status: HTTP's, if it were an answer of its own;
        body: OpenAI's error object.
        """
