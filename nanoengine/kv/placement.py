"""Which blocks move between the tiers for one step. Knows blocks and tables of blocks, no tensors.

A block that the step writes must have a device slot; what is not there is read from the host. Slots
are taken in this order: free ones, those of blocks that nobody references (LRU), then those of
referenced blocks in `drop_order`, once their host copy is complete. The last copy of a referenced
block is never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.step_plan import Load, Store

Tables = list[list[Block]]


@dataclass(frozen=True, slots=True)
class StepTables:
    """The blocks of all sequences: of those in the step, of those that run but sit this step out,
    and of preempted ones. tails: what running ones should keep on the device, see KVSpec.
    """

    active: Tables
    resting: Tables = field(default_factory=list)
    parked: Tables = field(default_factory=list)
    tails: frozenset[Block] = frozenset()

    @property
    def all(self) -> Tables:
        """All tables."""
        return [*self.parked, *self.resting, *self.active]


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """How early a block loses its device copy: the lowest rank first.

    is_tail: of a running sequence. standing: PARKED, RESTING or ACTIVE. shortness: less the longer
    the sequence, by powers of two.
    """

    is_tail: bool
    standing: int
    shortness: int
    is_shared: bool
    is_first: bool
    index: int


PARKED, RESTING, ACTIVE = range(3)
ANY = 1  # shortness above that of every sequence


def drop_ranks(tables: StepTables) -> dict[Block, Rank]:
    """Which blocks with a device copy lose it first, when the device is full.

    Blocks of preempted sequences go before those of resting ones, and these before those of the
    step. Then long sequences (by powers of two) before short ones, so that a short one stays
    resident beside a long one; blocks of one sequence before shared ones; middle blocks, oldest
    first, before the first block; tails last of all. Among equals any choice streams the same
    bytes: a step reads every block once.
    """
    ranks: dict[Block, Rank] = {}
    for standing, group in enumerate((tables.parked, tables.resting, tables.active)):
        for blocks in group:
            for index, block in enumerate(blocks):
                if block.device_slot is not None:
                    is_shared = block.ref_count > 1
                    is_tail = block in tables.tails
                    rank = Rank(is_tail, standing, _shortness(blocks), is_shared, index == 0, index)
                    ranks[block] = max(rank, ranks.get(block, rank))
    return ranks


def _shortness(blocks: list[Block]) -> int:
    return -len(blocks).bit_length()


class Placement:
    """Decides, for one step, which blocks move between the tiers."""

    def __init__(self, manager: BlockManager, tables: StepTables) -> None:
        self.stores: dict[Block, Store] = {}
        self.loads: dict[Block, Load] = {}
        self._manager = manager
        self._tables = tables
        self._ranks: dict[Block, Rank] = {}
        self._pinned: set[Block] = set()
        self._victims: Iterator[Block] | None = None
        self._predecessors: dict[Block, Block] | None = None

    def place(self, written: list[Block]) -> None:
        """Give every block that the step writes a device slot, and load what it held."""
        self._pinned.update(written)
        for block in written:
            if block.device_slot is None:
                slot = self._device_slot()
                assert slot is not None, "no device slot for a block that was granted one"
                self._move_in(block, slot)

    def promote(self) -> None:
        """Bring host blocks of the step into device slots: tails, where no other tail is; then into
        slots that nobody running uses, or only sequences that stream anyway, because they are
        longer: beside these short ones are resident.
        """
        tails = self._tables.tails
        for block in (b for blocks in self._tables.active if tails for b in blocks):
            if block in tails and block.num_tokens and block.device_slot is None:
                slot = self._device_slot(for_shortness=ANY)
                if slot is None:
                    break
                self._move_in(block, slot)
        for blocks in sorted(self._tables.active, key=len):
            for block in blocks:
                if block.num_tokens and block.device_slot is None:
                    slot = self._device_slot(for_shortness=_shortness(blocks))
                    if slot is None:
                        return
                    self._move_in(block, slot)

    def moved_tokens(self, blocks: list[Block]) -> tuple[int, int]:
        """Of these blocks, the tokens that are loaded and those that are stored."""
        loads = (self.loads[block] for block in blocks if block in self.loads)
        stores = (self.stores[block] for block in blocks if block in self.stores)
        return sum(x.num_tokens for x in loads), sum(x.stop - x.start for x in stores)

    def undo_loads(self) -> None:
        """After a step that failed: what was to be loaded is on the host only."""
        for block in self.loads:
            if block.device_slot is not None:
                self._manager.device.give(self._manager.drop_device(block))

    def _move_in(self, block: Block, slot: int) -> None:
        block.device_slot = slot
        self._pinned.add(block)
        if block.num_tokens:
            assert block.host_slot is not None and block.is_on_host
            self.loads[block] = Load(block.host_slot, slot, block.num_tokens)

    def _device_slot(self, for_shortness: int | None = None) -> int | None:
        """A free device slot; else that of a cached block, else of the first in the drop order: of
        one that is no tail and not of a running sequence as short as that.
        """
        slot = self._manager.device.take()
        if slot is not None:
            return slot
        cached = self._manager.oldest_on_device
        if cached is not None:
            return self._take_from_cached(cached)
        if self._victims is None:
            self._ranks = drop_ranks(self._tables)
            self._victims = iter(sorted(self._ranks, key=self._ranks.__getitem__))
        for block in self._victims:
            if block.device_slot is None or block in self._pinned:
                continue
            rank = self._ranks[block]
            is_running = rank.standing != PARKED
            if for_shortness is not None and (
                rank.is_tail or (is_running and rank.shortness >= for_shortness)
            ):
                continue
            if self._save(block):
                return self._manager.drop_device(block)
        return None

    def _take_from_cached(self, block: Block) -> int:
        """The device slot of an unreferenced block; it stays cached on the host if there is
        room.
        """
        if not block.is_on_host and (block.host_slot is not None or self._manager.host.num_free):
            self._save(block)
        if block.is_on_host:
            return self._manager.drop_device(block)
        slot = self._manager.drop_device(block)
        self._manager.evict(block)
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
        """A free host slot, next to that of the block before if it can be; else a reclaimed one."""
        before = self._before().get(block)
        next_to = before.host_slot + 1 if before and before.host_slot is not None else None
        slot = self._manager.host.take(next_to)
        if slot is not None:
            return slot
        for cached in list(self._manager.cached):
            if cached.host_slot is not None:
                if cached.device_slot is not None:
                    return self._manager.drop_host(cached)
                self._manager.evict(cached)
                return self._manager.host.take()
        for blocks in self._tables.all:
            for other in blocks:  # a second copy of a block that stays on the device
                twice = other.device_slot is not None and other.host_slot is not None
                if twice and other is not block and other not in self.loads:
                    return self._manager.drop_host(other)
        return None

    def _before(self) -> dict[Block, Block]:
        if self._predecessors is None:
            pairs = (pair for blocks in self._tables.all for pair in pairwise(blocks))
            self._predecessors = {after: before for before, after in pairs}
        return self._predecessors


def device_slot(block: Block) -> int:
    """The slot of a block that is on the device."""
    assert block.device_slot is not None
    return block.device_slot
