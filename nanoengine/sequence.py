"""A request on its way through the engine (Sequence) and the plan of one step (ScheduledBatch).

All state of a request that outlives a step is here, or in the KV manager's table under its
`seq_id`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Protocol, TypeVar

from nanoengine.errors import InvalidParamsError, LogitsError, RequestError
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams, StructuredOutputsParams

NO_TOKEN = -1  # what is sampled where no token can be
Sample = TypeVar("Sample")


class Admission(Enum):
    """What became of a waiting sequence that asked for its blocks."""

    ADMITTED = "admitted"
    IN_FLIGHT = "in flight"  # another sequence is computing the prefix it needs next
    FULL = "full"


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # until it is told how it goes on
    FINISHED = "finished"


class Guesser(Protocol):
    """Guesses how a sequence goes on (speculative.PromptLookup)."""

    @property
    def is_trusted(self) -> bool: ...
    @property
    def is_careful(self) -> bool: ...
    def guess(self, token_ids: list[int], most: int) -> tuple[int, ...]: ...
    def record(self, num_guesses: int, num_right: int) -> None: ...


class DraftLength(Protocol):
    """How many tokens are drafted for a sequence (draft_length.PayingDrafts)."""

    @property
    def pays(self) -> bool: ...
    @property
    def is_short(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def choose(self) -> int: ...
    def record(self, num_drafts: int, num_right: int, is_decode: bool, is_ahead: bool) -> None: ...


class TextStream(Protocol):
    """Turns tokens into text as they come (tokenizer.IncrementalDetokenizer)."""

    @property
    def text(self) -> str: ...
    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Grammar(Protocol):
    """Where a text stands in the form that it must have (grammar.GrammarState)."""

    def accept(self, token_id: int) -> bool: ...
    def is_end(self, token_id: int) -> bool: ...
    def masks(self, guesses: tuple[int, ...]) -> list[bytes]: ...
    def forced(self) -> tuple[int, ...]: ...


class Grammars(Protocol):
    """From the form of a text to its grammar, at the beginning of the text (grammar.Grammars)."""

    def state_of(self, form: StructuredOutputsParams) -> Grammar: ...
    def state_for(self, params: SamplingParams, prompt: list[int]) -> Grammar: ...


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely the model thought a token, before anything that sampling does to its logits.

    rank: 1 for the likeliest. likeliest: (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    rank: int
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenHistory:
    """What penalties look at: the distinct tokens of the prompt, and how often each token came
    since.
    """

    prompt: frozenset[int]
    output: dict[int, int] = field(default_factory=dict)

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        self.output[token_id] = self.output.get(token_id, 0) + 1


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for: one completion of a prompt.

    seed: of its random numbers. stop_token_ids: tokens that end it. max_total_tokens: prompt and
    completion. prompt: the text, where there was one. cache_salt: cached KV is shared between equal
    salts only. bad_words: what the output may not contain, as tokens. index: which completion of
    the prompt. num_candidates: of a beam, how many of the likeliest tokens are scored; it pauses
    after each token, which the search may change. 0: no beam.
    """

    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    prompt: str | None = None
    cache_salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    index: int = 0
    num_candidates: int = 0

    @property
    def num_likeliest(self) -> int | None:
        """How many likely tokens are scored beside each of the output; None: no scores."""
        return self.num_candidates or self.params.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens are scored, which takes the logits of each."""
        return self.params.prompt_logprobs is not None

    @property
    def pauses(self) -> bool:
        """Whether it pauses after each token, until it is told how it goes on."""
        return self.num_candidates > 0

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know a token before the next one can be sampled."""
        params = self.params
        return self.pauses or params.follows_history or params.is_held


@dataclass(slots=True)
class SequenceOutput:
    """What came out of a sequence, beside its tokens.

    text: set when a stop string cut it. text_stream: turns tokens into text as they come, where
    that is needed. scores, prompt_scores: of its tokens and of the prompt's from the second on,
    where asked for. error: why it failed. ends_in_token: the last token only ends the text.
    nan_from: no token could be chosen, perhaps as logits are no numbers; nor may be the KV from
    this position on. None: a token could.
    """

    text: str | None = None
    text_stream: TextStream | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    ends_in_token: bool = False
    nan_from: int | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Where a request stands: its tokens, and how many of them have their KV computed.

    token_ids grows from the prompt by every sampled token. `num_computed` tokens have KV; the step
    computes the next ones. At the first admission `num_cached` of them were found in the prefix
    cache, `num_cached_on_host` of these on the host only. prompt_owner: the sequence whose prompt
    this one shares: completion 0 of its request, or the beam that it was forked from. guesser,
    draft_length: for speculation; mtp_length: as the latter, for guesses by the MTP head.
    next_guesses: what follows the newest token, by that head or drafted while other sequences were
    in a step (None: nobody was asked).
    history: for penalties; grammar: of the form that the output must have, until it ends.
    may_guess: whether a step may check guesses at its next tokens.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    request: Request
    metrics: RequestMetrics
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_cached_on_host: int = 0
    prompt_owner: Sequence | None = None
    may_guess: bool = True
    guesser: Guesser | None = None
    draft_length: DraftLength | None = None
    mtp_length: DraftLength | None = None
    next_guesses: tuple[int, ...] | None = None
    history: TokenHistory | None = None
    grammar: Grammar | None = None
    output: SequenceOutput = field(default_factory=SequenceOutput)

    @property
    def is_finished(self) -> bool:
        """True once it has ended, however."""
        return self.status is SequenceStatus.FINISHED

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefill(self) -> bool:
        """True while more than the newest token is to be computed, or nothing was sampled yet."""
        return self.num_remaining > 1 or self.num_output_tokens == 0

    @property
    def follows_output(self) -> bool:
        """Whether its next token depends on its output beside the model: by a grammar, penalties or
        bad words.
        """
        return self.grammar is not None or self.request.params.follows_history

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as a new list."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def fork(self, seq_id: int, token_id: int) -> Sequence:
        """A sequence with the same tokens but for the last one. It shares the KV of the others, or
        computes it where that is gone.
        """
        num_shared = self.num_tokens - 1
        return Sequence(
            seq_id=seq_id,
            token_ids=[*self.token_ids[:num_shared], token_id],
            num_prompt_tokens=num_shared,
            request=self.request,
            metrics=RequestMetrics(self.metrics.arrival_time, self.metrics.first_scheduled_time),
            prompt_owner=self,
            may_guess=self.may_guess,
        )

    def append(self, token_id: int) -> None:
        """Add a sampled token and end the sequence if it, the text, its form or the length says
        so. Raises RequestError if the token does not fit the form.
        """
        request, stream = self.request, self.output.text_stream
        self.token_ids.append(token_id)
        is_complete = self.grammar is not None and self.grammar.accept(token_id)
        if self.history is not None:
            self.history.add(token_id)
        may_stop = self.num_output_tokens > request.params.min_tokens
        is_stopped = may_stop and token_id in request.stop_token_ids
        is_last = is_stopped or is_complete or self.num_tokens >= request.max_total_tokens
        is_end = is_complete and self.grammar is not None and self.grammar.is_end(token_id)
        self.output.ends_in_token = is_stopped or is_end
        if stream is not None:
            is_hidden = self.output.ends_in_token and not request.params.include_stop_str_in_output
            new = "" if is_hidden else stream.add(token_id)
            if is_last:
                new += stream.flush()  # half a code point may be a stop string, too
            if may_stop and new and self._ends_at_stop_string(stream.text, new):
                return
        if is_stopped:
            self.finish("stop", token_id if token_id in request.params.stop_ids else None)
        elif is_complete:
            self.finish("stop")
        elif is_last:
            self.finish("length")

    def _ends_at_stop_string(self, text: str, new: str) -> bool:
        """End the sequence where its text has a stop string; `new` is the last part of the text."""
        params, hits = self.request.params, []
        for stop in params.stop_strings:
            at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return False
        at, stop = min(hits)
        end = at + len(stop) if params.include_stop_str_in_output else at
        self.output.text = text[:end]
        self.finish("stop", stop)
        return True

    def fail(self, error: RequestError) -> None:
        """End the sequence by an error."""
        self.output.error = error
        self.finish("error")

    def fail_without_token(self) -> None:
        """End the sequence, as no token can come next: by its logits, or because its form allows
        only what other parameters forbid.
        """
        params, number = self.request.params, self.num_tokens
        others = ("allowed_token_ids", "bad_words", "min_tokens")
        named = [name for name in others if getattr(params, name)] if params.is_held else []
        # Where a request may forbid all tokens, it must not take from others what they computed.
        self.output.nan_from = self.num_cached if named else 0
        if not named:
            self.fail(LogitsError.for_token(number))
            return
        form = "structured_outputs" if params.form else "thinking_token_budget"
        self.fail(
            InvalidParamsError(
                f"{form} with {' and '.join(named)} leave no token to choose for token {number} of "
                "this request (unless the model's logits are no numbers); leave one of them out"
            )
        )

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the sequence; the first reason stays."""
        if not self.is_finished:
            self.status = SequenceStatus.FINISHED
            self.grammar = None
            self.output.finish_reason = reason
            self.output.stop_reason = stop_reason


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `seq`, from its first uncomputed one on; `num_ahead` further on where
    the step before this one is still computing so many. The last ones may be `guesses`, to be
    checked, and `num_drafts` of them that the step itself is to make. has_drafted: guesses are
    drafts, by this step or by the MTP head after the one before.

    start: position of the first of them. samples: this step computes the newest token, so the next
    one can be sampled. Both as of now: they hold when the sequence has gone on or ended.
    """

    seq: Sequence
    num_tokens: int
    num_ahead: int = 0
    guesses: tuple[int, ...] = ()
    num_drafts: int = 0
    has_drafted: bool = False
    start: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        start = self.seq.num_computed + self.num_ahead
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "samples", start + self.num_tokens >= self.seq.num_tokens)

    @property
    def num_samples(self) -> int:
        """Tokens that the step samples: the next one, and what would follow each guess."""
        return 1 + len(self.guesses) + self.num_drafts if self.samples else 0

    def with_drafts(self, drafts: tuple[int, ...]) -> ScheduledSequence:
        """The same with the drafts that were made."""
        guesses = (*self.guesses, *drafts)
        return replace(self, guesses=guesses, num_drafts=0, has_drafted=True) if drafts else self

    def accepted(self, sampled: list[int]) -> list[int]:
        """The sampled tokens up to and including the one in place of the first wrong guess. As each
        token is sampled by (seed, position), they are what one token a step would give.
        """
        right = 0
        while right < len(self.guesses) and sampled[right] == self.guesses[right]:
            right += 1
        return sampled[: right + 1]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step, in the order in which their tokens are laid end to end.

    resting: others, which only draft meanwhile, for a step of theirs; each as it would be in that.
    """

    items: tuple[ScheduledSequence, ...]
    resting: tuple[ScheduledSequence, ...] = ()

    def mark_scheduled(self) -> None:
        """Note the time for sequences that run for the first time."""
        now = time.perf_counter()
        for item in self.items:
            if item.seq.metrics.first_scheduled_time is None:
                item.seq.metrics.first_scheduled_time = now

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.num_tokens for item in self.items)

    @property
    def sampled(self) -> list[tuple[Sequence, int]]:
        """The sequence and the position of each row after which a token is sampled."""
        ends = ((item, item.start + item.num_tokens) for item in self.items)
        return [(item.seq, at) for item, end in ends for at in range(end - item.num_samples, end)]

    @property
    def num_drafts(self) -> int:
        """Tokens of these that the step is to draft itself."""
        return sum(item.num_drafts for item in self.items)

    @property
    def is_drafted(self) -> bool:
        """Whether some of its tokens are drafts, made or to be made."""
        items = *self.items, *self.resting
        return any(item.has_drafted or item.num_drafts for item in items)

    @property
    def of_resting(self) -> ScheduledBatch:
        """A batch of those that only draft."""
        return ScheduledBatch(self.resting)

    def split(self, samples: Iterable[Sample]) -> list[list[Sample]]:
        """What belongs to each item, of what the step samples or scores for all, in order."""
        left = iter(samples)
        return [list(islice(left, item.num_samples)) for item in self.items]

    @property
    def may_draft(self) -> bool:
        """Whether drafts pay for one of its sequences, or nobody knows yet."""
        lengths = (item.seq.draft_length for item in self.items)
        return any(length is not None and length.pays for length in lengths)

    @property
    def scores_prompts(self) -> bool:
        """Whether a request asks for log probabilities of its prompt."""
        return any(item.seq.request.scores_prompt for item in self.items)

    @property
    def is_decode(self) -> bool:
        """Whether each sequence computes one token, and its guesses if it has any."""
        return all(i.num_tokens == 1 + len(i.guesses) + i.num_drafts for i in self.items)
