"""The Triton kernels of triton_attention.py, and the arithmetic of a row that they share."""

from __future__ import annotations

import triton
import triton.language as tl

# Below every score, and finite, so that a row without keys does not compute inf - inf.
NOTHING: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap); near 0 by the odd polynomial of Cephes' tanhf."""
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
def _span(
    span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK: tl.constexpr
):  # fmt: skip
    """A span's sequence (its number, first token, queries, keys) and the span's keys."""
    seq = tl.load(seq_index + span)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    kv_len = tl.load(kv_lens + seq)
    first_key = tl.load(first_block + span) * BLOCK
    end_key = tl.minimum(first_key + tl.load(num_blocks + span) * BLOCK, kv_len)
    return seq, start_token, num_queries, kv_len, first_key, end_key


@triton.jit
def _keep(kept, number, row_max, row_sum, is_row):
    """Keep the state of rows over all their keys (number 0) or over tile number - 1, for add_mass.
    `at`: each row's place among num_rows. Does nothing where nobody asks for mass.
    """
    kept_max, kept_sum, at, num_rows = kept
    if kept_max is not None:
        to = tl.cast(number, tl.int64) * num_rows + at
        tl.store(kept_max + to, row_max, mask=is_row)
        tl.store(kept_sum + to, row_sum, mask=is_row)


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
    kept,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Fold one tile of keys, rows [first_row, first_row + TILE) of a page. `position` is the last
    key that each row sees here, `start` the position of the tile's first key; with a window,
    `hidden` is the last key before each row's window. `kept`: as in _keep.
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
    tile_sum = tl.sum(weights, 1)
    row_sum = tl.fma(row_sum, decay, tile_sum)
    _keep(kept, start // TILE + 1, new_max, tile_sum, start <= position)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _fold_tiles(
    q,
    keys,
    values,
    pages,
    first_key,
    kv_block,
    kv_row,
    scale,
    hidden,
    position,
    begin,
    all_see,
    end,
    row_max,
    row_sum,
    acc,
    kept,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Fold the keys [begin, end); every row sees all keys before `all_see`. `pages` holds the
    blocks from key `first_key` on.
    """
    if not IS_MASKED:
        for start in range(begin, all_see, TILE):
            page = tl.load(pages + (start - first_key) // BLOCK)
            row_max, row_sum, acc = _fold(
                q, keys, values, page, kv_block, kv_row, start % BLOCK, scale, hidden, position,
                start, row_max, row_sum, acc, kept,
                HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, False,
            )  # fmt: skip
        begin = tl.maximum(begin, all_see)
    for start in range(begin, end, TILE):
        page = tl.load(pages + (start - first_key) // BLOCK)
        row_max, row_sum, acc = _fold(
            q, keys, values, page, kv_block, kv_row, start % BLOCK, scale, hidden, position, start,
            row_max, row_sum, acc, kept,
            HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    return row_max, row_sum, acc


@triton.jit
def _load_state(state, at, is_row, d, HEAD_DIM: tl.constexpr):
    """Load the states of the rows in `is_row`; the other rows get an empty state."""
    state_max, state_sum, state_acc = state
    at_value = at[:, None] * HEAD_DIM + d[None, :]
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    row_max = tl.load(state_max + at, mask=is_row, other=NOTHING)
    row_sum = tl.load(state_sum + at, mask=is_row, other=0.0)
    acc = tl.load(state_acc + at_value, mask=is_value, other=0.0)
    return row_max, row_sum, acc


@triton.jit
def _store_state(state, at, is_row, d, row_max, row_sum, acc, HEAD_DIM: tl.constexpr):
    state_max, state_sum, state_acc = state
    at_value = at[:, None] * HEAD_DIM + d[None, :]
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(state_max + at, row_max, mask=is_row)
    tl.store(state_sum + at, row_sum, mask=is_row)
    tl.store(state_acc + at_value, acc, mask=is_value)


@triton.jit
def _merged(whole_max, whole_sum, whole_acc, row_max, row_sum, acc):
    """Merge the state of the next partition into that of the earlier ones. A partition without
    visible keys changes nothing; + 0.0 turns -0, whose sign depends on the order of work, into +0.
    """
    new_max = tl.maximum(whole_max, row_max)
    decay, weight = tl.exp2(whole_max - new_max), tl.exp2(row_max - new_max)
    whole_sum = tl.fma(whole_sum, decay, row_sum * weight)
    acc = tl.fma(whole_acc, decay[:, None], acc * weight[:, None]) + 0.0
    return new_max, whole_sum, acc


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def prefill(
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
    kept_max,
    kept_sum,
    out,
    scale,
    num_tokens,
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
    FEW: tl.constexpr,
):
    """Rows are the heads of a group, query by query; the longest tile of queries runs first. Memory
    holds first the states of all finished partitions, then those of started ones.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    span, first_query = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1)
    kv_head = tl.program_id(1)
    _seq, start_token, num_queries, kv_len, first_key, end_key = _span(
        span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK
    )

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
    kept = kept_max, kept_sum, at, num_tokens * HEADS
    part_at = at + num_tokens * HEADS
    is_carried = is_row & (r < tl.where(first_key > first_seen, ROWS, 0))
    state = state_max, state_sum, state_acc
    whole_max, whole_sum, whole_acc = _load_state(state, at, is_carried, d, HEAD_DIM)
    row_max, row_sum, acc = _load_state(state, part_at, is_carried, d, HEAD_DIM)

    keys, values, pages = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM, table + span * table_row
    begin = tl.maximum(first_key, _first_seen(first_position, WINDOW) // TILE * TILE)
    all_see = tl.minimum(end_key, first_position + 1) // TILE * TILE  # where there is no window
    end = tl.minimum(end_key, tl.max(position) + 1)
    for part in range(begin // PARTITION, tl.cdiv(end, PARTITION)):
        part_begin = tl.maximum(part * PARTITION, begin)
        part_end = tl.minimum((part + 1) * PARTITION, end)
        row_max, row_sum, acc = _fold_tiles(
            queries, keys, values, pages, first_key, kv_block, kv_row, scale, position - WINDOW,
            position, part_begin, tl.minimum(part_end, all_see), part_end, row_max, row_sum, acc,
            kept, HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, WINDOW > 0,
        )  # fmt: skip
        if part_end == (part + 1) * PARTITION:
            whole_max, whole_sum, whole_acc = _merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
            row_max = tl.zeros([ROWS], tl.float32) + NOTHING
            row_sum = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)

    if end_key == kv_len:
        whole_max, whole_sum, whole_acc = _merged(
            whole_max, whole_sum, whole_acc, row_max, row_sum, acc
        )
        _keep(kept, 0, whole_max, whole_sum, is_row)
        result = (whole_acc / tl.where(is_row, whole_sum, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_value)
    else:
        _store_state(state, at, is_row, d, whole_max, whole_sum, whole_acc, HEAD_DIM)
        _store_state(state, part_at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit(do_not_specialize=["table_row", "num_tokens"])
def decode(
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
    kept_max,
    kept_sum,
    scale,
    num_tokens,
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
    FEW: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Fold every n-th partition of the chunk, for few queries of one sequence and one group."""
    span, kv_head = tl.program_id(0), tl.program_id(1)
    seq, start_token, num_queries, kv_len, first_key, end_key = _span(
        span, seq_index, first_block, num_blocks, query_start, kv_lens, BLOCK
    )
    end_key = tl.where(num_queries <= FEW, end_key, 0)

    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    query, head = r // GROUP, kv_head * GROUP + r % GROUP
    is_row = query < num_queries
    position = tl.where(is_row, kv_len - num_queries + query, -1)
    hidden = position - WINDOW
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    at = (start_token + query).to(tl.int64) * q_token + head * q_head
    queries = tl.load(q + at[:, None] + d[None, :], mask=is_value, other=0.0)
    keys, values = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM
    pages = table + span * table_row
    kept = kept_max, kept_sum, (start_token + query) * HEADS + head, num_tokens * HEADS

    parts = part_max, part_sum, part_acc
    first_position = kv_len - num_queries
    kept_from = _first_seen(first_position, LONGEST) // PARTITION
    first_seen = _first_seen(first_position, WINDOW) // TILE * TILE
    first = tl.maximum(first_key, first_seen) // PARTITION + tl.program_id(2)
    for part in range(first, tl.cdiv(end_key, PARTITION), tl.num_programs(2)):
        part_begin = tl.maximum(part * PARTITION, first_seen)
        begin = tl.maximum(part_begin, first_key)
        end = tl.minimum((part + 1) * PARTITION, end_key)
        slot = tl.load(part_start + seq).to(tl.int64) + (part - kept_from) * num_queries
        at = (slot + query) * HEADS + head
        is_carried = is_row & (r < tl.where(begin > part_begin, ROWS, 0))
        row_max, row_sum, acc = _load_state(parts, at, is_carried, d, HEAD_DIM)
        row_max, row_sum, acc = _fold_tiles(
            queries, keys, values, pages, first_key, kv_block, kv_row, scale, hidden, position,
            begin, begin, end, row_max, row_sum, acc, kept,
            HEAD_DIM, DIM, BLOCK, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        _store_state(parts, at, is_row, d, row_max, row_sum, acc, HEAD_DIM)


@triton.jit
def merge(
    query_start,
    kv_lens,
    part_start,
    part_max,
    part_sum,
    part_acc,
    kept_max,
    kept_sum,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTITION: tl.constexpr,
    FEW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Merge the partition states of one head of one query, in logical order."""
    seq, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - start_token
    if (query >= num_queries) | (num_queries > FEW):
        return
    kv_len = tl.load(kv_lens + seq)
    num_parts = tl.cdiv(kv_len, PARTITION)
    first_position = kv_len - num_queries
    kept_from = _first_seen(first_position, LONGEST) // PARTITION
    slot = tl.load(part_start + seq).to(tl.int64) - kept_from * num_queries + query
    parts = part_max, part_sum, part_acc
    one, d = tl.arange(0, 1), tl.arange(0, DIM)
    is_dim = d < HEAD_DIM
    whole_max = tl.zeros([1], tl.float32) + NOTHING
    whole_sum = tl.zeros([1], tl.float32)
    whole_acc = tl.zeros([1, DIM], tl.float32)
    for first in range(_first_seen(first_position, WINDOW) // PARTITION, num_parts, AT_ONCE):
        for n in tl.static_range(AT_ONCE):  # all loads can be in flight at once
            at = (slot + (first + n) * num_queries) * HEADS + head + one
            is_there = one < num_parts - first - n
            row_max, row_sum, acc = _load_state(parts, at, is_there, d, HEAD_DIM)
            whole_max, whole_sum, whole_acc = _merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
    whole_sum = tl.where(num_parts > 0, whole_sum, 1.0)
    at = (start_token + query).to(tl.int64) * HEADS + head + one
    _keep((kept_max, kept_sum, at, 0), 0, whole_max, whole_sum, one == 0)
    result = (whole_acc / whole_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result, mask=is_dim[None, :])


@triton.jit(do_not_specialize=["num_tokens", "mass_row"])
def add_mass(
    query_start,
    kv_lens,
    kept_max,
    kept_sum,
    mass,
    num_tokens,
    mass_row,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add to the mass of one block of a sequence what the sequence's rows gave to its tiles."""
    seq, block = tl.program_id(0), tl.program_id(1)
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
