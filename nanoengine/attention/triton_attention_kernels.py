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
    load_rows,
    load_state,
    merged,
    num_partitions,
    partition_begin,
    partition_of,
    span_of,
    store_state,
)


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def prefill(
    q, k, v, key_box, value_box, tiles, seq_index, first_block, num_blocks, table,
    query_start, kv_lens, state_max, state_sum, state_acc, kept_max, kept_sum, sinks, out,
    scale, num_tokens, table_row, q_token, q_head, kv_block, kv_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS_OF_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, PARTITION: tl.constexpr,
    SHORT: tl.constexpr, FEW: tl.constexpr,
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
    query, token, head, is_row, queries = load_rows(
        q, r, d, first_query, group, start_token, num_queries, q_token, q_head, GROUP, HEAD_DIM
    )
    position = tl.where(is_row, kv_len - num_queries + query, -1)

    first_position = kv_len - num_queries + first_query
    first_seen = first_key_seen(kv_len - num_queries, WINDOW) // BLOCK * BLOCK
    at = token * HEADS + head
    kept = kept_max, kept_sum, at, num_tokens * HEADS
    part_at = at + num_tokens * HEADS
    is_carried = is_row & (r < tl.where(first_key > first_seen, ROWS, 0))
    state = state_max, state_sum, state_acc
    whole_max, whole_sum, whole_acc = load_state(state, at, is_carried, d, HEAD_DIM)
    whole_max, whole_sum = after_sinks(sinks, head, is_row & ~is_carried, whole_max, whole_sum)

    kv_at = group // GROUPS_OF_KEYS * HEAD_DIM
    keys, values, pages = k + kv_at, v + kv_at, table + span * table_row
    boxes = key_box, value_box, kv_at
    begin = tl.maximum(first_key, first_key_seen(first_position, WINDOW) // TILE * TILE)
    all_see = tl.minimum(end_key, first_position + 1) // TILE * TILE  # where there is no window
    end = tl.minimum(end_key, tl.max(position) + 1)
    whole, row = fold_tiles(
        queries, keys, values, boxes, pages, first_key, kv_block, kv_row, scale,
        position - WINDOW, position, begin, all_see, end, (whole_max, whole_sum, whole_acc),
        load_state(state, part_at, is_carried, d, HEAD_DIM), kept,
        HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, WINDOW > 0, PARTITION, SHORT,
    )  # fmt: skip
    whole_max, whole_sum, whole_acc = whole
    row_max, row_sum, acc = row

    if end_key == kv_len:
        whole_max, whole_sum, whole_acc = merged(
            whole_max, whole_sum, whole_acc, row_max, row_sum, acc
        )
        keep(kept, 0, whole_max, whole_sum, is_row)
        result = (whole_acc / tl.where(is_row, whole_sum, 1.0)[:, None]).to(out.dtype.element_ty)
        is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_value)
    else:
        store_state(state, at, is_row, d, whole_max, whole_sum, whole_acc, HEAD_DIM)
        store_state(state, part_at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def decode(
    q, k, v, key_box, value_box, seq_index, first_block, num_blocks, table, query_start, kv_lens,
    part_start, part_max, part_sum, part_acc, kept_max, kept_sum,
    scale, num_tokens, table_row, q_token, q_head, kv_block, kv_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS_OF_KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILE_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, LONGEST: tl.constexpr,
    ROWS: tl.constexpr, PARTITION: tl.constexpr, SHORT: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Fold every n-th partition of the chunk, for few queries of one sequence and one group."""
    span, group = tl.program_id(0), tl.program_id(1)
    seq, start_token, num_queries, kv_len, first_key, end_key = span_of(
        span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK
    )
    end_key = tl.where(num_queries <= FEW, end_key, 0)

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    query, token, head, is_row, queries = load_rows(
        q, r, d, 0, group, start_token, num_queries, q_token, q_head, GROUP, HEAD_DIM
    )
    position = tl.where(is_row, kv_len - num_queries + query, -1)
    hidden = position - WINDOW
    kv_at = group // GROUPS_OF_KEYS * HEAD_DIM
    keys, values, pages = k + kv_at, v + kv_at, table + span * table_row
    boxes = key_box, value_box, kv_at
    kept = kept_max, kept_sum, token * HEADS + head, num_tokens * HEADS

    parts = part_max, part_sum, part_acc
    first_position = kv_len - num_queries
    kept_from = partition_of(first_key_seen(first_position, LONGEST), PARTITION, SHORT)
    first_seen = first_key_seen(first_position, WINDOW) // TILE * TILE
    all_see = (first_position + 1) // TILE * TILE  # where there is no window
    first = partition_of(tl.maximum(first_key, first_seen), PARTITION, SHORT)
    end_part = num_partitions(end_key, PARTITION, SHORT)
    for part in range(first + tl.program_id(2), end_part, tl.num_programs(2)):
        part_begin = tl.maximum(partition_begin(part, PARTITION, SHORT), first_seen)
        begin = tl.maximum(part_begin, first_key)
        end = tl.minimum(partition_begin(part + 1, PARTITION, SHORT), end_key)
        slot = tl.load(part_start + seq).to(tl.int64) + (part - kept_from) * num_queries
        at = (slot + query) * HEADS + head
        is_carried = is_row & (r < tl.where(begin > part_begin, ROWS, 0))
        row = load_state(parts, at, is_carried, d, HEAD_DIM)
        _, row = fold_tiles(
            queries, keys, values, boxes, pages, first_key, kv_block, kv_row, scale, hidden,
            position, begin, tl.minimum(end, all_see), end, row, row, kept,
            HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, WINDOW > 0, 0, 0,
        )  # fmt: skip
        row_max, row_sum, acc = row
        store_state(parts, at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit
def merge(
    query_start, kv_lens, part_start, part_max, part_sum, part_acc, kept_max, kept_sum, sinks, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTITION: tl.constexpr,
    SHORT: tl.constexpr, FEW: tl.constexpr, AT_ONCE: tl.constexpr, WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Merge the partition states of one head of one query, in logical order."""
    seq, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    if (query >= num_queries) | (num_queries > FEW):
        return
    kv_len = tl.load(kv_lens + seq)
    num_parts = num_partitions(kv_len, PARTITION, SHORT)
    first_position = kv_len - num_queries
    kept_from = partition_of(first_key_seen(first_position, LONGEST), PARTITION, SHORT)
    slot = tl.load(part_start + seq).to(tl.int64) - kept_from * num_queries + query
    parts = part_max, part_sum, part_acc
    one, n, d = tl.arange(0, 1), tl.arange(0, AT_ONCE), tl.arange(0, DIM)
    whole_max, whole_sum, whole_acc = empty_state(1, DIM)
    whole_max, whole_sum = after_sinks(sinks, head + one, one == 0, whole_max, whole_sum)
    first_part = partition_of(first_key_seen(first_position, WINDOW), PARTITION, SHORT)
    for first in range(first_part, num_parts, AT_ONCE):
        # One load, as the compiler keeps loads in their order, each behind what uses the last one.
        at = (slot + (first + n) * num_queries) * HEADS + head
        some_max, some_sum, some_acc = load_state(parts, at, first + n < num_parts, d, HEAD_DIM)
        for number in tl.static_range(AT_ONCE):
            row_max = tl.sum(tl.where(n == number, some_max, 0.0), 0, keep_dims=True)
            row_sum = tl.sum(tl.where(n == number, some_sum, 0.0), 0, keep_dims=True)
            acc = tl.sum(tl.where((n == number)[:, None], some_acc, 0.0), 0, keep_dims=True)
            whole_max, whole_sum, whole_acc = merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
    whole_sum = tl.where(num_parts > 0, whole_sum, 1.0)
    at = (start_token + query).to(tl.int64) * HEADS + head + one
    keep((kept_max, kept_sum, at, 0), 0, whole_max, whole_sum, one == 0)
    result = (whole_acc / whole_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=(d < HEAD_DIM)[None, :])


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
