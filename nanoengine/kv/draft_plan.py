"""Plans of draft steps: decode steps that read only the KV on the device. Integers, no torch.

A sequence drafts some tokens over a part of its context, and one step over all of it checks them
(self-speculation as in TriForce, Sun et al. 2024). Drafts write their keys and values
where that step, layer by layer, writes its own before it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.kv.step_plan import DEVICE, Part, SequenceSpan, SlotWrite, StepPlan

MAX_DRAFT_TOKENS = 16384  # that a draft reads: more would take too long
DRAFT_SHARE = 8  # a draft of a resident sequence reads one in so many blocks: enough to draft well
HOPE = 0.8  # expected share of right drafts, before any was checked
LEAST_GAIN = 1.05  # drafts must give so many times the tokens a second of steps without


@dataclass(frozen=True, slots=True)
class DraftReads:
    """What the drafts of one sequence read and write, as device slots.

    index: of its item in the batch. start: position of its newest token. kept: full blocks before
    the one that holds this token, in logical order, others left out. tail: that block and those
    after it. stands: every draft is an assistant's: it stands where this token does, sees the keys
    before it, and writes none.
    """

    index: int
    start: int
    num_drafts: int
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    stands: bool = False

    def position(self, number: int) -> int:
        """Where draft `number` stands."""
        return self.start + (0 if self.stands else number)

    def num_keys(self, number: int, block_size: int) -> int:
        """Keys that draft `number` sees."""
        before = len(self.kept) * block_size + self.start % block_size
        return before + (0 if self.stands else number + 1)

    def write(self, row: int, number: int, block_size: int) -> SlotWrite:
        """Where draft `number` writes; it is row `row` of its step."""
        block, offset = divmod(self.start % block_size + number, block_size)
        return SlotWrite(row, self.tail[block], offset, 1)

    def span(self, row: int, number: int, block_size: int) -> SequenceSpan:
        """What draft `number` reads. Blocks are counted from 0: keys carry their position, and a
        window holds as many keys.
        """
        num_blocks = -(-self.num_keys(number, block_size) // block_size)
        return SequenceSpan(row, 0, (*self.kept, *self.tail)[:num_blocks])


def plan_draft(
    reads: Sequence[DraftReads], number: int, block_size: int, num_rows: int
) -> StepPlan:
    """The step in which each of these sequences makes draft `number`; a row each, no transfers.

    num_rows: as in StepPlan.
    """
    writes = tuple(
        each.write(row, number, block_size) for row, each in enumerate(reads) if not each.stands
    )
    return StepPlan(
        num_tokens=len(reads),
        num_rows=num_rows,
        writes=writes,
        write_slots=tuple(write.slot for write in writes),
        reads=(
            Part(DEVICE, tuple(r.span(row, number, block_size) for row, r in enumerate(reads))),
        ),
    )


def drafts_from(weight_bytes: int, block_bytes: int) -> int:
    """The fewest blocks with which a resident sequence may draft; 0: it never drafts.

    A step reads the weights and these blocks, a draft the weights and one in DRAFT_SHARE of them.
    One draft that is right with the chance HOPE must gain LEAST_GAIN: then the blocks have about
    half as many bytes as the weights.
    """
    most = (1 + HOPE) / LEAST_GAIN - 1  # bytes of a draft, times those of a step
    far = block_bytes * (most - 1 / DRAFT_SHARE)
    return math.ceil(weight_bytes * (1 - most) / far) if far else 0


def most_kept(heat: Sequence[float | None], block_size: int, least: int) -> int:
    """How many blocks before the tail drafts read. heat: as in kept_blocks. least: the fewest of a
    resident sequence.
    """
    most = MAX_DRAFT_TOKENS // block_size
    return most if None in heat else min(most, max(1, least, len(heat) // DRAFT_SHARE))


def kept_blocks(heat: Sequence[float | None], most: int) -> list[int]:
    """Which blocks before the tail drafts read, `most` in all: of those on the device the first
    one, the most recent ones, and between them those with the most heat.

    heat: of each block, see Block; None: it is not on the device.
    """
    there = {index: warmth for index, warmth in enumerate(heat) if warmth is not None}
    if len(there) <= most:
        return [*there]
    first, *others = there
    num_recent = most // 2
    recent, between = others[len(others) - num_recent :], others[: len(others) - num_recent]
    by_heat = sorted(between, key=lambda index: (there[index], index))
    return sorted([first, *by_heat[len(by_heat) - (most - 1 - num_recent) :], *recent])
