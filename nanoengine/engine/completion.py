"""Completion: all that a sequence has generated so far, and what is new since the last delta.

Reads the sequence, never changes its tokens; knows no engine and no thread. A delta is computed on
request, so a slow reader gets a larger one and nothing piles up.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.errors import RequestError
from nanoengine.outputs import CompletionOutput, Logprob, StreamDelta, TokenLogprobs
from nanoengine.sequence import Sequence, TokenScore
from nanoengine.text.answer_pieces import HeldBack
from nanoengine.text.detokenizer import text_after
from nanoengine.text.tokenizer import Tokenizer


class Completion:
    """One completion of a request; counts how much of it was given out as deltas."""

    def __init__(self, request_id: int, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        self.seq = seq
        self.is_given_out = False  # the last delta was taken
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._num_tokens = 0
        self._num_chars = 0
        self._held_back = HeldBack(seq.request.params.stop_strings)

    def output(self) -> CompletionOutput:
        """All so far. Without a tokenizer the text is empty."""
        return output_of(self._part(0, self._text(), 0))

    def new_delta(self) -> StreamDelta | None:
        """What is new since the last call; None if nothing is."""
        seq = self.seq
        if self.is_given_out or not (seq.is_finished or seq.num_output_tokens > self._num_tokens):
            return None
        text = self._text() if seq.is_finished else self._stable_text()
        delta = self._part(self._num_tokens, text, self._num_chars)
        self._num_tokens += len(delta.token_ids)
        self._num_chars += len(delta.text)
        self.is_given_out = seq.is_finished
        return delta

    def _part(self, first_token: int, text: str, first_char: int) -> StreamDelta:
        """The completion from a token and from a character of `text` on."""
        seq, output = self.seq, self.seq.output
        token_ids = tuple(seq.token_ids[seq.num_prompt_tokens + first_token :])
        logprobs = None
        if seq.request.params.logprobs is not None:
            # There may be more scores than tokens: a guess past the end has one.
            scores = output.scores[first_token : first_token + len(token_ids)]
            logprobs = tuple(token_logprobs(score, self._tokenizer) for score in scores)
        return StreamDelta(
            self._request_id,
            seq.request.index,
            text[first_char:],
            token_ids,
            output.finish_reason,
            output.stop_reason,
            output.error,
            logprobs,
        )

    def _stable_text(self) -> str:
        """The text of an unfinished sequence, without what may be the start of a stop string."""
        stream = self.seq.output.text_stream
        text = "" if stream is None else stream.text
        return text[: len(text) - self._held_back.num(text)]

    def _text(self) -> str:
        """The text of all tokens. If they cannot be decoded, the sequence gets the error."""
        output, params = self.seq.output, self.seq.request.params
        if output.text is not None:
            return output.text
        if self._tokenizer is None or not params.detokenize:
            return ""
        token_ids = self.seq.output_token_ids
        if output.ends_in_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the token that ended the text is not part of it
        try:
            prompt = self.seq.prompt_token_ids
            return text_after(self._tokenizer, prompt, token_ids, params.skip_special_tokens)
        except RequestError as error:
            output.error, output.finish_reason = error, "error"
            return ""


def merge_deltas(deltas: Iterable[StreamDelta]) -> list[StreamDelta]:
    """Merge deltas into one for each completion, in the order of their first ones."""
    merged: dict[tuple[int | str, int], StreamDelta] = {}
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


def output_of(whole: StreamDelta) -> CompletionOutput:
    """The output of a completion, from a delta that holds all of it."""
    scored = None if whole.logprobs is None else zip(whole.token_ids, whole.logprobs, strict=True)
    return CompletionOutput(
        whole.index,
        whole.text,
        [*whole.token_ids],
        whole.finish_reason,
        whole.stop_reason,
        None if whole.logprobs is None else [*whole.logprobs],
        None if scored is None else sum(entry[token_id].logprob for token_id, entry in scored),
    )


def token_logprobs(score: TokenScore, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """A score as users see it: the token of a position, as vLLM has it, and then the likeliest."""
    ranked = {i: (value, rank) for rank, (i, value) in enumerate(score.likeliest, 1)}
    own = score.token_id
    ranked = {own: ranked.get(own, (score.logprob, score.rank))} | ranked
    return {i: Logprob(*scored, _decoded(i, tokenizer)) for i, scored in ranked.items()}


def _decoded(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
