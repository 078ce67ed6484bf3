"""Placement: which blocks move between the tiers for one step. Knows blocks, no tensors.

A block that the step writes must have a device slot; other blocks may be read from the host.
Device slots are taken in this order: free ones, those of cached blocks (LRU), then those of
referenced blocks in the order of `drop_ranks`, once their host copy is complete. The last copy of a
referenced block is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.step_plan import Load, Store

Tables = list[list[Block]]


@dataclass(frozen=True, slots=True)
class StepTables:
    """The blocks of all sequences: in the step, running but not in this step, preempted.

    kept: blocks that running sequences should keep on the device, see KVSpec.kept_blocks.
    """

    in_step: Tables
    running: Tables = field(default_factory=list)
    preempted: Tables = field(default_factory=list)
    kept: frozenset[Block] = frozenset()

    @property
    def all(self) -> Tables:
        """All tables."""
        return [*self.preempted, *self.running, *self.in_step]


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """How early a block loses its device copy: the lowest rank first.

    priority: PREEMPTED, RUNNING or IN_STEP. length_rank: lower for longer sequences, by powers of
    two.
    """

    is_kept: bool
    priority: int
    length_rank: int
    is_shared: bool
    is_first: bool
    heat: float
    index: int


PREEMPTED, RUNNING, IN_STEP = range(3)
HOTTER = 1.5  # how many times as hot a block must be to take a place, or swaps would alternate
SWAPPED_SHARE = 4  # a step swaps at most one in so many of a sequence's device blocks
SAVED_AT_ONCE = 8  # blocks of a sequence that save_between copies in a step
ANY_LENGTH = 1  # a length_rank above that of every sequence


def drop_ranks(tables: StepTables) -> dict[Block, Rank]:
    """The order in which blocks lose their device copy when the device is full.

    Preempted sequences first, then running ones outside the step, then those in the step; within
    each, blocks of long sequences before those of short ones, so that a short one stays resident
    beside a long one; blocks of one sequence before shared ones; middle blocks, those that get
    least attention and then the oldest first, before the first block; kept blocks last. Among
    equals any choice streams the same bytes: a step reads every block once.
    """
    ranks: dict[Block, Rank] = {}
    for priority, group in enumerate((tables.preempted, tables.running, tables.in_step)):
        for blocks in group:
            for index, block in enumerate(blocks):
                if block.device_slot is not None:
                    rank = Rank(
                        is_kept=block in tables.kept,
                        priority=priority,
                        length_rank=_length_rank(blocks),
                        is_shared=block.ref_count > 1,
                        is_first=index == 0,
                        heat=block.heat,
                        index=index,
                    )
                    ranks[block] = max(rank, ranks.get(block, rank))
    return ranks


def _length_rank(blocks: list[Block]) -> int:
    return -len(blocks).bit_length()


class Placement:
    """Decides, for one step, which blocks move between the tiers."""

    def __init__(self, blocks: BlockManager, tables: StepTables) -> None:
        self.stores: dict[Block, Store] = {}
        self.loads: dict[Block, Load] = {}
        self._blocks = blocks
        self._tables = tables
        self._pinned: set[Block] = set()

    def place(self, written: list[Block]) -> None:
        """Give a device slot to every block that the step writes, and load the KV it has."""
        self._pinned.update(written)
        for block in written:
            if block.device_slot is None:
                slot = self._device_slot()
                assert slot is not None, "no device slot for a block that was granted one"
                self._move_in(block, slot)

    def promote(self) -> None:
        """Bring host blocks of the step into device slots. First kept blocks, into slots that hold
        no kept block. Then all, shortest sequences first, into slots that no running sequence uses
        or only longer ones, which stream anyway.
        """
        tables, kept = self._tables.in_step, self._tables.kept
        of_windows = ((b, ANY_LENGTH) for blocks in tables if kept for b in blocks if b in kept)
        by_length = sorted(tables, key=len)
        of_all = ((b, _length_rank(blocks)) for blocks in by_length for b in blocks)
        for wanted in (of_windows, of_all):
            for block, length_rank in wanted:
                if block.num_tokens and block.device_slot is None:
                    slot = self._device_slot(length_rank)
                    if slot is None:
                        break
                    self._move_in(block, slot)

    def swap_hot(self, blocks: list[Block]) -> None:
        """Bring the blocks of a sequence that attention looks at most to the device, in place of
        those that it looks at least. A few at a time: each swap is one more block on the link.
        """
        self._swap(blocks[:-1], lambda block: block.heat, HOTTER)

    def swap_recent(self, blocks: list[Block]) -> None:
        """Bring the most recent blocks of a sequence to the device, in place of the first ones. A
        run of device blocks is read in place; a single one would be streamed with its neighbours.
        """
        places = {block: place for place, block in enumerate(blocks)}
        self._swap(blocks[1:-1], places.__getitem__, 1)

    def _swap(self, blocks: list[Block], worth: Callable[[Block], float], least: float) -> None:
        """Let blocks that are worth more than `least` times as much take the places of others."""
        loose = [b for b in blocks if b not in self._pinned and b not in self._tables.kept]
        there = sorted((b for b in loose if b.device_slot is not None), key=worth)
        away = (b for b in loose if b.device_slot is None and b.num_tokens)
        best = sorted(away, key=worth, reverse=True)[: max(1, len(there) // SWAPPED_SHARE)]
        for worst, better in zip(there, best, strict=False):
            if worth(better) <= least * worth(worst) or not self._save(worst):
                return
            self._move_in(better, self._blocks.drop_device(worst))

    def save_between(self, blocks: list[Block]) -> None:
        """Give host copies to device blocks that lie before a host block of their sequence, a few
        at a time, so that all can be streamed together (step_plan.without_short_runs).
        """
        last = max((at for at, block in enumerate(blocks) if block.device_slot is None), default=0)
        alone = [b for b in blocks[:last] if not b.is_on_host and b not in self._pinned]
        for block in alone[:SAVED_AT_ONCE]:
            if self._blocks.host.num_free:
                self._save(block)

    def moved_tokens(self, blocks: list[Block]) -> tuple[int, int]:
        """How many tokens of these blocks are loaded, and how many are stored."""
        loads = (self.loads[block] for block in blocks if block in self.loads)
        stores = (self.stores[block] for block in blocks if block in self.stores)
        return sum(x.num_tokens for x in loads), sum(x.stop - x.start for x in stores)

    def undo_loads(self) -> None:
        """After a failed step: blocks that it would have loaded are on the host only."""
        for block in self.loads:
            if block.device_slot is not None:
                self._blocks.device.free(self._blocks.drop_device(block))

    def _move_in(self, block: Block, slot: int) -> None:
        block.device_slot = slot
        self._pinned.add(block)
        if block.num_tokens:
            assert block.host_slot is not None and block.is_on_host
            self.loads[block] = Load(block.host_slot, slot, block.num_tokens)

    def _device_slot(self, for_length_rank: int | None = None) -> int | None:
        """A free device slot; else that of a cached block; else that of the first in drop order.

        for_length_rank: take none from a kept block, nor from a running sequence of this rank or
        above.
        """
        slot = self._blocks.device.allocate()
        if slot is not None:
            return slot
        cached = self._blocks.oldest_on_device
        if cached is not None:
            return self._take_from_cached(cached)
        for block, rank in self._victims:
            if block.device_slot is None or block in self._pinned:
                continue
            is_running = rank.priority != PREEMPTED
            if for_length_rank is not None and (
                rank.is_kept or (is_running and rank.length_rank >= for_length_rank)
            ):
                continue
            if self._save(block):
                return self._blocks.drop_device(block)
        return None

    def _take_from_cached(self, block: Block) -> int:
        """The device slot of a cached block; it stays cached on the host if there is room."""
        if not block.is_on_host and (block.host_slot is not None or self._blocks.host.num_free):
            self._save(block)
        slot = self._blocks.drop_device(block)
        if not block.is_on_host:
            self._blocks.evict(block)
        return slot

    def _save(self, block: Block) -> bool:
        """Make the host copy complete; False if there is no host slot for it."""
        if block.is_on_host or not block.num_tokens:  # empty after a step that failed
            return True
        if block.host_slot is None:
            block.host_slot = self._host_slot(block)
        if block.host_slot is None or block.device_slot is None:
            return False
        slots = block.device_slot, block.host_slot
        self.stores[block] = Store(*slots, block.host_len, block.num_tokens)
        block.host_len = block.num_tokens
        return True

    def _host_slot(self, block: Block) -> int | None:
        """A free host slot, if possible next to that of the block before; else a reclaimed one."""
        before = self._before.get(block)
        next_to = before.host_slot + 1 if before and before.host_slot is not None else None
        slot = self._blocks.host.allocate(next_to)
        if slot is not None:
            return slot
        cached = next((b for b in self._blocks.cached if b.host_slot is not None), None)
        if cached is not None:
            if cached.device_slot is not None:
                return self._blocks.drop_host(cached)
            self._blocks.evict(cached)
            return self._blocks.host.allocate()
        for blocks in self._tables.all:
            for other in blocks:  # a second copy of a block that stays on the device
                twice = other.device_slot is not None and other.host_slot is not None
                if twice and other is not block and other not in self.loads:
                    return self._blocks.drop_host(other)
        return None

    @cached_property
    def _victims(self) -> Iterator[tuple[Block, Rank]]:
        """The blocks on the device that were not looked at yet, in drop order."""
        return iter(sorted(drop_ranks(self._tables).items(), key=itemgetter(1)))

    @cached_property
    def _before(self) -> dict[Block, Block]:
        """The block before each one in its sequence."""
        pairs = (pair for blocks in self._tables.all for pair in pairwise(blocks))
        return {after: before for before, after in pairs}


def device_slot(block: Block) -> int:
    """The slot of a block that is on the device."""
    assert block.device_slot is not None
    return block.device_slot
