"""Limits streaming per step, so that resident decodes slow down by a bounded factor only."""

from __future__ import annotations

from nanoengine.sequence import Sequence


class LinkPacer:
    """Lets streamed sequences run in only some steps, so that they copy at most `blocks_per_step`
    blocks per step on average (None: no limit).

    Deficit round robin (Shreedhar and Varghese 1995): unused budget is saved for the sequence at
    the head of the queue, no other sequence passes it, and after its turn it goes to the end.
    """

    def __init__(self, blocks_per_step: int | None) -> None:
        self._blocks_per_step = blocks_per_step
        self._credit = 0
        self.is_limited = self._is_blocked = False
        self._turns: dict[int, int] = {}
        self._num_turns = 0

    def in_turn(self, streamed: list[Sequence]) -> list[Sequence]:
        """The sequences in the order of their turns; those that have not had one come first."""
        return sorted(streamed, key=lambda seq: self._turns.get(seq.seq_id, -1))

    def start_step(self, is_limited: bool, largest_cost: int = 0) -> None:
        """Add a step's budget. is_limited: there are resident decodes to protect. largest_cost: of
        the queued sequences, in blocks; the budget saved is at most the larger of it and a step's.
        """
        per_step = self._blocks_per_step or 0
        self.is_limited = is_limited and self._blocks_per_step is not None
        self._is_blocked = False
        credit = min(self._credit + per_step, max(per_step, largest_cost))
        self._credit = credit if self.is_limited else 0

    def allows(self, cost: int) -> bool:
        """True if the next sequence in the queue, which copies `cost` blocks, may run now."""
        self._is_blocked |= self.is_limited and cost > self._credit
        return not self._is_blocked

    def spend(self, seq: Sequence, cost: int) -> None:
        """Record that the sequence runs in this step."""
        self._credit = max(0, self._credit - cost)
        self._num_turns += 1
        self._turns[seq.seq_id] = self._num_turns

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._turns.pop(seq.seq_id, None)
