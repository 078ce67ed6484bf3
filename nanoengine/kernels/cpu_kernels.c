/* Attention on the CPU over paged, grouped-query KV, and the law that makes it exact.
 *
 * The law: the bits of a query row depend on its own tokens, its position and the size of a KV block. They
 * do not depend on how many rows its sequence brings to a call, on how blocks are grouped into calls, on
 * the pool that holds them, on the number of threads, or on the other sequences of a call.
 *
 * For this the state of a row, (row_max, row_sum, acc), is made in one way:
 *
 *   scores   a score is one chain of fused steps over the words of head_dim, in order (a word: one number,
 *            or a pair of bf16); or, in matrix tiles, over 32 numbers at a time.
 *   tile     up to TILE keys, which begin at a multiple of TILE in their segment, are folded into the
 *            partial state of the segment. Their p are summed by keys mod LANES, then as sum_lanes does.
 *            acc takes one fused step for each key (or pair of keys, or 32 keys) in order.
 *   segment  up to SEG keys, which begin at a multiple of SEG in their block and end with it at the latest.
 *            Its partial state starts anew; at its end it is merged into the row's state, in logical
 *            order, as merge_of and merged say. The row's state starts empty, or with the sink of its head.
 *
 * Two ways through this differ in what runs in parallel and along which axis lanes lie; is_split chooses
 * by speed alone:
 *
 *   decode   segments in parallel, each into partial states in memory, which are then merged row by row.
 *            Lanes run along keys (scores) and head_dim; K and V are read once for a group of heads, in
 *            matrix tiles also once for all sequences that share the segment. There lanes run along rows
 *            in the softmax of more than NARROW of them.
 *   prefill  query tiles in parallel, each over all its segments one after the other. A group of rows goes
 *            over a whole segment and merges it before the next group begins: its state stays in the L1
 *            cache. Lanes run along rows (query, head of the group): a softmax needs no sum across lanes.
 *
 * Sums that both make are spelled with `fused`: a compiler that chose by itself what to fuse could choose
 * differently in two loops.
 *
 * Tiles and segments that end before the first query's window are skipped. Others may be computed for a row
 * that sees none of their keys (a neighbour does): this must not change the row. So alpha = 2^0 is exactly
 * 1, p of a masked key is exactly +0, denormals are flushed throughout, and a merge with a partial state
 * that saw no key changes nothing. A tile may leave -0 or +0 where another order of the work leaves the
 * other (-0 + 0 * v is +0): so a merge makes +0 of -0.
 *
 * Memory past a sequence's kv_len is never read: it may hold NaN, and 0 * NaN is NaN.
 * Four modes, which a call cannot choose: fp32; bf16 multiplied in pairs (AVX512-BF16) or in matrix tiles
 * (AMX); bf16 widened to fp32.
 */
#include <omp.h>
#include <stdlib.h>

#include "call_tape.h"
#include "cpu_tiles.h"

enum { TILE = 64, SEG = 256 };
enum { FEW = 4, SOME = 24 }; /* queries of an entry: see is_split */
enum { FAR_BYTES = 640 << 10 }; /* K and V of two tiles, where both are brought into L2 */
enum { WINDOW_BYTES = 512 << 10 }; /* of decode partials, a thread: they are merged from L2 */
#if LANES == 16
enum { KEYS = 8, DIMS = 8, DVEC = 4, SVECS = 4, ROWS = 6 }; /* register blocks: 24 sums in 32 registers */
#else
enum { KEYS = 4, DIMS = 4, DVEC = 2, SVECS = 2, ROWS = 4 }; /* up to 12 in 16 */
#endif
enum { RVECS = 3, TILE_VECS = 2 }; /* in prefill, row vectors of a block of registers, of matrix tiles */
enum { ROWS_PER_ITEM = 8 * RVECS * LANES, GROUPS = ROWS_PER_ITEM / LANES };
enum { BUNDLE_ROWS = 128 }; /* of a kv head */

/* ---- one call --------------------------------------------------------------------------------- */

typedef struct { /* filled by cpu_kernels.py with struct.pack: keep both in step; strides in elements */
    const char *q, *k, *v;
    const int32_t *seq_index, *first_block, *num_blocks, *block_table, *query_start, *kv_lens;
    float *row_max, *row_sum, *acc;
    void *out; /* NULL, or where the rows go once this chunk, the last, is folded in */
    const float *sinks; /* NULL, or [heads]: the score of a key that all see, and whose value is 0 */
    int64_t entries, table_stride, q_token_stride, q_head_stride, k_block_stride, v_block_stride;
    int64_t tokens, heads, kv_heads, head_dim, block_size, is_bf16, is_first, threads;
    int64_t has_tiles; /* allow_tiles succeeded */
    int64_t window; /* keys that a query sees, its own the last of them; INT32_MAX: all */
    /* NULL, or [sequences, blocks]: attention mass, added to by the call that writes `out`. Until then the
     * maximum and the sum of each row over each block are kept, [2, tokens, heads, blocks]. */
    float *mass, *kept;
    int64_t sequences, blocks, mass_stride;
    double scale;
} attend_args;

/* Of a whole model: what a call brings has no say. */
static int mode_of(const attend_args *a) {
    if (!a->is_bf16) return F32;
    if (HAVE_TILES && a->has_tiles && a->head_dim % 32 == 0) return BF16_TILES;
    return HAVE_PAIRS && a->head_dim % 2 == 0 ? BF16_PAIRS : BF16_WIDE; /* pairs stay in a row */
}
INLINE int64_t vecs_of(int mode) { return mode == BF16_TILES ? TILE_VECS : RVECS; }

typedef struct { /* what one row of the chunk is about; positions are absolute */
    int64_t query_start, q_len, first_pos, key_begin, key_end, seen_begin; /* seen by any query */
    const int32_t *blocks;
} entry_t;

static entry_t entry_at(const attend_args *a, int64_t e) {
    int64_t seq = a->seq_index[e], kv_len = a->kv_lens[seq];
    entry_t x = {.query_start = a->query_start[seq], .blocks = a->block_table + e * a->table_stride};
    x.q_len = a->query_start[seq + 1] - x.query_start;
    x.first_pos = kv_len - x.q_len;
    x.key_begin = a->first_block[e] * a->block_size;
    x.key_end = x.key_begin + a->num_blocks[e] * a->block_size;
    if (x.key_end > kv_len) x.key_end = kv_len;
    if (x.key_end < x.key_begin) x.key_end = x.key_begin;
    x.seen_begin = min64(max64(x.key_begin, x.first_pos + 1 - a->window), x.key_end);
    return x;
}

/* Whether an entry is attended segment by segment, in parallel, or a query tile at a time. By speed
 * alone: either gives the same bits. Some queries are worth it where there are keys to share out. */
static int is_split(const attend_args *a, const entry_t *e) {
    const int64_t rows = e->q_len * (a->heads / a->kv_heads), keys = e->key_end - e->seen_begin;
    return rows <= BUNDLE_ROWS && e->q_len <= (keys < SEG ? FEW : SOME);
}

INLINE int64_t up_to_line(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

/* ---- decode: lanes along keys, then head_dim -------------------------------------------------- */

typedef struct { /* segment `index` of an entry; `next`: where in the plan its next one is, or -1 */
    int64_t entry, index, next;
    int64_t bundle; /* in matrix tiles: so many from here on lie in one place; 0: one before has it */
} segment_t;

typedef struct { /* where a segment lies */
    const char *k, *v;
    int64_t pos, count; /* absolute position of its first key; keys to read */
} span_t;

static span_t span_of(const attend_args *a, const entry_t *e, int64_t index) {
    const int64_t per_block = ceil_div(a->block_size, SEG), offset = index % per_block * SEG;
    const int64_t block = index / per_block, id = e->blocks[block], size = a->is_bf16 ? 2 : 4;
    const int64_t pos = e->key_begin + block * a->block_size + offset;
    const int64_t skip = offset * a->kv_heads * a->head_dim;
    return (span_t){.k = a->k + size * (id * a->k_block_stride + skip),
                    .v = a->v + size * (id * a->v_block_stride + skip),
                    .pos = pos,
                    .count = min64(min64(SEG, a->block_size - offset), e->key_end - pos)};
}

/* acc and the two scalars of one row of one segment; a multiple of a cache line. */
INLINE int64_t partial_stride(int64_t head_dim) { return ceil_div(head_dim, 32) * 32 + 16; }

/* Into L2, line after line, one stream at a time: heads are read in strides, which the hardware
 * prefetcher does not follow (9 GB/s per core without this, 16 with it; a plain read loop has 21). */
INLINE void prefetch(const char *p, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
}

typedef struct { const char *at; int64_t lines, share; } soon_t; /* what is read next, and its shares */

/* A share of it into L2. Small and often: the core waits for a burst, and memory for the core after it. */
INLINE void bring_some(soon_t *soon) {
    const int64_t lines = min64(soon->share, soon->lines);
    soon->lines -= lines;
    for (const char *end = soon->at + 64 * lines; soon->at < end; soon->at += 64)
        __builtin_prefetch(soon->at, 0, 2);
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

/* How many of `rows` are multiplied at once; the last two times about as many. */
INLINE int64_t rows_at_once(int64_t rows) {
    return rows <= ROWS ? rows : rows < 2 * ROWS ? (rows + 1) / 2 : ROWS;
}
/* `call` with r = `rows`, of 1 to ROWS, as a constant. */
#define FOR_ROWS(rows, call)                                                                        \
    UNROLL for (int r = 1; r <= ROWS; r++)                                                          \
        if (r == rows) call;

/* Scores of n keys for the `rows` rows of a head. A sum runs over the words of head_dim in order, as in
 * prefill: so the keys are turned, and lanes run along them. */
#define DECODE_SCORES(name, mode)                                                                   \
    static void name(const float *keys, const char *q, int64_t q_bytes, int64_t words,              \
                     float *scores, int n, soon_t *soon, int64_t rows) {                            \
        for (int64_t some; rows > 0; rows -= some, q += some * q_bytes, scores += some * TILE) {    \
            some = rows_at_once(rows);                                                              \
            FOR_ROWS(some, key_scores_rows(keys, q, q_bytes, words, scores, n, soon, r, mode))      \
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
    else softmax_rows(scores, rows, n, visible, scale, states, alpha, BF16_PAIRS);
}

/* acc[r][d..] = acc * alpha + p V for `rows` rows and `vecs` vectors of head_dim (in pairs: of twice
 * LANES); alpha NULL: there is no acc yet. `left` is how many elements remain from d on. */
INLINE void decode_values(const char *v, int64_t v_stride, int n, const float *probs, float **acc,
                          const float *alpha, const char *soon, int64_t d, int64_t left,
                          const int rows, const int vecs, int mode) {
    enum { MAX = 4 };
    vf a[ROWS][2 * MAX];
    const int outs = mode == BF16_PAIRS ? 2 * vecs : vecs;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++)
            a[r][j] = alpha ? load(acc[r] + d + j * LANES) * alpha[r] : splat(0);
    if (mode == BF16_PAIRS) {
        for (int i = 0; i < n; i += 2) {
            if (soon) prefetch(soon + i * 64 * vecs, 128 * vecs);
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
            UNROLL for (int j = 0; j < vecs; j++) {
                if (soon) prefetch(soon + (i * vecs + j) * LANES * size, LANES * size);
                vf x = load_f32(v + i * v_stride + size * (d + j * LANES), left - j * LANES, mode);
                UNROLL for (int r = 0; r < rows; r++)
                    a[r][j] = fused(x, splat(probs[r * TILE + i]), a[r][j]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++) store(acc[r] + d + j * LANES, a[r][j]);
}

INLINE void decode_values_rows(const char *v, int64_t v_stride, int n, const float *probs, float **acc,
                               const float *alpha, const char *soon, int64_t dim, const int rows,
                               int mode) {
    const int wide = mode == BF16_PAIRS ? 32 : LANES, vecs = mode == BF16_PAIRS ? DVEC / 2 : DVEC;
    const int64_t size = mode == F32 ? 4 : 2, step = vecs * wide;
    int64_t d = 0;
    for (; d + step <= dim; d += step)
        decode_values(v, v_stride, n, probs, acc, alpha, soon ? soon + n * size * d : 0, d, step, rows, vecs, mode);
    for (; d < dim; d += wide)
        decode_values(v, v_stride, n, probs, acc, alpha, soon ? soon + n * size * d : 0, d, dim - d, rows, 1, mode);
}

#define DECODE_VALUES(name, mode)                                                                   \
    static void name(const char *v, int64_t v_stride, int n, const float *probs, float **acc,       \
                     const float *alpha, const char *soon, int64_t dim, int64_t rows) {             \
        FOR_ROWS(rows, decode_values_rows(v, v_stride, n, probs, acc, alpha, soon, dim, r, mode))   \
    }
DECODE_VALUES(values_f32, F32)
DECODE_VALUES(values_wide, BF16_WIDE)
DECODE_VALUES(values_pairs, BF16_PAIRS)

/* The query rows of one kv head, padded to whole vectors: row r is (query r / group, head r % group). */
static void pack_queries(const attend_args *a, const entry_t *e, int64_t kv_head, char *out, int mode) {
    int64_t group = a->heads / a->kv_heads, dim = a->head_dim, size = a->is_bf16 ? 2 : 4;
    int64_t padded = ceil_div(dim, 32) * 32;
    for (int64_t query = e->query_start; query < e->query_start + e->q_len; query++)
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++, out += padded * 4) {
            const char *q = a->q + size * (query * a->q_token_stride + head * a->q_head_stride);
            memset(out, 0, padded * 4);
            if (mode != BF16_WIDE) memcpy(out, q, dim * size);
            else for (int64_t d = 0; d < dim; d += LANES)
                store(out + 4 * d, load_f32(q + 2 * d, dim - d, mode));
        }
}

/* Partial states of all rows of the kv heads [head0, head1) over one segment. `after` is K of the
 * segment that comes next, `cold` says that nobody has prefetched this one, `packed` that `scratch` holds
 * the queries. */
static void decode_segment(const attend_args *a, segment_t seg, const span_t *after, int cold, int packed,
                           int64_t head0, int64_t head1, float *partial, char *scratch) {
    const int mode = mode_of(a);
    const int64_t dim = a->head_dim;
    const entry_t e = entry_at(a, seg.entry);
    const span_t span = span_of(a, &e, seg.index);
    const int64_t group = a->heads / a->kv_heads, rows = e.q_len * group, all = (head1 - head0) * rows;
    const int64_t size = mode == F32 ? 4 : 2, width = dim * size, key_stride = a->kv_heads * width;
    const int64_t stride = partial_stride(dim), q_bytes = ceil_div(dim, 32) * 32 * 4;
    const int whole = head1 - head0 == a->kv_heads; /* else others read the rest: leave it to them */
    const int64_t words = ceil_div(size * dim, 4), steps = ceil_div(words, LANES);
    /* Of a head: blocks of words to turn, and to multiply for some rows at a time; rows. */
    const int64_t calls = (head1 - head0) * (steps * (TILE / LANES + ceil_div(rows, ROWS)) + rows);
    const int64_t groups = ceil_div(all, LANES); /* of rows */
    float *keys = (float *)scratch, *probs = keys + TILE * (q_bytes / 4), *alpha = probs + all * TILE;
    states_t *states = (states_t *)(alpha + groups * LANES);
    char *q = (char *)(states + groups);
    float *acc[all];
    for (int64_t h = head0, i = 0; h < head1; h++) {
        if (!packed) pack_queries(a, &e, h, q + i * q_bytes, mode);
        for (int64_t query = 0; query < e.q_len; query++)
            for (int64_t head = h * group; head < (h + 1) * group; head++, i++)
                acc[i] = partial + (query * a->heads + head) * stride;
    }
    for (int64_t g = 0; g < groups; g++) states[g] = NO_KEYS;
    /* What is read next comes in a tile ahead; where two tiles do not fit L2, half a tile. */
    const int is_far = 4 * TILE * key_stride <= FAR_BYTES;
    if (cold && whole) {
        const int64_t bytes = min64(TILE, span.count) * key_stride;
        prefetch(span.k, bytes);
        if (is_far) prefetch(span.v, bytes);
    }
    const int64_t skipped = max64(0, e.seen_begin - span.pos) / TILE * TILE;
    for (int64_t t = skipped; t < span.count; t += TILE) {
        const int n = min64(TILE, span.count - t);
        const char *k = span.k + t * key_stride, *v = span.v + t * key_stride;
        const int is_last = t + TILE >= span.count;
        const char *next_k = !whole ? v : is_last ? after->k : k + TILE * key_stride;
        const char *next_v = !whole ? v : is_last ? after->v : v + TILE * key_stride;
        const int64_t lines = whole ? n * key_stride / 64 : 0;
        soon_t soon = {is_far ? next_k : v, lines, ceil_div(lines, calls)}; /* while K is read */
        for (int64_t h = head0, i = 0; h < head1; h++, i += rows)
            decode_scores(k + h * width, key_stride, n, q + i * q_bytes, q_bytes, rows, &soon, keys,
                          probs + i * TILE, dim, mode);
        int64_t row = 0, head = 0, last = e.first_pos;
        for (int64_t first = 0; first < all; first += LANES) {
            const int64_t some = min64(LANES, all - first);
            int visible[LANES];
            for (int64_t i = first; i < first + some; i++, row++, head++) {
                if (row == rows) row = head = 0, last = e.first_pos; /* the next kv head */
                if (head == group) head = 0, last++; /* the next query; a division takes 40 cycles */
                bring_some(&soon);
                for (int64_t j = min64(n, last + 1 - a->window - span.pos - t); j > 0; j--)
                    probs[i * TILE + j - 1] = -INFINITY; /* before the window */
                visible[i - first] = max64(0, min64(n, last + 1 - span.pos - t));
            }
            decode_softmax(probs + first * TILE, some, n, visible, a->scale, states + first / LANES,
                           alpha + first, mode);
        }
        for (int64_t h = head0; h < head1; h++) {
            const char *vh = v + h * width;
            const char *soon = (is_far ? next_v : next_k) + (h - head0) * n * width; /* while V is read */
            int64_t i = (h - head0) * rows, some;
            for (const int64_t end = i + rows; i < end; i += some, soon = 0) {
                some = rows_at_once(end - i);
                float *p = probs + i * TILE, **s = acc + i, *f = t == skipped ? NULL : alpha + i;
                (mode == F32 ? values_f32 : mode == BF16_WIDE ? values_wide : values_pairs)(
                    vh, key_stride, n, p, s, f, soon, dim, some);
            }
        }
    }
    for (int64_t i = 0; i < all; i++) {
        const states_t *own = states + i / LANES;
        acc[i][stride - 16] = own->top[i % LANES], acc[i][stride - 15] = own->sum[i % LANES];
    }
}

/* How a state and the partial one of a segment become one: each is scaled to the larger maximum. */
typedef struct { vf top, old, add; } merge_t;

INLINE merge_t merge_of(vf top, vf other) {
    const vi is_larger = top > other;
    const vf new = pick(is_larger, top, other), less = pick(is_larger, other, top);
    const vf scale = exp2v(base_of(less) - base_of(new)), one = splat(1); /* 2^0 is exactly 1 */
    return (merge_t){new, pick(is_larger, one, scale), pick(is_larger, scale, one)};
}
/* Of a sum or an element of acc; + 0.0f makes +0 of -0: see the law. */
INLINE vf merged(const merge_t *m, vf state, vf partial) {
    return fused(state, m->old, partial * m->add) + 0.0f;
}

/* state = state (+) partial, for `rows` rows, LANES at most; a partial that saw no key changes nothing. */
static void merge_partials(float *row_max, float *row_sum, float *acc, const float *partial, int64_t rows,
                           int64_t dim) {
    const int64_t stride = partial_stride(dim);
    vf top = splat(-INFINITY), sum = {0};
    for (int64_t r = 0; r < rows; r++) {
        top[r] = partial[(r + 1) * stride - 16], sum[r] = partial[(r + 1) * stride - 15];
    }
    const vi is_seen = top > splat(-INFINITY);
    const vf old_top = load_f32(row_max, rows, F32), old_sum = load_f32(row_sum, rows, F32);
    const merge_t m = merge_of(old_top, top);
    store_n(row_max, pick(is_seen, m.top, old_top), rows, F32);
    store_n(row_sum, pick(is_seen, merged(&m, old_sum, sum), old_sum), rows, F32);
    for (int64_t r = 0; r < rows; r++, acc += dim, partial += stride) {
        if (!is_seen[r]) continue;
        const merge_t one = {m.top, splat(m.old[r]), splat(m.add[r])};
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES)
            store(acc + d, merged(&one, load(acc + d), load(partial + d)));
        if (d < dim) STORE(acc, d, merged(&one, LOAD(acc, d, F32), load(partial + d)), F32);
    }
}

/* Keep (top, sum) of a row and a segment for add_mass, merged with those before it in its block. */
INLINE void keep_state(const attend_args *a, int64_t row, int64_t block, int is_first, float top,
                       float sum) {
    float *max = a->kept + row * a->blocks + block, *all = max + a->tokens * a->heads * a->blocks;
    if (is_first) {
        *max = top, *all = sum;
        return;
    }
    const merge_t m = merge_of(splat(*max), splat(top));
    *max = m.top[0], *all = merged(&m, splat(*all), splat(sum))[0];
}

/* Add to the mass of a sequence's blocks, LANES of them from `first` on, what its rows gave them. */
static void add_mass(const attend_args *a, int64_t seq, int64_t first) {
    const int64_t start = a->query_start[seq], q_len = a->query_start[seq + 1] - start;
    const int64_t first_pos = a->kv_lens[seq] - q_len;
    vf total = {0};
    for (int64_t i = 0; i < q_len * a->heads; i++) {
        const int64_t row = start * a->heads + i;
        const float *max = a->kept + row * a->blocks + first;
        const int64_t n = min64(ceil_div(first_pos + i / a->heads + 1, a->block_size) - first, LANES);
        if (n <= 0) continue; /* the row sees none of them */
        const vf top = load_f32(max, n, F32);
        const vf sum = load_f32(max + a->tokens * a->heads * a->blocks, n, F32);
        const vf p = exp2v(base_of(top) - base_of(splat(a->row_max[row]))) * sum / a->row_sum[row];
        total += pick(IOTA < (int32_t)n, p, splat(0));
    }
    float *mass = a->mass + seq * a->mass_stride + first;
    for (int64_t i = 0; i < min64(a->blocks - first, LANES); i++) mass[i] += total[i];
}

/* ---- prefill: lanes along rows ---------------------------------------------------------------- */

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

typedef struct { /* one tile of keys; strides in bytes and in words; window and scores: attend_args */
    const char *k;
    const float *v;
    int64_t k_stride, v_stride, pos;
    int count, window;
    double scale;
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
    tile_softmax(p, n, t->pos, masked, t->window, t->scale, w->pos + row, w->top + row, w->sum + row,
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
                .count = count, .window = a->window, .scale = a->scale};
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
 * saw no key of it (top is -inf, so old is 1 and add 0) stays as it is. */
static void merge_group(const workspace *w, group_t *g, int64_t dim) {
    const int64_t width = g->vecs * LANES;
    for (int64_t lane = 0; lane < width; lane += LANES) {
        const int64_t row = g->row + lane, at = g->row * w->padded + lane;
        const merge_t m = merge_of(load(w->all_top + row), load(w->top + row));
        store(w->all_top + row, m.top);
        store(w->all_sum + row, merged(&m, load(w->all_sum + row), load(w->sum + row)));
        store(w->top + row, splat(-INFINITY));
        store(w->sum + row, splat(0));
        if (g->is_empty) /* 0 * old + acc * 1: the same bits */
            for (int64_t i = at; i < at + dim * width; i += width)
                store(w->all_acc + i, load(w->acc + i) + 0.0f);
        else
            for (int64_t i = at; i < at + dim * width; i += width)
                store(w->all_acc + i, merged(&m, load(w->all_acc + i), load(w->acc + i)));
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

/* ---- decode in matrix tiles: segments that sequences share are read once ----------------------- */

typedef struct { int64_t pos; const char *q; float *partial; } decode_row_t;

/* The rows of a kv head over a bundle of segments. Returns how many. */
static int64_t bundled_rows(const attend_args *a, const segment_t *segments, int64_t kv_head,
                            float *partials, int64_t segment_floats, decode_row_t *rows) {
    const int64_t group = a->heads / a->kv_heads, stride = partial_stride(a->head_dim);
    int64_t count = 0;
    for (int64_t s = 0; s < segments->bundle; s++, partials += segment_floats) {
        const entry_t e = entry_at(a, segments[s].entry);
        for (int64_t r = 0; r < e.q_len * group; r++) {
            const int64_t query = r / group, head = kv_head * group + r % group;
            const int64_t at = (e.query_start + query) * a->q_token_stride + head * a->q_head_stride;
            rows[count++] = (decode_row_t){e.first_pos + query, a->q + 2 * at,
                                           partials + (query * a->heads + head) * stride};
        }
    }
    return count;
}

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
    for (int64_t i = 0; i < count; i++) {
        bring(next);
        float *p = probs + i * TILE;
        const int64_t seen = rows[i].pos + 1 - t->pos;
        for (int64_t j = min64(n, seen - a->window); j > 0; j--) p[j - 1] = -INFINITY;
        visible[i] = max64(0, min64(n, seen));
    }
    decode_softmax(probs, count, n, visible, a->scale, states, alpha, BF16_PAIRS);
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
    tile_softmax(turned, n, t->pos, masked, a->window, a->scale, pos, states->top, states->sum, &factors,
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
    int64_t seen = e.seen_begin; /* by any of them */
    for (int64_t s = 1; s < segments->bundle; s++)
        seen = min64(seen, entry_at(a, segments[s].entry).seen_begin);
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

/* out = acc / row_sum, all contiguous; a row without keys gives 0. */
INLINE void finish_row(const float *row_sum, const float *acc, void *out, int64_t row, int64_t dim,
                       int mode) {
    const float sum = row_sum[row] == 0.0f ? 1.0f : row_sum[row];
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(out, row * dim + d, LOAD(acc, row * dim + d, F32) / sum, mode);
}

/* ---- dispatch --------------------------------------------------------------------------------- */

typedef struct { /* the work of one call */
    int64_t *next_segment;  /* [entries]: of a decode entry, the first that is not merged; -1: none is left */
    segment_t *segments;    /* all first ones, all second ones ...: a prefix that entries share is in
                               L2 from the second of them on */
    item_t *items;
    int64_t *last_segment; /* [entries] */
    int64_t num_segments, num_items, max_rows, rows_per_item, largest_bundle, threads;
} plan_t;

/* Where segment i of the plan lies. */
static span_t span_at(const attend_args *a, const plan_t *p, int64_t i) {
    const entry_t e = entry_at(a, p->segments[i].entry);
    return span_of(a, &e, p->segments[i].index);
}

/* Segments among the first `keys` keys of an entry: all, or those that are whole. */
static int64_t segments_of(const attend_args *a, int64_t keys, int whole) {
    const int64_t per_block = ceil_div(a->block_size, SEG), rest = keys % a->block_size;
    return keys / a->block_size * per_block + (whole ? rest / SEG : ceil_div(rest, SEG));
}

/* The first one that a query sees, and how many there are from it on. */
static int64_t first_segment(const attend_args *a, const entry_t *e) {
    return segments_of(a, e->seen_begin - e->key_begin, 1);
}
static int64_t count_segments(const attend_args *a, const entry_t *e) {
    if (e->q_len == 0 || e->seen_begin == e->key_end) return 0;
    return segments_of(a, e->key_end - e->key_begin, 0) - first_segment(a, e);
}

static int by_cost(const void *x, const void *y) { /* dearest first */
    const int64_t a = ((const item_t *)x)->cost, b = ((const item_t *)y)->cost;
    return a < b ? 1 : a > b ? -1 : 0;
}

/* How much there is of each, so that the plan is one allocation. */
static void count_work(const attend_args *a, plan_t *p) {
    const int64_t group = a->heads / a->kv_heads;
    int64_t rows = 0, entries = 0, products = 0;
    for (int64_t i = 0; i < a->entries; i++) {
        const entry_t e = entry_at(a, i);
        products += e.q_len * a->heads * (e.key_end - e.seen_begin) * a->head_dim;
        if (is_split(a, &e)) {
            p->num_segments += count_segments(a, &e);
            if (e.q_len * a->heads > p->max_rows) p->max_rows = e.q_len * a->heads;
        } else {
            entries++, rows += e.q_len * group;
        }
    }
    p->threads = products < 1 << 16 ? 1 : a->threads; /* some 3 us: not worth waking anybody */
    /* Smaller tiles when there are few: rows are independent, so this moves no bit. */
    const int64_t width = vecs_of(mode_of(a)) * LANES;
    const int64_t share = rows * a->kv_heads / (4 * p->threads) / width * width;
    p->rows_per_item = max64(width, min64(share, ROWS_PER_ITEM));
    p->num_items = (rows / p->rows_per_item + entries) * a->kv_heads;
}

/* Segments of an entry stay in order, and `last` remembers the latest of each. */
static void fill_segments(const attend_args *a, plan_t *p) {
    int64_t *last = p->last_segment, n = 0;
    for (int64_t i = 0; i < a->entries; i++) p->next_segment[i] = last[i] = -1;
    for (int64_t index = 0; n < p->num_segments; index++)
        for (int64_t i = 0; i < a->entries; i++) {
            const entry_t e = entry_at(a, i);
            if (!is_split(a, &e) || index >= count_segments(a, &e)) continue;
            *(last[i] < 0 ? &p->next_segment[i] : &p->segments[last[i]].next) = n;
            p->segments[last[i] = n++] = (segment_t){i, first_segment(a, &e) + index, -1, 1};
        }
}

/* Segments that follow each other and lie in the same place, of one window of the plan, as far as their
 * rows fit. Returns how many bundles there are. */
static int64_t fill_bundles(const attend_args *a, plan_t *p, int64_t window) {
    const int64_t most = BUNDLE_ROWS / (p->max_rows / a->kv_heads);
    span_t first = {0};
    int64_t count = 0, head = 0;
    p->largest_bundle = 1;
    for (int64_t i = 0; i < p->num_segments; i++) {
        const span_t span = span_at(a, p, i);
        const int is_same = i % window && span.k == first.k && span.v == first.v &&
                            span.pos == first.pos && span.count == first.count;
        if (is_same && p->segments[head].bundle < most) {
            p->segments[head].bundle++, p->segments[i].bundle = 0;
            p->largest_bundle = max64(p->largest_bundle, p->segments[head].bundle);
            continue;
        }
        first = span, head = i, count++;
        p->segments[i].bundle = 1;
    }
    return count;
}

static void fill_plan(const attend_args *a, plan_t *p) {
    const int64_t group = a->heads / a->kv_heads;
    item_t *it = p->items;
    fill_segments(a, p);
    for (int64_t i = 0; i < a->entries; i++) {
        const entry_t e = entry_at(a, i);
        if (is_split(a, &e)) continue;
        for (int64_t r = 0; r < e.q_len * group; r += p->rows_per_item)
            for (int64_t h = 0; h < a->kv_heads; h++) {
                const int64_t rows = min64(p->rows_per_item, e.q_len * group - r);
                const int64_t seen = e.first_pos + (r + rows - 1) / group + 1;
                const int64_t begin = e.first_pos + r / group + 1 - a->window;
                const int64_t keys = min64(e.key_end, seen) - max64(e.key_begin, begin);
                if (keys > 0) *it++ = (item_t){i, h, r, rows, rows * keys};
            }
    }
    p->num_items = it - p->items;
    qsort(p->items, p->num_items, sizeof *p->items, by_cost);
}

/* Merge `rows` rows of entry i, from `row` on, with their partials of the segments [begin, end). */
static void merge_rows(const attend_args *a, const plan_t *p, int64_t i, int64_t row, int64_t rows,
                       int64_t begin, int64_t end, const float *partials) {
    const int64_t dim = a->head_dim, stride = partial_stride(dim);
    const entry_t e = entry_at(a, i);
    const int64_t at = e.query_start * a->heads + row, n = min64(rows, e.q_len * a->heads - row);
    if (n <= 0) return;
    for (int64_t s = p->next_segment[i]; s >= 0 && s < end; s = p->segments[s].next) {
        const float *partial = partials + ((s - begin) * p->max_rows + row) * stride;
        merge_partials(a->row_max + at, a->row_sum + at, a->acc + at * dim, partial, n, dim);
        if (!a->mass) continue;
        const int64_t index = p->segments[s].index, per_block = ceil_div(a->block_size, SEG);
        const int64_t block = per_block == 1 ? index : index / per_block; /* a division takes 40 cycles */
        const float *tail = partial + stride - 16;
        for (int64_t r = 0; r < n; r++, tail += stride)
            keep_state(a, at + r, a->first_block[i] + block, index == block * per_block, tail[0], tail[1]);
    }
}

/* Rows that have seen no key, or the sink of their head alone: it comes before all segments, and once. */
static void start_row(const attend_args *a, int64_t row) {
    a->row_max[row] = a->sinks ? a->sinks[row % a->heads] : -INFINITY;
    a->row_sum[row] = a->sinks ? 1 : 0;
    memset(a->acc + row * a->head_dim, 0, 4 * (size_t)a->head_dim);
}

/* Fold this call's keys into (row_max, row_sum, acc). Returns 0, or -1 when out of memory. */
int attend(const attend_args *a) {
    plan_t p = {0};
    count_work(a, &p);
    const int64_t padded = ceil_div(a->head_dim, 32) * 32;
    const int64_t segment_floats = p.max_rows * partial_stride(a->head_dim);
    int64_t window = segment_floats ? p.threads * WINDOW_BYTES / (4 * segment_floats) : 0;
    window = min64(p.num_segments, window > p.threads ? window : p.threads);
    int64_t scratch = p.max_rows * (padded + TILE + 3) + 3 * LANES + TILE * padded;
    const int tiled_decode = p.num_segments && mode_of(a) == BF16_TILES;
    if (p.num_items || tiled_decode) scratch = max64(scratch, workspace_words(a->head_dim));
    scratch = up_to_line(4 * scratch) / 4;
    const size_t tables = up_to_line(2 * a->entries * sizeof(int64_t) +
                                     p.num_segments * sizeof(segment_t) + p.num_items * sizeof(item_t));
    const size_t floats = window * segment_floats + p.threads * scratch;
    char *memory = aligned_alloc(64, tables + up_to_line(4 * floats));
    if (!memory) return -1;
    p.segments = (segment_t *)memory;
    p.items = (item_t *)(p.segments + p.num_segments);
    p.next_segment = (int64_t *)(p.items + p.num_items);
    p.last_segment = p.next_segment + a->entries;
    float *partials = (float *)(memory + tables), *scratches = partials + window * segment_floats;
    fill_plan(a, &p);
    /* Few segments: one kv head each, to feed every thread; else all heads, or as many as fit an item, to
     * read memory in order. */
    const int64_t work = tiled_decode ? fill_bundles(a, &p, window) : p.num_segments;
    const int64_t rows = p.largest_bundle * p.max_rows / a->kv_heads; /* of a head, padded below */
    const int64_t fit = tiled_decode ? ROWS_PER_ITEM / (ceil_div(rows, LANES) * LANES) : a->kv_heads;
    const int64_t split = work < 4 * p.threads ? a->kv_heads : ceil_div(a->kv_heads, fit);
    const int64_t heads = ceil_div(a->kv_heads, split);
    /* Rows merged at once: their states are one vector. */
    const int64_t at_once = max64(1, min64(LANES, ceil_div(a->entries * p.max_rows, p.threads)));
    const int64_t merges = ceil_div(p.max_rows, at_once);
    /* Runs of segments, so that one can prefetch the next; short enough to share them out evenly. */
    const int64_t run = window * split / (4 * p.threads), chunk = run < 1 ? 1 : min64(run, 8);
#pragma omp parallel num_threads((int)p.threads)
    {
        const unsigned saved = flush_denormals();
        float *mine = scratches + omp_get_thread_num() * scratch;
        int64_t packed = -1; /* whose queries lie there: entry and share of the heads */
        const int tiled = tiled_decode || (p.num_items && mode_of(a) == BF16_TILES);
        if (tiled) shape_tiles(TILE_ROWS, TILE_ROWS);
        if (a->is_first) { /* read past a barrier: that of the segments, or this one */
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < a->tokens * a->heads; row++) start_row(a, row);
            if (p.num_segments == 0) {
#pragma omp barrier
            }
        }
        for (int64_t begin = 0; begin < p.num_segments; begin += window) {
            const int64_t end = min64(begin + window, p.num_segments);
            int64_t next = -1; /* what was prefetched */
#pragma omp for schedule(dynamic, chunk)
            for (int64_t i = begin * split; i < end * split; i++) {
                const int64_t seg = i / split, h0 = i % split * heads;
                const int64_t h1 = min64(h0 + heads, a->kv_heads), bundle = p.segments[seg].bundle;
                if (bundle == 0 || h0 >= h1) continue;
                const span_t after = span_at(a, &p, min64(seg + bundle, p.num_segments - 1));
                const int64_t whose = p.segments[seg].entry * split + i % split;
                float *to = partials + (seg - begin) * segment_floats;
                if (tiled_decode)
                    decode_bundle(a, p.segments + seg, &after, next != i, h0, h1, to, segment_floats,
                                  mine);
                else
                    decode_segment(a, p.segments[seg], &after, next != i, packed == whose, h0, h1, to,
                                   (char *)mine);
                next = i + bundle * split, packed = whose;
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < a->entries * merges; i++)
                merge_rows(a, &p, i / merges, i % merges * at_once, at_once, begin, end, partials);
            if (end == p.num_segments) break;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < a->entries; i++)
                while (p.next_segment[i] >= 0 && p.next_segment[i] < end)
                    p.next_segment[i] = p.segments[p.next_segment[i]].next;
        }
        if (p.num_items) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < p.num_items; i++) prefill_item(a, &p.items[i], mine);
        }
        if (a->mass && a->out) {
            const int64_t places = ceil_div(a->blocks, LANES);
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < a->sequences * places; i++)
                add_mass(a, i / places, i % places * LANES);
        }
        if (tiled) release_tiles();
        restore_denormals(saved);
        if (a->out) {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < a->tokens * a->heads; row++)
                if (a->is_bf16) finish_row(a->row_sum, a->acc, a->out, row, a->head_dim, BF16_WIDE);
                else finish_row(a->row_sum, a->acc, a->out, row, a->head_dim, F32);
        }
    }
    free(memory);
    return 0;
}

/* ---- small operators; a row's bits depend on that row alone ----------------------------------- */

/* f(row, mode) for every row, the mode a constant; a small call is not worth a second thread. */
#define FOR_ROWS(rows, elements, is_bf16, threads, f)                                               \
    do {                                                                                            \
        const int team = (elements) < 1 << 16 ? 1 : (int)(threads);                                 \
        _Pragma("omp parallel for num_threads(team) schedule(static)")                              \
        for (int64_t row = 0; row < (rows); row++)                                                  \
            if (is_bf16) f(row, BF16_WIDE);                                                         \
            else f(row, F32);                                                                       \
    } while (0)
typedef struct { /* as attend_args: filled by cpu_kernels.py */
    const void *x, *weight;
    void *out;
    int64_t tokens, heads, dim, x_token, x_head, out_token, out_head, is_bf16, is_weight_bf16, threads;
    double eps;
} norm_args;

INLINE void norm_row(const norm_args *a, int64_t row, int mode) {
    const int64_t token = row / a->heads, head = row % a->heads;
    const char *x = AT(a->x, token * a->x_token + head * a->x_head, mode);
    char *out = AT(a->out, token * a->out_token + head * a->out_head, mode);
    if (a->is_weight_bf16) norm(x, a->weight, out, a->dim, (float)a->eps, mode, BF16_WIDE);
    else norm(x, a->weight, out, a->dim, (float)a->eps, mode, F32);
}
int rms_norm(const norm_args *a) {
#define ROW(i, mode) norm_row(a, i, mode)
    FOR_ROWS(a->tokens * a->heads, a->tokens * a->heads * a->dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

typedef struct {
    void *q, *k;
    const void *v;
    const float *cos, *sin;
    const int64_t *k_slots, *v_slots;
    void *pool;
    int64_t tokens, heads, kv_heads, head_dim, q_token, k_token, v_token, is_bf16, threads;
} rope_args;

/* Turn the pairs (i, i + head_dim / 2) of one head; fp32, rounded once. */
INLINE void turn(void *x, const float *cos, const float *sin, int64_t dim, int mode) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf a = LOAD(x, d, mode), b = LOAD(x, dim + d, mode);
        const vf c = LOAD(cos, d, F32), s = LOAD(sin, d, F32);
        STORE(x, d, a * c - b * s, mode);
        STORE(x, dim + d, b * c + a * s, mode);
    }
}

INLINE void turn_heads(const rope_args *a, char *x, int64_t heads, int64_t row, int mode) {
    const int64_t dim = a->head_dim, half = dim / 2;
    for (int64_t h = 0; h < heads; h++)
        turn(AT(x, h * dim, mode), a->cos + row * half, a->sin + row * half, half, mode);
}

/* Where a row of k or v goes, and how long it is. */
INLINE char *place(const rope_args *a, int64_t slot, int mode) {
    return AT(a->pool, slot * a->kv_heads * a->head_dim, mode);
}

INLINE void rope_row(const rope_args *a, int64_t row, int mode) {
    enum { AHEAD = 4 }; /* a store waits for its line; those of later rows can be on their way */
    const int64_t slot = a->k_slots[row];
    const size_t bytes = a->kv_heads * a->head_dim * (mode == F32 ? 4 : 2);
    char *q = AT(a->q, row * a->q_token, mode), *k = AT(a->k, row * a->k_token, mode);
    if (row + AHEAD < a->tokens)
        for (size_t b = 0; b < bytes; b += 64) {
            __builtin_prefetch(place(a, a->k_slots[row + AHEAD], mode) + b, 1);
            if (a->v_slots) __builtin_prefetch(place(a, a->v_slots[row + AHEAD], mode) + b, 1);
        }
    turn_heads(a, q, a->heads, row, mode);
    turn_heads(a, k, a->kv_heads, row, mode);
    if (slot < 0) return;
    memcpy(place(a, slot, mode), k, bytes);
    if (!a->v_slots) return; /* k is v, too */
    memcpy(place(a, a->v_slots[row], mode), AT(a->v, row * a->v_token, mode), bytes);
}
int rope_store(const rope_args *a) {
#define ROW(i, mode) rope_row(a, i, mode)
    const int64_t width = (a->heads + 2 * a->kv_heads) * a->head_dim;
    FOR_ROWS(a->tokens, a->tokens * width, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

/* q alone. */
int rotate(const rope_args *a) {
#define ROW(i, mode) turn_heads(a, AT(a->q, (i) * a->q_token, mode), a->heads, i, mode)
    FOR_ROWS(a->tokens, a->tokens * a->heads * a->head_dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

INLINE void gate_row(const void *gate_up, void *out, int64_t row, int64_t dim, int64_t stride,
                     const int activation, int mode) {
    const char *gate = AT(gate_up, row * stride, mode), *up = AT(gate, dim, mode);
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(out, row * dim + d, gated(LOAD(gate, d, mode), LOAD(up, d, mode), activation, mode), mode);
}
void silu_mul(const void *gate_up, void *out, int64_t rows, int64_t dim, int64_t stride,
              int64_t is_bf16, int64_t threads) {
#define ROW(i, mode) gate_row(gate_up, out, i, dim, stride, SILU, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}
void gelu_mul(const void *gate_up, void *out, int64_t rows, int64_t dim, int64_t stride,
              int64_t is_bf16, int64_t threads) {
#define ROW(i, mode) gate_row(gate_up, out, i, dim, stride, GELU, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}

void clamped_swiglu(const void *gate_up, void *out, int64_t rows, int64_t dim, int64_t stride,
                    int64_t is_bf16, int64_t threads) {
#define ROW(i, mode) gate_row(gate_up, out, i, dim, stride, SWIGLU, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}

/* x += y, in fp32 and rounded once, as torch does; with a gate, y times its sigmoid, rounded before. */
INLINE void add_row(void *x, const void *y, const float *gate, int64_t dim, int mode) {
    const float share = gate ? (float)(1 / (1 + exp(-(double)*gate))) : 1.0f;
    for (int64_t d = 0; d < dim; d += LANES) {
        vf term = rounded(LOAD(y, d, mode) * share, mode);
        KEEP_APART(term);
        STORE(x, d, LOAD(x, d, mode) + term, mode);
    }
}
void add(void *x, const void *y, const float *gates, int64_t rows, int64_t dim, int64_t is_bf16,
         int64_t threads) {
#define ROW(i, mode)                                                                                \
    add_row(AT(x, (i) * dim, mode), AT(y, (i) * dim, mode), gates ? gates + (i) : NULL, dim, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}

/* First index of the largest value of a row; a NaN is larger than all, as in torch. */
INLINE int64_t argmax_row(const void *x, int64_t dim, int mode) {
    enum { STRETCH = 64 * LANES };
    float best = -INFINITY;
    int64_t from = 0, d = 0;
    while (d < dim && best == best) { /* the first stretch that holds the largest */
        const int64_t begin = d, end = min64(d + STRETCH, dim);
        vf top = splat(-INFINITY);
        vi is_nan = {0};
        for (; d < end; d += LANES) {
            const vf v = LOAD(x, d, mode);
            top = vmax(top, pick(IOTA + (int32_t)d < (int32_t)dim, v, splat(-INFINITY)));
            is_nan |= v != v;
        }
        float most = max_lane(top);
        UNROLL for (int i = 0; i < LANES; i++) if (is_nan[i]) most = NAN;
        if (!(most <= best)) best = most, from = begin;
    }
    for (d = from; d < dim; d++) {
        const float v = load_f32(AT(x, d, mode), 1, mode)[0];
        if (v == best || (v != v && best != best)) return d;
    }
    return 0;
}
void argmax(const void *x, int64_t *out, int64_t rows, int64_t dim, int64_t stride, int64_t is_bf16,
            int64_t threads) {
#define ROW(i, mode) out[i] = argmax_row(AT(x, (i) * stride, mode), dim, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}

#include "cpu_delta.h"
#include "cpu_draw.h"

const char *isa(void) {
#if HAVE_PAIRS
    return "avx512_bf16";
#elif LANES == 16
    return "avx512";
#elif LANES == 8
    return "avx2";
#else
    return "generic";
#endif
}
