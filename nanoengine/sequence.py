"""A request on its way through the engine (Sequence) and the plan of one step (ScheduledBatch).

All state of a request that outlives a step is here, or in the KV manager's table under its
`seq_id`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from nanoengine.errors import TransferError
from nanoengine.sampling_params import SamplingParams


class Admission(Enum):
    """What became of a waiting sequence that asked for its blocks."""

    ADMITTED = "admitted"
    IN_FLIGHT = "in flight"  # another sequence is computing the prefix it needs next
    FULL = "full"


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request (time.perf_counter seconds; None until reached) and what it cost.

    h2d_bytes, d2h_bytes: its blocks that crossed the link (a shared block counts for each request).
    num_stalls, num_prefetch_hits: how often its steps waited for a copy, or found it ready.
    peak_streamed: most sequences that read host KV in one of its steps.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    num_stalls: int = 0
    num_prefetch_hits: int = 0
    peak_streamed: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens after the first; None for a single token."""
        if self.finished_time is None or self.first_token_time is None or self.num_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_tokens - 1)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class TextStream(Protocol):
    """Turns tokens into text as they come (tokenizer.IncrementalDetokenizer)."""

    @property
    def text(self) -> str: ...
    def add(self, token_id: int) -> str: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens, how many of them have their KV computed, and how it ended.

    token_ids grows from the prompt by every sampled token. `num_computed` tokens have KV; the step
    computes the next ones. At the first admission `num_cached` of them were found in the prefix
    cache, `num_cached_on_host` of these on the host only; sequences with another `cache_salt` find
    none of its KV. A sequence with stop strings carries a `text_stream`; `text` is set when a stop
    string cut it, `error` when it failed.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    metrics: RequestMetrics
    prompt: str | None = None
    cache_salt: str = ""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_cached_on_host: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text: str | None = None
    text_stream: TextStream | None = None

    @property
    def is_finished(self) -> bool:
        """True once it has ended, however."""
        return self.status is SequenceStatus.FINISHED

    @property
    def failure(self) -> TransferError | None:
        """`error` as what is raised or shown on an output."""
        return None if self.error is None else TransferError(self.error)

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
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Add a sampled token and end the sequence if it, the text or the length says so."""
        self.token_ids.append(token_id)
        may_stop = self.num_output_tokens > self.params.min_tokens
        if self._stop_string_found(token_id):
            return
        if may_stop and token_id in self.stop_token_ids:
            self.finish("stop", token_id if token_id in self.params.stop_ids else None)
        elif self.num_tokens >= self.max_total_tokens:
            self.finish("length")

    def _stop_string_found(self, token_id: int) -> bool:
        if self.text_stream is None:
            return False
        new = self.text_stream.add(token_id)
        if self.num_output_tokens <= self.params.min_tokens or not new:
            return False
        text = self.text_stream.text
        hits = []
        for stop in self.params.stop_strings:
            at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return False
        at, stop = min(hits)
        self.text = text[:at]
        self.finish("stop", stop)
        return True

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the sequence; the first reason stays."""
        if not self.is_finished:
            self.status = SequenceStatus.FINISHED
            self.finish_reason = reason
            self.stop_reason = stop_reason


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `seq`, from its first uncomputed one on; `num_ahead` further on where
    the step before this one is still computing so many.

    start: position of the first of them. samples: this step computes the newest token, so the next
    one can be sampled. Both as of now: they hold when the sequence has gone on or ended.
    """

    seq: Sequence
    num_tokens: int
    num_ahead: int = 0
    start: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        start = self.seq.num_computed + self.num_ahead
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "samples", start + self.num_tokens >= self.seq.num_tokens)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step, in the order in which their tokens are laid end to end."""

    items: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.num_tokens for item in self.items)
