"""StateSlots: the recurrent states of the sequences that run, and snapshots of states on the host.

Unlike KV, a state cannot be cut at an earlier token. A sequence that lost its state, or begins with
a cached prefix, goes on from the end of a block that has a snapshot. If guesses were wrong, it goes
on from the state before them and computes the right ones once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

from nanoengine.errors import EngineError
from nanoengine.kv.block_manager import Block
from nanoengine.kv.block_table import BlockTable
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.sequence import ScheduledBatch

UNKNOWN = -1  # a step has begun to change the state and has not ended


class StateSnapshots:
    """Which block has the snapshot of the state at its end. The one used longest ago makes room.

    places: of blocks that have one, that used longest ago first.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))[::-1]
        self.places: OrderedDict[Block, int] = OrderedDict()

    def __contains__(self, block: Block) -> bool:
        return block in self.places

    def num_before(self, blocks: Sequence[Block]) -> int:
        """How many of these consecutive blocks lie before the last snapshot among them."""
        found = (n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self.places)
        return next(found, 0)

    def use(self, block: Block) -> int:
        """The place of the snapshot of a block that has one."""
        self.places.move_to_end(block)
        return self.places[block]

    def add(self, block: Block) -> int:
        """A place for the snapshot of this block; there is one at least."""
        if block not in self.places:
            if not self._free:
                gone = (b for b in self.places if not b.ref_count and b.key is None)
                self._free.append(self.places.pop(next(gone, next(iter(self.places)))))
            self.places[block] = self._free.pop()
        return self.use(block)


class StateSlots:
    """Which sequence has which slot of KVMemory.states, and how many tokens its state has seen.
    Without recurrent layers every method does nothing.
    """

    def __init__(self, spec: KVSpec, memory: KVMemory, tables: Mapping[int, BlockTable]) -> None:
        """tables: by seq_id, of every sequence."""
        self._spec, self._memory, self._tables = spec, memory, tables
        self._free = list(range(spec.num_states))[::-1]
        self._slots: dict[int, int] = {}  # by seq_id, the one that took its slot first comes first
        self._lengths: dict[int, int] = {}  # by seq_id, the tokens behind its state
        self.snapshots = StateSnapshots(spec.num_snapshots)

    def take(self, table: BlockTable, running: Container[int]) -> None:
        """Give a sequence a slot, if it has none, and load the state at its last computed token. If
        no slot is free, one that does not run loses its own. running: the ids of those that do.
        """
        seq_id = table.seq.seq_id
        if not self._spec.num_states:
            return
        if seq_id not in self._slots:
            if not self._free:
                idle = [other for other in self._slots if other not in running]
                if not idle:
                    raise EngineError("more sequences run than there are recurrent states")
                self.release(idle[-1])
            self._slots[seq_id], self._lengths[seq_id] = self._free.pop(), 0
        self.load(table)

    def release(self, seq_id: int) -> None:
        """Free the slot of a sequence, if it has one."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            del self._lengths[seq_id]
            self._free.append(slot % self._spec.num_states)

    def is_at(self, table: BlockTable, num_ahead: int = 0) -> bool:
        """Whether the next token of a sequence can be computed, `num_ahead` tokens after those with
        KV. The first one always can be.
        """
        num_tokens = table.seq.num_computed + num_ahead
        known = self._lengths.get(table.seq.seq_id)
        return not self._spec.num_states or not num_tokens or known == num_tokens

    def num_resumable(self, blocks: Sequence[Block]) -> int:
        """How many of these consecutive blocks a sequence can begin with: to the last snapshot."""
        return self.snapshots.num_before(blocks) if self._spec.num_states else len(blocks)

    def load(self, table: BlockTable) -> None:
        """Load the snapshot at the last computed token, unless the state is there already."""
        seq_id, computed = table.seq.seq_id, table.seq.num_computed
        slot = self._slots.get(seq_id)
        if slot is not None and not self.is_at(table):
            block = table.blocks[computed // table.block_size - 1]
            self._memory.load_state(self.snapshots.use(block), slot)
            self._lengths[seq_id] = computed

    def tokens_to_stop(self, table: BlockTable, computed: int, num_tokens: int) -> int:
        """How many of these tokens a step computes: it ends where a snapshot may be of use."""
        if not self._spec.num_snapshots:
            return num_tokens
        stop = table.next_stop(computed, num_tokens)
        return num_tokens if stop is None else min(num_tokens, stop - computed)

    def keep(self, batch: ScheduledBatch) -> None:
        """A step is about to begin: keep the state of each sequence that has guesses in it."""
        for item in batch.items if self._spec.num_states else ():
            if item.guesses:
                slot = self._slots[item.seq.seq_id]
                self._memory.copy_state(slot, self._other(slot))

    def go_back(self, table: BlockTable) -> bool:
        """Guesses of the last step were wrong: the sequence gets its state before that step back.
        False without recurrent layers: KV can be cut after the last right guess.
        """
        seq_id = table.seq.seq_id
        if not self._spec.num_states:
            return False
        self._slots[seq_id] = self._other(self._slots[seq_id])
        self._lengths[seq_id] = table.seq.num_computed
        return True

    def _other(self, slot: int) -> int:
        """The second slot of a sequence that has this one."""
        return (slot + self._spec.num_states) % self._spec.num_state_slots

    def begin(self, batch: ScheduledBatch, num_rows: int) -> tuple[int, ...]:
        """Returns the slot of each sequence of a step, whose states it changes. Padding rows, up to
        num_rows, get the last slot, which no sequence has.
        """
        if not self._spec.num_states:
            return ()
        seq_ids = [item.seq.seq_id for item in batch.items]
        self._lengths.update(dict.fromkeys(seq_ids, UNKNOWN))
        slots = [self._slots[seq_id] for seq_id in seq_ids]
        return (*slots, *[self._spec.num_state_slots] * (num_rows - len(slots)))

    def end(self, batch: ScheduledBatch) -> None:
        """The step has changed these states. Take snapshots of sequences without guesses."""
        for item in batch.items if self._spec.num_states else ():
            self._lengths[item.seq.seq_id] = item.start + item.num_tokens
            if not item.guesses:
                self._take_snapshot(self._tables[item.seq.seq_id])

    def settle(self, table: BlockTable) -> None:
        """No guess of the last step was wrong: take the snapshot that `end` has put off."""
        if self._spec.keeps_states and self.is_at(table):
            self._take_snapshot(table)

    def _take_snapshot(self, table: BlockTable) -> None:
        """Take a snapshot of a sequence's state, where one is likely to be used."""
        seq_id = table.seq.seq_id
        index, rest = divmod(self._lengths[seq_id], table.block_size)
        if self._spec.num_snapshots and not rest and table.is_resumable(index):
            block = table.found_as(index - 1)
            if block not in self.snapshots:
                self._memory.save_state(self._slots[seq_id], self.snapshots.add(block))

    def check(self) -> None:
        """Raise AssertionError unless every slot is free or held once, by a sequence that lives."""
        held = [*(slot % self._spec.num_states for slot in self._slots.values()), *self._free]
        assert sorted(held) == list(range(self._spec.num_states)), "a slot is lost"
        assert self._slots.keys() <= self._tables.keys(), "a sequence that ended has a slot"
