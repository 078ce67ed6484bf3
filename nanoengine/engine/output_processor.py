"""OutputProcessor: from finished sequences to what a request gives back.

Owns the unfinished requests: a request gives its output when its last completion has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.engine.completion import Completion
from nanoengine.engine.logprobs import token_logprobs
from nanoengine.errors import RequestError
from nanoengine.outputs import CompletionOutput, RequestOutput, StreamDelta
from nanoengine.sequence import Sequence
from nanoengine.text.tokenizer import Tokenizer


class RequestState:
    """What a request has generated: its output so far, or the deltas since they were last taken."""

    def __init__(self, seqs: list[Sequence], tokenizer: Tokenizer | None) -> None:
        """seqs: one for each completion."""
        self.request_id = seqs[0].seq_id
        self.prompt = seqs[0].request.prompt
        self.seqs = seqs
        self._tokenizer = tokenizer
        self._parts = [Completion(self.request_id, seq, tokenizer) for seq in seqs]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as a new list."""
        return self.seqs[0].token_ids[: self.seqs[0].num_prompt_tokens]

    @property
    def has_ended(self) -> bool:
        """True when every completion has."""
        return all(seq.is_finished for seq in self.seqs)

    @property
    def is_given_out(self) -> bool:
        """True when the last delta of every completion was taken."""
        return all(part.is_given_out for part in self._parts)

    def new_deltas(self) -> list[StreamDelta]:
        """New output since the last call, at most one delta for each completion."""
        deltas = (part.new_delta() for part in self._parts)
        return [delta for delta in deltas if delta is not None]

    def output(self) -> RequestOutput:
        """All so far."""
        first = self.seqs[0]
        outputs = [part.output() for part in self._parts]
        scores = first.output.prompt_scores
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            metrics=first.metrics,
            num_cached_tokens=first.num_cached,
            num_host_cached_tokens=first.num_cached_on_host,
            error=next((seq.output.error for seq in self.seqs if seq.output.error), None),
            prompt_logprobs=(
                [None, *(token_logprobs(score, self._tokenizer) for score in scores)]
                if first.request.scores_prompt
                else None
            ),
        )


class OutputProcessor:
    """Makes outputs. Without a tokenizer their texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, RequestState] = {}

    def expect(self, seqs: list[Sequence]) -> RequestState:
        """Take a new request; seqs: one for each completion."""
        state = RequestState(seqs, self._tokenizer)
        self._requests[state.request_id] = state
        return state

    def unfinished(self, request_ids: Iterable[int]) -> list[Sequence]:
        """The sequences of those requests that are unfinished."""
        states = (self._requests[i] for i in request_ids if i in self._requests)
        return [seq for state in states for seq in state.seqs]

    def finish(self, ended: Iterable[Sequence]) -> list[RequestOutput]:
        """The outputs of the requests whose last completion is among the ended sequences."""
        ids = dict.fromkeys((seq.prompt_owner or seq).seq_id for seq in ended)
        done = [i for i in ids if i in self._requests and self._requests[i].has_ended]
        return [self._requests.pop(i).output() for i in done]

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special ones left out; "" without a tokenizer."""
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""


def refused(text: str | None, prompt: object, error: RequestError) -> RequestOutput:
    """The output of a request that never entered the engine."""
    ids = [t for t in prompt if type(t) is int] if isinstance(prompt, list | tuple) else []
    text = prompt if isinstance(prompt, str) else text
    return RequestOutput(-1, text, ids, [CompletionOutput(0, "", [], "error")], error=error)
