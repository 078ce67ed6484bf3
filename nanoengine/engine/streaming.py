"""Streams text: the new part of each completion, without a possible start of a stop string.

Reads sequences, never changes them; knows no engine and no thread. A delta is computed on request,
so a slow reader gets a larger one and nothing piles up.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nanoengine.errors import RequestError
from nanoengine.outputs import CompletionOutput, TokenLogprobs
from nanoengine.sequence import Sequence, TokenScore


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """The new part of one completion; `str(delta)` is its text.

    request_id, index: which completion of which request. text: never holds half a UTF-8 character
    or the start of a stop string, so it may be "". token_ids: the new tokens, also those whose text
    is held back. finish_reason, stop_reason: as in CompletionOutput, on the last delta of a
    completion, else None. error: the error if finish_reason is "error". logprobs: those of
    token_ids, if requested.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def __str__(self) -> str:
        return self.text


def num_held_back(text: str, stops: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string.

    As text grows, `len(text)` minus this never falls: the start of a stop string stays one.
    """
    most = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        if at >= 0:
            most = max(most, len(text) - at)
    return most


def merge_deltas(deltas: Iterable[StreamDelta]) -> list[StreamDelta]:
    """Merge deltas into one for each completion, in the order of their first ones."""
    merged: dict[tuple[int, int], StreamDelta] = {}
    for new in deltas:
        key = new.request_id, new.index
        old = merged.get(key)
        if old is not None:
            new = StreamDelta(
                *key,
                old.text + new.text,
                old.token_ids + new.token_ids,
                new.finish_reason,
                new.stop_reason,
                new.error,
                None if new.logprobs is None else (old.logprobs or ()) + new.logprobs,
            )
        merged[key] = new
    return list(merged.values())


class CompletionStream:
    """Counts how much of one completion was given out."""

    def __init__(self, request_id: int, index: int, seq: Sequence) -> None:
        self._request_id = request_id
        self._index = index
        self._seq = seq
        self._num_tokens = 0
        self._num_chars = 0
        self.is_finished = False

    def new_delta(
        self,
        completed: Callable[[Sequence], CompletionOutput],
        logprobs: Callable[[TokenScore], TokenLogprobs],
    ) -> StreamDelta | None:
        """The new part, None if there is none. `completed` makes the output of a completion that
        has ended; `logprobs` converts a token's score.
        """
        seq = self._seq
        if self.is_finished or not (seq.is_finished or seq.num_output_tokens > self._num_tokens):
            return None
        token_ids = tuple(seq.token_ids[seq.num_prompt_tokens + self._num_tokens :])
        before, self._num_tokens = self._num_tokens, self._num_tokens + len(token_ids)
        scored = None
        if seq.request.params.logprobs is not None:
            scored = tuple(map(logprobs, seq.output.scores[before : self._num_tokens]))
        self.is_finished = seq.is_finished
        if not seq.is_finished:
            text = "" if seq.output.text_stream is None else seq.output.text_stream.text
            text = text[: len(text) - num_held_back(text, seq.request.params.stop_strings)]
            return StreamDelta(
                self._request_id, self._index, self._new(text), token_ids, logprobs=scored
            )
        whole = completed(seq)
        return StreamDelta(
            self._request_id,
            self._index,
            self._new(whole.text),
            token_ids,
            whole.finish_reason,
            whole.stop_reason,
            seq.output.error,
            scored,
        )

    def _new(self, text: str) -> str:
        new = text[self._num_chars :]
        self._num_chars += len(new)
        return new


class RequestStream:
    """The deltas of one request, a step at a time; made by LLMEngine.add_stream."""

    def __init__(
        self,
        seqs: abc.Sequence[Sequence],
        completed: Callable[[Sequence], CompletionOutput],
        logprobs: Callable[[TokenScore], TokenLogprobs],
    ) -> None:
        """seqs: one for each completion. completed, logprobs: see CompletionStream.new_delta."""
        first = seqs[0]
        self.request_id = first.seq_id
        self.prompt = first.request.prompt
        self.prompt_token_ids = first.token_ids[: first.num_prompt_tokens]
        self._completed = completed
        self._logprobs = logprobs
        self._streams = [CompletionStream(self.request_id, i, seq) for i, seq in enumerate(seqs)]

    @property
    def is_finished(self) -> bool:
        """True when the last delta of every completion was taken."""
        return all(stream.is_finished for stream in self._streams)

    def new_deltas(self) -> list[StreamDelta]:
        """New output since the last call, at most one delta for each completion."""
        deltas = (stream.new_delta(self._completed, self._logprobs) for stream in self._streams)
        return [delta for delta in deltas if delta is not None]


class DeltaStream(Iterator[StreamDelta]):
    """Returned by LLM.stream: the deltas of one request; steps the engine when there are none.

    Leaving it early (close(), the end of a `with`, dropping it) aborts the request and frees its
    memory: at once, or after the engine's current call.
    """

    def __init__(
        self,
        request: RequestStream,
        advance: Callable[[RequestStream], list[StreamDelta]],
        abandon: Callable[[int], None],
    ) -> None:
        """advance: steps the engine until there are deltas. abandon: aborts a request by its id."""
        self.request = request
        self._advance = advance
        self._abandon = abandon
        self._ready: deque[StreamDelta] = deque()
        self._is_open = True

    def __next__(self) -> StreamDelta:
        """The next delta. Raises the error of the engine or the request and then ends."""
        if not self._ready and self._is_open:
            try:
                self._ready.extend(self._advance(self.request))
            except BaseException:
                self.close()
                raise
            self._is_open = not self.request.is_finished
        if not self._ready:
            raise StopIteration
        delta = self._ready.popleft()
        if delta.error is not None:
            self.close()
            raise delta.error
        return delta

    def close(self) -> None:
        """End the request unless it has ended; closing twice is fine."""
        self._ready.clear()
        if self._is_open:
            self._is_open = False
            self._abandon(self.request.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
