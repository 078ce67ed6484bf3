"""DraftTurns: who drafts in a step, and who drafts while others are checked.

Drafts compute and move nothing, a step over the link moves and hardly computes. So, where several
requests stream and draft, each step checks one half of them, and between its layers the other half
drafts for the step after it. Every request is checked in every second step.
"""

from __future__ import annotations

from typing import Protocol

from nanoengine.config.engine import EngineConfig
from nanoengine.engine.speculative import guesses_for
from nanoengine.sequence import ScheduledBatch, ScheduledSequence, Sequence, SequenceStatus


class DraftingKV(Protocol):
    """The KV manager, as far as drafts need it."""

    def may_draft(self, seq: Sequence) -> bool: ...
    def streams_alone(self, seq: Sequence) -> bool: ...
    def reserve(self, seq: Sequence, num_tokens: int, num_ahead: int = 0) -> int | None: ...
    def free_tokens(self, seq: Sequence) -> int: ...


class DraftTurns:
    """Remembers who was in the newest step. are_taken: whether requests take turns; a device that
    computes while it copies has to be there for it.
    """

    def __init__(self, config: EngineConfig, kv: DraftingKV, are_taken: bool) -> None:
        self._config = config
        self._kv = kv
        self.are_taken = are_taken
        self._checked: set[int] = set()

    def can_draft(self, decodes: list[Sequence]) -> bool:
        """Whether drafts may pay for each of these: none waits for those of others."""
        return self._config.num_drafts > 0 and all(map(self._kv.may_draft, decodes))

    def resting(self, running: list[Sequence]) -> list[Sequence]:
        """Who of the running sequences is not checked in the next step; [] where they take no
        turns. A grammar would have the host wait for each draft; blocks that two of them read
        cross the link once in a step with both.
        """
        if not self.are_taken or len(running) < 2 or not self.can_draft(running):
            return []
        if not all(map(self._may_rest, running)):
            return []
        checked = [seq for seq in running if seq.seq_id in self._checked]
        return checked if 0 < len(checked) < len(running) else running[1::2]

    def _may_rest(self, seq: Sequence) -> bool:
        is_short = seq.draft_length is not None and seq.draft_length.is_short
        is_free = not seq.is_prefill and seq.may_guess and seq.grammar is None
        return is_free and is_short and self._kv.streams_alone(seq)

    def drafts(self, resting: list[Sequence], most: int) -> tuple[ScheduledSequence, ...]:
        """What those who rest draft, each as an item of its next step. most: drafts of all."""
        items = []
        for seq in resting:
            if seq.status is not SequenceStatus.RUNNING:
                continue
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
        """A step has run: its drafts are kept for those who rested."""
        self._checked = {item.seq.seq_id for item in batch.items}
        for item in batch.resting:
            item.seq.next_guesses = item.guesses
