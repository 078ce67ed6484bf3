/* Attention of few queries, a segment at a time: lanes along keys, then along head_dim. */
#ifndef NANOENGINE_CPU_DECODE_H
#define NANOENGINE_CPU_DECODE_H
#include "cpu_attention.h"

/* Into L2, line after line, one stream at a time: heads are read in strides, which the hardware
 * prefetcher does not follow (9 GB/s per core without this, 16 with it; a plain read loop has 21). */
INLINE void prefetch(const char *p, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

typedef struct { const char *at; int64_t lines, share; } soon_t; /* what is read next, and its shares */

INLINE soon_t soon_of(const char *at, int64_t bytes, int64_t shares) {
    const int64_t lines = ceil_div(bytes, 64);
    return (soon_t){at, lines, ceil_div(lines, shares)};
}

/* A share of it into L2. Small and often: the core waits for a burst, and memory for the core after it. */
INLINE void bring_some(soon_t *soon) {
    const int64_t lines = min64(soon->share, soon->lines);
    soon->lines -= lines;
    for (const char *end = soon->at + 64 * lines; soon->at < end; soon->at += 64)
        __builtin_prefetch(soon->at, 0, 2);
}

/* The same of `count` rows, `stride` bytes apart. */
INLINE void prefetch_rows(const char *p, int64_t stride, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) prefetch(p + i * stride, bytes);
}

/* LANES rows of `words` elements into columns of a [word][width] array; room for a multiple of LANES. */
INLINE void rows_to_lanes(const char *const *rows, int64_t words, float *out, int64_t width,
                          const int mode) {
    for (int64_t d = 0; d < words; d += LANES) {
        vf x[LANES];
        UNROLL for (int i = 0; i < LANES; i++)
            x[i] = load_f32(rows[i] + (mode == F32 ? 4 : 2) * d, min64(words - d, LANES), mode);
        transpose(x);
        UNROLL for (int i = 0; i < LANES; i++) store(out + (d + i) * width, x[i]);
    }
}

/* n keys of a head, of `words` elements, as [word][TILE keys]. */
INLINE void transpose_keys(const char *k, int64_t k_stride, int n, int64_t words, soon_t *soon,
                           float *out, const int mode) {
    for (int c = 0; c < n; c += LANES, k += LANES * k_stride) {
        const char *rows[LANES];
        int64_t d = 0;
        if (mode == F32 && c + LANES <= n)
            for (; d + LANES <= words; d += LANES, bring_some(soon))
                transpose_words(k + 4 * d, k_stride, out + d * TILE + c, TILE);
        if (d == words) continue;
        const int64_t skipped = d * (mode == F32 ? 4 : 2);
        for (int i = 0; i < LANES; i++) rows[i] = k + min64(i, n - 1 - c) * k_stride + skipped;
        rows_to_lanes(rows, words - d, out + d * TILE + c, TILE, mode);
    }
}

/* One step of a sum over words: floats, or pairs of bf16. */
INLINE vf add_product(vf sum, vf a, vf b, const int mode) {
    return mode == BF16_PAIRS ? dot_pairs(sum, a, b) : fused(a, b, sum);
}

/* scores[row][key] of `rows` rows and `vecs` vectors of keys. BF16_WIDE: a word of a key is two bf16, of
 * a query two floats. */
INLINE void key_scores(const float *keys, const char *q, int64_t q_bytes, int64_t words, float *scores,
                       soon_t *soon, const int rows, const int vecs, const int mode) {
    vf s[ROWS][SVECS] = {0};
    for (int64_t w = 0; w < words; w++) {
        if (w % LANES == 0) bring_some(soon);
        const float *at = (const float *)q + (mode == BF16_WIDE ? 2 * w : w);
        UNROLL for (int j = 0; j < vecs; j++) {
            const vf x = load(keys + w * TILE + j * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                const float *y = (const float *)((const char *)at + r * q_bytes);
                if (mode == BF16_WIDE) {
                    s[r][j] = fused((vf)((vu)x << 16), splat(y[0]), s[r][j]);
                    s[r][j] = fused((vf)((vu)x & 0xffff0000u), splat(y[1]), s[r][j]);
                } else {
                    s[r][j] = add_product(s[r][j], x, splat(y[0]), mode);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vecs; j++) store(scores + r * TILE + j * LANES, s[r][j]);
}

INLINE void key_scores_rows(const float *keys, const char *q, int64_t q_bytes, int64_t words,
                            float *scores, int n, soon_t *soon, const int rows, const int mode) {
    int left = ceil_div(n, LANES);
    for (; left >= SVECS; left -= SVECS, keys += SVECS * LANES, scores += SVECS * LANES)
        key_scores(keys, q, q_bytes, words, scores, soon, rows, SVECS, mode);
    for (; left >= 2; left -= 2, keys += 2 * LANES, scores += 2 * LANES)
        key_scores(keys, q, q_bytes, words, scores, soon, rows, 2, mode);
    if (left) key_scores(keys, q, q_bytes, words, scores, soon, rows, 1, mode);
}

/* How many of `rows` are multiplied at once, at most `most`; the last two times about as many. */
INLINE int64_t rows_at_once(int64_t rows, int64_t most) {
    return rows <= most ? rows : rows < 2 * most ? (rows + 1) / 2 : most;
}
/* `call` with r = `rows`, of 1 to ROWS, as a constant. */
#define WITH_ROWS(rows, call)                                                                       \
    UNROLL for (int r = 1; r <= ROWS; r++)                                                          \
        if (r == rows) call;

/* Scores of n keys for the `rows` rows of a head. A sum runs over the words of head_dim in order, as in
 * prefill: so the keys are turned, and lanes run along them. */
#define DECODE_SCORES(name, mode)                                                                   \
    static void name(const float *keys, const char *q, int64_t q_bytes, int64_t words,              \
                     float *scores, int n, soon_t *soon, int64_t rows) {                            \
        if (!HAS_MODE(mode)) return;                                                                \
        for (int64_t some; rows > 0; rows -= some, q += some * q_bytes, scores += some * TILE) {    \
            some = rows_at_once(rows, ROWS);                                                        \
            WITH_ROWS(some, key_scores_rows(keys, q, q_bytes, words, scores, n, soon, r, mode))     \
        }                                                                                           \
    }
DECODE_SCORES(scores_in_floats, F32)
DECODE_SCORES(scores_in_pairs, BF16_PAIRS)
DECODE_SCORES(scores_of_pairs, BF16_WIDE)

static void decode_scores(const char *k, int64_t k_stride, int n, const char *q, int64_t q_bytes,
                          int64_t rows, soon_t *soon, float *keys, float *scores, int64_t dim, int mode) {
    if (mode != F32 && dim % 2 == 0) { /* two bf16 are a word */
        transpose_keys(k, k_stride, n, dim / 2, soon, keys, F32);
        (mode == BF16_PAIRS ? scores_in_pairs : scores_of_pairs)(keys, q, q_bytes, dim / 2, scores, n,
                                                                 soon, rows);
        return;
    }
    if (mode == F32) transpose_keys(k, k_stride, n, dim, soon, keys, F32);
    else transpose_keys(k, k_stride, n, dim, soon, keys, BF16_WIDE);
    scores_in_floats(keys, q, q_bytes, dim, scores, n, soon, rows);
}

/* p of a score, against a maximum. */
INLINE vf weight(vf score, float scale, vf base, const int mode) {
    return exp2_for(fused(score, splat(scale * LOG2E), -base), mode);
}

typedef struct { float top[LANES], sum[LANES]; } states_t; /* of so many rows; at first -inf and 0 */

static const states_t NO_KEYS = {.top = {[0 ... LANES - 1] = -INFINITY}};

/* Softmax of `rows` rows, LANES at most, over a tile, against their carried maxima; p replaces the scores,
 * [row][TILE]. visible: keys that each sees. alpha: factors for what was accumulated before. */
INLINE void softmax_rows(float *scores, int64_t rows, int n, const int *visible, float scale,
                         states_t *states, float *alpha, const int mode) {
    const int vecs = ceil_div(n, LANES);
    vf x[LANES];
    float bases[LANES];
    for (int r = 0; r < LANES; r++) {
        x[r] = splat(-INFINITY);
        for (int c = 0; c < vecs && r < rows; c++) {
            float *at = scores + r * TILE + c * LANES;
            if (visible[r] < (c + 1) * LANES)
                store(at, pick(IOTA + c * LANES < visible[r], load(at), splat(-INFINITY)));
            x[r] = vmax(x[r], load(at));
        }
    }
    const vf old = load(states->top), new = vmax(old, (max_of_each(x) + 0.0f) * scale);
    const vf base = base_of(new), lowest = splat(-INFINITY);
    const vf factor = pick(old == lowest, splat(0), exp2v(base_of(old) - base));
    store(bases, base);
    for (int r = 0; r < LANES; r++) {
        x[r] = splat(0);
        for (int c = 0; c < vecs && r < rows; c++) {
            float *at = scores + r * TILE;
            const vf p = weight(load(at + c * LANES), scale, splat(bases[r]), mode);
            x[r] += p;
            if (mode == BF16_PAIRS) store_n((uint16_t *)at + c * LANES, p, LANES, mode);
            else store(at + c * LANES, p);
        }
    }
    store(states->top, new), store(alpha, factor);
    store(states->sum, fused(load(states->sum), factor, sum_of_each(x)));
}

static void decode_softmax(float *scores, int64_t rows, int n, const int *visible, float scale,
                           states_t *states, float *alpha, int mode) {
    if (mode == F32) softmax_rows(scores, rows, n, visible, scale, states, alpha, F32);
    else if (mode == BF16_WIDE) softmax_rows(scores, rows, n, visible, scale, states, alpha, BF16_WIDE);
    else if (HAVE_PAIRS) softmax_rows(scores, rows, n, visible, scale, states, alpha, BF16_PAIRS);
}

typedef struct { int64_t pos; const char *q; float *partial; } decode_row_t;

/* acc[d..] = acc * alpha + p V for `rows` rows and `vecs` vectors of head_dim (in pairs: of twice LANES); acc is a
 * row's partial, alpha NULL: there is none yet. `left` is how many elements remain from d on. */
INLINE void decode_values(const char *v, int64_t v_stride, int n, const float *probs, const decode_row_t *to,
                          const float *alpha, soon_t *soon, int64_t d, int64_t left, const int rows,
                          const int vecs, int mode) {
    enum { MAX = 4 };
    vf a[ROWS][2 * MAX];
    const int outs = mode == BF16_PAIRS ? 2 * vecs : vecs;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++)
            a[r][j] = alpha ? load(to[r].partial + d + j * LANES) * alpha[r] : splat(0);
    if (mode == BF16_PAIRS) {
        for (int i = 0; i < n; i += 2) {
            if (i % 8 == 0) bring_some(soon);
            const char *v0 = v + i * v_stride + 2 * d, *v1 = i + 1 < n ? v0 + v_stride : v0;
            UNROLL for (int j = 0; j < vecs; j++) {
                vf x = load_bf16(v0 + 64 * j, left - 32 * j), y = load_bf16(v1 + 64 * j, left - 32 * j);
                vf lo = interleave(x, y, 0), hi = interleave(x, y, 1);
                UNROLL for (int r = 0; r < rows; r++) {
                    vf p = splat(probs[r * TILE + i / 2]);
                    a[r][2 * j] = dot_pairs(a[r][2 * j], lo, p);
                    a[r][2 * j + 1] = dot_pairs(a[r][2 * j + 1], hi, p);
                }
            }
        }
    } else {
        const int size = mode == F32 ? 4 : 2;
        for (int i = 0; i < n; i++) {
            if (i % 4 == 0) bring_some(soon);
            UNROLL for (int j = 0; j < vecs; j++) {
                vf x = load_f32(v + i * v_stride + size * (d + j * LANES), left - j * LANES, mode);
                UNROLL for (int r = 0; r < rows; r++)
                    a[r][j] = fused(x, splat(probs[r * TILE + i]), a[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++) store(to[r].partial + d + j * LANES, a[r][j]);
}

INLINE void decode_values_rows(const char *v, int64_t v_stride, int n, const float *probs, const decode_row_t *to,
                               const float *alpha, soon_t *soon, int64_t dim, const int rows, int mode) {
    const int wide = mode == BF16_PAIRS ? 32 : LANES, vecs = mode == BF16_PAIRS ? DVEC / 2 : DVEC;
    const int64_t step = vecs * wide;
    int64_t d = 0;
    for (; d + step <= dim; d += step)
        decode_values(v, v_stride, n, probs, to, alpha, soon, d, step, rows, vecs, mode);
    for (; d < dim; d += wide) decode_values(v, v_stride, n, probs, to, alpha, soon, d, dim - d, rows, 1, mode);
}

#define DECODE_VALUES(name, mode)                                                                   \
    static void name(const char *v, int64_t v_stride, int n, const float *probs, const decode_row_t *to,       \
                     const float *alpha, soon_t *soon, int64_t dim, int64_t rows) {                 \
        if (!HAS_MODE(mode)) return;                                                                \
        WITH_ROWS(rows, decode_values_rows(v, v_stride, n, probs, to, alpha, soon, dim, r, mode))   \
    }
DECODE_VALUES(values_f32, F32)
DECODE_VALUES(values_wide, BF16_WIDE)
DECODE_VALUES(values_pairs, BF16_PAIRS)

/* The rows of a kv head over a bundle of segments: of an entry, row r is (query r / group, head r % group).
 * `partials` are those of the first segment. Returns how many there are. */
static int64_t bundled_rows(const attend_args *a, const segment_t *segments, int64_t kv_head,
                            float *partials, int64_t segment_floats, decode_row_t *rows) {
    const int64_t group = a->heads / a->kv_heads, stride = partial_stride(a->head_dim);
    const int64_t size = a->is_bf16 ? 2 : 4;
    int64_t count = 0;
    for (int64_t s = 0; s < segments->bundle; s++, partials += segment_floats) {
        const entry_t e = entry_at(a, segments[s].entry);
        for (int64_t query = 0; query < e.q_len; query++) {
            const char *q = a->q + size * (e.query_start + query) * a->q_token_stride;
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                rows[count++] = (decode_row_t){e.first_pos + query, q + size * head * a->q_head_stride,
                                               partials + (query * a->heads + head) * stride};
        }
    }
    return count;
}

/* How many they are. */
static int64_t count_bundled(const attend_args *a, const segment_t *segments) {
    int64_t queries = 0;
    for (int64_t s = 0; s < segments->bundle; s++) queries += entry_at(a, segments[s].entry).q_len;
    return queries * (a->heads / a->kv_heads);
}

/* The first position that any of them sees. */
static int64_t first_seen(const attend_args *a, const segment_t *segments) {
    int64_t seen = INT64_MAX;
    for (int64_t s = 0; s < segments->bundle; s++)
        seen = min64(seen, entry_at(a, segments[s].entry).seen_begin);
    return seen;
}

typedef struct { /* the rows of some kv heads over a bundle of segments, and room for a tile of them */
    const attend_args *a;
    const decode_row_t *rows; /* [kv heads][of_head] */
    int64_t of_head, all, q_bytes;
    int mode;
    float *keys, *probs, *alpha;
    states_t *states; /* of 16 rows each */
    char *q;
} decoded_t;

INLINE int64_t q_bytes_of(int64_t dim) { return ceil_div(dim, 32) * 32 * 4; }

/* Words of a thread's room for so many rows. */
INLINE int64_t decode_words(int64_t rows, int64_t dim) {
    const int64_t words = q_bytes_of(dim) / 4;
    return rows * (words + TILE + 3) + 3 * LANES + TILE * words;
}

static decoded_t lay_out_decode(const attend_args *a, const decode_row_t *rows, int64_t of_head, int64_t all,
                                char *scratch) {
    const int64_t words = q_bytes_of(a->head_dim) / 4, groups = ceil_div(all, LANES); /* of rows */
    decoded_t d = {.a = a, .rows = rows, .of_head = of_head, .all = all, .q_bytes = 4 * words, .mode = mode_of(a)};
    d.keys = (float *)scratch, d.probs = d.keys + TILE * words, d.alpha = d.probs + all * TILE;
    d.states = (states_t *)(d.alpha + groups * LANES), d.q = (char *)(d.states + groups);
    return d;
}

/* Queries, padded to whole vectors. */
static void pack_queries(const decoded_t *d) {
    const int64_t dim = d->a->head_dim, size = d->a->is_bf16 ? 2 : 4;
    char *out = d->q;
    for (int64_t i = 0; i < d->all; i++, out += d->q_bytes) {
        const char *q = d->rows[i].q;
        memset(out, 0, d->q_bytes);
        if (d->mode != BF16_WIDE) memcpy(out, q, dim * size);
        else for (int64_t j = 0; j < dim; j += LANES) store(out + 4 * j, load_f32(q + 2 * j, dim - j, BF16_WIDE));
    }
}

/* Scores of n keys, the first at `pos`, become p. Inlined, it slows the loops around it by 2 %. */
NOINLINE void softmax_of_decode(const decoded_t *d, int64_t pos, int n, soon_t *soon) {
    const attend_args *a = d->a;
    if (a->softcap) cap_rows(a, d->probs, d->all, n);
    for (int64_t first = 0; first < d->all; first += LANES) {
        const int64_t some = min64(LANES, d->all - first);
        int visible[LANES];
        for (int64_t i = 0; i < some; i++) {
            const int64_t seen = d->rows[first + i].pos + 1 - pos;
            float *p = d->probs + (first + i) * TILE;
            bring_some(soon);
            for (int64_t j = min64(n, seen - a->window); j > 0; j--) p[j - 1] = -INFINITY;
            visible[i] = max64(0, min64(n, seen));
        }
        decode_softmax(d->probs + first * TILE, some, n, visible, scale_of(a), d->states + first / LANES,
                       d->alpha + first, d->mode);
    }
}

/* p V of n keys of the kv head whose rows begin at `row`, into their partials. */
static void add_values(const decoded_t *d, const char *v, int64_t stride, int n, int64_t row, int is_first,
                       soon_t *soon) {
    for (int64_t i = row, end = row + d->of_head, some; i < end; i += some) {
        some = rows_at_once(end - i, d->mode == BF16_PAIRS ? PAIRED_ROWS : ROWS);
        (d->mode == F32 ? values_f32 : d->mode == BF16_WIDE ? values_wide : values_pairs)(
            v, stride, n, d->probs + i * TILE, d->rows + i, is_first ? NULL : d->alpha + i, soon,
            d->a->head_dim, some);
    }
}

/* Partial states of all rows of the kv heads [head0, head1) over a bundle of segments. `after` is the
 * segment that comes next, `cold` says that nobody has prefetched this one, `packed` that `scratch` holds
 * the queries. */
static void decode_segments(const attend_args *a, const segment_t *segments, const span_t *after, int cold,
                            int packed, int64_t head0, int64_t head1, float *partials,
                            int64_t segment_floats, char *scratch) {
    const int64_t dim = a->head_dim, size = a->is_bf16 ? 2 : 4, width = dim * size;
    const int64_t key_stride = a->kv_heads * width, num_heads = head1 - head0;
    const entry_t e = entry_at(a, segments->entry);
    const span_t span = span_of(a, &e, segments->index);
    const int64_t of_head = count_bundled(a, segments), all = of_head * num_heads;
    decode_row_t rows[all];
    for (int64_t h = head0; h < head1; h++)
        bundled_rows(a, segments, h, partials, segment_floats, rows + (h - head0) * of_head);
    const decoded_t d = lay_out_decode(a, rows, of_head, all, scratch);
    if (!packed) pack_queries(&d);
    for (int64_t i = 0; i < all; i += LANES) d.states[i / LANES] = NO_KEYS;
    const int whole = num_heads == a->kv_heads; /* else others read the rest: leave it to them */
    /* What is read next comes in a tile ahead; where two tiles do not fit L2, half a tile. */
    const int is_far = 4 * TILE * key_stride <= FAR_BYTES;
    if (cold && whole) {
        const int64_t bytes = min64(TILE, span.count) * key_stride;
        prefetch(span.k, bytes);
        if (is_far) prefetch(span.v, bytes);
    }
    const int64_t skipped = max64(0, first_seen(a, segments) - span.pos) / TILE * TILE;
    for (int64_t t = skipped; t < span.count; t += TILE) {
        const int n = min64(TILE, span.count - t);
        const char *k = span.k + t * key_stride, *v = span.v + t * key_stride;
        const int is_last = t + TILE >= span.count;
        const char *next_k = is_last ? after->k : k + TILE * key_stride;
        const char *next_v = is_last ? after->v : v + TILE * key_stride;
        const int64_t ahead = min64(TILE, is_last ? after->count : span.count - t - TILE);
        const int64_t next_bytes = whole ? ahead * key_stride : 0;
        if (!whole) {
            const int64_t first = head0 * width, own = num_heads * width;
            if (t == skipped) prefetch_rows(k + first, key_stride, n, own);
            prefetch_rows(v + first, key_stride, n, own);
            const int64_t left = min64(TILE, span.count - t - TILE);
            prefetch_rows(k + TILE * key_stride + first, key_stride, left, own);
        }
        /* Of a head: blocks of words to turn, and to multiply for some rows at a time, and rows; of V. */
        const int64_t steps = ceil_div(ceil_div(width, 4), LANES), blocks = ceil_div(of_head, ROWS);
        const int64_t blocks_of_k = steps * (ceil_div(n, LANES) + blocks) + of_head;
        const int64_t blocks_of_v = blocks * ceil_div(dim, LANES * DVEC);
        soon_t soon = soon_of(is_far ? next_k : v, is_far || !whole ? next_bytes : n * key_stride,
                              blocks_of_k * num_heads); /* while K is read */
        for (int64_t h = head0, i = 0; h < head1; h++, i += of_head)
            decode_scores(k + h * width, key_stride, n, d.q + i * d.q_bytes, d.q_bytes, of_head, &soon,
                          d.keys, d.probs + i * TILE, dim, d.mode);
        softmax_of_decode(&d, span.pos + t, n, &soon);
        soon = soon_of(is_far ? next_v : next_k, next_bytes, /* while V is read */
                       blocks_of_v * num_heads * ceil_div(n, d.mode == BF16_PAIRS ? 8 : 4));
        for (int64_t h = head0, i = 0; h < head1; h++, i += of_head)
            add_values(&d, v + h * width, key_stride, n, i, t == skipped, &soon);
    }
    for (int64_t i = 0; i < all; i++) {
        const states_t *own = d.states + i / LANES;
        float *tail = rows[i].partial + partial_stride(dim) - 16;
        tail[0] = own->top[i % LANES], tail[1] = own->sum[i % LANES];
    }
}
#endif
