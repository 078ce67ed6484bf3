"""OutputsSoFar: what the completions of a request have generated so far, from their deltas.

A delta costs what is new in it, and outputs a copy of their lists. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.outputs import CompletionOutput, StreamDelta, TokenLogprobs


class OutputsSoFar:
    """The outputs of a request's completions, in the order of their indices."""

    def __init__(self, deltas: Iterable[StreamDelta] = ()) -> None:
        self._completions: dict[int, _SoFar] = {}
        self.add(deltas)

    def add(self, deltas: Iterable[StreamDelta]) -> None:
        """What is new; the deltas of a completion come in their order."""
        for delta in deltas:
            self._completions.setdefault(delta.index, _SoFar()).add(delta)

    def outputs(self) -> list[CompletionOutput]:
        """All so far."""
        return [self._completions[index].output() for index in sorted(self._completions)]


class _SoFar:
    """One completion."""

    def __init__(self) -> None:
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._logprob = 0.0

    def add(self, delta: StreamDelta) -> None:
        self._newest = delta
        self._text += delta.text
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs += delta.logprobs
            scored = zip(delta.token_ids, delta.logprobs, strict=True)
            self._logprob += sum(entry[token_id].logprob for token_id, entry in scored)

    def output(self) -> CompletionOutput:
        newest = self._newest
        is_scored = newest.logprobs is not None
        return CompletionOutput(
            newest.index,
            self._text,
            [*self._token_ids],
            newest.finish_reason,
            newest.stop_reason,
            [*self._logprobs] if is_scored else None,
            self._logprob if is_scored else None,
        )
