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
 *            With a softcap it goes through cap_scores, before any is hidden.
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
 *            Lanes run along keys (scores) and head_dim; K and V are read once for a group of heads and for
 *            the sequences that share the segment. In matrix tiles lanes run along rows in the softmax of
 *            more than NARROW of them.
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
#ifndef NANOENGINE_CPU_ATTENTION_H
#define NANOENGINE_CPU_ATTENTION_H
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
enum { PAIRED_ROWS = LANES == 16 ? 5 : ROWS }; /* of pairs of V, whose words and two orders take 6 registers */
enum { RVECS = 3, TILE_VECS = 2 }; /* in prefill, row vectors of a block of registers, of matrix tiles */
enum { ROWS_PER_ITEM = 8 * RVECS * LANES, GROUPS = ROWS_PER_ITEM / LANES };
enum { BUNDLE_ROWS = 128, VECTOR_ROWS = 48 }; /* of a kv head over a bundle, in tiles and in vectors */

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
    double softcap; /* 0, or scores become softcap tanh(scale score / softcap) */
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

/* ---- scores ------------------------------------------------------------------------------------ */

/* What softmax multiplies scores by: cap_scores has scaled those with a cap. */
INLINE float scale_of(const attend_args *a) { return a->softcap ? 1.0f : (float)a->scale; }

/* Of `count` vectors. Compiled once for both ways, so that no two loops can round differently. */
NOINLINE void cap_scores(const attend_args *a, float *scores, int64_t count) {
    const vf within = splat((float)(a->scale / a->softcap)), cap = splat((float)a->softcap);
    for (float *end = scores + count * LANES; scores < end; scores += LANES)
        store(scores, tanhv(load(scores) * within) * cap);
}
/* Of n keys, [row][TILE]. */
INLINE void cap_rows(const attend_args *a, float *scores, int64_t rows, int n) {
    for (int64_t r = 0; r < rows; r++) cap_scores(a, scores + r * TILE, ceil_div(n, LANES));
}

/* ---- segments ----------------------------------------------------------------------------------- */

typedef struct { /* segment `index` of an entry; `next`: where in the plan its next one is, or -1 */
    int64_t entry, index, next;
    int64_t bundle; /* so many from here on lie in one place; 0: one before has it */
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

/* ---- the state of a row -------------------------------------------------------------------------- */

/* Rows that have seen no key, or the sink of their head alone: it comes before all segments, and once. */
static void start_row(const attend_args *a, int64_t row) {
    a->row_max[row] = a->sinks ? a->sinks[row % a->heads] : -INFINITY;
    a->row_sum[row] = a->sinks ? 1 : 0;
    memset(a->acc + row * a->head_dim, 0, 4 * (size_t)a->head_dim);
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
    const vi is_seen = sum != splat(0); /* NaN counts: what is broken stays visible */
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

/* out = acc / row_sum, all contiguous; a row without keys gives 0. */
INLINE void finish_row(const float *row_sum, const float *acc, void *out, int64_t row, int64_t dim,
                       int mode) {
    const float sum = row_sum[row] == 0.0f ? 1.0f : row_sum[row];
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(out, row * dim + d, LOAD(acc, row * dim + d, F32) / sum, mode);
}
#endif
