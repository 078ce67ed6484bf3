"""The Triton kernels of triton_attention.py; triton_rows.py has the arithmetic of their rows."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.attention.triton_rows import (
    NOTHING,
    after_sinks,
    empty_state,
    first_key_seen,
    fold_tiles,
    keep,
    load_state,
    merged,
    span_of,
    store_state,
)


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def prefill(
    q, k, v, tiles, seq_index, first_block, num_blocks, table, query_start, kv_lens,
    state_max, state_sum, state_acc, kept_max, kept_sum, sinks, out,
    scale, num_tokens, table_row, q_token, q_head, kv_block, kv_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS_OF_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, PARTITION: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Rows are the heads of a group, query by query; the longest tile of queries runs first. Memory
    holds first the states of all finished partitions, then those of started ones.
    """
    number, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    span, first_query = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1)
    _seq, start_token, num_queries, kv_len, first_key, end_key = span_of(
        span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK
    )

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = first_query + r // GROUP
    is_row = (r < ROWS // GROUP * GROUP) & (query < num_queries)
    head = group * GROUP + r % GROUP
    token = (start_token + query).to(tl.int64)
    position = tl.where(is_row, kv_len - num_queries + query, -1)
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = token * q_token + head * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)

    first_position = kv_len - num_queries + first_query
    first_seen = first_key_seen(kv_len - num_queries, WINDOW) // BLOCK * BLOCK
    at = token * HEADS + head
    kept = kept_max, kept_sum, at, num_tokens * HEADS
    part_at = at + num_tokens * HEADS
    is_carried = is_row & (r < tl.where(first_key > first_seen, ROWS, 0))
    state = state_max, state_sum, state_acc
    whole_max, whole_sum, whole_acc = load_state(state, at, is_carried, d, HEAD_DIM)
    begins = is_row & (r >= tl.where(first_key > first_seen, ROWS, 0))
    whole_max, whole_sum = after_sinks(sinks, head, begins, whole_max, whole_sum)
    row_max, row_sum, acc = load_state(state, part_at, is_carried, d, HEAD_DIM)

    kv_at = group // GROUPS_OF_KEYS * HEAD_DIM
    keys, values, pages = k + kv_at, v + kv_at, table + span * table_row
    begin = tl.maximum(first_key, first_key_seen(first_position, WINDOW) // TILE * TILE)
    all_see = tl.minimum(end_key, first_position + 1) // TILE * TILE  # where there is no window
    end = tl.minimum(end_key, tl.max(position) + 1)
    for part in range(begin // PARTITION, tl.cdiv(end, PARTITION)):
        part_begin = tl.maximum(part * PARTITION, begin)
        part_end = tl.minimum((part + 1) * PARTITION, end)
        row_max, row_sum, acc = fold_tiles(
            queries, keys, values, pages, first_key, kv_block, kv_row, scale, position - WINDOW,
            position, part_begin, tl.minimum(part_end, all_see), part_end, row_max, row_sum, acc,
            kept, HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, WINDOW > 0,
        )  # fmt: skip
        if part_end == (part + 1) * PARTITION:
            whole_max, whole_sum, whole_acc = merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
            row_max, row_sum, acc = empty_state(ROWS, DIM)

    if end_key == kv_len:
        whole_max, whole_sum, whole_acc = merged(
            whole_max, whole_sum, whole_acc, row_max, row_sum, acc
        )
        keep(kept, 0, whole_max, whole_sum, is_row)
        result = (whole_acc / tl.where(is_row, whole_sum, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_value)
    else:
        store_state(state, at, is_row, d, whole_max, whole_sum, whole_acc, HEAD_DIM)
        store_state(state, part_at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def decode(
    q, k, v, seq_index, first_block, num_blocks, table, query_start, kv_lens,
    part_start, part_max, part_sum, part_acc, kept_max, kept_sum,
    scale, num_tokens, table_row, q_token, q_head, kv_block, kv_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS_OF_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, LONGEST: tl.constexpr,
    ROWS: tl.constexpr, PARTITION: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Fold every n-th partition of the chunk, for few queries of one sequence and one group."""
    span, group = tl.program_id(0), tl.program_id(1)
    seq, start_token, num_queries, kv_len, first_key, end_key = span_of(
        span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK
    )
    end_key = tl.where(num_queries <= FEW, end_key, 0)

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    query, head = r // GROUP, group * GROUP + r % GROUP
    is_row = query < num_queries
    position = tl.where(is_row, kv_len - num_queries + query, -1)
    hidden = position - WINDOW
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = (start_token + query).to(tl.int64) * q_token + head * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)
    kv_at = group // GROUPS_OF_KEYS * HEAD_DIM
    keys, values = k + kv_at, v + kv_at
    pages = table + span * table_row
    kept = kept_max, kept_sum, (start_token + query) * HEADS + head, num_tokens * HEADS

    parts = part_max, part_sum, part_acc
    first_position = kv_len - num_queries
    kept_from = first_key_seen(first_position, LONGEST) // PARTITION
    first_seen = first_key_seen(first_position, WINDOW) // TILE * TILE
    first = tl.maximum(first_key, first_seen) // PARTITION + tl.program_id(2)
    for part in range(first, tl.cdiv(end_key, PARTITION), tl.num_programs(2)):
        part_begin = tl.maximum(part * PARTITION, first_seen)
        begin = tl.maximum(part_begin, first_key)
        end = tl.minimum((part + 1) * PARTITION, end_key)
        slot = tl.load(part_start + seq).to(tl.int64) + (part - kept_from) * num_queries
        at = (slot + query) * HEADS + head
        is_carried = is_row & (r < tl.where(begin > part_begin, ROWS, 0))
        row_max, row_sum, acc = load_state(parts, at, is_carried, d, HEAD_DIM)
        row_max, row_sum, acc = fold_tiles(
            queries, keys, values, pages, first_key, kv_block, kv_row, scale, hidden, position,
            begin, begin, end, row_max, row_sum, acc, kept,
            HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        store_state(parts, at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit
def merge(
    query_start, kv_lens, part_start, part_max, part_sum, part_acc, kept_max, kept_sum, sinks, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTITION: tl.constexpr,
    FEW: tl.constexpr, AT_ONCE: tl.constexpr, WINDOW: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Merge the partition states of one head of one query, in logical order."""
    seq, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    if (query >= num_queries) | (num_queries > FEW):
        return
    kv_len = tl.load(kv_lens + seq)
    num_parts = tl.cdiv(kv_len, PARTITION)
    first_position = kv_len - num_queries
    kept_from = first_key_seen(first_position, LONGEST) // PARTITION
    slot = tl.load(part_start + seq).to(tl.int64) - kept_from * num_queries + query
    parts = part_max, part_sum, part_acc
    one, d = tl.arange(0, 1), tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    whole_max, whole_sum, whole_acc = empty_state(1, DIM)
    whole_max, whole_sum = after_sinks(sinks, head + one, one == 0, whole_max, whole_sum)
    for first in range(first_key_seen(first_position, WINDOW) // PARTITION, num_parts, AT_ONCE):
        for n in tl.static_range(AT_ONCE):  # all loads can be in flight at once
            at = (slot + (first + n) * num_queries) * HEADS + head + one
            is_there = one < num_parts - first - n
            row_max, row_sum, acc = load_state(parts, at, is_there, d, HEAD_DIM)
            whole_max, whole_sum, whole_acc = merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
    whole_sum = tl.where(num_parts > 0, whole_sum, 1.0)
    at = (start_token + query).to(tl.int64) * HEADS + head + one
    keep((kept_max, kept_sum, at, 0), 0, whole_max, whole_sum, one == 0)
    result = (whole_acc / whole_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_dim[None, :])


@triton.jit(do_not_specialize=["num_tokens", "mass_row"])
def add_mass(
    query_start, kv_lens, kept_max, kept_sum, mass, num_tokens, mass_row,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add to the mass of one block of a sequence what the sequence's rows gave to its tiles."""
    block, seq = tl.program_id(0), tl.program_id(1)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    kv_len = tl.load(kv_lens + seq)
    first_row = start_token.to(tl.int64) * HEADS
    total = tl.zeros([ROWS], tl.float32)
    for start in range(block * BLOCK, tl.minimum((block + 1) * BLOCK, kv_len), TILE):
        tile = tl.cast(start // TILE + 1, tl.int64) * num_tokens * HEADS
        for first in range(0, num_queries * HEADS, ROWS):
            r = first + tl.arange(0, ROWS)
            sees = (r < num_queries * HEADS) & (kv_len - num_queries + r // HEADS >= start)
            at = first_row + r
            row_max = tl.load(kept_max + at, mask=sees, other=0.0)
            row_sum = tl.load(kept_sum + at, mask=sees, other=1.0)
            tile_max = tl.load(kept_max + tile + at, mask=sees, other=NOTHING)
            tile_sum = tl.load(kept_sum + tile + at, mask=sees, other=0.0)
            total += tl.exp2(tile_max - row_max) * tile_sum / row_sum
    at = mass + seq * mass_row + block
    tl.store(at, tl.load(at) + tl.sum(total, 0))
