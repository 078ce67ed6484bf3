"""StepKV: one step's view of the KV cache, the face that the attention sees.

Made by HybridKVCacheManager.begin, once everything is placed and planned; good for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.context import KVChunk, Spans
from nanoengine.offload import OffloadEngine, TransferCounters, TransferRun
from nanoengine.placement import Placement
from nanoengine.sequence import RequestMetrics
from nanoengine.step_plan import DEVICE, HOST, Part

MakeTensor = Callable[[object, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """A part of the step's reads as the tensors of a KVChunk, the same for every layer."""

    part: Part
    fill_index: int
    seq_index: Tensor
    first_block: Tensor
    num_blocks: Tensor
    block_table: Tensor
    spans: Spans
    slots: tuple[int, ...]

    @classmethod
    def make(cls, part: Part, fill_index: int, tensor: MakeTensor) -> ChunkTable:
        spans = part.spans
        width = max(len(span.slots) for span in spans)
        padded = [[*span.slots, *[0] * (width - len(span.slots))] for span in spans]
        return cls(
            part,
            fill_index,
            tensor([span.index for span in spans], torch.int32),
            tensor([span.first for span in spans], torch.int32),
            tensor([len(span.slots) for span in spans], torch.int32),
            tensor(padded, torch.int32),
            tuple((span.index, span.first, span.slots) for span in spans),
            tuple({slot for span in spans for slot in span.slots}),
        )

    def chunk(self, blocks: Tensor) -> KVChunk:
        """The chunk over the pool `blocks`, [pool_blocks, 2, block_size, kv_heads, head_dim]."""
        k, v = blocks.unbind(1)
        return KVChunk(
            k, v, self.seq_index, self.first_block, self.num_blocks, self.block_table, self.spans
        )


@dataclass(frozen=True, slots=True)
class StepKV:
    """One step's view of the KV cache (context.KVCache).

    rows: which rows of this step's K and V are stored (None: all); k_slots, v_slots: at which rows
    of a layer's pool, flattened to [device_blocks x 2 x block_size, kv_heads, head_dim].
    """

    pool: Tensor
    offload: OffloadEngine
    rows: Tensor | None
    k_slots: Tensor
    v_slots: Tensor
    reads: list[ChunkTable]
    run: TransferRun
    placement: Placement
    streamed: list[RequestMetrics]
    counted: TransferCounters

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, [tokens, kv_heads, head_dim]."""
        self.run.before_write(layer)
        if self.rows is not None:
            k, v = k[self.rows], v[self.rows]
        flat = self.pool[layer].flatten(0, 2)
        flat.index_copy_(0, self.k_slots, k)
        flat.index_copy_(0, self.v_slots, v)

    def read(self, layer: int) -> Iterator[KVChunk]:
        """All blocks of all sequences, each sequence's in logical order."""
        for table in self.reads:
            if table.part.tier == DEVICE:
                self.run.read_device(layer, table.slots)
                yield table.chunk(self.pool[layer])
            elif table.part.fill:
                yield table.chunk(self.run.fill(layer, table.fill_index))
                self.run.drained(layer, table.fill_index)
            else:
                self.run.read_host(layer, table.part.tier - HOST, table.slots)
                yield table.chunk(self.offload.host.piece(table.part.tier - HOST, layer))

    def end(self) -> None:
        """Wait for what is still under way; to be called whether the step succeeded or not."""
        if not self.run.end():
            self.placement.undo_loads()
        now = self.offload.counters
        for metrics in self.streamed:
            metrics.num_stalls += now.num_stalls - self.counted.num_stalls
            metrics.num_prefetch_hits += now.num_prefetch_hits - self.counted.num_prefetch_hits
            metrics.peak_streamed = max(metrics.peak_streamed, len(self.streamed))
