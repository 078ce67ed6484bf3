"""StepPlanner: from a batch and its block tables to a StepPlan. Knows blocks, no tensors.

Placement gives a device slot to every block that the step writes, and decides which blocks move;
plan_reads cuts what the step reads into calls of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.block_table import BlockTable, Write
from nanoengine.kv.draft_plan import DraftReads, kept_blocks, most_kept, plan_draft
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.placement import Placement, StepTables, device_slot
from nanoengine.kv.state_slots import StateSlots
from nanoengine.kv.step_plan import (
    DEVICE,
    HOST,
    Location,
    Part,
    SlotWrite,
    StepPlan,
    StepTransfers,
    fills_of_layers,
    plan_reads,
    streamed_bytes,
    unseen_parts,
    without_short_runs,
)
from nanoengine.outputs import RequestMetrics
from nanoengine.sequence import ScheduledBatch

Locate = Callable[[int], tuple[int, int]]
# Rows of a step that are padded, at most: more take longer, on a GPU too.
MOST_CHECKED = 64


@dataclass(frozen=True, slots=True)
class StepPadding:
    """How decode steps get padding rows, which belong to no sequence.

    laid_out: number of sequences -> the number that a step is laid out for, so that fewer shapes
    occur; None: as many as it has. checked_rows: the fewest rows of each sequence, so that products
    do not depend on how many guesses are checked; 0: no more than it has.
    """

    laid_out: Callable[[int], int] | None = None
    checked_rows: int = 0

    def of(self, batch: ScheduledBatch) -> int:
        """How many padding rows a step gets, so that guesses do not change the bits."""
        num_rows = len(batch.items) * self.checked_rows
        if num_rows > MOST_CHECKED or not batch.is_decode:
            return 0
        laid_out = self.laid_out(num_rows) if self.laid_out else num_rows
        return max(0, laid_out - batch.num_tokens)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, the blocks that it writes and moves (placement), and the metrics of the sequences
    that read host KV (streamed). drafts: reads of sequences that draft before the step; of_resting:
    of sequences outside the step, which draft between its layers.
    """

    plan: StepPlan
    writes: tuple[Write, ...]
    placement: Placement
    streamed: tuple[RequestMetrics, ...]
    drafts: tuple[DraftReads, ...]
    of_resting: tuple[DraftReads, ...]


class StepPlanner:
    """Plans one step after the other; what it changes is where blocks lie."""

    def __init__(
        self,
        spec: KVSpec,
        blocks: BlockManager,
        locate: Locate | None,
        states: StateSlots,
        padding: StepPadding | None = None,
    ) -> None:
        """locate: host slot -> (segment of the host pool, place in it); None without a host tier.
        padding: None: no step is padded.
        """
        self.states, self.blocks = states, blocks
        self._spec = spec
        self._least_run, self._read_bytes = spec.least_run, spec.read_bytes
        self._loads = spec.load_bytes // spec.block_size  # bytes of a token
        self._stores = spec.host_block_bytes // spec.block_size
        self._locate = locate
        self._padding = padding or StepPadding()

    def plan(self, batch: ScheduledBatch, tables: Mapping[int, BlockTable]) -> PlannedStep:
        """Place the blocks that the batch writes, and plan what it reads and moves."""
        step = [tables[item.seq.seq_id] for item in batch.items]
        writes = tuple(self._writes(batch, step))
        resting = [tables[item.seq.seq_id] for item in batch.resting]
        tails = self._tails(batch, resting)
        placement = self._place(batch, tables, [*(write.block for write in writes), *tails])
        stops = [
            -(-(item.start + item.num_tokens) // self._spec.block_size) for item in batch.items
        ]
        seen = [t.blocks[t.num_released : stop] for t, stop in zip(step, stops, strict=True)]
        parts = plan_reads(
            [self._locations(blocks) for blocks in seen],
            self._spec.slot_blocks,
            [table.num_released for table in step],
        )
        starts = [item.start for item in batch.items]
        unseen = unseen_parts(parts, starts, self._spec.block_size, self._spec.windows)
        metrics = [item.seq.metrics for item in batch.items]
        self._count_transfers(metrics, seen, placement, parts, unseen)
        streamed = {span.sequence for part in parts if part.tier != DEVICE for span in part.spans}
        num_padding = self._padding.of(batch)
        num_rows = self._num_rows(parts, batch, num_padding)
        num_sequences = max(num_rows, len(batch.items) + num_padding)
        plan = StepPlan(
            num_tokens=batch.num_tokens,
            num_rows=num_rows,
            writes=tuple(
                SlotWrite(write.row, device_slot(write.block), write.offset, write.num_tokens)
                for write in writes
            ),
            write_slots=tuple(dict.fromkeys(device_slot(write.block) for write in writes)),
            reads=tuple(parts),
            unseen=unseen,
            transfers=self._transfers(batch, placement, parts, unseen, seen),
            state_slots=self.states.begin(batch, num_sequences),
            num_padding=num_padding,
        )
        counted = tuple(metrics[index] for index in streamed)
        drafts = tuple(self._drafts(batch, step, placement))
        of_resting = tuple(self._drafts(batch.of_resting, resting, placement))
        return PlannedStep(plan, writes, placement, counted, drafts, of_resting)

    def plan_draft(self, drafts: Sequence[DraftReads], number: int) -> StepPlan:
        """The step in which each of these sequences makes draft `number`."""
        laid_out = self._padding.laid_out
        num_rows = laid_out(len(drafts)) if laid_out else 0
        return plan_draft(drafts, number, self._spec.block_size, num_rows)

    def _drafts(
        self, batch: ScheduledBatch, step: list[BlockTable], placement: Placement
    ) -> Iterable[DraftReads]:
        """What the drafts of the batch read: blocks on the device, without those that the step
        loads. A sequence whose newest token lies in a shared block does not draft: the step would
        not overwrite what the draft wrote there.
        """
        size, stands = self._spec.block_size, self._spec.drafts_stand
        for index, (item, table) in enumerate(zip(batch.items, step, strict=True)):
            overwrites = stands or item.start >= table.num_shared_tokens
            if not item.num_drafts or not overwrites:
                continue
            first, stop = item.start // size, -(-(item.start + item.num_tokens) // size)
            tail = table.blocks[first:stop]
            if any(b in placement.loads or b.device_slot is None for b in tail):
                continue
            before = table.blocks[:first]
            there = (b.device_slot is not None and b not in placement.loads for b in before)
            heat = [b.heat if is_there else None for b, is_there in zip(before, there, strict=True)]
            # Half of the kept blocks are the most recent: enough for the widest window. The MTP
            # head, which drafts after a guess, and other models are small: they read all.
            reads_all = self._spec.drafts_apart or item.guesses
            least = len(before) if reads_all else 2 * self._spec.widest_blocks
            kept = kept_blocks(heat, most_kept(heat, size, least))
            slots = tuple(device_slot(before[i]) for i in kept)
            tail_slots = tuple(map(device_slot, tail))
            reads = DraftReads(index, item.start, item.num_drafts, slots, tail_slots, stands)
            if reads.num_keys(0, size):
                yield reads

    def _tails(self, batch: ScheduledBatch, resting: list[BlockTable]) -> Iterable[Block]:
        """The blocks that resting sequences draft into, without those that would need a load."""
        for write in self._writes(batch.of_resting, resting):
            if write.block.device_slot is not None or not write.block.num_tokens:
                yield write.block

    def _writes(self, batch: ScheduledBatch, step: list[BlockTable]) -> Iterable[Write]:
        """Where the KV of the batch's tokens is stored, block by block."""
        row = 0
        for table, item in zip(step, batch.items, strict=True):
            yield from table.writes(row, item.start, item.num_tokens)
            row += item.num_tokens

    def _place(
        self, batch: ScheduledBatch, tables: Mapping[int, BlockTable], written: Iterable[Block]
    ) -> Placement:
        placement = Placement(self.blocks, self._step_tables(batch, tables))
        placement.place(list(dict.fromkeys(written)))
        if self._spec.slot_blocks:
            placement.promote()
            swap = placement.swap_hot if batch.may_draft else placement.swap_recent
            for item in batch.items:
                if item.seq.draft_length is not None and not item.seq.is_prefill:
                    held = tables[item.seq.seq_id].held
                    swap(held)
                    if self._least_run > 1:
                        placement.save_between(held)
        return placement

    def _step_tables(self, batch: ScheduledBatch, tables: Mapping[int, BlockTable]) -> StepTables:
        starts = {item.seq.seq_id: item.start for item in batch.items}
        step = [tables[seq_id] for seq_id in starts]
        others = [t for seq_id, t in tables.items() if seq_id not in starts]
        running = [t for t in others if not t.is_preempted]
        kept: set[Block] = set()
        if self._spec.kept_blocks > 1:
            for table in (*step, *running):
                start = starts.get(table.seq.seq_id, table.seq.num_computed)
                first = max(table.num_released, self._spec.first_kept(start))
                kept.update(table.blocks[first:])
        return StepTables(
            [table.held for table in step],
            [table.held for table in running],
            [table.held for table in others if table.is_preempted],
            frozenset(kept),
        )

    def _locations(self, blocks: list[Block]) -> list[Location]:
        """Where a step reads the blocks of a sequence."""
        where = [self._location(block) for block in blocks]
        if not self._least_run or all(tier == DEVICE for tier, _ in where):
            return where
        copies = [
            (HOST, block.host_slot) if block.host_slot is not None and block.is_on_host else None
            for block in blocks
        ]
        return without_short_runs(where, copies, self._least_run)

    def _location(self, block: Block) -> Location:
        """Where a step reads the block: on the device if it is there."""
        if block.device_slot is not None:
            return DEVICE, block.device_slot
        assert block.host_slot is not None and self._locate is not None
        if self._spec.slot_blocks:
            return HOST, block.host_slot
        segment, place = self._locate(block.host_slot)
        return HOST + segment, place

    def _num_rows(self, parts: list[Part], batch: ScheduledBatch, num_padding: int) -> int:
        """The number of sequences that a step is padded to; 0: it is not padded."""
        is_resident = len(parts) == 1 and parts[0].tier == DEVICE
        is_plain = batch.num_tokens == len(batch.items)
        laid_out, num_sequences = self._padding.laid_out, len(batch.items)
        if laid_out is None or not is_plain or not is_resident:
            return 0
        return num_sequences + num_padding if num_padding else laid_out(num_sequences)

    def _transfers(
        self,
        batch: ScheduledBatch,
        placement: Placement,
        parts: list[Part],
        unseen: tuple[frozenset[int], ...],
        seen: list[list[Block]],
    ) -> StepTransfers:
        """seen: the blocks of each sequence that the step reads."""
        if not self._spec.num_host_blocks:
            return StepTransfers()
        moved = [*placement.stores, *(block for blocks in seen for block in blocks)]
        return StepTransfers(
            stores=tuple(placement.stores.values()),
            loads=tuple(placement.loads.values()),
            fills=tuple(part.fill for part in parts if part.fill),
            fills_of=fills_of_layers(parts, unseen),
            block_ids={b.host_slot: b.block_id for b in moved if b.host_slot is not None},
            is_decode=batch.is_decode,
        )

    def _count_transfers(
        self,
        metrics: list[RequestMetrics],
        seen: list[list[Block]],
        placement: Placement,
        parts: list[Part],
        unseen: tuple[frozenset[int], ...],
    ) -> None:
        """Count what the step moves for each of its sequences; a shared block counts for each."""
        streamed = streamed_bytes(parts, unseen, self._read_bytes)
        if not (streamed or placement.loads or placement.stores):
            return
        for index, (counted, blocks) in enumerate(zip(metrics, seen, strict=True)):
            loaded, stored = placement.moved_tokens(blocks)
            counted.h2d_bytes += streamed.get(index, 0) + loaded * self._loads
            counted.d2h_bytes += stored * self._stores
