"""DraftTurns: which sequences a step checks, and which ones rest and draft meanwhile.

Drafts compute and copy nothing; a streamed step copies and hardly computes. If several requests
stream and draft, each step therefore checks one half of them, and the other half drafts between its
layers for the next step. Every request is checked in every second step.
"""

from __future__ import annotations

import time

from nanoengine.config.engine import EngineConfig
from nanoengine.engine.speculative import guesses_for
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceStatus

SKIPPED = 2  # first steps of a trial, not timed: their drafts were made in the other way
TRIAL = SKIPPED + 6  # steps
FIRST_WAIT, LAST_WAIT = 128, 1024  # steps from one trial to the next, doubled each time


class FasterWay:
    """Chooses between steps of all requests and steps of one half. It tries both, stays with what
    checks more requests a second, and tries the other again, less and less often.
    """

    def __init__(self) -> None:
        self._is_apart, self._rates = False, dict[bool, float]()
        self._num_steps, self._until, self._wait = 0, TRIAL, FIRST_WAIT
        self._began, self._num_checked = 0.0, 0

    def next(self, num_checked: int) -> bool:
        """Whether the next step has one half. num_checked: requests in the last step."""
        self._num_checked += num_checked
        now = time.perf_counter()
        if self._num_steps == self._until:
            self._end_trial(self._num_checked / max(1e-9, now - self._began))
        if self._num_steps == SKIPPED:
            self._began, self._num_checked = now, 0
        self._num_steps += 1
        return self._is_apart

    def _end_trial(self, rate: float) -> None:
        """Go on in the better way, or try the other."""
        self._rates[self._is_apart] = rate
        if len(self._rates) == 2 and self._until == TRIAL:
            self._is_apart = self._rates[True] > self._rates[False]
            self._until, self._wait = self._wait, min(2 * self._wait, LAST_WAIT)
        else:
            self._is_apart, self._until = not self._is_apart, TRIAL
        self._num_steps = 0


class DraftTurns:
    """Remembers which requests were in the newest step. are_taken: whether requests may take turns,
    as on a device that computes while it copies. are_apart: whether they do in this step.
    """

    def __init__(self, config: EngineConfig, kv: HybridKVCacheManager, are_taken: bool) -> None:
        self._config = config
        self._kv = kv
        self.are_taken, self.are_apart = are_taken, False
        self._checked: set[int] = set()
        self._way, self._running = FasterWay(), set[int]()

    def can_draft(self, decodes: list[Sequence]) -> bool:
        """Whether drafts may pay for each of these: none waits for those of others."""
        return self._config.most_drafts > 0 and all(map(self._kv.may_draft, decodes))

    def resting(self, running: list[Sequence]) -> list[Sequence]:
        """The running sequences that the next step does not check; [] if they take no turns. They
        take none with a grammar, which would let the host wait for each draft, nor with shared
        blocks, which cross the link once in a step of all.
        """
        are_several = self.are_taken and len(running) > 1 and self.can_draft(running)
        if self._running != (ids := {seq.seq_id for seq in running}):
            self._way, self._running = FasterWay(), ids
        self.are_apart = are_several and all(map(self._may_rest, running))
        self.are_apart = self.are_apart and self._way.next(len(self._checked))
        if not self.are_apart:
            return []
        checked = [seq for seq in running if seq.seq_id in self._checked]
        return checked if 0 < len(checked) < len(running) else running[1::2]

    def _may_rest(self, seq: Sequence) -> bool:
        is_short = seq.draft_length is not None and seq.draft_length.is_short
        is_free = not seq.is_prefill and seq.may_guess and seq.grammar is None
        return is_free and is_short and self._kv.streams_alone(seq)

    def drafts(
        self, resting: list[Sequence], checked: tuple[ScheduledSequence, ...], most: int
    ) -> tuple[ScheduledSequence, ...]:
        """The drafts of resting sequences, each as an item of its next step. checked: the items of
        this step; beside a prefill there are no drafts. most: drafts of all together.
        """
        items, runs = [], [item.seq for item in checked]
        for seq in resting if checked and ScheduledBatch(checked).is_decode else ():
            if seq.status is not SequenceStatus.RUNNING or seq in runs:
                continue  # it was preempted just now, or the others could not run
            room = min(most, self._kv.free_tokens(seq) - 1)
            guesses = guesses_for(seq, room, self._config.num_guesses, drafts=True)
            if not guesses:
                seq.next_guesses = ()
            elif guesses.num_drafts and (granted := self._kv.reserve(seq, 1 + len(guesses))):
                guesses = guesses.first(granted - 1)
                items.append(guesses.of(seq, granted))
                most -= len(guesses)
        return tuple(item for item in items if item.num_drafts)

    def end_step(self, batch: ScheduledBatch) -> None:
        """A step has run: resting sequences get their drafts as next guesses."""
        self._checked = {item.seq.seq_id for item in batch.items}
        for item in batch.resting:
            item.seq.next_guesses = item.guesses
