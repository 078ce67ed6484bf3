"""How much may stream in a step, so that resident decodes slow down by a bounded factor only."""

from __future__ import annotations

from nanoengine.sequence import (
    Sequence,
)


class LinkPacer:
    """Lets streamed sequences take part in every k-th step, so that they bring no more than
    `blocks_per_step` blocks a step over the link on average (None: no limit).

    Deficit round robin (Shreedhar and Varghese 1995): unused budget is kept for the sequence at the
    head of the line, nobody passes it, and after its turn it goes to the end.
    """

    def __init__(self, blocks_per_step: int | None) -> None:
        self._blocks_per_step = blocks_per_step
        self._credit = 0
        self.is_limited = self._is_blocked = False
        self._turns: dict[int, int] = {}
        self._num_turns = 0

    def in_turn(self, streamed: list[Sequence]) -> list[Sequence]:
        """The sequences in the order of their turns; those that never had one first."""
        return sorted(streamed, key=lambda seq: self._turns.get(seq.seq_id, -1))

    def start_step(self, is_limited: bool, largest_cost: int = 0) -> None:
        """is_limited: there are resident decodes to protect. largest_cost: of those in line, in
        blocks; more than that, or than a step's budget, is not saved up.
        """
        per_step = self._blocks_per_step or 0
        self.is_limited = is_limited and self._blocks_per_step is not None
        self._is_blocked = False
        credit = min(self._credit + per_step, max(per_step, largest_cost))
        self._credit = credit if self.is_limited else 0

    def allows(self, cost: int) -> bool:
        """True when the next sequence in line, which brings `cost` blocks, may take part."""
        self._is_blocked |= self.is_limited and cost > self._credit
        return not self._is_blocked

    def spend(self, seq: Sequence, cost: int) -> None:
        """The sequence takes part."""
        self._credit = max(0, self._credit - cost)
        self._num_turns += 1
        self._turns[seq.seq_id] = self._num_turns

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._turns.pop(seq.seq_id, None)
