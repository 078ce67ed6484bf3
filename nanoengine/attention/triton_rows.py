"""What Triton kernels of attention do with rows: scores, tiles of keys, states of partitions."""

from __future__ import annotations

import triton
import triton.language as tl

# Below every score, and finite, so that a row without keys does not compute inf - inf.
NOTHING: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LONG: tl.constexpr = tl.constexpr(4)  # a long partition is as long as so many short ones


@triton.jit
def first_key_seen(position, WINDOW: tl.constexpr):
    """The first key that a query at this position sees."""
    if WINDOW:
        return tl.maximum(position + 1 - WINDOW, 0)
    return position * 0


@triton.jit
def partition_of(key, PARTITION: tl.constexpr, SHORT: tl.constexpr):
    """The number of a key's partition: SHORT short ones of PARTITION keys, then long ones."""
    short = key // PARTITION
    return tl.where(short < SHORT, short, SHORT + (short - SHORT) // LONG)


@triton.jit
def partition_begin(number, PARTITION: tl.constexpr, SHORT: tl.constexpr):
    """The first key of a partition."""
    return tl.where(number < SHORT, number, SHORT + (number - SHORT) * LONG) * PARTITION


@triton.jit
def num_partitions(keys, PARTITION: tl.constexpr, SHORT: tl.constexpr):
    """How many partitions hold the first `keys` keys."""
    short = tl.cdiv(keys, PARTITION)
    return tl.where(short < SHORT, short, SHORT + tl.cdiv(short - SHORT, LONG))


@triton.jit
def ends_partition(key, PARTITION: tl.constexpr, SHORT: tl.constexpr):
    """Whether a partition ends before this key. PARTITION = 0: no."""
    if not PARTITION:
        return False
    short = key // PARTITION
    is_inside = (short > SHORT) & ((short - SHORT) % LONG != 0)
    return (key % PARTITION == 0) & ~is_inside


@triton.jit
def span_of(
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
def load_rows(
    q, r, d, first_query, group, start_token, num_queries, q_token, q_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Of rows r, the heads of a group query by query: query, token, head, whether there is such a
    row, and its numbers.
    """
    query, head = first_query + r // GROUP, group * GROUP + r % GROUP
    is_row = (r < r.shape[0] // GROUP * GROUP) & (query < num_queries)
    token = (start_token + query).to(tl.int64)
    at = token * q_token + head * q_head
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
    return query, token, head, is_row, queries


@triton.jit
def _tanh(x):
    """As tanhv of cpu_vectors.h."""
    size, square = tl.abs(x), x * x
    p = square * -0.0057049873 + 0.020639088
    p = p * square - 0.053739715
    p = p * square + 0.13331442
    p = p * square - 0.3333328
    e = tl.exp2(size * (-2 * LOG2E))
    quotient = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.625, x + x * square * p, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _fold(
    q, keys, values, boxes, page, kv_block, kv_row, first_row, scale, hidden, position, start,
    row_max, row_sum, acc, kept,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    TILE_PAD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys, rows [first_row, first_row + TILE) of a page. `position` is the last
    key that each row sees here, `start` the position of the tile's first key; with a window,
    `hidden` is the last key before each row's window. `boxes`: as in fold_tiles; `kept`: as in
    keep. `scale` makes powers of two of scores; with a SOFTCAP parts of it.
    """
    n, d = tl.arange(0, TILE_PAD), tl.arange(0, DIM)
    key_box, value_box, column = boxes
    seen_by_any = (n < TILE) & (start + n <= tl.max(position))
    if key_box is not None:
        box_row = page * (kv_block // kv_row) + first_row
        k = key_box.load([box_row, column])
        v = value_box.load([box_row, column])
        if IS_MASKED:  # what nobody sees may be anything, NaN too
            v = tl.where(seen_by_any[:, None], v, 0.0)
    else:
        at = page.to(tl.int64) * kv_block + (first_row + n) * kv_row
        if IS_MASKED or DIM != HEAD_DIM or TILE != TILE_PAD:
            mask = seen_by_any[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + at[:, None] + d[None, :], mask=mask, other=0.0)
            v = tl.load(values + at[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(keys + at[:, None] + d[None, :])
            v = tl.load(values + at[:, None] + d[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP is not None:
        scores = _tanh(scores * scale) * (SOFTCAP * LOG2E)
        scale = 1.0
    if IS_MASKED or TILE != TILE_PAD:
        sees = (start + n)[None, :] <= position[:, None]
        if WINDOW:
            sees = sees & ((start + n)[None, :] > hidden[:, None])
        scores = tl.where(sees & (n < TILE)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # The compiler would make such a sum of some loops and not of others.
    weights = tl.exp2(tl.fma(scores, scale, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    tile_sum = tl.sum(weights, 1)
    row_sum = tl.fma(row_sum, decay, tile_sum)
    keep(kept, start // TILE + 1, new_max, tile_sum, start <= position)
    # From zero: Triton 3.6 does not wait for a product that adds to acc before acc is merged.
    tile_acc = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    acc = tl.fma(acc, decay[:, None], tile_acc)
    return new_max, row_sum, acc


@triton.jit
def fold_tiles(
    q, keys, values, boxes, pages, first_key, kv_block, kv_row, scale, hidden, position, begin,
    all_see, end, whole, row, kept,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    TILE_PAD: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr,
    PARTITION: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Fold the keys [begin, end) into the state `row`, and where a partition ends, that into
    `whole`: one loop over all partitions, as copies ahead of time end with a loop. PARTITION = 0:
    the keys are those of one, and `whole` stays.

    Every row sees all keys before `all_see`. `pages` holds the blocks from key `first_key` on.
    boxes: descriptors of keys and of values as rows of all heads, by which the GPU copies a tile in
    one go, and the head's first column; (None, None, _) without.
    """
    row_max, row_sum, acc = row
    whole_max, whole_sum, whole_acc = whole
    if not IS_MASKED:
        for start in range(begin, all_see, TILE):
            page = tl.load(pages + (start - first_key) // BLOCK)
            row_max, row_sum, acc = _fold(
                q, keys, values, boxes, page, kv_block, kv_row, start % BLOCK, scale, hidden,
                position, start, row_max, row_sum, acc, kept,
                HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, False,
            )  # fmt: skip
            if ends_partition(start + TILE, PARTITION, SHORT):
                whole_max, whole_sum, whole_acc = merged(
                    whole_max, whole_sum, whole_acc, row_max, row_sum, acc
                )
                row_max, row_sum, acc = empty_state(acc.shape[0], DIM)
        begin = tl.maximum(begin, all_see)
    for start in range(begin, end, TILE):
        page = tl.load(pages + (start - first_key) // BLOCK)
        row_max, row_sum, acc = _fold(
            q, keys, values, boxes, page, kv_block, kv_row, start % BLOCK, scale, hidden, position,
            start, row_max, row_sum, acc, kept,
            HEAD_DIM, DIM, TILE, TILE_PAD, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        if ends_partition(start + TILE, PARTITION, SHORT):
            whole_max, whole_sum, whole_acc = merged(
                whole_max, whole_sum, whole_acc, row_max, row_sum, acc
            )
            row_max, row_sum, acc = empty_state(acc.shape[0], DIM)
    return (whole_max, whole_sum, whole_acc), (row_max, row_sum, acc)


@triton.jit
def keep(kept, number, row_max, row_sum, is_row):
    """Keep the state of rows over all their keys (number 0) or over tile number - 1, for add_mass.
    `at`: each row's place among num_rows. Does nothing where nobody asks for mass.
    """
    kept_max, kept_sum, at, num_rows = kept
    if kept_max is not None:
        to = tl.cast(number, tl.int64) * num_rows + at
        tl.store(kept_max + to, row_max, mask=is_row)
        tl.store(kept_sum + to, row_sum, mask=is_row)


@triton.jit
def load_state(state, at, is_row, d, HEAD_DIM: tl.constexpr):
    """Load the states of the rows in `is_row`; the other rows get an empty state."""
    state_max, state_sum, state_acc = state
    at_value = at[:, None] * HEAD_DIM + d[None, :]
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    row_max = tl.load(state_max + at, mask=is_row, other=NOTHING)
    row_sum = tl.load(state_sum + at, mask=is_row, other=0.0)
    acc = tl.load(state_acc + at_value, mask=is_value, other=0.0)
    return row_max, row_sum, acc


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The states of rows that have seen nothing."""
    row_max = tl.zeros([ROWS], tl.float32) + NOTHING
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def after_sinks(sinks, head, begins, row_max, row_sum):
    """The rows in `begins` see the sink of their head, if there are sinks, before all keys."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=begins, other=0.0) * LOG2E
        row_max = tl.where(begins, sink, row_max)
        row_sum = tl.where(begins, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def store_state(state, at, is_row, d, row_max, row_sum, acc, HEAD_DIM: tl.constexpr):
    """Store the states of the rows in `is_row`."""
    state_max, state_sum, state_acc = state
    at_value = at[:, None] * HEAD_DIM + d[None, :]
    is_value = is_row[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(state_max + at, row_max, mask=is_row)
    tl.store(state_sum + at, row_sum, mask=is_row)
    tl.store(state_acc + at_value, acc, mask=is_value)


@triton.jit
def merged(whole_max, whole_sum, whole_acc, row_max, row_sum, acc):
    """Merge the state of the next partition into that of the earlier ones. A partition without
    visible keys changes nothing; + 0.0 turns -0, whose sign depends on the order of work, into +0.
    """
    new_max = tl.maximum(whole_max, row_max)
    decay, weight = tl.exp2(whole_max - new_max), tl.exp2(row_max - new_max)
    whole_sum = tl.fma(whole_sum, decay, row_sum * weight)
    acc = tl.fma(whole_acc, decay[:, None], acc * weight[:, None]) + 0.0
    return new_max, whole_sum, acc
