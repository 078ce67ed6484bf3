/* Decode in matrix tiles: segments that sequences share are read once. */
#ifndef NANOENGINE_CPU_BUNDLES_H
#define NANOENGINE_CPU_BUNDLES_H
#include "cpu_prefill.h"

typedef struct { int64_t kv_head, first, count; } rows16_t; /* up to 16 rows of a kv head */

typedef struct { /* K and V that come next: rows of `lines` lines each, `share` of them at a time */
    const char *k, *v;
    int64_t gap, lines, rows, left, share; /* gap: bytes between rows; left: lines of this row */
} keys_ahead_t;

/* Some lines of them into L2. A few at a time between steps of arithmetic: a burst of more than the core
 * can have under way stops it, and memory idles afterwards. */
INLINE void bring(keys_ahead_t *next) {
    for (int64_t n = next->share, some; n > 0 && next->rows > 0; n -= some) {
        some = min64(n, next->left);
        /* K and V in turns: 3 % faster than one after the other */
        for (const char *end = next->k + 64 * some; next->k < end; next->k += 64, next->v += 64)
            __builtin_prefetch(next->k, 0, 2), __builtin_prefetch(next->v, 0, 2);
        if (next->left -= some) return;
        next->k += next->gap, next->v += next->gap, next->left = next->lines, next->rows--;
    }
}

/* n keys of `width` bytes, to be brought in `calls` calls; keys that lie side by side are one row. */
INLINE keys_ahead_t keys_ahead(const char *k, const char *v, int64_t stride, int64_t width, int64_t n,
                               int64_t calls) {
    const int64_t rows = width == stride ? n > 0 : n;
    const int64_t lines = ceil_div(width == stride ? n * width : width, 64);
    return (keys_ahead_t){k, v, stride - 64 * lines, lines, rows, lines, ceil_div(lines * rows, calls)};
}

/* Scores of few rows, [row][TILE], become p in pairs; alpha: the factors of what was accumulated before. */
static void narrow_softmax(const attend_args *a, const tile_t *t, int n, const decode_row_t *rows,
                           int64_t count, float *probs, states_t *states, float *alpha,
                           keys_ahead_t *next) {
    int visible[LANES];
    if (a->softcap) cap_rows(a, probs, count, n);
    for (int64_t i = 0; i < count; i++) {
        bring(next);
        float *p = probs + i * TILE;
        const int64_t seen = rows[i].pos + 1 - t->pos;
        for (int64_t j = min64(n, seen - a->window); j > 0; j--) p[j - 1] = -INFINITY;
        visible[i] = max64(0, min64(n, seen));
    }
    decode_softmax(probs, count, n, visible, scale_of(a), states, alpha, BF16_PAIRS);
    for (int64_t i = 0; i < count; i++) { /* up to 32 */
        uint16_t *p = (uint16_t *)(probs + i * TILE);
        store_n(p + ceil_div(n, LANES) * LANES, (vf){0}, LANES, BF16_PAIRS);
    }
}

/* The same of more rows, whose scores are [key][row]. Their p are turned, which are half as much. */
static void wide_softmax(const attend_args *a, const tile_t *t, int n, const decode_row_t *rows, int64_t count,
                         float *turned, float *probs, states_t *states, float *alpha, keys_ahead_t *next) {
    int32_t pos[LANES];
    int masked = 0;
    for (int64_t i = 0; i < LANES; i++) {
        const int64_t at = rows[min64(i, count - 1)].pos;
        pos[i] = (int32_t)at;
        masked |= at < t->pos + n - 1 || at >= t->pos + a->window;
    }
    vf factors;
    if (a->softcap) cap_scores(a, turned, n);
    tile_softmax(turned, n, t->pos, masked, a->window, scale_of(a), pos, states->top, states->sum, &factors,
                 1, BF16_TILES);
    store(alpha, factors);
    for (int c = 0; c < n; c += 2 * LANES) {
        vf x[LANES];
        bring(next);
        UNROLL for (int i = 0; i < LANES; i++) x[i] = load(turned + (c / 2 + i) * LANES);
        transpose(x);
        UNROLL for (int i = 0; i < LANES; i++)
            if (i < count) store(probs + i * TILE + c / 2, x[i]);
    }
}

/* One tile of `n` keys into acc[row][dim], by quarters, and the states of up to 16 rows. */
static void bundle_tile(const attend_args *a, const tile_t *t, const workspace *w, int n,
                        const decode_row_t *rows, int64_t count, const float *q, float *acc,
                        states_t *states, int is_narrow, keys_ahead_t *next) {
    const int64_t dim = a->head_dim;
    float *turned = w->scores, *probs = w->scores + TILE * LANES, alpha[LANES];
    bring(next);
    if (is_narrow) {
        multiply_narrow((side_t){t->k, t->k_stride, TILE_BYTES}, n, q, dim / 32, probs, TILE);
        narrow_softmax(a, t, n, rows, count, probs, states, alpha, next);
    } else {
        tiled_scores(t->k, t->k_stride, n, q, dim, turned, 1);
        wide_softmax(a, t, n, rows, count, turned, probs, states, alpha, next);
    }
    for (int64_t i = 0; i < count; i++) {
        float *end = acc + (i + 1) * dim;
        for (float *at = end - dim; at < end && alpha[i] != 1.0f; at += LANES)
            store(at, load(at) * alpha[i]);
    }
    const side_t left = {(const char *)probs, TILE * 4, TILE_BYTES};
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        const int64_t width = 4 * w->padded;
        const side_t right = {(const char *)(w->values + d), width, TILE_PAIRS * width};
        const product_t p = {left, right, TILE_BYTES, ceil_div(n, 32), 4 * dim};
        bring(next);
        multiply_tiles(p, (ahead_t){0}, acc + d, 0, 0, 1, 0, 0);
    }
}

/* As decode_segment, for all segments of a bundle; `after` is the one that comes next. */
static void decode_bundle(const attend_args *a, const segment_t *segments, const span_t *after, int cold,
                          int64_t head0, int64_t head1, float *partials, int64_t segment_floats,
                          float *scratch) {
    if (!HAVE_TILES) return;
    const int64_t dim = a->head_dim, width = 2 * dim, stride = a->kv_heads * width;
    const workspace w = carve(scratch, dim);
    const entry_t e = entry_at(a, segments->entry);
    const span_t span = span_of(a, &e, segments->index);
    decode_row_t rows[ROWS_PER_ITEM];
    rows16_t groups[GROUPS];
    states_t states[GROUPS];
    int64_t num = 0, total = 0;
    for (int64_t h = head0; h < head1; h++) {
        const int64_t count = bundled_rows(a, segments, h, partials, segment_floats, rows + total);
        for (int64_t r = 0; r < count; r += LANES, num++) {
            const char *q[LANES];
            groups[num] = (rows16_t){h, total + r, min64(LANES, count - r)};
            states[num] = NO_KEYS;
            for (int64_t i = 0; i < LANES; i++) /* those past the end repeat the last row */
                q[i] = rows[total + min64(r + i, count - 1)].q;
            rows_to_lanes(q, dim / 2, w.q + num * LANES * w.padded, LANES, F32);
        }
        total += count;
    }
    for (int64_t g = 0; g < num; g++) memset(w.acc + g * LANES * dim, 0, 4 * groups[g].count * dim);
    const int is_narrow = total <= (head1 - head0) * NARROW;
    const int64_t products = num * (dim / (2 * LANES)) + head1 - head0;
    const int64_t calls = products + (is_narrow ? num + total : 3 * num); /* of bring, in a tile */
    if (is_narrow) shape_narrow_tiles();
    const int64_t seen = first_seen(a, segments);
    if (cold) {
        keys_ahead_t now = keys_ahead(span.k + head0 * width, span.v + head0 * width, stride,
                                      (head1 - head0) * width, min64(TILE, span.count), 1);
        bring(&now);
    }
    for (int64_t t = max64(0, seen - span.pos) / TILE * TILE; t < span.count; t += TILE) {
        const int n = min64(TILE, span.count - t), is_last = t + TILE >= span.count;
        const char *k = span.k + t * stride, *v = span.v + t * stride;
        const char *next_k = is_last ? after->k : k + TILE * stride;
        const char *next_v = is_last ? after->v : v + TILE * stride;
        const int64_t ahead = min64(TILE, is_last ? after->count : span.count - t - TILE);
        keys_ahead_t next = keys_ahead(next_k + head0 * width, next_v + head0 * width, stride,
                                       (head1 - head0) * width, ahead, calls);
        tile_t tile = {.pos = span.pos + t};
        for (int64_t g = 0; g < num; g++) {
            const int64_t h = groups[g].kv_head;
            if (g == 0 || h != groups[g - 1].kv_head) {
                tile.k_stride = stride;
                tile.k = whole_keys(k + h * width, &tile.k_stride, n, dim, w.keys);
                bring(&next);
                pair_quarters(v + h * width, stride, n, dim, w.values, w.padded);
            }
            bundle_tile(a, &tile, &w, n, rows + groups[g].first, groups[g].count,
                        w.q + g * LANES * w.padded, w.acc + g * LANES * dim, &states[g],
                        is_narrow, &next);
        }
        next.share = next.lines * next.rows;
        bring(&next);
    }
    if (is_narrow) shape_tiles(TILE_ROWS, TILE_ROWS);
    for (int64_t g = 0; g < num; g++)
        for (int64_t i = 0; i < groups[g].count; i++) {
            float *to = rows[groups[g].first + i].partial, *tail = to + partial_stride(dim) - 16;
            const float *from = w.acc + (g * LANES + i) * dim;
            for (int64_t d = 0; d < dim; d += 2 * LANES)
                UNROLL for (int half = 0; half < 2; half++)
                    store(to + d + half * LANES, join_quarters(load(from + d), load(from + d + LANES), half));
            tail[0] = states[g].top[i], tail[1] = states[g].sum[i];
        }
}
#endif
