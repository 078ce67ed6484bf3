"""StepKV: one step's view of the KV cache, which attention writes and reads layer by layer.

Opened from a StepPlan over a KVMemory; good for one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.context import KVChunk, KVTarget, MakeTensor, RecurrentState, ReplayKey, packed
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_plan import DEVICE, HOST, Part, SequenceSpan, StepPlan


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """A part of the step's reads, the same for every layer. tensors: seq_index, first_block,
    num_blocks and block_table of its KVChunk. slots: those that it reads, each once.
    """

    part: Part
    fill_index: int
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    slots: tuple[int, ...]

    @classmethod
    def make(cls, part: Part, fill_index: int, tensor: MakeTensor, num_rows: int = 0) -> ChunkTable:
        """num_rows: sequences of a padded step, those past the real ones without blocks; each row
        has room for a power of two of blocks. 0: the step is not padded.
        """
        spans = part.spans
        width = max(len(span.slots) for span in spans)
        if num_rows:
            width = 1 << (width - 1).bit_length()
        rows = [*spans, *(SequenceSpan(row, 0, ()) for row in range(len(spans), num_rows))]
        ids = ((*row.slots, *[0] * (width - len(row.slots))) for row in rows)
        seq_index, first_block, num_blocks, table = packed(
            tensor,
            (
                [row.sequence for row in rows],
                [row.first for row in rows],
                [len(row.slots) for row in rows],
                [*chain.from_iterable(ids)],
            ),
            torch.int32,
        )
        slots = tuple({slot for span in spans for slot in span.slots})
        return cls(
            part, fill_index, (seq_index, first_block, num_blocks, table.view(-1, width)), slots
        )

    def chunk(self, parts: tuple[Tensor, ...], is_last: bool) -> KVChunk:
        """The chunk over k and perhaps v, each [pool_blocks, block_size, kv_heads, head_dim]."""
        return KVChunk(parts[0], parts[-1], *self.tensors, spans=self.part.spans, is_last=is_last)


@dataclass(frozen=True, slots=True)
class StepKV:
    """One step's view of the KV cache (context.KVCache).

    k_slots, v_slots, stored: as in KVTarget, for the `rows` of a layer's pool. reads: in the order
    of plan.reads. run: the step's transfers under way; None if it can have none. state_slots: as in
    RecurrentState; None if no layer is recurrent. may_replay: as rank 0 decided; None: not yet.
    """

    plan: StepPlan
    memory: KVMemory
    k_slots: Tensor
    v_slots: Tensor | None
    stored: Tensor | None
    reads: list[ChunkTable]
    run: TransferRun | None
    state_slots: Tensor | None
    may_replay: bool | None = None

    @classmethod
    def open(cls, plan: StepPlan, memory: KVMemory, run: TransferRun | None = None) -> StepKV:
        """Lay out what the step writes and reads. run: its transfers, which were started."""
        tensor = memory.device.tensor
        slots = _token_slots(plan, memory.block_size, memory.parts)
        num_stored = sum(write.num_tokens for write in plan.writes)
        # Kernels of steps that are replayed skip padding rows.
        is_whole = num_stored == (plan.num_tokens if plan.num_rows else len(slots[0]))
        rows = tensor(slots, torch.int64).unbind()
        fills = count()
        return cls(
            plan,
            memory,
            rows[0],
            rows[1] if memory.parts == 2 else None,
            None if is_whole else tensor(np.flatnonzero(slots[0] >= 0), torch.int64),
            [
                ChunkTable.make(part, next(fills) if part.fill else -1, tensor, plan.num_rows)
                for part in plan.reads
            ],
            run,
            tensor(plan.state_slots, torch.int64) if plan.state_slots else None,
        )

    def state(self, layer: int) -> RecurrentState:
        assert self.state_slots is not None
        return RecurrentState(*self.memory.states[layer], self.state_slots)

    def target(self, layer: int) -> KVTarget:
        """Where this step's keys and values go; they may be stored from now on."""
        if self.run is not None:
            self.run.await_loads(layer)
        self.memory.before_write(layer, self.plan.write_slots)
        return KVTarget(self.memory.layers[layer].rows, self.k_slots, self.v_slots, self.stored)

    def replay_key(self) -> ReplayKey | None:
        """The tensors behind every target and chunk, if the step moves nothing between the tiers.

        Never on a checking device, which wants to be told of every access.
        """
        memory, plan = self.memory, self.plan
        if self.may_replay is False or memory.device.is_checked:
            return None
        if self.stored is not None or not plan.transfers.is_none:
            return None
        if memory.offload and self.may_replay is None:
            on_host = [(t.part.tier - HOST, t.slots) for t in self.reads if t.part.tier != DEVICE]
            if not memory.offload.are_stored(plan.write_slots, on_host):
                return None
        slots = (s for s in (self.k_slots, self.v_slots, self.state_slots) if s is not None)
        return ReplayKey(
            (*slots, *(tensor for t in self.reads for tensor in t.tensors)),
            (*(table.part.tier for table in self.reads), self.plan.unseen),
        )

    def read(self, layer: int) -> Iterator[KVChunk]:
        """The blocks of all sequences that the layer sees, each sequence's in logical order."""
        unseen = self.plan.unseen[layer] if self.plan.unseen else ()
        source = self.memory.sources[layer]
        for number, table in enumerate(self.reads):
            if number in unseen:
                continue
            is_last = table is self.reads[-1]
            if table.part.tier == DEVICE:
                self.memory.before_read(source, table.slots)
                yield table.chunk(self.memory.layers[source].blocks, is_last)
            else:
                yield from self._read_host(layer, table, is_last)

    def _read_host(self, layer: int, table: ChunkTable, is_last: bool) -> Iterator[KVChunk]:
        """Through a ring slot, or in place."""
        assert self.run is not None
        if table.part.fill:
            ring_slot = self.run.fill(layer, table.fill_index)
            yield table.chunk(ring_slot.unbind(1), is_last)
            self.run.drained(layer, table.fill_index)
        else:
            segment = self.run.read_host(layer, table.part.tier - HOST, table.slots)
            yield table.chunk(segment.unbind(1), is_last)

    def finish(self) -> bool:
        """Wait for transfers still under way; False if the step did not come to its end."""
        return self.run is None or self.run.finish()


def _token_slots(plan: StepPlan, block_size: int, parts: int) -> npt.NDArray[np.int64]:
    """[parts, tokens]: the rows of a layer's pool for each token; -1: not stored."""
    num_rows = max(plan.num_tokens + plan.num_padding, plan.num_rows)
    slots = np.full((parts, num_rows), -1)
    for part, rows in enumerate(slots):
        for row, slot, offset, num_tokens in plan.writes:
            first = (slot * parts + part) * block_size + offset
            if num_tokens == 1:  # as in decode steps: five times faster than a range
                rows[row] = first
            else:
                rows[row : row + num_tokens] = np.arange(first, first + num_tokens)
    return slots
