"""HybridKVCacheManager: which sequence holds which block, and the tensors behind the blocks.

The only object with two faces. The scheduler admits, reserves, commits and releases sequences; the
attention of a step writes and reads through the StepKV that `begin` makes. It knows no model and
no sampler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.block_manager import Block, BlockManager, pack_tokens
from nanoengine.context import KVChunk
from nanoengine.errors import OutOfMemoryError, PromptTooLongError
from nanoengine.sequence import ScheduledBatch, Sequence


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the device pool, [layers, blocks, block_size, kv_heads, head_dim] for K and
    for V.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        per_layer = self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * per_layer

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in logical order; the first `num_published` are findable by
    content.

    `num_shared_tokens` came from the prefix cache: their KV is never written again. `parent` is
    the block under which the next full one is chained.
    """

    blocks: list[Block] = field(default_factory=list)
    num_published: int = 0
    num_shared_tokens: int = 0
    parent: Block | None = None


class HybridKVCacheManager:
    """Owns the KV pool and every sequence's block table."""

    def __init__(
        self,
        spec: KVSpec,
        device: torch.device,
        enable_prefix_caching: bool = True,
        decode_reserve_blocks: int = 0,
    ) -> None:
        self.spec = spec
        self._device = device
        self._enable_prefix_caching = enable_prefix_caching
        self._decode_reserve_blocks = decode_reserve_blocks
        self._manager = BlockManager(spec.num_blocks)
        self._tables: dict[int, BlockTable] = {}
        shape = (
            spec.num_layers,
            spec.num_blocks,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        try:
            self._k = torch.empty(shape, dtype=spec.dtype, device=device)
            self._v = torch.empty(shape, dtype=spec.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            gib = spec.block_bytes * spec.num_blocks / (1 << 30)
            raise OutOfMemoryError(
                f"{spec.num_blocks} KV blocks need {gib:.2f} GiB on {device}, which could not be "
                "had; "
                "lower kv_cache_gib or num_gpu_blocks"
            ) from error

    # -- the scheduler's face
    # ------------------------------------------------------------------------

    def check_fits(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise PromptTooLongError if the request could not finish alone in an empty engine."""
        asked = num_prompt_tokens + (max_tokens or 1)
        if asked > self.spec.num_tokens:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and may generate {max_tokens or 1}: "
                f"{asked} in "
                f"all, but the KV cache holds {self.spec.num_tokens} ({self.spec.num_blocks} "
                "blocks x "
                f"{self.spec.block_size} tokens); raise kv_cache_gib or num_gpu_blocks, or ask "
                "for less"
            )

    def admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its tokens, reusing cached ones; False if it
        must wait.

        Sets `num_computed`, and `num_cached` at the first admission. Nothing changes on False.
        """
        hits = self._lookup(seq)
        needed = self._blocks_for(seq.num_tokens) - len(hits)
        idle_hits = sum(self._manager.is_cached(block) for block in hits)
        reserve = self._decode_reserve_blocks if self._tables else 0
        if needed + idle_hits + reserve > self._manager.num_available:
            return False
        for block in hits:
            self._manager.acquire(block)
        blocks = hits + [self._manager.allocate() for _ in range(needed)]
        shared = len(hits) * self.spec.block_size
        parent = hits[-1] if hits else None
        self._tables[seq.seq_id] = BlockTable(blocks, len(hits), shared, parent)
        seq.num_computed = min(shared, seq.num_tokens - 1)
        if seq.metrics.first_scheduled_time is None:
            seq.num_cached = seq.num_computed
        return True

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make sure the next `num_tokens` tokens have blocks; False (and no change) when there
        are none.
        """
        table = self._tables[seq.seq_id]
        needed = self._blocks_for(seq.num_computed + num_tokens) - len(table.blocks)
        if needed > self._manager.num_available:
            return False
        table.blocks.extend(self._manager.allocate() for _ in range(needed))
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens now have KV: count them and publish the blocks they
        filled.
        """
        seq.num_computed += num_tokens
        if not self._enable_prefix_caching:
            return
        table, size = self._tables[seq.seq_id], self.spec.block_size
        for index in range(table.num_published, seq.num_computed // size):
            tokens = pack_tokens(seq.token_ids[index * size : (index + 1) * size])
            table.parent = self._manager.publish(table.blocks[index], table.parent, tokens)
            table.num_published = index + 1

    def deallocate(self, seq: Sequence) -> None:
        """The one place where a sequence's blocks and table end: finish, abort, error,
        preemption.
        """
        table = self._tables.pop(seq.seq_id, None)
        if table is not None:
            for block in reversed(table.blocks):  # a prefix outlives what follows it in the LRU
                self._manager.release(block)
        seq.num_computed = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV that no running sequence uses."""
        self._manager.reset_cache()

    def close(self) -> None:
        """Free the pool. Nothing may be admitted afterwards."""
        self._tables.clear()
        self._k = self._v = torch.empty(0)

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for. Meant for tests, after any
        step.
        """
        references: dict[int, int] = {}
        for table in self._tables.values():
            for block in table.blocks:
                references[block.slot] = references.get(block.slot, 0) + 1
                assert block.ref_count > 0, "a table holds a block without a reference"
        self._manager.check(references)

    # -- the attention's face
    # ------------------------------------------------------------------------

    def begin(self, batch: ScheduledBatch) -> StepKV:
        """The view through which this step's layers write and read KV."""
        size = self.spec.block_size
        rows: list[int] = []
        slots: list[int] = []
        tables, row = [], 0
        for item in batch.items:
            table, start = self._tables[item.seq.seq_id], item.seq.num_computed
            stop = start + item.num_tokens
            fresh = range(max(start, table.num_shared_tokens), stop)
            slots.extend(table.blocks[p // size].slot * size + p % size for p in fresh)
            rows.extend(range(row + fresh.start - start, row + item.num_tokens))
            row += item.num_tokens
            tables.append([block.slot for block in table.blocks[: self._blocks_for(stop)]])
        all_rows = len(rows) == batch.num_tokens
        return StepKV(
            self._k,
            self._v,
            None if all_rows else self._tensor(rows, torch.int64),
            self._tensor(slots, torch.int64),
            self._tables_as_tensors(tables),
        )

    def _lookup(self, seq: Sequence) -> list[Block]:
        hits: list[Block] = []
        size = self.spec.block_size
        if not self._enable_prefix_caching:
            return hits
        for index in range(seq.num_tokens // size):
            tokens = pack_tokens(seq.token_ids[index * size : (index + 1) * size])
            block = self._manager.find(hits[-1] if hits else None, tokens)
            if block is None:
                break
            hits.append(block)
        return hits

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _tensor(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _tables_as_tensors(self, tables: list[list[int]]) -> _Tables:
        width = max(map(len, tables))
        flat = [slot for table in tables for slot in table + [0] * (width - len(table))]
        counts = [len(table) for table in tables]
        return _Tables(
            self._tensor(list(range(len(tables))), torch.int32),
            self._tensor([0] * len(tables), torch.int32),
            self._tensor(counts, torch.int32),
            self._tensor(flat, torch.int32).view(len(tables), width),
        )


@dataclass(frozen=True, slots=True)
class _Tables:
    seq_index: Tensor
    first_block: Tensor
    num_blocks: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class StepKV:
    """One step's view of the KV cache (context.KVCache).

    rows, slots: which rows of this step's K and V are stored (None: all), and at which flat pool
    slots.
    Rows whose KV came from the prefix cache are not stored again: other sequences may be reading
    it.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None
    slots: Tensor
    tables: _Tables

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, [tokens, kv_heads, head_dim]."""
        if self.rows is not None:
            k, v = k[self.rows], v[self.rows]
        self.k[layer].flatten(0, 1).index_copy_(0, self.slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, self.slots, v)

    def read(self, layer: int) -> Iterable[KVChunk]:
        """All blocks of all sequences, in one chunk."""
        t = self.tables
        yield KVChunk(
            self.k[layer], self.v[layer], t.seq_index, t.first_block, t.num_blocks, t.block_table
        )
