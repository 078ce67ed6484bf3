"""BlockTable: the blocks of one sequence, and where its next tokens go; and what the reservations
of a step add up to. Knows no pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanoengine.block_manager import Block, BlockKey
from nanoengine.sequence import Sequence


@dataclass(slots=True)
class StepBudget:
    """What the reservations of one step may still write, how many loads were granted, and which
    host blocks the step streams so far.
    """

    write_blocks: int
    loads: int
    streamed: set[Block] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens of a step, from `row` on, whose KV goes to one block, from `offset` on."""

    row: int
    block: Block
    offset: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in logical order.

    The first len(published) are findable by content, each under the block that stands for it there.
    `keys` are those of its full blocks, as far as they were needed; the first `num_promised` were
    promised to others while it computes them.
    `num_shared_tokens` came from the prefix cache: their KV is never written again.
    """

    seq: Sequence
    blocks: list[Block] = field(default_factory=list)
    published: list[Block] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    num_promised: int = 0
    num_shared_tokens: int = 0
    is_parked: bool = True

    def writes(self, row: int, start: int, num_tokens: int, size: int) -> Iterator[Write]:
        """Where tokens from position `start` on are stored, the first of them row `row` of a step.

        Those whose KV came from the prefix cache are left out: other sequences may be reading it.
        """
        position, stop = max(start, self.num_shared_tokens), start + num_tokens
        while position < stop:
            end = min(stop, (position // size + 1) * size)
            place = self.blocks[position // size], position % size
            yield Write(row + position - start, *place, end - position)
            position = end
