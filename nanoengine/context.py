"""What one forward pass needs to know, and the interfaces of the KV cache and of attention.

The model sees a ForwardContext: it stores keys and values at `ctx.kv.target`, then calls
`ctx.attention.run`. It knows neither which tier a block lives on nor how attention is computed; the
attention backend knows neither schedulers nor sequences, only lengths and block ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

MakeTensor = Callable[[object, torch.dtype], Tensor]
PACKED_AT = 16  # bytes; kernels are compiled for pointers that are multiples of it

Spans = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class KVChunk:
    """Consecutive logical blocks of some of the batch's sequences, in one pool, for one layer.

    k, v          [pool_blocks, block_size, kv_heads, head_dim], any float dtype; may be the same
    seq_index     int32 [n]: which sequences of the batch (rows of ForwardContext.kv_lens)
    first_block   int32 [n]: logical index of the first block of each of them
    num_blocks    int32 [n]: how many blocks each of them has in this chunk
    block_table   int32 [n, max(num_blocks)]: their ids in the pool
    spans         the same for backends driven from Python: (sequence, first block, ids) of each
    is_last       whether this is the last chunk of the layer

    Over the chunks of a layer, the blocks of every sequence appear in logical order, each exactly
    once. A backend never reads keys at or past a sequence's `kv_lens`.
    """

    k: Tensor
    v: Tensor
    seq_index: Tensor
    first_block: Tensor
    num_blocks: Tensor
    block_table: Tensor
    spans: Spans = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """What attention carries from one chunk to the next: a softmax that is not yet divided.

    row_max, row_sum  fp32 [rows, heads]
    acc               fp32 [rows, heads, head_dim]
    """

    row_max: Tensor
    row_sum: Tensor
    acc: Tensor
    lowest: ClassVar[float] = -torch.inf  # row_max of a row without keys

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """A state without rows."""
        return cls(*(torch.empty(0, dtype=torch.float32, device=device) for _ in range(3)))

    def start(self, q: Tensor, sinks: Tensor | None = None) -> None:
        """Reset the state to one empty row for each row of q. Its storage only grows.

        sinks: as in AttentionBackend.run; an empty row has seen the sink of its head.
        """
        row_max, row_sum = (part.resize_(q.shape[:2]) for part in (self.row_max, self.row_sum))
        self.acc.resize_(q.shape).zero_()
        if sinks is None:
            row_max.fill_(self.lowest)
            row_sum.zero_()
        else:
            row_max.copy_(sinks.expand_as(row_max))
            row_sum.fill_(1)


def packed(make: MakeTensor, parts: Iterable[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Lists of numbers as slices of one tensor, which is copied to a GPU at once."""
    step = PACKED_AT // dtype.itemsize
    numbers: list[int] = []
    places: list[slice] = []
    for part in parts:
        places.append(slice(len(numbers), len(numbers) + len(part)))
        numbers += part
        numbers += [0] * (-len(numbers) % step)
    whole = make(numbers, dtype)
    return [whole[place] for place in places]


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Where the keys and values of this step's tokens go, for one layer.

    pool              [rows, kv_heads, head_dim], contiguous
    k_slots, v_slots  int64 [tokens]: rows of the pool; -1 for a token whose KV is there already.
                      v_slots None: v is not stored, as rotated keys are the values, too
    stored            int64 [n]: the tokens that have a row; None: all of them
    """

    pool: Tensor
    k_slots: Tensor
    v_slots: Tensor | None
    stored: Tensor | None = None

    def store(self, k: Tensor, v: Tensor) -> None:
        """Store k and v, each [tokens, kv_heads, head_dim], with PyTorch."""
        for rows, slots in ((k, self.k_slots), (v, self.v_slots)):
            if slots is not None and self.stored is not None:
                rows, slots = rows[self.stored], slots[self.stored]
            if slots is not None:
                self.pool.index_copy_(0, slots, rows)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a recurrent layer, which a step reads and replaces. A sequence whose first token
    is in the step begins with zeros, whatever its slot holds.

    inputs  [slots, conv_size - 1, channels]: what the convolution saw last, the oldest first
    memory  float32 [slots, value_heads, key_dim, value_dim]; [slots, 0]: the rule has none
    slots   int64 [n]: the slot of each sequence of the step
    """

    inputs: Tensor
    memory: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """What a step must have in common with an earlier one to be replayed as that one.

    tensors: what the layers read; their shapes must be equal, their values may differ.
    layout: everything else that the calls of the layers depend on; it must be equal.
    """

    tensors: tuple[Tensor, ...]
    layout: tuple[Hashable, ...]


class KVCache(Protocol):
    """The KV cache as attention sees it, for one step. Layers are counted among those with KV."""

    def target(self, layer: int) -> KVTarget:
        """Where this step's keys and values go. Waits until they may be stored."""
        ...

    def state(self, layer: int) -> RecurrentState:
        """The state of a recurrent layer, counted among these."""
        ...

    def replay_key(self) -> ReplayKey | None:
        """The tensors and the layout behind every layer's target and chunks.

        None if a step cannot be replayed because its layers wait for copies.
        """
        ...

    def read(self, layer: int) -> Iterable[KVChunk]:
        """Everything the step's queries may attend to, this step's tokens included.

        A chunk is valid until the next one is taken.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention of this step's queries over the chunks of one layer.

    can_replay: what it does depends on the tensors of a context alone, not on its `lengths`.
    is_batch_invariant: the bits of a row depend on its own tokens and positions alone.
    """

    name: str
    can_replay: bool
    is_batch_invariant: bool

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """Make room for a step of these `lengths` that is recorded or replayed. True: in place of
        what earlier recordings have, none of which may then be replayed.
        """
        ...

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        """q is [tokens, heads, head_dim]; so is the result, in the same dtype.

        The last query of a sequence sees all of its kv_lens keys, the one before sees one fewer.
        sinks: fp32 [heads], contiguous, the score of a key that every query of the head sees and
        whose value is 0 (arXiv 2309.17453, learned as in gpt-oss); None: there is no such key. It
        is the first that a row sees: its softmax starts at (sink, 1, 0).
        """
        ...


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step in integers, as in ForwardContext."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    lengths: Sequence[tuple[int, int]]
    logit_rows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass over the tokens of n sequences, laid end to end.

    token_ids     int64 [tokens]
    positions     int64 [tokens]
    query_start   int32 [n + 1]: tokens [query_start[i], query_start[i + 1]) belong to sequence i
    kv_lens       int32 [n]: keys of sequence i once this step's are written
    lengths       (query tokens, kv_lens) of each sequence, for backends driven from Python
    logit_rows    int64 [m]: the tokens whose logits are wanted
    last_rows     these in integers, if the model's result is to have them alone: its last layer
                  then does for the others no more than store their KV. None: it is to have all
    block_mass    None, or float32 [n, blocks] with a place for every block that has keys: for
                  sequence i and its logical block b, attention adds the probability that the
                  queries of sequence i give to the keys of b, summed over these queries, all heads
                  and all layers without a window. While a layer runs, this takes 8 bytes of memory
                  for each query, head and block (in Triton, tile of keys). Flash kernels leave it
                  as it is.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    kv_lens: Tensor
    lengths: tuple[tuple[int, int], ...]
    logit_rows: Tensor
    kv: KVCache
    attention: AttentionBackend
    block_mass: Tensor | None = None
    last_rows: tuple[int, ...] | None = None

    @classmethod
    def lay_out(
        cls,
        rows: StepRows,
        kv: KVCache,
        attention: AttentionBackend,
        tensor: MakeTensor,
        block_mass: Tensor | None = None,
        logits_alone: bool = False,
    ) -> ForwardContext:
        """The context of these rows, with its tensors made by `tensor`. logits_alone: whether the
        model's result is to have the logit rows alone.
        """
        starts = [*accumulate((num for num, _ in rows.lengths), initial=0)]
        kv_lens = [num_keys for _, num_keys in rows.lengths]
        token_ids, positions, logit_rows = packed(
            tensor, (rows.token_ids, rows.positions, rows.logit_rows), torch.int64
        )
        query_start, lens = packed(tensor, (starts, kv_lens), torch.int32)
        return cls(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            kv_lens=lens,
            lengths=tuple(rows.lengths),
            logit_rows=logit_rows,
            kv=kv,
            attention=attention,
            block_mass=block_mass,
            last_rows=tuple(rows.logit_rows) if logits_alone else None,
        )
