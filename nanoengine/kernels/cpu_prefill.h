/* Attention of many queries, a tile of them at a time over all their segments: lanes along rows. */
#ifndef NANOENGINE_CPU_PREFILL_H
#define NANOENGINE_CPU_PREFILL_H
#include "cpu_decode.h"

typedef struct { /* rows [row, row + rows) of an entry and kv head; row r is (query r / group, */
    int64_t entry, kv_head, row, rows, cost; /* head r % group) */
} item_t;

typedef struct { /* per-thread scratch; words are 4 bytes: one float or one pair of bf16 */
    float *q;                   /* [row group][words of head_dim][row] */
    float *acc, *all_acc;       /* [row group][head_dim][row]: of this segment; and of all before it */
    float *top, *sum;           /* [row] of this segment */
    float *all_top, *all_sum;   /* and of all before it */
    int32_t *pos;               /* [row] */
    float *scores;              /* [key][row], then p in its place, [key or pair of keys][row] */
    float *keys, *values;       /* the tiles of a segment, widened, or their V in pairs of keys */
    int64_t padded;             /* head_dim, rounded up */
} workspace;

static int64_t workspace_words(int64_t dim) {
    const int64_t rows = ROWS_PER_ITEM, padded = ceil_div(dim, 32) * 32;
    return rows * (3 * padded + 5) + TILE * RVECS * LANES + 2 * SEG * padded;
}

static workspace carve(float *p, int64_t dim) {
    const int64_t rows = ROWS_PER_ITEM;
    workspace w = {.padded = ceil_div(dim, 32) * 32};
    w.q = p, p += rows * w.padded;
    w.acc = p, p += rows * w.padded;
    w.all_acc = p, p += rows * w.padded;
    w.scores = p, p += TILE * RVECS * LANES;
    w.keys = p, p += SEG * w.padded;
    w.values = p, p += SEG * w.padded;
    w.top = p, p += rows;
    w.sum = p, p += rows;
    w.all_top = p, p += rows;
    w.all_sum = p, p += rows;
    w.pos = (int32_t *)p;
    return w;
}

/* scores[key][row] = K Q^T for one row group; K is read in place, one word broadcast at a time. */
INLINE void tile_scores(const char *k, int64_t k_stride, int n, const float *q, int64_t words,
                        float *scores, const int vecs, int mode) {
    for (int key = 0; key < n; key += KEYS) {
        const char *row[KEYS];
        vf s[KEYS][RVECS] = {0};
        UNROLL for (int i = 0; i < KEYS; i++) row[i] = k + min64(key + i, n - 1) * k_stride;
        for (int64_t w = 0; w < words; w++) {
            vf x[RVECS];
            UNROLL for (int r = 0; r < vecs; r++) x[r] = load(q + (w * vecs + r) * LANES);
            UNROLL for (int i = 0; i < KEYS; i++) {
                vf y = splat(((const float *)row[i])[w]);
                UNROLL for (int r = 0; r < vecs; r++)
                    s[i][r] = add_product(s[i][r], x[r], y, mode);
            }
        }
        UNROLL for (int i = 0; i < KEYS; i++)
            UNROLL for (int r = 0; r < vecs; r++)
                store(scores + ((key + i) * vecs + r) * LANES, s[i][r]);
    }
}

/* The right side of a product with matrix tiles: pairs of words of one or two vectors of rows. */
INLINE side_t tiled_rows(const float *words, const int vecs) {
    return (side_t){(const char *)words, vecs * TILE_BYTES, TILE_PAIRS * vecs * TILE_BYTES};
}

/* As tile_scores, in matrix tiles; reads K up to a multiple of 16 keys. */
INLINE void tiled_scores(const char *k, int64_t k_stride, int n, const float *q, int64_t dim,
                         float *scores, const int vecs) {
    const ahead_t none = {0};
    for (int key = 0; key < n; key += 2 * TILE_ROWS, scores += 2 * TILE_ROWS * vecs * LANES) {
        const side_t keys = {k + key * k_stride, k_stride, TILE_BYTES};
        const product_t p = {keys, tiled_rows(q, vecs), TILE_BYTES, dim / 32, vecs * TILE_BYTES};
        if (n - key > TILE_ROWS) multiply_tiles(p, none, scores, 1, 1, vecs == 2, 0, 0);
        else multiply_tiles(p, none, scores, 1, 0, vecs == 2, 0, 0);
    }
}

/* As tile_values, in matrix tiles: V is [head_dim][TILE keys], with zeros up to a multiple of 32. */
INLINE void tiled_values(const char *v, int n, const float *probs, const vf *alpha, int is_first,
                         float *acc, int64_t dim, const int vecs) {
    const int64_t width = vecs * LANES;
    const vf one = splat(1.0f);
    UNROLL for (int r = 0; r < vecs; r++) { /* most tiles raise no maximum: nothing to scale */
        if (is_first || memcmp(&alpha[r], &one, sizeof one) == 0) continue;
        for (float *at = acc + r * LANES; at < acc + dim * width; at += width)
            store(at, load(at) * alpha[r]);
    }
    for (int64_t d = 0; d < dim; d += 2 * TILE_ROWS, acc += 2 * TILE_ROWS * width) {
        const side_t values = {v + d * TILE * 2, TILE * 2, TILE_BYTES};
        const product_t p = {values, tiled_rows(probs, vecs), TILE_BYTES, ceil_div(n, 32), 4 * width};
        multiply_tiles(p, (ahead_t){0}, acc, is_first, 1, vecs == 2, 0, 0);
    }
}

/* Softmax down the keys for every row of the group, in place: p, or pairs of it, replace the scores. A
 * row's p are summed as decode_softmax does: keys mod LANES, then in the order of sum_lanes. */
INLINE void tile_softmax(float *scores, int n, int64_t key_pos, int masked, int window, float scale,
                         const int32_t *pos, float *top, float *sum, vf *alpha, const int vecs,
                         int mode) {
    const int whole = mode == BF16_TILES ? 32 : LANES, padded = ceil_div(n, whole) * whole;
    const int step = vecs * LANES, pairs = mode >= BF16_PAIRS;
    for (int r = 0; r < vecs; r++, scores += LANES, pos += LANES, top += LANES, sum += LANES) {
        vf best[4], total[LANES] = {0}, old = load(top);
        UNROLL for (int j = 0; j < 4; j++) best[j] = splat(-INFINITY);
        if (masked) {
            vi at;
            memcpy(&at, pos, sizeof at);
            for (int i = 0; i < n; i++) {
                const vi back = at - splat_i(key_pos + i), seen = (back >= 0) & (back < window);
                store(scores + i * step, pick(seen, load(scores + i * step), best[0]));
            }
        }
        for (int i = n; i < padded; i++) store(scores + i * step, best[0]);
        for (int i = 0; i < padded; i += 4)
            UNROLL for (int j = 0; j < 4; j++) best[j] = vmax(best[j], load(scores + (i + j) * step));
        best[0] = vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
        const vf new = vmax(old, (best[0] + 0.0f) * scale), base = base_of(new); /* +0 of -0 */
        for (int i = 0; i < padded; i += LANES)
            UNROLL for (int j = 0; j < LANES; j += 2) {
                float *at = scores + (i + j) * step, *to = scores + (i + j) / 2 * step;
                const vf p0 = weight(load(at), scale, base, mode);
                const vf p1 = weight(load(at + step), scale, base, mode);
                total[j] += p0, total[j + 1] += p1;
                if (pairs) store(to, round_pairs(p0, p1));
                else store(at, p0), store(at + step, p1);
            }
        UNROLL for (int w = LANES / 2; w > 0; w /= 2)
            UNROLL for (int j = 0; j < w; j++) total[j] += total[j + w];
        alpha[r] = exp2v(base_of(old) - base);
        store(sum, fused(load(sum), alpha[r], total[0]));
        store(top, new);
    }
}

/* acc[d][row] = acc * alpha + V^T P, at first V^T P, over `n` keys (or pairs of them) for `dims` elements. */
INLINE void tile_values(const float *v, int64_t v_stride, int n, const float *probs, const vf *alpha,
                        int is_first, float *acc, const int dims, const int vecs, int mode) {
    vf a[DIMS][RVECS] = {0};
    if (!is_first)
        UNROLL for (int j = 0; j < dims; j++)
            UNROLL for (int r = 0; r < vecs; r++)
                a[j][r] = load(acc + (j * vecs + r) * LANES) * alpha[r];
    for (int i = 0; i < n; i++) {
        vf x[RVECS];
        UNROLL for (int r = 0; r < vecs; r++) x[r] = load(probs + (i * vecs + r) * LANES);
        UNROLL for (int j = 0; j < dims; j++) {
            vf y = splat(v[i * v_stride + j]);
            UNROLL for (int r = 0; r < vecs; r++)
                a[j][r] = add_product(a[j][r], x[r], y, mode);
        }
    }
    UNROLL for (int j = 0; j < dims; j++)
        UNROLL for (int r = 0; r < vecs; r++) store(acc + (j * vecs + r) * LANES, a[j][r]);
}

typedef struct { /* one tile of keys; strides in bytes and in words; window: as in attend_args */
    const char *k;
    const float *v;
    int64_t k_stride, v_stride, pos;
    int count, window;
    const attend_args *call;
} tile_t;

typedef struct { /* up to RVECS vectors of rows; have they seen no tile of this segment, none at all */
    int64_t row, vecs, first_pos, last_pos, is_fresh, is_empty;
} group_t;

INLINE void attend_group(const tile_t *t, const workspace *w, group_t *g, int n, int64_t dim,
                         const int vecs, int mode) {
    const int64_t row = g->row, is_first = g->is_fresh;
    const int masked = g->first_pos < t->pos + n - 1 || g->last_pos >= t->pos + t->window;
    const int pairs = mode == BF16_PAIRS, steps = pairs ? (n + 1) / 2 : n;
    float *acc = w->acc + row * w->padded, *p = w->scores;
    const float *q = w->q + row * w->padded;
    vf alpha[RVECS];
    g->is_fresh = 0;
    if (mode == BF16_TILES) tiled_scores(t->k, t->k_stride, n, q, dim, p, vecs);
    else tile_scores(t->k, t->k_stride, n, q, pairs ? dim / 2 : dim, p, vecs, mode);
    if (t->call->softcap) cap_scores(t->call, p, n * vecs);
    tile_softmax(p, n, t->pos, masked, t->window, scale_of(t->call), w->pos + row, w->top + row, w->sum + row,
                 alpha, vecs, mode);
    if (mode == BF16_TILES) {
        tiled_values((const char *)t->v, n, p, alpha, is_first, acc, dim, vecs);
        return;
    }
    int64_t d = 0;
    for (; d + DIMS <= dim; d += DIMS, acc += DIMS * vecs * LANES)
        tile_values(t->v + d, t->v_stride, steps, p, alpha, is_first, acc, DIMS, vecs, mode);
    for (; d < dim; d++, acc += vecs * LANES)
        tile_values(t->v + d, t->v_stride, steps, p, alpha, is_first, acc, 1, vecs, mode);
}

#define ATTEND_TILE(name, mode)                                                                     \
    static void name(const tile_t *t, const workspace *w, group_t *g, int64_t dim) {                \
        if (!HAS_MODE(mode)) return;                                                                \
        const int n = min64(t->count, g->last_pos + 1 - t->pos);                                    \
        if (n <= 0 || g->first_pos + 1 - t->window >= t->pos + t->count) return;                    \
        switch (g->vecs) {                                                                          \
        case 1: attend_group(t, w, g, n, dim, 1, mode); break;                                      \
        case 2: attend_group(t, w, g, n, dim, 2, mode); break;                                      \
        default:                                                                                    \
            if (mode != BF16_TILES) attend_group(t, w, g, n, dim, 3, mode);                         \
        }                                                                                           \
    }
ATTEND_TILE(tile_in_floats, F32)
ATTEND_TILE(tile_in_wide, BF16_WIDE)
ATTEND_TILE(tile_in_pairs, BF16_PAIRS)
ATTEND_TILE(tile_in_tiles, BF16_TILES)

/* V of a tile as [head_dim][TILE keys], with zeros up to a multiple of 32 keys. */
static void transpose_values(const char *v, int64_t stride, int count, int64_t dim, char *out) {
    for (int key = 0; key < count; key += 2 * LANES, out += 4 * LANES)
        for (int64_t d = 0; d < dim; d += 2 * LANES)
            for (int half = 0; half < 2; half++) {
                vf x[LANES];
                UNROLL for (int i = 0; i < LANES; i++) {
                    const int at = key + 2 * i;
                    const char *from = v + at * stride + 2 * d;
                    const vf a = at < count ? load(from) : (vf){0};
                    const vf b = at + 1 < count ? load(from + stride) : (vf){0};
                    x[i] = interleave_quarters(a, b, half);
                }
                transpose(x);
                UNROLL for (int i = 0; i < LANES; i++)
                    store(out + (d + quarter_at(half, i)) * TILE * 2, x[i]);
            }
}

/* Pairs of keys of V, [pair][width of words]; the last one may be with 0. */
static void pair_values(const char *v, int64_t stride, int count, int64_t dim, float *out,
                        int64_t width) {
    for (int i = 0; i < count; i += 2)
        for (int64_t d = 0; d < dim; d += 32) {
            vf x = load_bf16(v + i * stride + 2 * d, dim - d);
            vf y = i + 1 < count ? load_bf16(v + (i + 1) * stride + 2 * d, dim - d) : (vf){0};
            store(out + i / 2 * width + d, interleave(x, y, 0));
            store(out + i / 2 * width + d + LANES, interleave(x, y, 1));
        }
}

/* The same for matrix tiles: pairs by quarters, and zeros after them, for 0 * NaN is NaN. */
static void pair_quarters(const char *v, int64_t stride, int count, int64_t dim, float *out, int64_t width) {
    for (int i = 0; i < count; i += 2, out += width)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            const char *at = v + i * stride + 2 * d;
            const vf x = load(at), y = i + 1 < count ? load(at + stride) : (vf){0};
            UNROLL for (int half = 0; half < 2; half++)
                store(out + d + half * LANES, interleave_quarters(x, y, half));
        }
    for (int64_t i = ceil_div(count, 2); i % TILE_PAIRS; i++, out += width) memset(out, 0, 4 * dim);
}

/* K where it is; or, where the keys do not fill matrix tiles, a copy with zeros after them. */
static const char *whole_keys(const char *k, int64_t *stride, int count, int64_t dim, float *copy) {
    if (count % TILE_ROWS == 0) return k;
    char *to = (char *)copy;
    for (int i = 0; i < count; i++, to += 2 * dim) memcpy(to, k + i * *stride, 2 * dim);
    memset(to, 0, (TILE_ROWS - count % TILE_ROWS) * 2 * dim);
    *stride = 2 * dim;
    return (const char *)copy;
}

/* Bring a tile, which begins `from` keys after its segment, into the shape that the loops above read:
 * nothing to do for fp32 and for K in pairs. */
static tile_t prepare_tile(const attend_args *a, const workspace *w, const char *k, const char *v,
                           int64_t stride, int count, int64_t pos, int64_t from, int mode) {
    const int64_t dim = a->head_dim;
    float *const keys = w->keys + from * w->padded, *const values = w->values + from * w->padded;
    tile_t t = {.k = k, .v = (const float *)v, .k_stride = stride, .v_stride = stride / 4, .pos = pos,
                .count = count, .window = a->window, .call = a};
    if (mode == F32) return t;
    const int64_t padded = w->padded;
    if (mode == BF16_TILES) {
        t.v = values;
        transpose_values(v, stride, count, dim, (char *)values);
        t.k = whole_keys(k, &t.k_stride, count, dim, keys);
        return t;
    }
    t.v = values, t.v_stride = padded;
    if (mode == BF16_PAIRS) {
        pair_values(v, stride, count, dim, values, padded);
        return t;
    }
    t.k = (const char *)keys, t.k_stride = 4 * padded;
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d += LANES) {
            store(keys + i * padded + d, load_f32(k + i * stride + 2 * d, dim - d, mode));
            store(values + i * padded + d, load_f32(v + i * stride + 2 * d, dim - d, mode));
        }
    return t;
}

/* The reverse of rows_to_lanes; a row that is NULL is skipped. */
static void lanes_to_rows(float *const *rows, int64_t words, const float *in, int64_t width) {
    for (int64_t d = 0; d < words; d += LANES) {
        vf x[LANES];
        UNROLL for (int i = 0; i < LANES; i++) x[i] = load(in + (d + i) * width);
        transpose(x);
        for (int i = 0; i < LANES; i++)
            if (rows[i]) memcpy(rows[i] + d, &x[i], 4 * min64(words - d, LANES));
    }
}

/* Where row r of an item is: its token and, of that token, its head. */
INLINE int64_t token_of(const attend_args *a, const entry_t *e, const item_t *it, int64_t r) {
    return e->query_start + (it->row + r) / (a->heads / a->kv_heads);
}
INLINE int64_t head_of(const attend_args *a, const item_t *it, int64_t r) {
    const int64_t group = a->heads / a->kv_heads;
    return it->kv_head * group + (it->row + r) % group;
}

/* The rows of an item into the workspace; lanes past the end repeat the last row. */
static int load_rows(const attend_args *a, const entry_t *e, const item_t *it, const workspace *w,
                     group_t *groups, int mode) {
    const int64_t dim = a->head_dim, size = mode == F32 ? 4 : 2;
    const int64_t words = mode >= BF16_PAIRS ? dim / 2 : dim;
    const int is_empty = a->is_first && !a->sinks;
    int count = 0;
    for (int64_t row = 0, width; row < it->rows; row += width) {
        width = min64(vecs_of(mode), ceil_div(it->rows - row, LANES)) * LANES;
        for (int64_t lane = 0; lane < width; lane += LANES) {
            const char *q[LANES], *acc[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t to = row + lane + i, r = min64(to, it->rows - 1);
                const int64_t token = token_of(a, e, it, r), head = head_of(a, it, r);
                const int64_t at = token * a->heads + head;
                q[i] = a->q + size * (token * a->q_token_stride + head * a->q_head_stride);
                acc[i] = (const char *)(a->acc + at * dim);
                w->all_top[to] = a->row_max[at], w->all_sum[to] = a->row_sum[at];
                w->top[to] = -INFINITY, w->sum[to] = 0;
                w->pos[to] = e->first_pos + token - e->query_start;
            }
            const int64_t to = row * w->padded + lane;
            if (mode == BF16_WIDE) rows_to_lanes(q, words, w->q + to, width, BF16_WIDE);
            else rows_to_lanes(q, words, w->q + to, width, F32);
            if (!is_empty) rows_to_lanes(acc, dim, w->all_acc + to, width, F32);
        }
        groups[count++] =
            (group_t){row, width / LANES, w->pos[row], w->pos[row + width - 1], 1, is_empty};
    }
    return count;
}

static void store_rows(const attend_args *a, const entry_t *e, const item_t *it, const workspace *w,
                       const group_t *groups, int count) {
    for (int g = 0; g < count; g++) {
        const int64_t row = groups[g].row, width = groups[g].vecs * LANES;
        if (groups[g].is_empty) continue; /* start_row has been there */
        for (int64_t lane = 0; lane < width; lane += LANES) {
            float *acc[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t r = row + lane + i;
                const int64_t at = token_of(a, e, it, r) * a->heads + head_of(a, it, r);
                acc[i] = 0; /* no row, or one that saw nothing here: untouched, bit for bit */
                if (r >= it->rows || w->pos[r] < e->key_begin) continue;
                a->row_max[at] = w->all_top[r], a->row_sum[at] = w->all_sum[r];
                acc[i] = a->acc + at * a->head_dim;
            }
            lanes_to_rows(acc, a->head_dim, w->all_acc + row * w->padded + lane, width);
        }
    }
}

/* The segment's state of every row into that of all before it, and a fresh one in its place. A row that
 * saw no key of it (top is -inf, so old is 1 and add 0) stays as it is: what it has of a value that is no
 * number, 0 times that, is left out. */
static void merge_group(const workspace *w, group_t *g, int64_t dim) {
    const int64_t width = g->vecs * LANES;
    for (int64_t lane = 0; lane < width; lane += LANES) {
        const int64_t row = g->row + lane, at = g->row * w->padded + lane;
        const merge_t m = merge_of(load(w->all_top + row), load(w->top + row));
        const vf none = {0};
        const vi is_seen = load(w->sum + row) != none; /* as in merge_partials */
        store(w->all_top + row, m.top);
        store(w->all_sum + row, merged(&m, load(w->all_sum + row), load(w->sum + row)));
        store(w->top + row, splat(-INFINITY));
        store(w->sum + row, none);
        if (g->is_empty) /* 0 * old + acc * 1: the same bits */
            for (int64_t i = at; i < at + dim * width; i += width)
                store(w->all_acc + i, pick(is_seen, load(w->acc + i) + 0.0f, none));
        else
            for (int64_t i = at; i < at + dim * width; i += width) {
                const vf partial = pick(is_seen, load(w->acc + i), none);
                store(w->all_acc + i, merged(&m, load(w->all_acc + i), partial));
            }
    }
    g->is_fresh = 1, g->is_empty = 0;
}

/* keep_state of the rows of a group, which saw a tile of a segment. */
static void keep_states(const attend_args *a, const entry_t *e, const item_t *it, const workspace *w,
                        const group_t *g, int64_t block, int is_first) {
    for (int64_t r = g->row, end = min64(r + g->vecs * LANES, it->rows); r < end; r++)
        keep_state(a, token_of(a, e, it, r) * a->heads + head_of(a, it, r), block, is_first, w->top[r],
                   w->sum[r]);
}

/* The tiles of keys [from, end) of a segment that begins at `pos`, k and v. Returns how many. */
static int prepare_tiles(const attend_args *a, const workspace *w, const char *k, const char *v,
                         int64_t pos, int64_t from, int64_t end, tile_t *tiles) {
    const int mode = mode_of(a);
    const int64_t stride = a->kv_heads * a->head_dim * (mode == F32 ? 4 : 2);
    int count = 0;
    for (int64_t t = from; t < end; t += TILE)
        tiles[count++] = prepare_tile(a, w, k + t * stride, v + t * stride, stride,
                                      min64(TILE, end - t), pos + t, t, mode);
    return count;
}

/* All rows of a group over the tiles of a segment. */
static void group_over_tiles(const tile_t *tiles, int count, const workspace *w, group_t *g, int64_t dim,
                             int mode) {
    for (int t = 0; t < count; t++)
        (mode == BF16_TILES   ? tile_in_tiles
         : mode == BF16_PAIRS ? tile_in_pairs
         : mode == BF16_WIDE  ? tile_in_wide
                              : tile_in_floats)(&tiles[t], w, g, dim);
}

static void prefill_item(const attend_args *a, const item_t *it, float *scratch) {
    const entry_t e = entry_at(a, it->entry);
    const workspace w = carve(scratch, a->head_dim);
    const int64_t dim = a->head_dim, size = a->is_bf16 ? 2 : 4, stride = a->kv_heads * dim * size;
    const int64_t group = a->heads / a->kv_heads;
    const int64_t end = min64(e.key_end, e.first_pos + (it->row + it->rows - 1) / group + 1);
    const int64_t begin = max64(e.key_begin, e.first_pos + it->row / group + 1 - a->window);
    const int mode = mode_of(a);
    group_t groups[GROUPS];
    tile_t tiles[SEG / TILE];
    if (end <= begin) return;
    const int count = load_rows(a, &e, it, &w, groups, mode);
    const int64_t first = (begin - e.key_begin) / a->block_size;
    for (int64_t b = first, start = e.key_begin + b * a->block_size; start < end;
         start += a->block_size, b++) {
        const char *k = a->k + size * (e.blocks[b] * a->k_block_stride + it->kv_head * dim);
        const char *v = a->v + size * (e.blocks[b] * a->v_block_stride + it->kv_head * dim);
        const int64_t block_end = min64(a->block_size, end - start), skipped = max64(0, begin - start);
        for (int64_t off = skipped / SEG * SEG; off < block_end; off += SEG) {
            const int num_tiles = prepare_tiles(a, &w, k + off * stride, v + off * stride, start + off,
                                                max64(0, skipped - off) / TILE * TILE,
                                                min64(SEG, block_end - off), tiles);
            for (group_t *g = groups; g < groups + count; g++) { /* its state stays in the L1 cache */
                group_over_tiles(tiles, num_tiles, &w, g, dim, mode);
                if (g->is_fresh) continue;
                if (a->mass) keep_states(a, &e, it, &w, g, a->first_block[it->entry] + b, off == 0);
                merge_group(&w, g, dim);
            }
        }
    }
    store_rows(a, &e, it, &w, groups, count);
}
#endif
