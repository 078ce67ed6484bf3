"""HybridKVCacheManager: which sequence holds which block, and where each block lives in a step.

The only object with two faces. The scheduler admits, reserves, commits, preempts and deallocates
sequences; the attention of a step writes and reads through the StepKV that `begin` makes. It knows
no model and no sampler, and leaves the moving of bytes to the OffloadEngine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from nanoengine.devices.device import Device
from nanoengine.errors import OutOfMemoryError
from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.block_table import BlockTable, StepBudget, Write
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import OffloadEngine
from nanoengine.kv.placement import Placement, StepTables, device_slot
from nanoengine.kv.step_kv import ChunkTable, LayerPool, Pad, StepKV, count_transfers
from nanoengine.kv.step_plan import (
    DEVICE,
    HOST,
    Location,
    Part,
    fills_of_layers,
    plan_reads,
    streamed_pieces,
    unseen_parts,
)
from nanoengine.kv.transfers import StepTransfers, TransferCounters
from nanoengine.sequence import Admission, ScheduledBatch, Sequence


class HybridKVCacheManager:
    """Owns the device pool, every block table and, with a host tier, the OffloadEngine."""

    def __init__(
        self,
        spec: KVSpec,
        device: Device,
        enable_prefix_caching: bool = True,
        decode_reserve_blocks: int = 0,
        debug: bool = False,
        pad_decode: Pad | None = None,
    ) -> None:
        """pad_decode: for how many sequences a decode step of so many is laid out, where fewer
        kinds of steps are wanted (None: as many as it has).
        """
        self.spec = spec
        self._pad_decode = pad_decode
        self.peak_streamed = 0
        self._device = device
        self._enable_prefix_caching = enable_prefix_caching
        self._decode_reserve_blocks = decode_reserve_blocks
        self._debug = debug
        self._manager = BlockManager(spec.num_blocks, spec.num_host_blocks, spec.spare_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._budget = StepBudget(0, 0)
        block = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        shape = (spec.num_layers, spec.num_blocks, *block)
        try:
            self._pool = torch.empty(shape, dtype=spec.dtype, device=device.torch_device)
            self._offload = OffloadEngine(
                device,
                self._pool,
                spec.num_host_blocks,
                spec.ring_slots,
                spec.slot_blocks,
                debug,
                spec.host_codec,
            )
        except (RuntimeError, MemoryError) as error:
            num_bytes = spec.block_bytes * spec.num_blocks
            gib = (num_bytes + spec.host_block_bytes * spec.num_host_blocks) / (1 << 30)
            raise OutOfMemoryError(
                f"{spec.num_blocks} device and {spec.num_host_blocks} host KV blocks need "
                f"{gib:.2f} "
                "GiB, which could not be had; lower kv_cache_gib, num_gpu_blocks or kv_offload_gib"
            ) from error
        self._layers = [LayerPool.of(blocks) for blocks in self._pool]

    @property
    def counters(self) -> TransferCounters:
        """Bytes moved between the tiers so far."""
        return self._offload.counters

    # -- the scheduler's face ----------------------------------------------------------------------

    def start_step(self) -> None:
        """Reservations from here on are for one step."""
        kept = self._num_kept([t for t in self._tables.values() if not t.is_parked])
        self._budget = StepBudget(self.spec.num_blocks - kept, 0)

    def admit(self, seq: Sequence) -> Admission:
        """Give a waiting sequence the blocks of all its tokens, reusing cached ones.

        Nothing changes if it must wait: because blocks are short, or because another sequence is
        computing what it would find in the cache a little later. A preempted sequence goes on with
        what it still holds; one with a `source` shares that one's prompt, once it is computed. Sets
        `num_computed`, and what was cached at the first admission.
        """
        table = self._tables.setdefault(seq.seq_id, BlockTable(seq))
        active = [t for t in self._tables.values() if not t.is_parked]
        # Every active sequence writes to a device block, and one more keeps a prefill going.
        room = self.spec.num_blocks - self._num_kept([*active, table])
        if active and self.spec.num_host_blocks and len(active) >= room - 1:
            return Admission.FULL
        source = self._source(table)
        if source is not None and source.seq.num_computed < seq.num_prompt_tokens:
            return Admission.IN_FLIGHT
        num_full = seq.num_prompt_tokens // self.spec.block_size
        held = table.blocks or (source.blocks[:num_full] if source else self._lookup(table))
        if not (table.blocks or source) and self._is_in_flight(table, len(held)):
            return Admission.IN_FLIGHT
        left = table.num_left
        if not table.blocks:
            left = self.spec.first_held(self._num_found(seq, held))
        most = min(self._blocks_for(seq.num_tokens), left + self.spec.most_held)
        needed = max(0, most - len(held))
        reserve = self._decode_reserve_blocks if active else 0
        reserve += max(0, self._budget.loads - self.spec.spare_blocks)
        # A reclaimed block may be one of the hits, so what is idle is counted anew each time.
        while needed + _num_idle(held[left:]) + reserve > self._manager.num_available:
            if active or not self._reclaim(besides=seq.seq_id):
                return Admission.FULL
        if not table.blocks:
            self._take(table, held, left)
        table.is_parked = False
        table.blocks += [self._manager.allocate() for _ in range(needed)]
        if source is not None:
            self._copy_tail(table, source)
        self._promise(table)
        self._budget.write_blocks -= self._num_kept([table])
        return Admission.ADMITTED

    def stream_cost(self, seq: Sequence) -> int:
        """Blocks that would cross the link for this sequence in a step, besides those that already
        do for others.
        """
        if not self.spec.slot_blocks:
            return 0
        blocks = self._streamed(self._tables[seq.seq_id]) - self._budget.streamed
        return -(-len(blocks) * self.spec.streaming_layers // self.spec.num_layers)

    def reserve(self, seq: Sequence, num_tokens: int, num_ahead: int = 0) -> int | None:
        """How many of the next `num_tokens` tokens can be computed in this step.

        num_ahead: tokens before these that a step is still computing. Returns 0: none in this step,
        the device blocks to write to are taken. None: blocks have run out, a sequence must be
        preempted.
        """
        table = self._tables[seq.seq_id]
        num_computed = seq.num_computed + num_ahead
        if self.spec.window:
            room = (table.num_left + self.spec.most_held) * self.spec.block_size - num_computed
            num_tokens = min(num_tokens, room)
        needed = self._blocks_for(num_computed + num_tokens) - len(table.blocks)
        while needed > self._manager.num_available:
            if not self._reclaim(besides=seq.seq_id):
                return None
        start = max(num_computed, table.num_shared_tokens)
        first = start // self.spec.block_size
        loads = int(first < len(table.blocks) and table.blocks[first].device_slot is None)
        loads = loads and table.blocks[first].num_tokens > 0
        room = (first + self._budget.write_blocks) * self.spec.block_size - num_computed
        granted = min(num_tokens, room)
        stop = num_computed + granted
        needed = max(0, self._blocks_for(stop) - len(table.blocks))
        # A load holds two slots during the step: what new blocks leave free must do for all loads.
        loads += self._budget.loads
        free = self._manager.num_available - needed + self.spec.spare_blocks
        if granted <= 0 or loads > free:
            return 0
        self._budget.loads = loads
        if self.spec.slot_blocks:
            self._budget.streamed |= self._streamed(table)
        self._budget.write_blocks -= max(0, self._blocks_for(stop) - first) if stop > start else 0
        table.blocks += [self._manager.allocate() for _ in range(needed)]
        return granted

    def room(self, seq: Sequence) -> int:
        """Tokens that a running sequence can compute without taking anybody's blocks."""
        num_blocks = len(self._tables[seq.seq_id].blocks) + self._manager.num_available
        return num_blocks * self.spec.block_size - seq.num_computed

    def commit(self, seq: Sequence, num_tokens: int, num_rejected: int = 0) -> None:
        """The next `num_tokens` tokens now have KV: count them and publish the blocks they
        filled. That of the `num_rejected` after them is void.
        """
        table, size = self._tables[seq.seq_id], self.spec.block_size
        first = seq.num_computed // size
        seq.num_computed += num_tokens
        table.count(first, size, num_rejected)
        if self._enable_prefix_caching:
            self._publish(table, seq.num_computed // size)
        for block in reversed(table.leave(self.spec.first_held(seq.num_computed))):
            self._release(block)

    def preempt(self, seq: Sequence) -> None:
        """The sequence leaves the running set and keeps its KV; `reserve` and `admit` of others may
        take its blocks, last ones first, and then it computes those again.
        """
        table = self._tables[seq.seq_id]
        table.is_parked = True
        self._withdraw(table)

    def take_failures(self, batch: ScheduledBatch) -> dict[int, str]:
        """Sequences whose KV was lost or never delivered since the last call, and why.

        batch: the step that has just ended. They must be deallocated without committing the step;
        lost blocks cannot be found any more.
        """
        failed: dict[int, str] = {}
        step = {item.seq.seq_id for item in batch.items}
        for failure in self._offload.take_failures():
            blocks = {block for block in failure.owners if isinstance(block, Block)}
            for table in self._tables.values():
                concerned = failure.lost or table.seq.seq_id in step
                if concerned and not blocks.isdisjoint(table.blocks):
                    failed.setdefault(table.seq.seq_id, failure.reason)
            for block in blocks:
                self._give_up(block, failure.lost)
        return failed

    def deallocate(self, seq: Sequence) -> None:
        """The one place where a sequence's blocks and table end: finish, abort, error."""
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            self._withdraw(table)
            for block in reversed(table.held):  # a prefix outlives what follows it in the LRU
                self._release(block)
        seq.num_computed = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV that no unfinished request uses."""
        for block in list(self._manager.cached):
            self._evict(block)
        self._manager.reset_cache()

    # -- for start-up and benchmarks ---------------------------------------------------------------

    def fill_random(self, seq: Sequence, on_host: bool) -> None:
        """Give an admitted sequence random KV for all its tokens but the last, on one tier."""
        shape = self._pool.shape[2:]
        pool = self._pool
        values = torch.randn(shape, dtype=torch.float32, device=pool.device)
        if on_host:
            values = self._offload.as_stored(values)
        slots = self._manager.host if on_host else self._manager.device
        seq.num_computed, table = seq.num_tokens - 1, self._tables[seq.seq_id]
        table.skip(self._blocks_for(seq.num_tokens) - len(table.blocks))
        for index, block in enumerate(table.held, table.num_left):
            num_tokens = seq.num_computed - index * self.spec.block_size
            block.num_tokens = max(0, min(self.spec.block_size, num_tokens))
            if not block.num_tokens:
                break
            slot = slots.take()
            assert slot is not None, "no free slot for random KV"
            for layer in range(self.spec.num_layers):
                target = self._offload.host.block(layer, slot) if on_host else pool[layer, slot]
                target.copy_(values)
            if on_host:
                block.host_slot, block.host_len = slot, block.num_tokens
            else:
                block.device_slot = slot

    @contextmanager
    def full_device(self, keep_free: int) -> Iterator[None]:
        """Take all free device slots but `keep_free`, so that host blocks stay where they are."""
        with self._manager.device.all_taken_but(keep_free):
            yield

    def ring_pieces(self, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of (part of the ring, host blocks) to time `fetch` with; none without a ring."""
        return self._offload.ring_pieces(num_blocks) if self.spec.slot_blocks else []

    def fetch(self, dst: Tensor, src: Tensor) -> None:
        """Queue one of these copies."""
        self._offload.fetch(dst, src)

    def end_probe(self) -> None:
        """With nothing held, cached or under way: NaN everywhere again (debug only), and the rest
        of the host memory may be taken, which would have disturbed what start-up timed.
        """
        self._offload.host.take_rest()
        self._offload.poison_all()

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        self._offload.counters = TransferCounters()
        self.peak_streamed = 0

    def close(self) -> None:
        """Free all pools. Nothing may be admitted afterwards."""
        self._tables.clear()
        self._offload.close()
        self._layers.clear()
        self._pool = torch.empty(0)

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for. Meant for tests, after any
        step.
        """
        references: dict[Block, int] = {}
        for table in self._tables.values():
            for block in table.held:
                references[block] = references.get(block, 0) + 1
            held = sum(block.num_tokens for block in table.held)
            held += table.num_left * self.spec.block_size
            assert held >= table.seq.num_computed, "computed tokens without KV"
        self._manager.check(references)

    # -- the attention's face ----------------------------------------------------------------------

    def begin(self, batch: ScheduledBatch) -> StepKV:
        """Place the blocks that the step writes, plan what it streams, and start the transfers."""
        writes = self._plan_writes(batch)
        tables = self._step_tables(batch)
        stops = [item.start + item.num_tokens for item in batch.items]
        step = [self._tables[item.seq.seq_id] for item in batch.items]
        active = [
            t.blocks[t.num_left : self._blocks_for(n)] for t, n in zip(step, stops, strict=True)
        ]
        placement = Placement(self._manager, tables)
        written = list(dict.fromkeys(write.block for write in writes))
        placement.place(written)
        if self.spec.slot_blocks:
            placement.promote()
        parts = plan_reads(
            [[self._location(block) for block in blocks] for blocks in active],
            self.spec.slot_blocks,
            [table.num_left for table in step],
        )
        streamed = {span.index for part in parts if part.tier != DEVICE for span in part.spans}
        self.peak_streamed = max(self.peak_streamed, len(streamed))
        starts = [item.start for item in batch.items]
        unseen = unseen_parts(parts, starts, self.spec.block_size, self.spec.windows)
        pieces = streamed_pieces(parts, unseen, self.spec.num_layers)
        metrics = [item.seq.metrics for item in batch.items]
        count_transfers(metrics, active, placement, pieces, self.spec)
        transfers = StepTransfers(
            stores=tuple(placement.stores.values()),
            loads=tuple(placement.loads.values()),
            fills=tuple(part.fill for part in parts if part.fill),
            fills_of=fills_of_layers(parts, unseen),
            write_slots=tuple(device_slot(block) for block in written),
            owners=self._owners([*placement.stores], *active),
            is_decode=batch.is_decode,
        )
        size = self.spec.block_size
        num_rows = self._num_rows(parts, batch)
        slots = np.full((2, max(batch.num_tokens, num_rows)), -1)
        for write in writes:
            rows, first = slice(write.row, write.row + write.num_tokens), device_slot(write.block)
            slots[0, rows] = np.arange(write.num_tokens) + first * 2 * size + write.offset
            slots[1, rows] = slots[0, rows] + size
        is_whole = sum(write.num_tokens for write in writes) == batch.num_tokens
        k_slots, v_slots = self._tensor(slots, torch.int64)
        counted = replace(self.counters)
        return StepKV(
            num_rows=num_rows or len(batch.items),
            writes=writes,
            pools=self._layers,
            offload=self._offload,
            k_slots=k_slots,
            v_slots=v_slots,
            stored=None if is_whole else self._tensor(np.flatnonzero(slots[0] >= 0), torch.int64),
            reads=self._chunk_tables(parts, num_rows),
            run=self._offload.begin(transfers),
            placement=placement,
            streamed=[metrics[index] for index in streamed],
            counted=counted,
            unseen=unseen,
        )

    def _owners(self, *tables: list[Block]) -> dict[int, Block]:
        """Of each host slot of these blocks, the block."""
        if not self.spec.num_host_blocks:
            return {}
        blocks = (block for table in tables for block in table)
        return {block.host_slot: block for block in blocks if block.host_slot is not None}

    def _chunk_tables(self, parts: list[Part], num_rows: int) -> list[ChunkTable]:
        fills = count()
        return [
            ChunkTable.make(part, next(fills) if part.fill else -1, self._tensor, num_rows)
            for part in parts
        ]

    def _num_rows(self, parts: list[Part], batch: ScheduledBatch) -> int:
        """Sequences that a step is padded to; 0: it is not."""
        is_resident = len(parts) == 1 and parts[0].tier == DEVICE
        is_plain = batch.num_tokens == len(batch.items)
        if self._pad_decode is None or not is_plain or not is_resident:
            return 0
        return self._pad_decode(len(batch.items))

    def _plan_writes(self, batch: ScheduledBatch) -> list[Write]:
        """Where the KV of the batch's tokens is stored, block by block."""
        row = 0
        writes: list[Write] = []
        for item in batch.items:
            table = self._tables[item.seq.seq_id]
            writes += table.writes(row, item.start, item.num_tokens, self.spec.block_size)
            row += item.num_tokens
        return writes

    def _step_tables(self, batch: ScheduledBatch) -> StepTables:
        starts = {item.seq.seq_id: item.start for item in batch.items}
        step = [self._tables[seq_id] for seq_id in starts]
        others = [t for seq_id, t in self._tables.items() if seq_id not in starts]
        resting = [t for t in others if not t.is_parked]
        tails: set[Block] = set()
        if self.spec.tail_blocks > 1:
            for table in (*step, *resting):
                start = starts.get(table.seq.seq_id, table.seq.num_computed)
                tails.update(table.held_from(self.spec.first_of_tail(start)))
        return StepTables(
            [table.held for table in step],
            [table.held for table in resting],
            [table.held for table in others if table.is_parked],
            frozenset(tails),
        )

    def _location(self, block: Block) -> Location:
        """Where a step reads the block: on the device if it is there."""
        if block.device_slot is not None:
            return DEVICE, block.device_slot
        assert block.host_slot is not None
        if self.spec.slot_blocks:
            return HOST, block.host_slot
        piece, place = self._offload.host.locate(block.host_slot)
        return HOST + piece, place

    def _num_kept(self, running: list[BlockTable]) -> int:
        """Device blocks that these keep, besides one each to write to."""
        most = self.spec.tail_blocks
        if most == 1:
            return 0
        return sum(min(most, self._blocks_for(t.seq.max_total_tokens)) - 1 for t in running)

    def _streamed(self, table: BlockTable) -> set[Block]:
        """Blocks with KV that lies on the host only."""
        return {block for block in table.blocks if block.num_tokens and block.device_slot is None}

    def _publish(self, table: BlockTable, num_blocks: int) -> None:
        """Make the first `num_blocks` blocks findable, which are full."""
        keys = table.first_keys(num_blocks, self.spec.block_size)
        for index in range(len(table.published), num_blocks):
            parent = table.published[-1] if table.published else None
            table.published.append(self._manager.publish(table.blocks[index], parent, keys[index]))
            self._manager.withdraw(keys[index], table.seq.seq_id)

    def _lookup(self, table: BlockTable) -> list[Block]:
        """The cached blocks with which the sequence begins; none where its prompt is scored, as
        that takes every token's logits.
        """
        hits: list[Block] = []
        if self._enable_prefix_caching and table.seq.params.prompt_logprobs is None:
            for key in table.first_keys(
                table.seq.num_tokens // self.spec.block_size, self.spec.block_size
            ):
                block = self._manager.find(hits[-1] if hits else None, key)
                if block is None:
                    break
                hits.append(block)
        return hits

    def _is_in_flight(self, table: BlockTable, num_hits: int) -> bool:
        """True when a sequence is computing the block after the hits."""
        key = table.keys[num_hits] if num_hits < len(table.keys) else None
        return key is not None and self._manager.is_in_flight(key)

    def _num_found(self, seq: Sequence, hits: list[Block]) -> int:
        """Tokens that need not be computed; the last one always is, for what follows it."""
        return min(len(hits) * self.spec.block_size, seq.num_tokens - 1)

    def _take(self, table: BlockTable, hits: list[Block], num_left: int) -> None:
        seq, size = table.seq, self.spec.block_size
        for block in hits[num_left:]:
            self._manager.acquire(block)
        table.take(hits, num_left)
        table.num_shared_tokens = len(hits) * size
        seq.num_computed = self._num_found(seq, hits)
        if seq.metrics.first_scheduled_time is None:
            seq.num_cached = seq.num_computed
            seq.num_cached_on_host = sum(
                min(size, seq.num_computed - index * size)
                for index, block in enumerate(hits)
                if block.device_slot is None
            )

    def _source(self, table: BlockTable) -> BlockTable | None:
        """The table whose prompt this one, which holds nothing, shares; None when that has ended,
        has not begun, or has given back what is needed.
        """
        source = table.seq.source
        if source is None or table.blocks or source.is_finished:
            return None
        found = self._tables.get(source.seq_id)
        num_full = source.num_prompt_tokens // self.spec.block_size
        needed = self.spec.first_held(num_full * self.spec.block_size)
        return None if found is None or found.num_left > needed else found

    def _copy_tail(self, table: BlockTable, source: BlockTable) -> None:
        """The part of a block with which the shared prompt ends, as the block is written to from
        here on. Where no device slot is to be had at once it is computed again.
        """
        seq, size = table.seq, self.spec.block_size
        index, num_tokens = divmod(seq.num_prompt_tokens, size)
        table.published, table.keys = source.published[:index], source.keys[:index]
        block = source.blocks[index] if num_tokens else None
        slot = self._manager.idle_device_slot() if block and block.device_slot is not None else None
        if block is None or slot is None:
            return
        tail = table.blocks[index]
        tail.device_slot, tail.num_tokens = slot, num_tokens
        self._offload.copy_on_device(device_slot(block), slot, num_tokens)
        table.num_shared_tokens = seq.num_prompt_tokens
        seq.num_computed = min(seq.num_prompt_tokens, seq.num_tokens - 1)

    def _promise(self, table: BlockTable) -> None:
        """Others that need the same prefix may wait for what this sequence is going to compute."""
        if self._enable_prefix_caching:
            keys = table.first_keys(
                table.seq.num_tokens // self.spec.block_size, self.spec.block_size
            )
            table.num_promised = len(keys)
            for key in keys[len(table.published) :]:
                self._manager.promise(key, table.seq.seq_id)

    def _withdraw(self, table: BlockTable) -> None:
        for key in table.keys[len(table.published) : table.num_promised]:
            self._manager.withdraw(key, table.seq.seq_id)
        table.num_promised = 0

    def _give_up(self, block: Block, lost: bool) -> None:
        """A copy of the block failed. If its content is lost, nobody finds it any more; else what
        was to be loaded is on the host only.
        """
        if not lost:
            if block.device_slot is not None and block.is_on_host:
                self._manager.device.give(self._manager.drop_device(block))
        elif block.ref_count:
            self._manager.unpublish(block)
        elif block.key is not None:
            self._evict(block)

    def _reclaim(self, besides: int) -> bool:
        """Take the last block of the youngest other preempted sequence; False when none has any."""
        parked = [
            t for t in self._tables.values() if t.is_parked and t.blocks and t.seq.seq_id != besides
        ]
        table = max(parked, key=lambda t: t.seq.seq_id, default=None)
        if table is None:
            return False
        for block in table.forget(len(table.blocks) - 1, self.spec.block_size):
            self._release(block)
        return True

    def _release(self, block: Block) -> None:
        slots = block.device_slot, block.host_slot
        self._manager.release(block)
        self._poison(block, slots)

    def _evict(self, block: Block) -> None:
        slots = block.device_slot, block.host_slot
        self._manager.evict(block)
        self._poison(block, slots)

    def _poison(self, block: Block, slots: tuple[int | None, int | None]) -> None:
        if self._debug and block.device_slot is None and block.host_slot is None:
            device, host = ([] if slot is None else [slot] for slot in slots)
            self._offload.poison(device, host)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return self._device.tensor(values, dtype)


def _num_idle(blocks: list[Block]) -> int:
    """Blocks that nobody references: to acquire them takes room."""
    return sum(not block.ref_count for block in blocks)
