"""HybridKVCacheManager: which sequence holds which block, on two tiers.

The scheduler resets the budget, admits, reserves, commits, preempts and deallocates; the runner
opens a step. Blocks are numbers here: KVMemory holds the tensors, StepPlanner says where each block
lies in a step, PrefixCache which blocks are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanoengine.devices.device import Device
from nanoengine.kv.block_heat import BlockHeat
from nanoengine.kv.block_manager import Block, BlockManager
from nanoengine.kv.block_table import BlockTable, StepBudget
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.open_step import OpenStep
from nanoengine.kv.prefix_cache import PrefixCache, PrefixHits
from nanoengine.kv.state_slots import StateSlots
from nanoengine.kv.step_planner import StepPadding, StepPlanner
from nanoengine.kv.transfers import FailedTransfer, TransferCounters
from nanoengine.sequence import Admission, ScheduledBatch, Sequence


class HybridKVCacheManager:
    """Owns every block and block table, and the memory behind them.

    tables: by seq_id, of every sequence that holds blocks. states: the recurrent ones.
    peak_streamed: most sequences that read host KV in one step so far.
    """

    def __init__(
        self,
        spec: KVSpec,
        device: Device,
        enable_prefix_caching: bool = True,
        decode_reserve_blocks: int = 0,
        debug: bool = False,
        padding: StepPadding | None = None,
        make_memory: Callable[[KVSpec, Device, bool], KVMemory] = KVMemory,
    ) -> None:
        """decode_reserve_blocks: blocks that admission leaves free for running sequences. debug:
        freed memory is filled with NaN. padding: see StepPlanner. Raises OutOfMemoryError.
        """
        self.spec = spec
        self._streamed_bytes, self._load_bytes = spec.streamed_bytes, spec.load_bytes
        self.peak_streamed = 0
        self.tables: dict[int, BlockTable] = {}
        self.blocks = BlockManager(spec.num_blocks, spec.num_host_blocks, spec.spare_blocks)
        self.memory = make_memory(spec, device, debug)
        self._decode_reserve_blocks = decode_reserve_blocks
        self.states = StateSlots(spec, self.memory, self.tables)
        resumable = self.states.num_resumable
        self._prefix_cache = PrefixCache(self.blocks, spec, enable_prefix_caching, resumable)
        locate = self.memory.offload.host.locate if self.memory.offload else None
        self._planner = StepPlanner(spec, self.blocks, locate, self.states, padding)
        self._heat = BlockHeat(device)
        self._budget = StepBudget(0)
        self._kept: dict[int, int] = {}  # by seq_id, of those that run: see _blocks_kept

    # -- for the scheduler -------------------------------------------------------------------------

    def reset_budget(self) -> None:
        """Reservations from here on are for one step."""
        self._budget = StepBudget(self.spec.num_blocks - sum(self._kept.values()))

    def admit(self, seq: Sequence) -> Admission:
        """Give a waiting sequence the blocks of all its tokens, reusing cached ones.

        Nothing changes if it must wait: because there are too few blocks, or because another
        sequence is computing what it would find in the cache a little later. A preempted sequence
        goes on with what it still holds; one with a `prompt_owner` shares that one's prompt, once
        it is computed. Sets what was cached at the first admission.
        """
        table = self.tables.setdefault(seq.seq_id, BlockTable(seq, self.spec.block_size))
        running, kept = self._kept, self._blocks_kept(seq)
        # Every running sequence writes to a device block, and one more keeps a prefill going.
        num_writable = self.spec.num_blocks - sum(running.values()) - kept
        if running and self.spec.num_host_blocks and len(running) >= num_writable - 1:
            return Admission.FULL
        if self.spec.num_states and len(running) >= self.spec.num_states:
            return Admission.FULL
        self._rewind_if_lost(table)
        start = self._prefix_cache.find_start(table, self.tables)
        if start is None:
            return Admission.IN_FLIGHT
        most = min(self._blocks_for(seq.num_tokens), start.num_released + self.spec.max_held_blocks)
        num_new = max(0, most - len(start.blocks))
        reserve = self._decode_reserve_blocks if running else 0
        reserve += max(0, self._budget.num_loads - self.spec.spare_blocks)
        # A reclaimed block may be one of the hits, so the idle ones are counted anew each time.
        while num_new + start.num_idle + reserve > self.blocks.num_available:
            if running or not self._reclaim(besides=seq.seq_id):
                return Admission.FULL
        if not table.blocks:
            self._prefix_cache.adopt(table, start)
        table.is_preempted = False
        self.states.take(table, running)
        running[seq.seq_id] = kept
        self._grow(table, num_new)
        if start.prompt_owner is not None:
            copy = self._prefix_cache.share_prompt(table, start.prompt_owner)
            if copy is not None:
                self.memory.copy_block(*copy)
        self._prefix_cache.announce(table)
        self._budget.num_write_blocks -= kept
        return Admission.ADMITTED

    def stream_cost(self, seq: Sequence) -> int:
        """How many more blocks would cross the link in this step if this sequence ran in it."""
        if not self.spec.slot_blocks:
            return 0
        blocks = self.tables[seq.seq_id].streamed - self._budget.streamed
        return -(-len(blocks) * self._streamed_bytes // self._load_bytes)

    def is_streamed(self, seq: Sequence) -> bool:
        """Whether KV of this sequence crosses the link in each of its steps."""
        return self.spec.slot_blocks > 0 and bool(self.tables[seq.seq_id].streamed)

    def streams_alone(self, seq: Sequence) -> bool:
        """Whether it streams, and no other sequence shares a block that it streams."""
        streamed = self.tables[seq.seq_id].streamed
        return self.is_streamed(seq) and all(block.ref_count == 1 for block in streamed)

    def may_draft(self, seq: Sequence) -> bool:
        """Whether drafts may pay for this sequence: it streams, or has much KV on the device, or
        another model makes them.
        """
        table, least = self.tables[seq.seq_id], self.spec.drafts_from
        return (
            self.spec.drafts_apart
            or self.is_streamed(seq)
            or (0 < least <= len(table.blocks) and not table.streamed)
        )

    def reserve(self, seq: Sequence, num_tokens: int, num_ahead: int = 0) -> int | None:
        """How many of the next `num_tokens` tokens this step can compute.

        num_ahead: tokens before them that the step under way computes. Returns 0 if the sequence
        must wait for a later step, as others write to the device blocks in this one; None if there
        are too few blocks, so that a sequence must be preempted.
        """
        table, size, budget = self.tables[seq.seq_id], self.spec.block_size, self._budget
        if not num_ahead:
            self._rewind_if_lost(table)
        elif not self.states.is_at(table, num_ahead):
            return 0
        computed = seq.num_computed + num_ahead
        if self.spec.window:
            most = (table.num_released + self.spec.max_held_blocks) * size
            num_tokens = min(num_tokens, most - computed)
        wanted = self._blocks_for(computed + num_tokens) - len(table.blocks)
        while wanted > self.blocks.num_available:
            if not self._reclaim(besides=seq.seq_id):
                return None
        first_write = max(computed, table.num_shared_tokens)
        first = first_write // size
        num_tokens = self.states.tokens_to_stop(table, computed, num_tokens)
        granted = min(num_tokens, (first + budget.num_write_blocks) * size - computed)
        stop = computed + granted
        num_new = max(0, self._blocks_for(stop) - len(table.blocks))
        # A load takes a second slot during the step: one that new blocks do not take.
        num_loads = budget.num_loads + table.needs_load(first)
        if granted <= 0 or num_loads > self.blocks.num_available - num_new + self.spec.spare_blocks:
            return 0
        budget.num_loads = num_loads
        if self.spec.slot_blocks:
            budget.streamed |= table.streamed
        if stop > first_write:
            budget.num_write_blocks -= max(0, self._blocks_for(stop) - first)
        self._grow(table, num_new)
        return granted

    def free_tokens(self, seq: Sequence) -> int:
        """Tokens that a running sequence can compute without taking other sequences' blocks."""
        num_blocks = len(self.tables[seq.seq_id].blocks) + self.blocks.num_available
        return num_blocks * self.spec.block_size - seq.num_computed

    def commit(self, seq: Sequence, num_tokens: int, num_rejected: int = 0) -> None:
        """Count the next `num_tokens` tokens as computed, publish the blocks that they filled, and
        release those that every window has passed. KV of the `num_rejected` tokens after them is
        discarded; a model with recurrent layers then discards the whole step.
        """
        table = self.tables[seq.seq_id]
        first = seq.num_computed // table.block_size
        if num_rejected and self.states.go_back(table):
            num_tokens, num_rejected = 0, num_tokens + num_rejected
        table.commit(seq.num_computed + num_tokens)
        table.mark_computed(first, num_rejected)
        if not num_rejected:
            self.states.settle(table)
        self._prefix_cache.publish(table, seq.num_computed // table.block_size)
        self._release(table.release_passed(self.spec.first_needed(seq.num_computed)))

    def preempt(self, seq: Sequence) -> None:
        """The sequence stops running and keeps its KV. Other sequences may take its blocks, the
        last ones first; it computes those again.
        """
        table = self.tables[seq.seq_id]
        table.is_preempted = True
        self._kept.pop(seq.seq_id, None)
        self._prefix_cache.withdraw(table)

    def take_failures(self, batch: ScheduledBatch) -> dict[int, str]:
        """The sequences, by id, whose KV copies have failed since the last call, and why. They must
        be deallocated without committing the step. batch: the step that has just ended.
        """
        failed: dict[int, str] = {}
        in_step = {item.seq.seq_id for item in batch.items}
        for failure in self.memory.take_failures():
            blocks = self._blocks_of(failure)
            for seq_id, table in self.tables.items():
                if (failure.is_lost or seq_id in in_step) and not blocks.isdisjoint(table.blocks):
                    failed.setdefault(seq_id, failure.reason)
            for block in blocks:
                self._give_up(block, failure.is_lost)
        return failed

    def deallocate(self, seq: Sequence) -> None:
        """Free the blocks and the table of a sequence that has ended, for whatever reason."""
        table = self.tables.pop(seq.seq_id, None)
        self._kept.pop(seq.seq_id, None)
        if table is not None:
            self._prefix_cache.withdraw(table)
            self.states.release(seq.seq_id)
            if (nan_from := seq.output.nan_from) is not None:
                self._hide(table.published[-(-nan_from // self.spec.block_size) :])
            self._release(table.held)
            self.blocks.touch(table.published[: table.num_released])
            table.commit(0)

    # -- for the runner ----------------------------------------------------------------------------

    def open_step(self, batch: ScheduledBatch) -> OpenStep:
        """Place the blocks that the step writes, plan what it reads, and start its transfers."""
        with self.blocks.at_once():
            self._heat.fold()
            self.states.keep(batch)
            planned = self._planner.plan(batch, self.tables)
            self.peak_streamed = max(self.peak_streamed, len(planned.streamed))
            # Without streams only steps that check drafts measure heat: others are replayed.
            if planned.drafts or (planned.streamed and self.spec.slot_blocks):
                self._heat.begin(batch, self.tables)
            return OpenStep(planned, batch, self.memory, self._planner, self._heat)

    # -- for the engine and its user ---------------------------------------------------------------

    @property
    def counters(self) -> TransferCounters:
        """Bytes moved between the tiers so far."""
        return self.memory.counters

    @property
    def prefix_hits(self) -> PrefixHits:
        """What the prefix cache found so far."""
        return self._prefix_cache.hits

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        self.memory.reset_counters()
        self._prefix_cache.hits = PrefixHits()
        self.peak_streamed = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV that no unfinished request uses."""
        self._hide(self.blocks.by_digest.values())

    def evict(self, block: Block) -> None:
        """Forget a block that no table holds, and free its slots."""
        slots = block.device_slot, block.host_slot
        self.blocks.evict(block)
        self.memory.poison(*slots)

    def close(self) -> None:
        """Free all pools. Nothing may be admitted afterwards."""
        self.tables.clear()
        self.memory.close()

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for. For tests, after any step."""
        references: dict[Block, int] = {}
        for table in self.tables.values():
            for block in table.held:
                references[block] = references.get(block, 0) + 1
            held = sum(b.num_tokens for b in table.held) + table.num_released * self.spec.block_size
            assert held >= table.seq.num_computed, "computed tokens without KV"
        self.blocks.check(references)
        self.states.check()

    # -- helpers -----------------------------------------------------------------------------------

    def _rewind_if_lost(self, table: BlockTable) -> None:
        """A sequence that lost its recurrent state goes back to a snapshot, or to the start."""
        if not self.states.is_at(table):
            computed = table.blocks[: table.seq.num_computed // table.block_size]
            self._release(table.keep_first(self.states.num_resumable(computed)))
            self.states.load(table)

    def _grow(self, table: BlockTable, num_blocks: int) -> None:
        table.blocks += [self.blocks.allocate() for _ in range(num_blocks)]

    def _blocks_kept(self, seq: Sequence) -> int:
        """Device blocks that a sequence keeps while it runs, besides one to write to."""
        return min(self.spec.kept_blocks, self._blocks_for(seq.request.max_total_tokens)) - 1

    def _blocks_of(self, failure: FailedTransfer) -> set[Block]:
        """The blocks of a failed copy that can still be reached."""
        tables = (block for table in self.tables.values() for block in table.blocks)
        return {b for b in (*tables, *self.blocks.cached) if b.block_id in failure.block_ids}

    def _give_up(self, block: Block, is_lost: bool) -> None:
        """A copy of the block failed. If its content is lost, nobody finds it any more. Otherwise a
        load failed and the host copy is good: free the device slot.
        """
        if not is_lost:
            if block.device_slot is not None and block.is_on_host:
                self.blocks.device.free(self.blocks.drop_device(block))
        else:
            self._hide([block])

    def _hide(self, blocks: Iterable[Block]) -> None:
        """Let no request find these blocks any more, and free those that none holds."""
        for block in list(blocks):
            if block.ref_count:
                self.blocks.unpublish(block)
            elif block.key is not None:
                self.evict(block)

    def _reclaim(self, besides: int) -> bool:
        """Take the last block of the youngest other preempted sequence; False when none has any."""
        others = (t for i, t in self.tables.items() if t.is_preempted and t.blocks and i != besides)
        table = max(others, key=lambda table: table.seq.seq_id, default=None)
        if table is not None:
            self._release(table.keep_first(len(table.blocks) - 1))
        return table is not None

    def _release(self, blocks: list[Block]) -> None:
        """Drop references, the last first: the LRU then evicts the end of a prefix first."""
        for block in reversed(blocks):
            slots = block.device_slot, block.host_slot
            self.blocks.release(block)
            if block.device_slot is None and block.host_slot is None:
                self.memory.poison(*slots)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)
