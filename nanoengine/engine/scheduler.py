"""Scheduler: which sequences run in the next step, and how many tokens of each.

Continuous batching with chunked prefill. Every step is one mixed batch under a token budget: first
the running sequences, oldest first (a decode is one token), then waiting ones in order of arrival.
A second budget, of blocks that cross the link, protects resident decodes from streamed neighbours.
Knows counts and the KV manager's face for the scheduler, no tensors.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from nanoengine.config.engine import EngineConfig
from nanoengine.engine.draft_turns import DraftTurns
from nanoengine.engine.link_pacer import LinkPacer
from nanoengine.engine.speculative import guesses_for, is_draft_due, record_guesses
from nanoengine.errors import RequestError, TransferError
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.sequence import (
    NO_TOKEN,
    Admission,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
)

LOOK_PAST = 256  # waiting sequences that may be passed over in a step to admit later ones


@dataclass(slots=True)
class _Step:
    """A step while it is planned. tokens: what is left of its budget; guess_tokens: how many of
    them may be guesses. items: by seq_id.
    """

    tokens: int
    guess_tokens: int
    items: dict[int, ScheduledSequence] = field(default_factory=dict)


class Scheduler:
    """Owns the waiting queue and the running list (oldest first)."""

    def __init__(
        self,
        config: EngineConfig,
        kv: HybridKVCacheManager,
        max_num_batched_tokens: int,
        stream_blocks_per_step: int | None = None,
        takes_turns: bool = False,
    ) -> None:
        """max_num_batched_tokens: the setting, or less if the KV pools are small.
        stream_blocks_per_step: blocks that may cross the link in a step beside resident decodes.
        takes_turns: see DraftTurns.
        """
        self._config = config
        self._kv = kv
        self._max_tokens = max_num_batched_tokens
        self._long_tokens = config.long_prefill_token_threshold or max(1, self._max_tokens // 2)
        # Rows that sample: memory is planned for so many logits.
        self._max_sampled = min(config.sampled_rows, self._max_tokens)
        self._pacer = LinkPacer(stream_blocks_per_step)
        self.turns = DraftTurns(config, kv, takes_turns and not config.num_assisted)
        self._may_draft = False
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new request."""
        self.waiting[seq] = None

    def resume(self, seqs: Iterable[Sequence]) -> None:
        """Put paused sequences, and new ones, before all others that wait."""
        first = list(dict.fromkeys(seqs))
        for seq in first:
            seq.status = SequenceStatus.WAITING
        self._put_first(first)

    def abort(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """End these sequences, free what they hold, and return those that had not ended yet."""
        ended = [seq for seq in dict.fromkeys(seqs) if not seq.is_finished]
        for seq in ended:
            seq.finish("abort")
            self._end(seq)
        self._drop(ended)
        return ended

    def schedule(self) -> ScheduledBatch:
        """The next step. When blocks run out it preempts the youngest; the oldest gets its turn."""
        self._kv.reset_budget()
        order = self._in_order()
        resting = self.turns.resting(order)
        step = self._schedule_running([seq for seq in order if seq not in resting])
        if not step.items and self.running:
            # None of the protected decodes or of those in turn can run, or those that could were
            # preempted: schedule all running sequences, without these limits.
            self._kv.reset_budget()
            self._pacer.start_step(is_limited=False)
            step = self._schedule_running(order)
        if len(self.running) == len(order):  # none was preempted
            self._admit_waiting(step)
        # Decodes first, each kind in running order: `order` was for the choice alone.
        seqs = sorted(self.running, key=lambda s: s.is_prefill)
        items = tuple(step.items[s.seq_id] for s in seqs if s.seq_id in step.items)
        most = min(step.tokens - 1, step.guess_tokens)
        batch = ScheduledBatch(items, self.turns.drafts(resting, items, most))
        batch.mark_scheduled()
        return batch

    def schedule_ahead(self, batch: ScheduledBatch) -> ScheduledBatch | None:
        """The step after `batch`, which still runs: its sequences, one step further. None if that
        step depends on the tokens that `batch` samples, or has other sequences.

        A sequence that `batch` brings to its length is left out. One that ends in it by a stop is
        computed once more in vain.
        """
        has_all = len(batch.items) == len(self.running) and not self.waiting
        if self._config.num_guesses or self._pacer.is_limited or not has_all:
            return None
        if sum(not item.samples for item in batch.items) > 1:
            return None  # several prompts share a step by other rules
        if any(item.seq.request.needs_tokens for item in batch.items):
            return None
        sampled = [item.seq for item in batch.items if item.samples]
        if batch.is_drafted or is_draft_due(sampled, self.turns.can_draft(sampled)):
            return None
        items: list[ScheduledSequence] = []
        budget = self._max_tokens
        self._kv.reset_budget()
        for item in batch.items:
            seq, done = item.seq, item.start + item.num_tokens
            if item.samples and done + 1 >= seq.request.max_total_tokens:
                continue
            wanted = min(max(1, seq.num_tokens - done), budget)
            granted = self._kv.reserve(seq, wanted, item.num_tokens) if wanted else 0
            if not granted:
                return None
            items.append(ScheduledSequence(seq, granted, item.num_tokens))
            budget -= granted
        return ScheduledBatch(tuple(items)) if items else None

    def postprocess(
        self,
        batch: ScheduledBatch,
        token_ids: list[int],
        failed: Mapping[int, str] | None = None,
        next_guesses: Iterable[int] = (),
    ) -> list[Sequence]:
        """Commit the computed tokens, append the sampled ones, free what ended sequences hold;
        returns the ended sequences.

        token_ids: what the items of the batch sample, in order. next_guesses: what the MTP head
        guesses after each. failed: why sequences, by id, have lost KV: an error ends them.
        """
        self.turns.end_step(batch)
        ended = self._fail(failed or {})
        now = time.perf_counter()
        is_timed = batch.is_decode and not self.turns.are_apart
        parts = batch.items, batch.split(token_ids), batch.split(next_guesses)
        for item, sampled, guesses in zip(*parts, strict=True):
            if item.seq.is_finished:
                continue
            accepted = item.accepted(sampled)
            self._append_tokens(item, accepted, is_timed)
            item.seq.next_guesses = (guesses[len(accepted) - 1],) if guesses else None
            if sampled and item.seq.metrics.first_token_time is None:
                item.seq.metrics.first_token_time = now
            if item.seq.is_finished:
                self._end(item.seq)
                ended.append(item.seq)
            elif sampled and item.seq.request.pauses:
                self._pause(item.seq)
        self._drop(ended)
        return ended

    def _append_tokens(self, item: ScheduledSequence, accepted: list[int], is_timed: bool) -> None:
        """Append tokens until one ends the sequence, and commit their KV. NO_TOKEN fails the
        sequence, and its KV is not published.
        """
        seq, num_before = item.seq, item.seq.num_tokens
        for token in accepted:
            if token == NO_TOKEN:
                seq.fail_without_token()
                return
            try:
                seq.append(token)
            except RequestError as error:  # its text cannot be decoded
                seq.fail(error)
            if seq.is_finished:
                break
        num_right = max(0, seq.num_tokens - num_before - 1)
        num_rejected = len(item.guesses) - num_right
        record_guesses(item, num_right, is_timed)
        self._kv.commit(seq, item.num_tokens - num_rejected, num_rejected)

    def _in_order(self) -> list[Sequence]:
        """Running sequences in the order in which they get their tokens: decodes before prefills,
        oldest first. Protected resident decodes come first, then those that stream, in turn.
        """
        costs = {s.seq_id: self._kv.stream_cost(s) for s in self.running}
        decodes = [s for s in self.running if not s.is_prefill]
        self._may_draft = self.turns.can_draft(decodes)
        protected = any(not costs[s.seq_id] for s in decodes)
        self._pacer.start_step(protected, max(costs.values(), default=0))
        order = sorted(self.running, key=lambda s: s.is_prefill)
        if not self._pacer.is_limited:
            return order
        streamed = self._pacer.in_turn([s for s in self.running if costs[s.seq_id]])
        resident = [s for s in order if not costs[s.seq_id]]
        num_decodes = sum(not s.is_prefill for s in resident)
        return resident[:num_decodes] + streamed + resident[num_decodes:]

    def _fail(self, failed: Mapping[int, str]) -> list[Sequence]:
        ended = [s for s in [*self.running, *self.waiting] if s.seq_id in failed] if failed else []
        for seq in ended:
            seq.fail(TransferError(failed[seq.seq_id]))
            self._end(seq)
        return ended

    def _schedule_running(self, order: list[Sequence]) -> _Step:
        most_rows = min(self._config.max_num_seqs, len(self.running) + len(self.waiting))
        step = _Step(self._max_tokens, self._max_sampled - most_rows)
        for seq in order:
            if seq.status is SequenceStatus.RUNNING and step.tokens:
                self._schedule_one(seq, step)
        return step

    def _schedule_one(self, seq: Sequence, step: _Step) -> None:
        """Plan as many tokens of `seq` as there is room for, preempting the youngest for blocks."""
        cost = self._kv.stream_cost(seq)
        if cost and not self._pacer.allows(cost):
            return
        wanted = self._chunk(seq, step.tokens)
        most = min(step.tokens - wanted, step.guess_tokens, self._kv.free_tokens(seq) - 1)
        in_the_way = self._pacer.is_limited and not self._config.num_assisted
        drafts = self._may_draft and not in_the_way and self.turns.can_draft([seq])
        guesses = guesses_for(seq, most, self._config.num_guesses, drafts)
        wanted += len(guesses)
        while (granted := self._kv.reserve(seq, wanted)) is None:
            victim = self.running[-1]
            step.items.pop(victim.seq_id, None)
            self.preempt(victim)
            if victim is seq:
                return
        if granted:
            # reserve() may have taken the sequence back to its prefill.
            guesses = guesses.first(0 if seq.is_prefill else granted - 1)
            granted = min(granted, seq.num_remaining + len(guesses))
            step.items[seq.seq_id] = guesses.of(seq, granted)
            step.tokens -= granted
            step.guess_tokens -= len(guesses)
            if cost:
                self._pacer.spend(seq, cost)

    def _admit_waiting(self, step: _Step) -> None:
        passed: list[Sequence] = []
        most = self._config.max_num_seqs
        while self.waiting and step.tokens and len(self.running) < most and len(passed) < LOOK_PAST:
            seq, _ = self.waiting.popitem(last=False)
            if seq.status is SequenceStatus.PAUSED or not self._may_start(seq, step):
                passed.append(seq)  # shorter prompts may pass it
                continue
            admission = self._kv.admit(seq)
            if admission is Admission.ADMITTED:
                seq.status = SequenceStatus.RUNNING
                self.running.append(seq)
                self._schedule_one(seq, step)
                continue
            passed.append(seq)
            if admission is Admission.FULL:
                break
        self._put_first(passed)

    def _put_first(self, seqs: list[Sequence]) -> None:
        """Let these sequences wait, in this order, before all others."""
        for seq in reversed(seqs):
            self.waiting[seq] = None
            self.waiting.move_to_end(seq, last=False)

    def _chunk(self, seq: Sequence, most: int) -> int:
        """Tokens for `seq` in this step. A long prefill leaves some to other prefills."""
        wanted = min(seq.num_remaining, most)
        others = (s for s in chain(self.waiting, self.running) if seq not in (s, s.prompt_owner))
        if wanted > self._long_tokens and any(s.is_prefill for s in others):
            return self._long_tokens
        return wanted

    def _may_start(self, seq: Sequence, step: _Step) -> bool:
        """False when `seq` would stay half computed and enough prompts already do."""
        if self._chunk(seq, step.tokens) == seq.num_remaining:
            return True
        partial = [item.seq for item in step.items.values() if not item.samples]
        if len(partial) >= self._config.max_num_partial_prefills:
            return False
        num_long = sum(map(self._is_long, partial))
        return not self._is_long(seq) or num_long < self._config.max_long_partial_prefills

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_remaining > self._long_tokens

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence at the front of the queue. Others may take its KV meanwhile."""
        self.running.remove(seq)
        self._kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        seq.metrics.num_preemptions += 1
        self._put_first([seq])

    def _pause(self, seq: Sequence) -> None:
        """Let a running sequence wait for `resume`; others may take its KV, as if preempted."""
        self.running.remove(seq)
        self._kv.preempt(seq)
        seq.status = SequenceStatus.PAUSED
        self.waiting[seq] = None

    def _end(self, seq: Sequence) -> None:
        """Free what a finished sequence holds."""
        seq.metrics.finished_time = time.perf_counter()
        seq.metrics.num_tokens = seq.num_output_tokens
        self._pacer.forget(seq)
        self._kv.deallocate(seq)

    def _drop(self, ended: list[Sequence]) -> None:
        self.running = [s for s in self.running if not s.is_finished]
        for seq in ended:
            self.waiting.pop(seq, None)
