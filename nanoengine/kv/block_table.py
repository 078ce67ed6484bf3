"""BlockTable: the blocks of one sequence, and where its next tokens go. Knows no pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanoengine.kv.block_manager import Block, BlockKey, block_key
from nanoengine.sequence import Sequence

RELEASED = Block(ref_count=0)  # stands in a table for a block that was released; never changed


@dataclass(slots=True)
class StepBudget:
    """What is left for the reservations of one step.

    num_write_blocks: blocks that may still be written. num_loads: loads granted so far. streamed:
    host blocks that sequences of the step stream so far.
    """

    num_write_blocks: int
    num_loads: int = 0
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
    """The blocks of one sequence, of `block_size` tokens each, in logical order. Every layer's
    window has passed the first `num_released` of them; RELEASED stands in their place.

    published: for its first blocks, the block that the prefix cache finds with the same content.
    keys: of its full blocks, as far as they were needed; the first `num_announced` are announced to
    others, as this sequence computes them. num_shared_tokens: from the prefix cache; their KV is
    never written again. known: the cached blocks of its prefix, with or without a recurrent state.
    """

    seq: Sequence
    block_size: int
    blocks: list[Block] = field(default_factory=list)
    published: list[Block] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    num_announced: int = 0
    num_shared_tokens: int = 0
    num_released: int = 0
    is_preempted: bool = True
    known: list[Block] = field(default_factory=list)

    @property
    def streamed(self) -> set[Block]:
        """Its blocks with KV that lies on the host only."""
        return {block for block in self.blocks if block.num_tokens and block.device_slot is None}

    def needs_load(self, index: int) -> bool:
        """Whether block `index`, which a step writes, has KV that lies on the host only."""
        written = self.blocks[index : index + 1]
        return any(block.num_tokens and block.device_slot is None for block in written)

    @property
    def held(self) -> list[Block]:
        """The blocks that the sequence has a reference to."""
        return self.blocks[self.num_released :]

    def is_resumable(self, index: int) -> bool:
        """Whether this sequence or others are likely to go on after the first `index` blocks:
        earlier texts branched off there, or the prompt ends in the next block.
        """
        last_of_prompt = (self.seq.num_prompt_tokens - 1) // self.block_size
        return index == len(self.known) or index >= last_of_prompt

    def found_as(self, index: int) -> Block:
        """The block that the prefix cache finds in place of block `index` of this sequence."""
        is_known = index == len(self.known) - 1 and self.known[index].key is not None
        return self.known[index] if is_known else self.blocks[index]

    def next_stop(self, computed: int, num_tokens: int) -> int | None:
        """The position at which a step must end, so that the state is one to go on from; None if it
        need not. Guesses end with a block.
        """
        size, last = self.block_size, max(self.seq.num_tokens - 1, computed + num_tokens - 1)
        stops = (len(self.known), (self.seq.num_tokens - 1) // size, last // size)
        return min((size * stop for stop in stops if size * stop > computed), default=None)

    def first_keys(self, num_blocks: int) -> list[BlockKey]:
        """The keys of the first `num_blocks` blocks, which are full."""
        seq, keys, size = self.seq, self.keys, self.block_size
        for index in range(len(keys), num_blocks):
            tokens = seq.token_ids[index * size : (index + 1) * size]
            keys.append(block_key(keys[-1] if keys else None, tokens, seq.request.cache_salt))
        return keys[:num_blocks]

    def commit(self, num_computed: int) -> None:
        """The first `num_computed` tokens have KV. Nothing else sets num_computed."""
        self.seq.num_computed = num_computed

    def mark_computed(self, first: int, num_rejected: int) -> None:
        """Blocks from `first` on hold the computed tokens, without the rejected ones after them."""
        num_computed, size = self.seq.num_computed, self.block_size
        for index in range(first, -(-(num_computed + num_rejected) // size)):
            block, num_tokens = self.blocks[index], min(size, num_computed - index * size)
            # A step that was begun early may have counted more already.
            least = 0 if num_rejected else block.num_tokens
            block.num_tokens = max(least, num_tokens)

    def release_passed(self, num_released: int) -> list[Block]:
        """Every window has passed the first `num_released` blocks; returns those still held."""
        passed = self.blocks[self.num_released : num_released]
        num_released = self.num_released + len(passed)
        self.blocks[:num_released] = [RELEASED] * num_released
        self.num_released = num_released
        return passed

    def start_at(self, num_blocks: int) -> None:
        """Put `num_blocks` released blocks before those that it holds."""
        self.blocks[:0], self.num_released = [RELEASED] * num_blocks, num_blocks

    def adopt(self, hits: list[Block], num_released: int) -> None:
        """Begin with these cached blocks, of which the first `num_released` are not needed."""
        self.blocks = [RELEASED] * num_released + hits[num_released:]
        self.published, self.num_released = list(hits), num_released

    def keep_first(self, num_kept: int) -> list[Block]:
        """Keep the first `num_kept` blocks; returns the others that were held.

        A table that has released blocks keeps nothing: what follows them could not be computed
        again.
        """
        if self.num_released:
            num_kept = 0
        dropped = self.blocks[max(num_kept, self.num_released) :]
        del self.blocks[num_kept:], self.published[num_kept:]
        self.num_released = 0
        num_tokens = num_kept * self.block_size
        self.num_shared_tokens = min(self.num_shared_tokens, num_tokens)
        self.commit(min(self.seq.num_computed, num_tokens))
        return dropped

    def writes(self, row: int, start: int, num_tokens: int) -> Iterator[Write]:
        """Where tokens from position `start` on are stored; the first is row `row` of a step.

        Tokens whose KV came from the prefix cache are left out: other sequences may be reading it.
        """
        size, stop = self.block_size, start + num_tokens
        position = max(start, self.num_shared_tokens)
        while position < stop:
            end = min(stop, (position // size + 1) * size)
            block, offset = self.blocks[position // size], position % size
            yield Write(row + position - start, block, offset, end - position)
            position = end
