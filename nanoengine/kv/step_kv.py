"""StepKV: one step's view of the KV cache, the face that the attention sees.

Made by HybridKVCacheManager.begin, once everything is placed and planned; good for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from nanoengine.context import KVChunk, KVTarget, MakeTensor, ReplayKey, Spans, packed
from nanoengine.kv.block_manager import Block
from nanoengine.kv.block_table import Write
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import OffloadEngine, TransferRun
from nanoengine.kv.placement import Placement
from nanoengine.kv.step_plan import DEVICE, HOST, Part
from nanoengine.kv.transfers import TransferCounters
from nanoengine.sequence import RequestMetrics

Pad = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class LayerPool:
    """The device pool of one layer in the two shapes it is used in, made once: views cost more than
    a small kernel.

    blocks: k and v, each [device_blocks, block_size, kv_heads, head_dim]; rows: both, flattened to
    [device_blocks x 2 x block_size, kv_heads, head_dim].
    """

    blocks: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def of(cls, blocks: Tensor) -> LayerPool:
        """blocks: [device_blocks, 2, block_size, kv_heads, head_dim]."""
        return cls(blocks.unbind(1), blocks.flatten(0, 2))


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
    def make(cls, part: Part, fill_index: int, tensor: MakeTensor, num_rows: int = 0) -> ChunkTable:
        """num_rows: at least so many sequences, those past the real ones without blocks, and room
        for a power of two of blocks each.
        """
        spans = part.spans
        width = max(len(span.slots) for span in spans)
        if num_rows:
            width = 1 << (width - 1).bit_length()
        rows = [[*span.slots, *[0] * (width - len(span.slots))] for span in spans]
        empty = range(len(spans), num_rows)
        nothing = [0 for _ in empty]
        seq_index, first_block, num_blocks, table = packed(
            tensor,
            (
                [*(span.index for span in spans), *empty],
                [*(span.first for span in spans), *nothing],
                [*(len(span.slots) for span in spans), *nothing],
                [*chain(*rows), *[0] * (width * len(empty))],
            ),
            torch.int32,
        )
        return cls(
            part,
            fill_index,
            seq_index,
            first_block,
            num_blocks,
            table.view(-1, width),
            tuple((span.index, span.first, span.slots) for span in spans),
            tuple({slot for span in spans for slot in span.slots}),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of the chunk, but for k and v."""
        return self.seq_index, self.first_block, self.num_blocks, self.block_table

    def chunk(self, k_and_v: tuple[Tensor, ...], is_last: bool) -> KVChunk:
        """The chunk over k and v, each [pool_blocks, block_size, kv_heads, head_dim]."""
        k, v = k_and_v
        return KVChunk(k, v, *self.tensors, spans=self.spans, is_last=is_last)


@dataclass(frozen=True, slots=True)
class StepKV:
    """One step's view of the KV cache (context.KVCache).

    num_rows: sequences that the step is laid out for, those past the real ones without KV. writes:
    where their tokens go.
    pools: of each layer. k_slots, v_slots, stored: as in KVTarget, for `rows` of such a pool.
    unseen: for each layer, which of `reads` lie before its window; () if no layer has one.
    """

    num_rows: int
    writes: list[Write]
    pools: list[LayerPool]
    offload: OffloadEngine
    k_slots: Tensor
    v_slots: Tensor
    stored: Tensor | None
    reads: list[ChunkTable]
    run: TransferRun
    placement: Placement
    streamed: list[RequestMetrics]
    counted: TransferCounters
    unseen: tuple[frozenset[int], ...] = ()

    def target(self, layer: int) -> KVTarget:
        """See context.KVCache."""
        self.run.before_write(layer)
        return KVTarget(self.pools[layer].rows, self.k_slots, self.v_slots, self.stored)

    def replay_key(self) -> ReplayKey | None:
        """See context.KVCache."""
        on_host = [(t.part.tier - HOST, t.slots) for t in self.reads if t.part.tier != DEVICE]
        if self.stored is not None or not self.run.moves_nothing(on_host):
            return None
        return ReplayKey(
            (self.k_slots, self.v_slots, *(tensor for t in self.reads for tensor in t.tensors)),
            (*(table.part.tier for table in self.reads), self.unseen),
        )

    def read(self, layer: int) -> Iterator[KVChunk]:
        """The blocks of all sequences that the layer sees, each sequence's in logical order."""
        unseen = self.unseen[layer] if self.unseen else ()
        for number, table in enumerate(self.reads):
            if number in unseen:
                continue
            is_last = table is self.reads[-1]
            if table.part.tier == DEVICE:
                self.run.read_device(layer, table.slots)
                yield table.chunk(self.pools[layer].blocks, is_last)
            elif table.part.fill:
                slots = self.run.fill(layer, table.fill_index)
                yield table.chunk(slots.unbind(1), is_last)
                self.run.drained(layer, table.fill_index)
            else:
                self.run.read_host(layer, table.part.tier - HOST, table.slots)
                piece = self.offload.host.piece(table.part.tier - HOST, layer)
                yield table.chunk(piece.unbind(1), is_last)

    def count(self) -> None:
        """The layers have stored what they were to store: from here on it may go to the host, and a
        step that is begun before this one is counted finds the blocks as they will be.
        """
        for write in self.writes:
            write.block.num_tokens = max(write.block.num_tokens, write.offset + write.num_tokens)

    def end(self) -> None:
        """Wait for what is still under way; to be called whether the step succeeded or not."""
        if not self.run.end():
            self.placement.undo_loads()
        now = self.offload.counters
        for metrics in self.streamed:
            metrics.num_stalls += now.num_stalls - self.counted.num_stalls
            metrics.num_prefetch_hits += now.num_prefetch_hits - self.counted.num_prefetch_hits
            metrics.peak_streamed = max(metrics.peak_streamed, len(self.streamed))


def count_transfers(
    metrics: list[RequestMetrics],
    tables: list[list[Block]],
    placement: Placement,
    pieces: dict[int, int],
    spec: KVSpec,
) -> None:
    """Count what a step moves for each of its sequences, which see these blocks.

    pieces: as step_plan.streamed_pieces gives them.
    """
    if not (pieces or placement.loads or placement.stores):
        return
    for index, (counted, blocks) in enumerate(zip(metrics, tables, strict=True)):
        loaded, stored = placement.moved_tokens(blocks)
        streamed = pieces.get(index, 0) * spec.host_block_bytes // spec.num_layers
        counted.h2d_bytes += streamed + loaded * spec.host_block_bytes // spec.block_size
        counted.d2h_bytes += stored * spec.host_block_bytes // spec.block_size
