"""Manages the blocks of both tiers: slots, reference counts, prefix hashes, LRU. No torch.

A Block is the KV of `block_size` consecutive tokens over all layers. It has a slot on the device,
on the host, on both, or (before anything is written) on neither. Block tables reference it; it is
cached if no table does but a hash lookup can find it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count

import xxhash


@dataclass(slots=True, eq=False)
class Block:
    """One block: `num_tokens` of its tokens are computed, the first `host_len` have a host copy.

    The device copy, where there is a device slot, holds all of them. `block_id` is never used
    again. `key` is set while the block, full and computed, is published: it can be found under
    `parent`. heat: its share of the attention of a sequence that drafts; see BlockHeat.
    """

    block_id: int = -1
    ref_count: int = 1
    num_tokens: int = 0
    device_slot: int | None = None
    host_slot: int | None = None
    host_len: int = 0
    key: BlockKey | None = None
    parent: Block | None = None
    heat: float = 0.0

    @property
    def is_on_host(self) -> bool:
        """True when the host copy is complete, so that the device copy can be dropped for free."""
        return self.host_slot is not None and self.host_len == self.num_tokens


class SlotPool:
    """The free slots of one tier. Only slots that were ever used take memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._freed: dict[int, None] = {}  # used before; the last freed is taken first
        self._next = 0  # slots from here on were never used ...
        self._ahead: set[int] = set()  # ... except these, which a caller preferred

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can return."""
        return len(self._freed) + self.num_slots - self._next - len(self._ahead)

    def allocate(self, preferred: int | None = None) -> int | None:
        """Take a slot: `preferred` if it is free, else the one freed last, else the lowest unused
        one; None if there is none.
        """
        if preferred is not None and self._is_free(preferred):
            if preferred in self._freed:
                del self._freed[preferred]
            else:
                self._ahead.add(preferred)
            return preferred
        if self._freed:
            return self._freed.popitem()[0]
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        if self._next == self.num_slots:
            return None
        self._next += 1
        return self._next - 1

    def free(self, slot: int) -> None:
        """Free a slot."""
        if not self._is_free(slot):
            self._freed[slot] = None

    @contextmanager
    def all_taken_but(self, num_kept: int) -> Iterator[None]:
        """Hide all free slots but the next `num_kept`; slots freed meanwhile can be taken."""
        kept = [slot for _ in range(num_kept) if (slot := self.allocate()) is not None]
        hidden = self._freed, self._next, self._ahead
        self._freed, self._next, self._ahead = dict.fromkeys(kept[::-1]), self.num_slots, set()
        try:
            yield
        finally:
            left = self._freed
            self._freed, self._next, self._ahead = hidden
            for slot in left:
                self.free(slot)

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is either free or held, exactly once."""
        slots = list(held)
        assert len(set(slots)) == len(slots), "a slot is held twice"
        assert not any(self._is_free(slot) for slot in slots), "a slot is both free and held"
        assert self.num_free + len(slots) == self.num_slots, "slots leaked"

    def _is_free(self, slot: int) -> bool:
        is_new = self._next <= slot < self.num_slots and slot not in self._ahead
        return is_new or slot in self._freed


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Lookup key of a full block: its tokens, and a digest of them and of all tokens before."""

    digest: bytes
    tokens: bytes


def block_key(before: BlockKey | None, token_ids: Sequence[int], salt: str = "") -> BlockKey:
    """The key of the full block with these tokens, after the block with key `before`.

    salt is part of the first block's tokens, so prompts with different salts share nothing.
    """
    tokens = array("i", token_ids).tobytes()
    if before is None and salt:  # a published block keeps its key, and a salt may be long
        tokens += sha256(salt.encode()).digest()
    return BlockKey(chain_digest(before.digest if before else b"", tokens), tokens)


def chain_digest(before: bytes, tokens: bytes) -> bytes:
    """xxh3-128 of a block's tokens, chained over the digest of everything before them."""
    return xxhash.xxh3_128_digest(before + tokens)


class BlockManager:
    """Owns the slots of both tiers and every block.

    At most `capacity` blocks may be referenced at once: all slots of both tiers minus `spare`
    slots, which are needed to move blocks when both tiers are full.

    cached: unreferenced published blocks, least recently used first. by_digest: the published
    blocks by the digest of their key. in_flight: the id of the sequence that computes a block, by
    its digest. is_whole: False in the middle of at_once(), for good where an error left it.
    """

    def __init__(self, num_device: int, num_host: int = 0, spare: int = 0) -> None:
        self.device = SlotPool(num_device)
        self.host = SlotPool(num_host)
        self.capacity = num_device + num_host - (spare if num_host else 0)
        self._ids = count()
        self._num_referenced = 0
        self.cached: OrderedDict[Block, None] = OrderedDict()
        self._cached_on_device: OrderedDict[Block, None] = OrderedDict()  # those with a device slot
        self.by_digest: dict[bytes, Block] = {}
        self.in_flight: dict[bytes, int] = {}
        self.is_whole = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Bookkeeping: an error in the middle leaves blocks and sequences that do not agree."""
        was_whole, self.is_whole = self.is_whole, False
        yield
        self.is_whole = was_whole

    @property
    def num_available(self) -> int:
        """Blocks that may still be referenced; cached blocks are evicted for them."""
        return self.capacity - self._num_referenced

    @property
    def oldest_on_device(self) -> Block | None:
        """The least recently used unreferenced block that has a device slot."""
        return next(iter(self._cached_on_device), None)

    def idle_device_slot(self) -> int | None:
        """Take a free device slot, or that of the oldest cached block if it is complete on the host
        or there is no host tier; None otherwise.
        """
        cached = self.oldest_on_device
        if cached is None or self.device.num_free:
            return self.device.allocate()
        if cached.is_on_host:
            return self.drop_device(cached)
        if self.host.num_slots:
            return None
        self.evict(cached)
        return self.device.allocate()

    def allocate(self) -> Block:
        """A new empty block with one reference and no slot; num_available must be above 0."""
        self._num_referenced += 1
        return Block(next(self._ids))

    def find(self, parent: Block | None, key: BlockKey) -> Block | None:
        """The published block with this key after `parent`, without taking a reference.

        Tokens and parent are compared, so a hash collision cannot give out another prompt's KV.
        """
        block = self.by_digest.get(key.digest)
        return block if block and block.key == key and block.parent is parent else None

    def promise(self, key: BlockKey, owner: int) -> None:
        """Record that `owner` will compute the block with this key, unless another owner will."""
        self.in_flight.setdefault(key.digest, owner)

    def withdraw(self, key: BlockKey, owner: int) -> None:
        """End `owner`'s promise: it has computed the block or never will."""
        if self.in_flight.get(key.digest) == owner:
            del self.in_flight[key.digest]

    def is_in_flight(self, key: BlockKey) -> bool:
        """True while a sequence computes the block with this key. A collision only costs a wait."""
        return key.digest in self.in_flight

    def acquire(self, block: Block) -> None:
        """Add a table's reference to the block."""
        if not block.ref_count:
            self._uncache(block)
            self._num_referenced += 1
        block.ref_count += 1

    def touch(self, blocks: Sequence[Block]) -> None:
        """Mark the cached ones of consecutive blocks as used now, the first one last."""
        for block in reversed(blocks):
            for cached in (self.cached, self._cached_on_device):
                if block in cached:
                    cached.move_to_end(block)

    def publish(self, block: Block, parent: Block | None, key: BlockKey) -> Block:
        """Make a full, computed block findable; returns the published block with this content.

        If another block with this content was published first, that one stays and is returned:
        following blocks are chained under it. One whose parent was evicted makes room.
        """
        if parent is not None and parent.key is None:  # the parent was evicted
            return block
        known = self.find(parent, key)
        if known is not None:
            return known
        old = self.by_digest.get(key.digest)
        if old is not None and old.parent is not None and old.parent.key is None:
            (self.unpublish if old.ref_count else self.evict)(old)  # no lookup can reach it
        if key.digest not in self.by_digest:
            block.key, block.parent = key, parent
            self.by_digest[key.digest] = block
        return block

    def release(self, block: Block) -> None:
        """Drop a table's reference; with the last, cache a published block and free others."""
        block.ref_count -= 1
        if block.ref_count:
            return
        self._num_referenced -= 1
        if block.key is None:
            self._free_slots(block)
        else:
            self.cached[block] = None
            if block.device_slot is not None:
                self._cached_on_device[block] = None

    def evict(self, block: Block) -> None:
        """Remove a cached block and free its slots."""
        self._uncache(block)
        self.unpublish(block)
        self._free_slots(block)

    def unpublish(self, block: Block) -> None:
        """Take a block out of the prefix lookup; tables may still hold it."""
        if block.key is not None:
            del self.by_digest[block.key.digest]
        block.key, block.parent = None, None

    def drop_device(self, block: Block) -> int:
        """Remove and return the device slot of a block that is complete on the host, or lost."""
        slot, block.device_slot = block.device_slot, None
        self._cached_on_device.pop(block, None)
        assert slot is not None
        return slot

    def drop_host(self, block: Block) -> int:
        """Remove and return the host slot of a block that has a device copy."""
        slot, block.host_slot, block.host_len = block.host_slot, None, 0
        assert slot is not None and block.device_slot is not None, "the last copy of a block"
        return slot

    def check(self, references: dict[Block, int]) -> None:
        """Raise AssertionError unless all slots and references are consistent.

        references: block -> number of tables holding it.
        """
        assert len(references) == self._num_referenced, "referenced blocks are miscounted"
        for block, num_tables in references.items():
            assert block.ref_count == num_tables, "a reference count is off"
        blocks = [*references, *self.cached]
        assert len(set(blocks)) == len(blocks), "a block is both referenced and cached"
        self.device.check(b.device_slot for b in blocks if b.device_slot is not None)
        self.host.check(b.host_slot for b in blocks if b.host_slot is not None)
        for block in self.by_digest.values():
            assert block.ref_count == references.get(block, 0), "a reference count is off"
            assert block.ref_count or block in self.cached, "published, but neither used nor cached"
            assert block.num_tokens, "published, but not computed"
        on_device = [b for b in self.cached if b.device_slot is not None]
        assert set(on_device) == set(self._cached_on_device), "the device's cache is miscounted"
        for block in blocks:
            copied = block.device_slot is not None or block.is_on_host
            assert copied or not block.num_tokens, "the last copy of a block is gone"
            assert block.host_len <= block.num_tokens, "a host copy is longer than the block"

    def _uncache(self, block: Block) -> None:
        del self.cached[block]
        self._cached_on_device.pop(block, None)

    def _free_slots(self, block: Block) -> None:
        if block.device_slot is not None:
            self.device.free(block.device_slot)
        if block.host_slot is not None:
            self.host.free(block.host_slot)
        block.device_slot = block.host_slot = None
        block.host_len = block.num_tokens = 0
