"""Attention on a GPU by Triton kernels, with the same arithmetic for every row.

The context of a row is split into partitions: short ones of PARTITION keys, so that short contexts
have some, then long ones, so that there are not too many. Each is folded tile by tile into its own
state (maximum, sum, accumulator), by the online softmax of Milakov and Gimelshein (arXiv
1805.02867); the states are merged in logical order. Tiles and partitions lie at fixed logical
positions, so the result does not depend on the pool of a block, on chunks, on the sequence's number
of rows or on other sequences.

Two paths run different things in parallel. Many queries: a program for each tile of queries folds
all partitions. Few queries: a program for each partition, and a second kernel that merges (the
split of Flash-Decoding, Dao et al. 2023).

The mass of a block is exact: each tile, which lies in one block, leaves its maximum and its sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.attention.triton_attention_kernels import add_mass, decode, merge, prefill
from nanoengine.attention.triton_rows import LOG2E, LONG
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, SoftmaxState, Spans
from nanoengine.devices.device import to_device
from nanoengine.kernels.triton_launch import FUSED, power_of_two

PARTITION, SHORT = 512, 64  # keys; so many partitions, then LONG times as long ones
MERGED_AT_ONCE = 16  # partitions whose states are loaded together, at most
LEAST_STATES = 256  # of decode steps: 4 MB of an 8B model
FEW_QUERIES = 17  # the most of a sequence whose partitions run in parallel
MOST_ROWS, PREFILL_WARPS = 128, 8  # rows: heads of queries
MOST_OF_4_WARPS = 64 * 128  # numbers of the results that 4 warps hold in registers
DECODE_PROGRAMS = 4096  # per launch, also of sequences that only pad: some for each multiprocessor
TWO_AT_ONCE = 64  # rows of a program that leaves room for another: that one reads ahead for it
MAX_TILE = 128
MASS_ROWS = 256  # of the states that add_mass loads together
TILES_IN_SHARED_MEMORY = 2  # the one in use, and the next one on its way
MIN_DOT = 16  # the smallest side of a matrix product
BOX_ALIGNMENT = 16  # bytes: of what a descriptor describes

WIDE_DIM = 128  # a program holds the results of MOST_ROWS rows of so many numbers, at most

Lengths = tuple[tuple[int, int], ...]
# What add_mass needs of a layer: fp32 [1 + tiles, tokens, heads], the maxima and the sums of each
# row over all its keys and over each tile; without mass nothing.
Kept = tuple[Tensor, Tensor] | tuple[None, None]


@dataclass(frozen=True, slots=True)
class _Partitions:
    """Softmax states of sequences with few queries, one for each partition and query.

    start: int32 [n], index of the first state of sequence i, that of the first partition that any
    layer sees. few: the largest number of queries that counts as few; queries: the kernel has rows
    for so many, the most of such a sequence in this step or more. at_once: partitions that are
    merged together.
    """

    start: Tensor
    states: SoftmaxState
    few: int
    queries: int
    at_once: int


@dataclass(slots=True)
class _Buffers:
    """What the layers of one shape share in a step. parts: of sequences with few queries; states:
    of those with many; None: there are none.
    """

    parts: _Partitions | None = None
    states: SoftmaxState | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer computes, and where its results go. window: 0: there is none."""

    q: Tensor
    ctx: ForwardContext
    sinks: Tensor | None
    window: int
    kept: Kept
    out: Tensor


class TritonAttention:
    """Runs the kernels of triton_attention_kernels.py over the chunks of a layer."""

    can_replay = True
    is_batch_invariant = False  # tiles have a fixed order; the compiler orders sums inside a tile

    def __init__(
        self,
        config: AttentionConfig,
        dtype: torch.dtype,
        device: torch.device,
        checked_rows: int = 1,
    ) -> None:
        """checked_rows: most queries that check guesses; with fewer the same kernel runs."""
        self._config = config
        self._checked_rows = checked_rows
        self.name = f"Triton {triton.__version__}"
        # The kernels use powers of two, and a cap's parts before these.
        self._scale = config.score_scale * LOG2E.value
        if config.softcap is not None:
            self._scale = config.score_scale / config.softcap
        self._shared_bytes = _shared_memory(device)
        self._copies_boxes = copies_boxes(device)
        key_bytes = 2 * _padded(config.head_dim) * dtype.itemsize
        room = self._shared_bytes // (TILES_IN_SHARED_MEMORY * key_bytes)
        self._most_keys: int = min(MAX_TILE, 1 << (room.bit_length() - 1))
        keys, dim = max(MIN_DOT, self._most_keys), _padded(config.head_dim)
        self._least_bytes = _program_bytes(MIN_DOT, keys, dim, dtype)
        self._programs: dict[tuple[int, ...], tuple[int, int]] = {}
        self._shapes: dict[tuple[int, ...], dict[str, Any]] = {}
        self._tiles: dict[tuple[int, int, int], tuple[Spans, Tensor | None]] = {}
        self._buffers: dict[tuple[int, ...], _Buffers] = {}
        # Of layers of a shape, so many states for all steps; graphs would each hold their own.
        self._num_states = 0
        self._states: dict[tuple[int, ...], SoftmaxState] = {}
        self._kept: dict[int, Kept] = {}  # by the heads of q
        self._step: Tensor | None = None  # whose these are

    @property
    def lack(self) -> str:
        """Why the GPU cannot run it; "" if it can."""
        if self._shared_bytes >= self._least_bytes:
            return ""
        has, needs = self._shared_bytes >> 10, self._least_bytes >> 10
        return f"Triton: heads of {self._config.head_dim} need {needs} KiB of a GPU with {has} KiB"

    def reserve(self, lengths: Lengths) -> bool:
        """States for decode steps, by their contexts as they are now: if all had as many as the
        longest one, 64 contexts of 128K would take 110 MiB of an 8B model, whatever they hold.
        """
        needed = self._num_of_states(lengths)
        if needed <= self._num_states:
            return False
        self._num_states = power_of_two(max(needed, LEAST_STATES))
        had_states = bool(self._states)
        self._states.clear()
        return had_states

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = self._config.window(layer) or 0
        for number, chunk in enumerate(ctx.kv.read(layer)):
            if not number:
                # A pass may run between two layers of another.
                if not layer or self._step is not ctx.query_start:
                    self._step = ctx.query_start
                    self._tiles, self._buffers, self._kept = {}, {}, {}
                buffers = self._buffers_of(q, chunk, ctx)
                kept = (None, None) if window else self._kept_of(q, chunk.k.shape[1], ctx)
                this = _Layer(q, ctx, sinks, window, kept, out)
            tiles = self._tiles_of(chunk, ctx.lengths, q)
            if tiles is not None:
                self._run_prefill(this, chunk, buffers, tiles)
            if buffers.parts is not None:
                self._run_decode(this, chunk, buffers.parts)
        if buffers.parts is not None:
            self._run_merge(this, buffers.parts)
        if kept[0] is not None:
            self._add_mass(ctx, chunk.k.shape[1], kept)
        return out

    def _buffers_of(self, q: Tensor, chunk: KVChunk, ctx: ForwardContext) -> _Buffers:
        """Of layers of this shape. Each step allocates them, so that its graph holds that."""
        shape = *q.shape[1:], chunk.k.shape[2]
        if shape in self._buffers:
            return self._buffers[shape]
        buffers = self._buffers[shape] = _Buffers()
        few = few_queries(*self._program(q, chunk))
        counts = [num_queries for num_queries, _ in ctx.lengths if num_queries <= few]
        if counts:
            start = self._first_states(ctx, few)
            states = self._states_of(q, [length for length in ctx.lengths if length[0] <= few])
            queries = max(*counts, min(self._checked_rows, few))
            buffers.parts = _Partitions(start, states, few, queries, self._at_once(chunk))
        if len(counts) < len(ctx.lengths):
            buffers.states = _states(q, 0 if chunk.is_last else 2 * len(q))
        return buffers

    def _kept_of(self, q: Tensor, block_size: int, ctx: ForwardContext) -> Kept:
        """Of layers of so many heads."""
        if q.shape[1] not in self._kept:
            self._kept[q.shape[1]] = self._make_kept(q, block_size, ctx)
        return self._kept[q.shape[1]]

    def _make_kept(self, q: Tensor, block_size: int, ctx: ForwardContext) -> Kept:
        if ctx.block_mass is None:
            return None, None
        num_keys = ctx.block_mass.shape[1] * block_size
        assert num_keys >= max(kv_len for _, kv_len in ctx.lengths)
        shape = 1 + num_keys // self._tile(block_size), *q.shape[:2]
        row_max = torch.empty(shape, dtype=torch.float32, device=q.device)
        return row_max, torch.empty_like(row_max)

    def _tile(self, block_size: int) -> int:
        """Keys of a tile, which lies in one block, at the same place whatever chunk that is in."""
        return min(self._most_keys, block_size & -block_size)

    def _at_once(self, chunk: KVChunk) -> int:
        """Partitions merged together: those of a full block table, the same in all replays."""
        keys = chunk.block_table.shape[1] * chunk.k.shape[1]
        return min(MERGED_AT_ONCE, power_of_two(max(1, num_partitions(keys))))

    def _first_states(self, ctx: ForwardContext, few: int) -> Tensor:
        """_Partitions.start, from tensors only, as graphs may be replayed on longer contexts."""
        num_queries = ctx.query_start[1:] - ctx.query_start[:-1]
        counts: Tensor = num_partitions(ctx.kv_lens)
        if longest := self._config.longest_window:
            unseen = (ctx.kv_lens - num_queries + 1 - longest).clamp(min=0)
            counts -= num_partitions(unseen + 1) - 1
        counts *= num_queries * (num_queries <= few)
        return (counts.cumsum(0) - counts).to(torch.int32)

    def _states_of(self, q: Tensor, lengths: Sequence[tuple[int, int]]) -> SoftmaxState:
        """Of all partitions and queries. Those of layers of this shape, if they are enough."""
        needed, shape = self._num_of_states(lengths), tuple(q.shape[1:])
        if needed > self._num_states:
            return _states(q, needed)
        if shape not in self._states:
            self._states[shape] = _states(q, self._num_states)
        return self._states[shape]

    def _num_of_states(self, lengths: Sequence[tuple[int, int]]) -> int:
        """Of steps of few queries, at most."""
        longest, total = self._config.longest_window, 0
        for num_queries, kv_len in lengths:
            of_each: int = num_partitions(kv_len)
            if longest is not None:  # its first key may lie anywhere in a partition
                of_each = min(of_each, -(-(longest + num_queries) // PARTITION) + 1)
            total += num_queries * of_each
        return total

    def _tiles_of(self, chunk: KVChunk, lengths: Lengths, q: Tensor) -> Tensor | None:
        """(span, first query) of each tile of queries over this chunk; None without tiles."""
        group, rows = self._program(q, chunk)
        tile = rows // group
        # Spans are kept beside the tiles, so no other object gets their id.
        key = id(chunk.spans), group, tile
        if key not in self._tiles:
            found = query_tiles(chunk, lengths, tile, few_queries(group, rows))
            tiles = to_device(found, torch.int32, q.device) if found else None
            self._tiles[key] = chunk.spans, tiles
        return self._tiles[key][1]

    def _run_prefill(self, of: _Layer, chunk: KVChunk, buffers: _Buffers, tiles: Tensor) -> None:
        q, states = of.q, buffers.states
        assert states is not None
        if not chunk.is_last and not len(states.row_max):  # the first layer read fewer chunks
            states = buffers.states = _states(q, 2 * len(q))
        group, rows = self._program(q, chunk)
        shape = self._shape(q, chunk, rows)
        prefill[(len(tiles), q.shape[1] // group)](
            q, chunk.k, chunk.v, *self._boxes(of, chunk, rows), tiles,
            chunk.seq_index, chunk.first_block, chunk.num_blocks, chunk.block_table,
            of.ctx.query_start, of.ctx.kv_lens,
            states.row_max, states.row_sum, states.acc, *of.kept, of.sinks, of.out,
            self._scale, len(q), *_strides(q, chunk), **shape, WINDOW=of.window,
            **FUSED, num_warps=PREFILL_WARPS, num_stages=_stages(q),
        )  # fmt: skip

    def _run_decode(self, of: _Layer, chunk: KVChunk, parts: _Partitions) -> None:
        q, (group, most_rows) = of.q, self._program(of.q, chunk)
        num_spans, num_groups = len(chunk.seq_index), q.shape[1] // group
        width = num_partitions(chunk.block_table.shape[1] * chunk.k.shape[1]) + 1
        wanted = max(1, DECODE_PROGRAMS // (num_spans * num_groups))
        rows = few_rows(parts.queries * group, most_rows)
        shape, states = self._shape(q, chunk, rows), parts.states
        decode[(num_spans, num_groups, min(width, wanted))](
            q, chunk.k, chunk.v, *self._boxes(of, chunk, rows),
            chunk.seq_index, chunk.first_block, chunk.num_blocks, chunk.block_table,
            of.ctx.query_start, of.ctx.kv_lens,
            parts.start, states.row_max, states.row_sum, states.acc, *of.kept,
            self._scale, len(q), *_strides(q, chunk), **shape, WINDOW=of.window,
            LONGEST=self._config.longest_window or 0,
            **FUSED, num_warps=4 if rows * shape["DIM"] <= MOST_OF_4_WARPS else 8,
            num_stages=1 if rows == TWO_AT_ONCE else _stages(q),
        )  # fmt: skip

    def _run_merge(self, of: _Layer, parts: _Partitions) -> None:
        _, heads, head_dim = of.out.shape
        states = parts.states
        merge[(len(of.ctx.lengths), heads, parts.queries)](
            of.ctx.query_start, of.ctx.kv_lens,
            parts.start, states.row_max, states.row_sum, states.acc, *of.kept, of.sinks, of.out,
            heads, head_dim, _padded(head_dim), PARTITION, SHORT, parts.few, parts.at_once,
            of.window, self._config.longest_window or 0,
            **FUSED, num_warps=max(1, _padded(head_dim) // 128),
        )  # fmt: skip

    def _add_mass(self, ctx: ForwardContext, block_size: int, kept: tuple[Tensor, Tensor]) -> None:
        mass = ctx.block_mass
        assert mass is not None
        _, num_tokens, heads = kept[0].shape
        num_sequences, num_blocks = mass.shape
        add_mass[(num_blocks, num_sequences)](  # a GPU has 65,535 programs in y, at most
            ctx.query_start, ctx.kv_lens, *kept, mass, num_tokens, mass.stride(0),
            heads, block_size, self._tile(block_size), MASS_ROWS, **FUSED, num_warps=4,
        )  # fmt: skip

    def _shape(self, q: Tensor, chunk: KVChunk, rows: int) -> dict[str, Any]:
        _, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = chunk.k.shape
        key = heads, kv_heads, head_dim, block_size, rows
        if key in self._shapes:
            return self._shapes[key]
        tile = self._tile(block_size)
        group, most_rows = self._program(q, chunk)
        shape = self._shapes[key] = {
            "HEADS": heads,
            "GROUP": group,
            "GROUPS_OF_KEYS": heads // kv_heads // group,
            "HEAD_DIM": head_dim,
            "DIM": _padded(head_dim),
            "BLOCK": block_size,
            "TILE": tile,
            "TILE_PAD": max(MIN_DOT, tile),
            "ROWS": rows,
            "PARTITION": PARTITION,
            "SHORT": SHORT,
            "FEW": few_queries(group, most_rows),
            "SOFTCAP": self._config.softcap,
        }
        return shape

    def _boxes(self, of: _Layer, chunk: KVChunk, rows: int) -> tuple[Any, Any]:
        """Descriptors of the keys and the values of all heads as rows, by which a GPU copies a tile
        in one go (NVIDIA's from compute capability 9.0 on); (None, None) where none can do it, or
        where it is not worth it: for the fewest rows, and where each tile has a mask.
        """
        if not self._copies_boxes or rows == MIN_DOT or of.window:
            return None, None
        _, block_size, kv_heads, head_dim = chunk.k.shape
        block, row, *_ = chunk.k.stride()
        tile = self._tile(block_size)
        if head_dim != _padded(head_dim) or tile < MIN_DOT:
            return None, None
        shape = [(len(chunk.k) - 1) * (block // row) + block_size, kv_heads * head_dim]
        if block % row or row < shape[1] or row * chunk.k.element_size() % BOX_ALIGNMENT:
            return None, None
        if (chunk.k.data_ptr() | chunk.v.data_ptr()) % BOX_ALIGNMENT:
            return None, None
        return tuple(
            TensorDescriptor(x, shape, [row, 1], [tile, head_dim]) for x in (chunk.k, chunk.v)
        )

    def _program(self, q: Tensor, chunk: KVChunk) -> tuple[int, int]:
        """The heads of q that a program takes, and the rows that it has at most: so many that it
        fits the GPU's shared memory. It takes all heads of a KV head, or where few rows fit a part
        of them, so that the rows that check guesses are not too many.
        """
        _, heads, head_dim = q.shape
        key = heads, chunk.k.shape[2], head_dim
        if key not in self._programs:
            dim, group = _padded(head_dim), heads // chunk.k.shape[2]
            keys, rows = max(MIN_DOT, self._most_keys), MOST_ROWS * WIDE_DIM // max(WIDE_DIM, dim)
            while rows > MIN_DOT and self._shared_bytes < _program_bytes(rows, keys, dim, q.dtype):
                rows //= 2
            queries = 1 if rows == MOST_ROWS else min(self._checked_rows, FEW_QUERIES, rows)
            sizes = (size for size in range(group, 0, -1) if group % size == 0)
            self._programs[key] = next(size for size in sizes if size * queries <= rows), rows
        return self._programs[key]


def few_rows(wanted: int, most: int) -> int:
    """Rows of a program for few queries. Not 32 unless that is the most: there warps share rows, so
    that their sums have another order than those of 16, of 64 and of prompts, which are the same
    bit by bit on an H200.
    """
    rows = max(MIN_DOT, power_of_two(wanted))
    return min(64, most) if rows == 32 else rows


def num_partitions(keys: Any) -> Any:
    """How many partitions hold the first `keys` keys, an int or a tensor: as many as if all were
    short, or, where that is fewer, the short ones and long ones behind them.
    """
    long = LONG.value * PARTITION
    all_short = (keys + (PARTITION - 1)) // PARTITION
    mixed = (keys + ((SHORT + 1) * long - SHORT * PARTITION - 1)) // long
    return torch.minimum(all_short, mixed) if isinstance(keys, Tensor) else min(all_short, mixed)


def copies_boxes(device: torch.device) -> bool:
    """Whether the GPU has an engine that copies tiles by descriptors: NVIDIA's from Hopper on."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def few_queries(group: int, most_rows: int) -> int:
    """The most queries of a sequence whose partitions run in parallel; chosen for speed only."""
    return max(1, min(FEW_QUERIES, most_rows // group))


def query_tiles(chunk: KVChunk, lengths: Lengths, tile: int, few: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile of many queries that sees keys of the chunk, or for which
    the chunk is the sequence's last.
    """
    block_size = chunk.k.shape[1]
    found = []
    for number, (index, first, blocks) in enumerate(chunk.spans):
        num_queries, kv_len = lengths[index]
        if num_queries <= few:
            continue
        is_last = (first + len(blocks)) * block_size >= kv_len
        # The first tile with a query at or past the first key.
        unseen = 0 if is_last else max(0, first * block_size - (kv_len - num_queries))
        found += [(number, query) for query in range(unseen // tile * tile, num_queries, tile)]
    return found


def _program_bytes(rows: int, keys: int, dim: int, dtype: torch.dtype) -> int:
    """Shared memory: of queries, a tile of keys and one of values, and the weights between them."""
    return dtype.itemsize * (rows * dim + 2 * keys * dim + rows * keys)


def _padded(head_dim: int) -> int:
    """Numbers of a head with which kernels compute."""
    return max(MIN_DOT, power_of_two(head_dim))


def _states(q: Tensor, num_rows: int) -> SoftmaxState:
    """Allocate softmax states for `num_rows` rows of every head."""
    _, heads, head_dim = q.shape
    shapes = (num_rows, heads), (num_rows, heads), (num_rows, heads, head_dim)
    return SoftmaxState(
        *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    )


def _strides(q: Tensor, chunk: KVChunk) -> tuple[int, ...]:
    token, head, _ = q.stride()
    block, row, _, _ = chunk.k.stride()
    return chunk.block_table.stride(0), token, head, block, row


def _stages(q: Tensor) -> int:
    """Pipeline stages of loads. An exact fp32 product needs the shared memory of a second tile."""
    return 1 if q.dtype == torch.float32 else TILES_IN_SHARED_MEMORY


def _shared_memory(device: torch.device) -> int:
    """Shared memory of a program in bytes; in Triton's interpreter that of a GPU of 2022. PyTorch
    for AMD has one number for it.
    """
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    least: int = properties.shared_memory_per_block
    return int(getattr(properties, "shared_memory_per_block_optin", least))
