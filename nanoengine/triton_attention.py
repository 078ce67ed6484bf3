"""Attention on a GPU by Triton kernels that walk a sequence's keys in logical order.

Queries of a prompt: one program folds tiles of keys into (maximum, sum, accumulator), the online
softmax of Milakov and Gimelshein (arXiv 1805.02867), and leaves that state in memory between two
chunks. A decoding query: its context is cut into partitions of PARTITION keys, each folded by a
program of its own and merged in order at the end (the split of Flash-Decoding, Dao et al. 2023).
Tiles and partitions lie at fixed logical positions, so the bits of a result depend neither on which
pool a block came from, nor in how many chunks, nor on the other sequences of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.config import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, Spans
from nanoengine.device import to_device

PARTITION = 512
MERGED_AT_ONCE = 8
PREFILL_ROWS, PREFILL_WARPS = 128, 8
DECODE_PROGRAMS, DECODE_WARPS = 1024, 4  # programs of a launch: several for each multiprocessor
MAX_TILE = 128
TILES_IN_SHARED_MEMORY = 2  # the one in use, and the next one on its way
MIN_DOT = 16  # the least of any side of a matrix product
# Below every score, and finite: a row that has seen no key is no inf - inf.
NOTHING: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

Lengths = tuple[tuple[int, int], ...]
States = tuple[Tensor, Tensor, Tensor]  # row maximum and sum, fp32 [rows, heads]; accumulator


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap), near 0 by the odd polynomial of Cephes' tanhf."""
    x = scores / softcap
    z = x * x
    near = z * -5.70498872745e-3 + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = (near * z - 3.33332819422e-1) * z * x + x
    e = tl.exp(tl.abs(x) * -2.0)
    far = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first key that a query at this position sees."""
    if WINDOW:
        return tl.maximum(position + 1 - WINDOW, 0)
    return position * 0


@triton.jit
def _fold(
    q,
    keys,
    values,
    page,
    kv_block,
    kv_row,
    first_row,
    scale,
    hidden,
    position,
    start,
    row_max,
    row_sum,
    acc,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Fold one tile of keys, rows [first_row, first_row + TILE) of a page; `position` is the last
    key that each row sees here, `start` the position of the tile's first; where there is a window,
    `hidden` is the last key before that of each row.
    """
    n, d = tl.arange(0, TILE_PAD), tl.arange(0, DIM)
    at = page.to(tl.int64) * kv_block + (first_row + n) * kv_row
    seen_by_any = (n < TILE) & (start + n <= tl.max(position))
    if IS_MASKED or DIM != HEAD_DIM or TILE != TILE_PAD:
        mask = seen_by_any[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + at[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=mask, other=0.0)
    else:
        k = tl.load(keys + at[:, None] + d[None, :])
        v = tl.load(values + at[:, None] + d[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        scores = _capped(scores, SOFTCAP) * LOG2E
    if IS_MASKED or TILE != TILE_PAD:
        sees = (start + n)[None, :] <= position[:, None]
        if WINDOW:
            sees = sees & ((start + n)[None, :] > hidden[:, None])
        scores = tl.where(sees & (n < TILE)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    q,
    k,
    v,
    tiles,
    seq_index,
    first_block,
    num_blocks,
    table,
    query_start,
    kv_lens,
    state_max,
    state_sum,
    state_acc,
    out,
    scale,
    table_row,
    q_token,
    q_head,
    kv_block,
    kv_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows are the heads of a group, query by query; the longest tile of queries runs first."""
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    span, first_query = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1)
    kv_head = tl.program_id(1)
    seq = tl.load(seq_index + span)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    kv_len = tl.load(kv_lens + seq)
    first_key = tl.load(first_block + span) * BLOCK
    end_key = tl.minimum(first_key + tl.load(num_blocks + span) * BLOCK, kv_len)

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = first_query + r // GROUP
    is_row = (r < ROWS // GROUP * GROUP) & (query < num_queries)
    head = kv_head * GROUP + r % GROUP
    token = (start_token + query).to(tl.int64)
    position = tl.where(is_row, kv_len - num_queries + query, -1)
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = token * q_token + head * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)

    first_position = kv_len - num_queries + first_query
    first_seen = _first_seen(kv_len - num_queries, WINDOW) // BLOCK * BLOCK
    at = token * HEADS + head
    is_carried = is_row & (r < tl.where(first_key > first_seen, ROWS, 0))
    row_max = tl.load(state_max + at, mask=is_carried, other=NOTHING)
    row_sum = tl.load(state_sum + at, mask=is_carried, other=0.0)
    at_value = at[:, None] * HEAD_DIM + d[None, :]
    carried = is_carried[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.load(state_acc + at_value, mask=carried, other=0.0)

    keys, values = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM
    pages = table + span * table_row
    hidden = position - WINDOW
    begin = tl.maximum(first_key, _first_seen(first_position, WINDOW) // TILE * TILE)
    all_see = tl.minimum(end_key, first_position + 1) // TILE * TILE
    all_see = tl.maximum(all_see, begin)
    if WINDOW:
        all_see = begin  # the first tiles may hide keys from the last rows
    for start in range(begin, all_see, TILE):
        page = tl.load(pages + (start - first_key) // BLOCK)
        row_max, row_sum, acc = _fold(
            queries, keys, values, page, kv_block, kv_row, start % BLOCK, scale, hidden, position,
            start, row_max, row_sum, acc, HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for start in range(all_see, tl.minimum(end_key, tl.max(position) + 1), TILE):
        page = tl.load(pages + (start - first_key) // BLOCK)
        row_max, row_sum, acc = _fold(
            queries, keys, values, page, kv_block, kv_row, start % BLOCK, scale, hidden, position,
            start, row_max, row_sum, acc, HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
        )  # fmt: skip

    if end_key == kv_len:
        row_sum = tl.where(is_row, row_sum, 1.0)
        result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + at_value, result, mask=is_value)
    else:
        tl.store(state_max + at, row_max, mask=is_row)
        tl.store(state_sum + at, row_sum, mask=is_row)
        tl.store(state_acc + at_value, acc, mask=is_value)


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    q,
    k,
    v,
    seq_index,
    first_block,
    num_blocks,
    table,
    query_start,
    kv_lens,
    part_start,
    part_max,
    part_sum,
    part_acc,
    scale,
    table_row,
    q_token,
    q_head,
    kv_block,
    kv_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTITION: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """One query of one sequence, the heads of one group, every n-th partition of the chunk."""
    span, kv_head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(seq_index + span)
    token = tl.load(query_start + seq)
    is_decode = tl.load(query_start + seq + 1) == token + 1
    kv_len = tl.load(kv_lens + seq)
    first_key = tl.load(first_block + span) * BLOCK
    end_key = tl.minimum(first_key + tl.load(num_blocks + span) * BLOCK, kv_len)
    end_key = tl.where(is_decode, end_key, 0)

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    is_row = r < GROUP
    head = kv_head * GROUP + r
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = token.to(tl.int64) * q_token + head * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)
    keys, values = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM
    pages = table + span * table_row
    slots = tl.load(part_start + seq).to(tl.int64) - _first_seen(kv_len - 1, LONGEST) // PARTITION

    hidden = tl.zeros([ROWS], tl.int32) + (kv_len - 1 - WINDOW)
    first_seen = _first_seen(kv_len - 1, WINDOW) // TILE * TILE
    first = tl.maximum(first_key, first_seen) // PARTITION + tl.program_id(2)
    for part in range(first, tl.cdiv(end_key, PARTITION), tl.num_programs(2)):
        part_begin = tl.maximum(part * PARTITION, first_seen)
        begin = tl.maximum(part_begin, first_key)
        end = tl.minimum((part + 1) * PARTITION, end_key)
        last_seen = tl.zeros([ROWS], tl.int32) + (end - 1)
        at = (slots + part) * HEADS + head
        at_value = at[:, None] * HEAD_DIM + d[None, :]
        is_carried = is_row & (r < tl.where(begin > part_begin, ROWS, 0))
        row_max = tl.load(part_max + at, mask=is_carried, other=NOTHING)
        row_sum = tl.load(part_sum + at, mask=is_carried, other=0.0)
        carried = is_carried[:, None] & (d < HEAD_DIM)[None, :]
        acc = tl.load(part_acc + at_value, mask=carried, other=0.0)
        for start in range(begin, end, TILE):
            page = tl.load(pages + (start - first_key) // BLOCK)
            row_max, row_sum, acc = _fold(
                queries, keys, values, page, kv_block, kv_row, start % BLOCK, scale, hidden,
                last_seen, start, row_max, row_sum, acc,
                HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
            )  # fmt: skip
        tl.store(part_max + at, row_max, mask=is_row)
        tl.store(part_sum + at, row_sum, mask=is_row)
        tl.store(part_acc + at_value, acc, mask=is_value)


@triton.jit
def _merge(
    query_start,
    kv_lens,
    part_start,
    part_max,
    part_sum,
    part_acc,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTITION: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """One head of one decoding query: its partitions, a few at a time, in logical order."""
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + seq)
    if tl.load(query_start + seq + 1) != token + 1:
        return
    kv_len = tl.load(kv_lens + seq)
    num_parts = tl.cdiv(kv_len, PARTITION)
    slots = tl.load(part_start + seq).to(tl.int64) - _first_seen(kv_len - 1, LONGEST) // PARTITION
    n, d = tl.arange(0, AT_ONCE), tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    row_max = tl.zeros([1], tl.float32) + NOTHING
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for first in range(_first_seen(kv_len - 1, WINDOW) // PARTITION, num_parts, AT_ONCE):
        there = first + n < num_parts
        at = (slots + first + n) * HEADS + head
        maxima = tl.load(part_max + at, mask=there, other=NOTHING)
        sums = tl.load(part_sum + at, mask=there, other=0.0)
        mask = there[:, None] & is_dim[None, :]
        parts = tl.load(part_acc + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_max)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(sums * weights, 0)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        row_max = new_max
    row_sum = tl.where(num_parts > 0, row_sum, 1.0)
    at = (token.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    tl.store(out + at, (acc / row_sum).to(out.dtype.element_ty), mask=is_dim)


@dataclass(frozen=True, slots=True)
class _Partitions:
    """Softmax states of the step's decoding queries, one for each partition of their context.

    start: int32 [n], where the partitions of sequence i begin, from the first that any layer sees
    on; row_max and row_sum: fp32 [partitions, heads]; acc: fp32 [partitions, heads, head_dim].
    """

    start: Tensor
    row_max: Tensor
    row_sum: Tensor
    acc: Tensor


class TritonAttention:
    """See context.AttentionBackend."""

    follows_tensors = True

    def __init__(self, config: AttentionConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self.name = f"Triton {triton.__version__}"
        # Powers of two, not of e, from where no softcap comes between.
        self._scale = config.score_scale * (1 if config.softcap else LOG2E.value)
        self._dim = max(MIN_DOT, triton.next_power_of_2(config.head_dim))
        key_bytes = 2 * self._dim * dtype.itemsize
        room = _shared_memory(device) // (TILES_IN_SHARED_MEMORY * key_bytes)
        self._most_keys = min(MAX_TILE, 1 << (room.bit_length() - 1))
        self._tiles: dict[int, tuple[Spans, Tensor | None]] = {}
        self._parts: _Partitions | None = None
        self._states: States | None = None

    def run(self, layer: int, q: Tensor, ctx: ForwardContext) -> Tensor:
        """See context.AttentionBackend."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = self._config.window(layer) or 0
        for number, chunk in enumerate(ctx.kv.read(layer)):
            if not layer and not number:
                self._begin(q, chunk, ctx)
            tiles = self._tiles_of(chunk, ctx.lengths, q)
            if tiles is not None:
                self._run_prefill(q, chunk, ctx, tiles, out, window)
            if self._parts is not None:
                self._run_decode(q, chunk, ctx, self._parts, window)
        if self._parts is not None:
            self._run_merge(ctx, self._parts, out, window)
        return out

    def _begin(self, q: Tensor, chunk: KVChunk, ctx: ForwardContext) -> None:
        """Room for the states of a step. Made anew in each, so that a graph of it is whole."""
        self._tiles, self._parts, self._states = {}, None, None
        if any(num_queries == 1 for num_queries, _ in ctx.lengths):
            counts = (ctx.kv_lens + (PARTITION - 1)) // PARTITION
            if longest := self._config.longest_window:
                counts -= (ctx.kv_lens - longest).clamp(min=0) // PARTITION
            start = (counts.cumsum(0) - counts).to(torch.int32)
            num = self._most_partitions(chunk, ctx)
            self._parts = _Partitions(start, *_states(q, num))
        if any(num_queries > 1 for num_queries, _ in ctx.lengths):
            self._states = _states(q, 0 if chunk.is_last else len(q))

    def _most_partitions(self, chunk: KVChunk, ctx: ForwardContext) -> int:
        """Partitions of all sequences. For a step of one chunk, those that its table has room for:
        such a step may be done again on longer contexts.
        """
        most = sum(-(-kv_len // PARTITION) for _, kv_len in ctx.lengths)
        if chunk.is_last:
            width = chunk.block_table.shape[1] * chunk.k.shape[1]
            each = -(-width // PARTITION)
            if self._config.longest_window is not None:
                each += 1  # the first key in the table may lie anywhere in a partition
            return max(most, len(ctx.lengths) * each)
        return most

    def _tiles_of(self, chunk: KVChunk, lengths: Lengths, q: Tensor) -> Tensor | None:
        """(span, first query) of each tile of queries for this chunk of the step; None: no prompt
        has any there.
        """
        key = id(chunk.spans)  # kept beside the tiles, so that no other object gets this id
        if key not in self._tiles:
            group = q.shape[1] // chunk.k.shape[2]
            found = query_tiles(chunk, lengths, max(1, PREFILL_ROWS // group))
            tiles = to_device(found, torch.int32, q.device) if found else None
            self._tiles[key] = chunk.spans, tiles
        return self._tiles[key][1]

    def _run_prefill(
        self,
        q: Tensor,
        chunk: KVChunk,
        ctx: ForwardContext,
        tiles: Tensor,
        out: Tensor,
        window: int,
    ) -> None:
        assert self._states is not None
        if not chunk.is_last and not len(self._states[0]):  # the first layer read fewer chunks
            self._states = _states(q, len(q))
        group = q.shape[1] // chunk.k.shape[2]
        shape = self._shape(q, chunk, max(PREFILL_ROWS, triton.next_power_of_2(group)))
        _prefill[(len(tiles), chunk.k.shape[2])](
            q, chunk.k, chunk.v, tiles,
            chunk.seq_index, chunk.first_block, chunk.num_blocks, chunk.block_table,
            ctx.query_start, ctx.kv_lens,
            *self._states, out,
            self._scale, *_strides(q, chunk), **shape, WINDOW=window,
            num_warps=PREFILL_WARPS, num_stages=_stages(q),
        )  # fmt: skip

    def _run_decode(
        self, q: Tensor, chunk: KVChunk, ctx: ForwardContext, parts: _Partitions, window: int
    ) -> None:
        num_spans, kv_heads = len(chunk.seq_index), chunk.k.shape[2]
        width = triton.cdiv(chunk.block_table.shape[1] * chunk.k.shape[1], PARTITION) + 1
        wanted = max(1, DECODE_PROGRAMS // (num_spans * kv_heads))
        group = q.shape[1] // kv_heads
        shape = self._shape(q, chunk, max(MIN_DOT, triton.next_power_of_2(group)))
        _decode[(num_spans, kv_heads, min(width, wanted))](
            q, chunk.k, chunk.v,
            chunk.seq_index, chunk.first_block, chunk.num_blocks, chunk.block_table,
            ctx.query_start, ctx.kv_lens,
            parts.start, parts.row_max, parts.row_sum, parts.acc,
            self._scale, *_strides(q, chunk), **shape, WINDOW=window, PARTITION=PARTITION,
            LONGEST=self._config.longest_window or 0, num_warps=DECODE_WARPS, num_stages=_stages(q),
        )  # fmt: skip

    def _run_merge(self, ctx: ForwardContext, parts: _Partitions, out: Tensor, window: int) -> None:
        _, heads, head_dim = out.shape
        _merge[(len(ctx.lengths), heads)](
            ctx.query_start, ctx.kv_lens,
            parts.start, parts.row_max, parts.row_sum, parts.acc, out,
            heads, head_dim, self._dim, PARTITION, MERGED_AT_ONCE, window,
            self._config.longest_window or 0, num_warps=2,
        )  # fmt: skip

    def _shape(self, q: Tensor, chunk: KVChunk, rows: int) -> dict[str, Any]:
        _, heads, head_dim = q.shape
        _, block_size, kv_heads, _ = chunk.k.shape
        # A tile lies in one block, and at the same place whatever chunk the block is in.
        tile = min(self._most_keys, block_size & -block_size)
        return {
            "HEADS": heads,
            "GROUP": heads // kv_heads,
            "HEAD_DIM": head_dim,
            "DIM": self._dim,
            "BLOCK": block_size,
            "TILE": tile,
            "TILE_PAD": max(MIN_DOT, tile),
            "ROWS": rows,
            "SOFTCAP": self._config.softcap or 0.0,
        }


def query_tiles(chunk: KVChunk, lengths: Lengths, tile: int) -> list[tuple[int, int]]:
    """(span, first query) of each tile of queries of a prompt that the chunk concerns: they see
    keys of it, or nothing follows it for their sequence.
    """
    block_size = chunk.k.shape[1]
    found = []
    for number, (index, first, blocks) in enumerate(chunk.spans):
        num_queries, kv_len = lengths[index]
        if num_queries == 1:
            continue
        is_last = (first + len(blocks)) * block_size >= kv_len
        # The first tile with a query at or past the first key.
        unseen = 0 if is_last else max(0, first * block_size - (kv_len - num_queries))
        found += [(number, query) for query in range(unseen // tile * tile, num_queries, tile)]
    return found


def _states(q: Tensor, num_rows: int) -> States:
    """Room for so many rows of every head."""
    _, heads, head_dim = q.shape
    shapes = (num_rows, heads), (num_rows, heads), (num_rows, heads, head_dim)
    row_max, row_sum, acc = (
        torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes
    )
    return row_max, row_sum, acc


def _strides(q: Tensor, chunk: KVChunk) -> tuple[int, ...]:
    token, head, _ = q.stride()
    block, row, _, _ = chunk.k.stride()
    return chunk.block_table.stride(0), token, head, block, row


def _stages(q: Tensor) -> int:
    """Tiles that are loaded ahead. An exact fp32 product takes the room of the second itself."""
    return 1 if q.dtype == torch.float32 else TILES_IN_SHARED_MEMORY


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of a GPU of 2022 where there is none (an interpreter)."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
