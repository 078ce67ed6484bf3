"""OutputProcessor: from finished sequences to what a request gives back.

Owns the unfinished requests: a request gives its output when its last completion has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.errors import RequestError
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from nanoengine.sequence import Sequence, TokenScore
from nanoengine.text.tokenizer import Tokenizer


class OutputProcessor:
    """Makes outputs. Without a tokenizer their texts are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, list[Sequence]] = {}  # by request id, their completions

    def expect(self, seqs: list[Sequence]) -> int:
        """Take the completions of a new request; returns its id."""
        self._requests[seqs[0].seq_id] = seqs
        return seqs[0].seq_id

    def completions(self, request_ids: Iterable[int]) -> list[Sequence]:
        """The completions of those requests that are unfinished."""
        return [seq for i in request_ids for seq in self._requests.get(i, ())]

    def finish(self, ended: Iterable[Sequence]) -> list[RequestOutput]:
        """The outputs of the requests whose last completion is among the ended sequences."""
        ids = dict.fromkeys((seq.prompt_owner or seq).seq_id for seq in ended)
        done = [
            i
            for i in ids
            if i in self._requests and all(seq.is_finished for seq in self._requests[i])
        ]
        return [self.output(self._requests.pop(i)) for i in done]

    def output(self, seqs: list[Sequence]) -> RequestOutput:
        """The output of one request; seqs: its completions."""
        seq = seqs[0]
        failures = (each.output.error for each in seqs)
        is_prompt_scored = seq.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=seq.request.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            outputs=[self.completion(each) for each in seqs],
            metrics=seq.metrics,
            num_cached_tokens=seq.num_cached,
            num_host_cached_tokens=seq.num_cached_on_host,
            error=next(filter(None, failures), None),
            prompt_logprobs=(
                [None, *map(self.logprobs, seq.output.prompt_scores)] if is_prompt_scored else None
            ),
        )

    def completion(self, seq: Sequence) -> CompletionOutput:
        """What one completion has generated so far."""
        token_ids = seq.output_token_ids
        scores = seq.output.scores[: len(token_ids)]
        is_scored = seq.request.params.logprobs is not None
        return CompletionOutput(
            seq.request.index,
            self._text(seq),
            token_ids,
            seq.output.finish_reason,
            seq.output.stop_reason,
            [self.logprobs(score) for score in scores] if is_scored else None,
            sum(score.logprob for score in scores) if is_scored else None,
        )

    def logprobs(self, score: TokenScore) -> TokenLogprobs:
        """The likeliest tokens of a position and the one that stands there."""
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(score.likeliest, 1)]
        if all(i != score.token_id for i, _, _ in ranked):
            ranked.append((score.token_id, score.logprob, score.rank))
        return {i: Logprob(value, rank, self._decoded(i)) for i, value, rank in ranked}

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special ones left out; "" without a tokenizer."""
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""

    def _text(self, seq: Sequence) -> str:
        if seq.output.text is not None:
            return seq.output.text
        if self._tokenizer is None or not seq.request.params.detokenize:
            return ""
        token_ids = seq.output_token_ids
        if seq.output.finish_reason == "stop" and not seq.request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the token that ended the text is not part of it
        try:
            return self._tokenizer.decode(token_ids, seq.request.params.skip_special_tokens)
        except RequestError as error:
            seq.output.error, seq.output.finish_reason = error, "error"
            return ""

    def _decoded(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def refused(text: str | None, prompt: object, error: RequestError) -> RequestOutput:
    """The output of a request that never entered the engine."""
    ids = [t for t in prompt if type(t) is int] if isinstance(prompt, list | tuple) else []
    text = prompt if isinstance(prompt, str) else text
    return RequestOutput(-1, text, ids, [CompletionOutput(0, "", [], "error")], error=error)
