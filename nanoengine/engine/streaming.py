"""Text as it comes: what is new of each completion, with what may begin a stop string held back.

Reads sequences, never changes them; knows no engine and no thread. What is new is worked out when
it is asked for, so whoever asks seldom gets more at once and nothing piles up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nanoengine.errors import RequestError
from nanoengine.outputs import CompletionOutput, TokenLogprobs
from nanoengine.sequence import Sequence, TokenScore


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What is new of one completion; `str(delta)` is its text.

    request_id, index: which completion of which request. text: may be "" while it is held back: no
    half code point and no possible beginning of a stop string is shown. token_ids: the new tokens,
    those whose text is held back included. finish_reason, stop_reason: as in CompletionOutput, on
    the last delta of a completion, else None. error: why it failed, with finish_reason "error".
    logprobs: of each of token_ids, where asked for.
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
    """Length of the longest end of `text` that begins a stop string without being all of it.

    As text grows, `len(text)` less this never falls: what begins a stop string later begins one
    now.
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
    """One delta for each completion, in the order of their first ones."""
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
    """How much of one completion was given out."""

    def __init__(self, request_id: int, index: int, seq: Sequence) -> None:
        self._request_id = request_id
        self._index = index
        self._seq = seq
        self._num_tokens = 0
        self._num_chars = 0
        self.is_finished = False

    def take(
        self,
        completed: Callable[[Sequence], CompletionOutput],
        logprobs: Callable[[TokenScore], TokenLogprobs],
    ) -> StreamDelta | None:
        """What is new, None when nothing is. `completed` tells the whole of a completion that has
        ended: what was held back, less a stop. `logprobs` shows a token's score.
        """
        seq = self._seq
        if self.is_finished or not (seq.is_finished or seq.num_output_tokens > self._num_tokens):
            return None
        token_ids = tuple(seq.token_ids[seq.num_prompt_tokens + self._num_tokens :])
        before, self._num_tokens = self._num_tokens, self._num_tokens + len(token_ids)
        scored = None
        if seq.params.logprobs is not None:
            scored = tuple(map(logprobs, seq.scores[before : self._num_tokens]))
        self.is_finished = seq.is_finished
        if not seq.is_finished:
            text = "" if seq.text_stream is None else seq.text_stream.text
            text = text[: len(text) - num_held_back(text, seq.params.stop_strings)]
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
            seq.error,
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
        seqs: Seq[Sequence],
        completed: Callable[[Sequence], CompletionOutput],
        logprobs: Callable[[TokenScore], TokenLogprobs],
    ) -> None:
        """seqs: one for each completion; see CompletionStream.take for the others."""
        first = seqs[0]
        self.request_id = first.seq_id
        self.prompt = first.prompt
        self.prompt_token_ids = first.token_ids[: first.num_prompt_tokens]
        self._completed = completed
        self._logprobs = logprobs
        self._streams = [CompletionStream(self.request_id, i, seq) for i, seq in enumerate(seqs)]

    @property
    def is_finished(self) -> bool:
        """True when the last delta of every completion was taken."""
        return all(stream.is_finished for stream in self._streams)

    def take(self) -> list[StreamDelta]:
        """What the steps since the last call have brought, at most one delta a completion."""
        deltas = (stream.take(self._completed, self._logprobs) for stream in self._streams)
        return [delta for delta in deltas if delta is not None]


class DeltaStream(Iterator[StreamDelta]):
    """What LLM.stream returns: the deltas of one request, stepping the engine when there are none.

    Leaving it before its end (close(), the end of a `with`, dropping it) ends the request and frees
    what it holds, at once or, where the engine is at work just then, when that call ends.
    """

    def __init__(
        self,
        request: RequestStream,
        advance: Callable[[RequestStream], list[StreamDelta]],
        abandon: Callable[[int], None],
    ) -> None:
        """advance: steps until there is something new. abandon: ends the request of this id."""
        self.request = request
        self._advance = advance
        self._abandon = abandon
        self._ready: deque[StreamDelta] = deque()
        self._is_open = True

    def __next__(self) -> StreamDelta:
        """The next delta. Raises what the engine or the request failed with; that is the end."""
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
