"""Which block holds what: free list, reference counts, prefix hashes, LRU. No torch, no sequences.

A Block is the KV of `block_size` consecutive tokens over all layers. It is referenced by the
tables that hold it, cached when nobody references it but its hash is known, and free otherwise.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool. `digest` is set once the block is full, computed and published."""

    slot: int
    ref_count: int = 0
    digest: bytes | None = None
    parent: Block | None = None
    tokens: bytes = b""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes, to hash and to compare."""
    return array("i", token_ids).tobytes()


def chain_digest(parent: Block | None, tokens: bytes) -> bytes:
    """xxh3-128 of a full block's tokens, chained over everything before them."""
    previous = parent.digest if parent is not None and parent.digest is not None else b""
    return xxhash.xxh3_128_digest(previous + tokens)


class BlockManager:
    """Hands out the blocks of one pool and remembers the full ones by their content."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, Block] = (
            OrderedDict()
        )  # slot -> unreferenced block, oldest first
        self._by_digest: dict[bytes, Block] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still hand out: free ones and unreferenced cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content may be found again."""
        return len(self._cached)

    def allocate(self) -> Block:
        """A block with one reference; evicts the least recently used cached block when none is
        free.
        """
        if not self._free:
            self._evict()
        return Block(self._free.popleft(), ref_count=1)

    def find(self, parent: Block | None, tokens: bytes) -> Block | None:
        """The published block that holds `tokens` after `parent`, without taking a reference.

        Tokens and parent are compared, so a hash collision cannot give out another prompt's KV.
        """
        block = self._by_digest.get(chain_digest(parent, tokens))
        return block if block and block.tokens == tokens and block.parent is parent else None

    def is_cached(self, block: Block) -> bool:
        """True when nobody references the block but it can still be found."""
        return block.slot in self._cached

    def acquire(self, block: Block) -> None:
        """One more table holds the block."""
        self._cached.pop(block.slot, None)
        block.ref_count += 1

    def publish(self, block: Block, parent: Block | None, tokens: bytes) -> Block:
        """Make a full, computed block findable; returns the block that stands for this content.

        When another block with the same content was published first, that one stays and is
        returned: it is the parent under which the following blocks are chained.
        """
        if (
            parent is not None and parent.digest is None
        ):  # evicted meanwhile: nothing to chain under
            return block
        known = self.find(parent, tokens)
        if known is not None:
            return known
        digest = chain_digest(parent, tokens)
        if digest not in self._by_digest:
            block.digest, block.parent, block.tokens = digest, parent, tokens
            self._by_digest[digest] = block
        return block

    def release(self, block: Block) -> None:
        """One table less holds the block; unreferenced it stays cached if published, else is
        free.
        """
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.digest is None:
            self._free.append(block.slot)
        else:
            self._cached[block.slot] = block

    def reset_cache(self) -> None:
        """Forget every published block; those in use stay in use."""
        while self._cached:
            self._evict()
        for block in self._by_digest.values():
            block.digest = None
        self._by_digest.clear()

    def check(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless free, cached and referenced blocks add up.

        references: slot -> number of tables holding it.
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not (free | cached) & references.keys(), (
            "a block is in two states"
        )
        assert len(free) + len(cached) + len(references) == self.num_blocks, "blocks leaked"
        for block in self._by_digest.values():
            assert block.ref_count == references.get(block.slot, 0), "reference count is off"
            assert block.ref_count or block.slot in cached, (
                "a published block is neither used nor cached"
            )

    def _evict(self) -> None:
        _, block = self._cached.popitem(last=False)
        if block.digest is not None:
            del self._by_digest[block.digest]
        block.digest, block.parent = None, None
        self._free.append(block.slot)
