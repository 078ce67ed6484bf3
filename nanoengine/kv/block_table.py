"""BlockTable: the blocks of one sequence, and where its next tokens go; and what the reservations
of a step add up to. Knows no pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanoengine.kv.block_manager import Block, BlockKey, block_key
from nanoengine.sequence import Sequence

LEFT = Block(ref_count=0)  # stands for a block that was given back; nobody changes it


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
    """The blocks of one sequence in logical order; in place of the first `num_left`, which every
    layer's window has left, LEFT.

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
    num_left: int = 0
    is_parked: bool = True

    @property
    def held(self) -> list[Block]:
        """Those that the sequence has a reference to."""
        return self.held_from(0)

    def held_from(self, first: int) -> list[Block]:
        """Those of them from block `first` on."""
        return self.blocks[max(self.num_left, first) :]

    def first_keys(self, num_blocks: int, size: int) -> list[BlockKey]:
        """The keys of the first `num_blocks` blocks of `size` tokens, which are full."""
        seq, keys = self.seq, self.keys
        for index in range(len(keys), num_blocks):
            tokens = seq.token_ids[index * size : (index + 1) * size]
            keys.append(block_key(keys[-1] if keys else None, tokens, seq.cache_salt))
        return keys[:num_blocks]

    def count(self, first: int, size: int, num_rejected: int) -> None:
        """Blocks of `size` tokens, from `first` on, hold what the sequence has computed; not what
        was rejected after it.
        """
        num_computed = self.seq.num_computed
        for index in range(first, -(-(num_computed + num_rejected) // size)):
            block, num_tokens = self.blocks[index], min(size, num_computed - index * size)
            # A step that was begun early may have counted more already.
            least = 0 if num_rejected else block.num_tokens
            block.num_tokens = max(least, num_tokens)

    def leave(self, num_left: int) -> list[Block]:
        """The first `num_left` blocks are needed no more; returns those that were still held."""
        left = self.blocks[self.num_left : num_left]
        self.blocks[: self.num_left + len(left)] = [LEFT] * (self.num_left + len(left))
        self.num_left += len(left)
        return left

    def skip(self, num_blocks: int) -> None:
        """What it holds are the blocks after so many, which are not needed."""
        self.blocks[:0], self.num_left = [LEFT] * num_blocks, num_blocks

    def take(self, hits: list[Block], num_left: int) -> None:
        """Begin with these cached blocks, of which the first `num_left` are not needed."""
        self.blocks = [LEFT] * num_left + hits[num_left:]
        self.published, self.num_left = list(hits), num_left

    def forget(self, num_kept: int, size: int) -> list[Block]:
        """Keep the first `num_kept` blocks of `size` tokens; returns the others that were held.

        Without those that the window left none can be computed anew: then it keeps nothing.
        """
        if self.num_left:
            num_kept = 0
        gone = self.blocks[max(num_kept, self.num_left) :]
        del self.blocks[num_kept:], self.published[num_kept:]
        self.num_left = 0
        self.num_shared_tokens = min(self.num_shared_tokens, num_kept * size)
        self.seq.num_computed = min(self.seq.num_computed, num_kept * size)
        return gone

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
