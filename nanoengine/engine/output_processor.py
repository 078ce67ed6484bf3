"""OutputProcessor: from finished sequences to what a request gives back.

Owns the unfinished requests: a request gives its output when its last completion has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from nanoengine.engine.completion import Completion, token_logprobs
from nanoengine.outputs import RequestMetrics, RequestOutput, StreamDelta, TokenLogprobs
from nanoengine.sequence import Sequence
from nanoengine.text.detokenizer import text_after
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
        return self.seqs[0].prompt_token_ids

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Of each token of the prompt once it is computed, if requested; None for the first."""
        first = self.seqs[0]
        if not first.request.scores_prompt:
            return None
        scores = first.output.prompt_scores
        return [None, *(token_logprobs(score, self._tokenizer) for score in scores)]

    @property
    def has_ended(self) -> bool:
        """True when every completion has."""
        return all(seq.is_finished for seq in self.seqs)

    @property
    def is_given_out(self) -> bool:
        """True when the last delta of every completion was taken."""
        return all(part.is_given_out for part in self._parts)

    def new_deltas(self) -> list[StreamDelta]:
        """New output since the last call, a delta for a completion, once the prompt is scored."""
        first = self.seqs[0]  # others may have found the prompt in the prefix cache
        is_scored = len(first.output.prompt_scores) >= first.num_prompt_tokens - 1
        if first.request.scores_prompt and not (is_scored or self.has_ended):
            return []
        deltas = (part.new_delta() for part in self._parts)
        return [delta for delta in deltas if delta is not None]

    def output(self) -> RequestOutput:
        """All so far."""
        first = self.seqs[0]
        outputs = [part.output() for part in self._parts]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            metrics=reduce(RequestMetrics.plus, (seq.metrics for seq in self.seqs)),
            num_cached_tokens=first.num_cached,
            num_host_cached_tokens=first.num_cached_on_host,
            error=next((seq.output.error for seq in self.seqs if seq.output.error), None),
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(slots=True)
class Totals:
    """Sums over sequences. num_host_cached_tokens: of their prompts, found only on the host;
    num_guessed, num_accepted: tokens guessed ahead, and those of them that were right.
    """

    num_output_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_preemptions: int = 0
    num_guessed: int = 0
    num_accepted: int = 0

    def add(self, seqs: Iterable[Sequence]) -> Totals:
        """Count these, too."""
        for seq in seqs:
            self.num_output_tokens += seq.num_output_tokens
            self.num_host_cached_tokens += 0 if seq.request.index else seq.num_cached_on_host
            self.num_preemptions += seq.metrics.num_preemptions
            self.num_guessed += seq.metrics.num_guessed
            self.num_accepted += seq.metrics.num_accepted
        return self


class OutputProcessor:
    """Makes outputs. Without a tokenizer their texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, RequestState] = {}
        self._ended = Totals()
        self.step_sizes: Counter[int] = Counter()  # tokens of a step -> steps that had so many

    def expect(self, seqs: list[Sequence]) -> RequestState:
        """Take a new request; seqs: one for each completion."""
        state = RequestState(seqs, self._tokenizer)
        self._requests[state.request_id] = state
        return state

    def unfinished(self, request_ids: Iterable[int]) -> list[Sequence]:
        """The sequences of those requests that are unfinished."""
        states = (self._requests[i] for i in request_ids if i in self._requests)
        return [seq for state in states for seq in state.seqs]

    def finish(self, ended: Iterable[Sequence], step_tokens: int = 0) -> list[RequestOutput]:
        """The outputs of the requests whose last completion is among the ended sequences.

        step_tokens: of the step that ended them, which is counted.
        """
        if step_tokens:
            self.step_sizes[step_tokens] += 1
        own = self._of_requests(ended)
        self._ended.add(own)
        ids = dict.fromkeys((seq.prompt_owner or seq).seq_id for seq in own)
        ready = [self._requests.pop(i) for i in ids if self._requests[i].has_ended]
        return [state.output() for state in ready]

    def count(self, num_tokens: int) -> None:
        """Count generated tokens that are in no request's output: those of beams."""
        self._ended.num_output_tokens += num_tokens

    def totals(self, begun: Iterable[Sequence]) -> Totals:
        """Of all requests so far. begun: the unfinished sequences that were ever admitted."""
        return replace(self._ended).add(self._of_requests(begun))

    def _of_requests(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Those of these sequences that belong to a request: beams do not."""
        return [seq for seq in seqs if (seq.prompt_owner or seq).seq_id in self._requests]

    def text_after(self, prompt: list[int], token_ids: list[int]) -> str:
        """What tokens add to a prompt's text, special ones left out; "" without a tokenizer."""
        return text_after(self._tokenizer, prompt, token_ids) if self._tokenizer else ""
