"""Who runs in the next step and how many tokens each: continuous batching with chunked prefill.

Every step is one mixed batch under a token budget: first the running sequences, oldest first (a
decode is
one token), then waiting ones in order of arrival. Knows counts and the KV manager's scheduler
face, no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from nanoengine.config import EngineConfig
from nanoengine.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceStatus


class KVAdmission(Protocol):
    """The scheduler's face of the KV manager."""

    def start_step(self) -> None: ...
    def admit(self, seq: Sequence) -> bool: ...
    def reserve(self, seq: Sequence, num_tokens: int) -> int | None: ...
    def commit(self, seq: Sequence, num_tokens: int) -> None: ...
    def preempt(self, seq: Sequence) -> None: ...
    def deallocate(self, seq: Sequence) -> None: ...


class Scheduler:
    """Owns the waiting queue and the running list (oldest first)."""

    def __init__(self, config: EngineConfig, kv: KVAdmission) -> None:
        self._config = config
        self._kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(seq)

    def abort(self, seq_ids: Iterable[int]) -> list[Sequence]:
        """End the given requests wherever they are and free what they hold."""
        wanted = set(seq_ids)
        ended = [s for s in [*self.running, *self.waiting] if s.seq_id in wanted]
        for seq in ended:
            self._end(seq, "abort")
        self._drop_finished()
        return ended

    def schedule(self) -> ScheduledBatch:
        """The next step. Preempts the youngest when blocks run out; the oldest always gets its
        turn.
        """
        plan: dict[int, ScheduledSequence] = {}
        budget = self._config.max_num_batched_tokens
        num_running = len(self.running)
        self._kv.start_step()
        # Decodes first, each oldest first.
        for seq in sorted(self.running, key=lambda s: s.is_prefill):
            if seq.status is SequenceStatus.RUNNING and budget:
                budget -= self._schedule_one(seq, budget, plan)
        if len(self.running) == num_running:  # nobody was preempted
            self._admit_waiting(budget, plan)
        self._stamp(plan.values())
        return ScheduledBatch(tuple(plan.values()))

    def postprocess(self, batch: ScheduledBatch, token_ids: list[int]) -> list[Sequence]:
        """Count the computed tokens, append the sampled ones, free what is done; returns the ended
        ones.

        token_ids holds one token for each item of the batch that samples, in order.
        """
        sampled = iter(token_ids)
        now = time.perf_counter()
        for item in batch.items:
            samples = item.samples
            self._kv.commit(item.seq, item.num_tokens)
            if samples:
                item.seq.append(next(sampled))
                if item.seq.metrics.first_token_time is None:
                    item.seq.metrics.first_token_time = now
        ended = [i.seq for i in batch.items if i.seq.status is SequenceStatus.FINISHED]
        for seq in ended:
            self._end(seq, "stop")
        self._drop_finished()
        return ended

    def _schedule_one(self, seq: Sequence, budget: int, plan: dict[int, ScheduledSequence]) -> int:
        """Plan as many tokens of `seq` as there is room for, preempting the youngest for blocks."""
        wanted = self._chunk(seq, budget)
        while (granted := self._kv.reserve(seq, wanted)) is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return 0
        if granted:
            plan[seq.seq_id] = ScheduledSequence(seq, granted)
        return granted

    def _admit_waiting(self, budget: int, plan: dict[int, ScheduledSequence]) -> None:
        skipped: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self._config.max_num_seqs:
            seq = self.waiting.popleft()
            if not self._may_start(seq, budget, plan):
                skipped.append(seq)  # shorter ones may pass while it waits for its place
                continue
            if not self._kv.admit(seq):
                self.waiting.appendleft(seq)
                break
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            budget -= self._schedule_one(seq, budget, plan)
        self.waiting.extendleft(reversed(skipped))

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens for `seq` in this step; a long prefill leaves room while others wait for
        theirs.
        """
        wanted = min(seq.num_remaining, budget)
        if self._is_long(seq) and self._others_prefill(seq):
            wanted = min(wanted, self._config.long_prefill_tokens)
        return wanted

    def _may_start(self, seq: Sequence, budget: int, plan: dict[int, ScheduledSequence]) -> bool:
        """False when `seq` would stay half computed and enough prompts already do."""
        if self._chunk(seq, budget) == seq.num_remaining:
            return True
        partial = [item.seq for item in plan.values() if not item.samples]
        if len(partial) >= self._config.max_num_partial_prefills:
            return False
        long = sum(map(self._is_long, partial))
        return not self._is_long(seq) or long < self._config.max_long_partial_prefills

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_remaining > self._config.long_prefill_tokens

    def _others_prefill(self, seq: Sequence) -> bool:
        return any(s is not seq and s.is_prefill for s in [*self.waiting, *self.running])

    def _stamp(self, items: Iterable[ScheduledSequence]) -> None:
        now = time.perf_counter()
        for item in items:
            if item.seq.metrics.first_scheduled_time is None:
                item.seq.metrics.first_scheduled_time = now

    def _preempt(self, seq: Sequence, plan: dict[int, ScheduledSequence]) -> None:
        """The sequence waits at the front; what is taken of its KV meanwhile is computed again."""
        plan.pop(seq.seq_id, None)
        self.running.remove(seq)
        self._kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        seq.metrics.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _end(self, seq: Sequence, reason: str) -> None:
        seq.finish(reason)
        seq.metrics.finished_time = time.perf_counter()
        seq.metrics.num_tokens = seq.num_output_tokens
        self._kv.deallocate(seq)

    def _drop_finished(self) -> None:
        self.running = [s for s in self.running if s.status is not SequenceStatus.FINISHED]
        self.waiting = deque(s for s in self.waiting if s.status is not SequenceStatus.FINISHED)
