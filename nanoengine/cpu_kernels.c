/* Attention on the CPU over paged, grouped-query KV, and the law that makes it exact.
 *
 * The law: the state of a query row, (row_max, row_sum, acc), is a left fold over fixed pieces of its
 * keys, in logical order. A piece never crosses a block boundary and starts at a fixed offset within
 * its block, so the state after a sequence of calls does not depend on how blocks are grouped into
 * calls, on the pool that holds them, on the number of threads, or on the other sequences of a call.
 * A row's arithmetic depends on the q_len of its own sequence only:
 *
 *   decode   (q_len <= DECODE_MAX) a piece is a segment of SEG keys. Each one becomes a partial state
 *            (itself a fold over tiles of TILE keys), segments in parallel; then every row merges its
 *            partials in order. Lanes run along head_dim, K and V are read once for a group of heads.
 *   prefill  a piece is a tile of TILE keys, folded straight into the state; query tiles in parallel.
 *            Lanes run along rows (query, head of the group), so a softmax needs no sum across lanes.
 *
 * A tile may also be computed for a row that sees none of its keys (a neighbour does): this must not
 * change the row. So alpha = 2^0 is exactly 1, p of a masked key is exactly +0, denormals are flushed
 * throughout, and -0 is turned into +0 wherever the accumulator is rescaled or stored.
 *
 * Memory past a sequence's kv_len is never read: it may hold NaN, and 0 * NaN is NaN.
 * Three modes: fp32; bf16 multiplied in pairs (AVX512-BF16); bf16 widened to fp32.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { F32, BF16_WIDE, BF16_PAIRS };
enum { TILE = 64, SEG = 256, DECODE_MAX = 4, ROWS_PER_ITEM = 192 };
enum { WINDOW_BYTES = 16 << 20 }; /* bound on the decode partials that exist at one time */

/* ---- vectors ---------------------------------------------------------------------------------- */

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w), X(4, w), X(5, w), X(6, w), X(7, w), \
                        X(8, w), X(9, w), X(10, w), X(11, w), X(12, w), X(13, w), X(14, w), X(15, w)
enum { KEYS = 8, DIMS = 8, DVEC = 4 }; /* register blocks: 3 * 8 accumulators of 32 registers */
#else
enum { KEYS = 4, DIMS = 4, DVEC = 2 }; /* 3 * 4 of 16 */
#if defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w), X(4, w), X(5, w), X(6, w), X(7, w)
#else
#define LANES 4
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w)
#endif
#endif
enum { RVECS = 3 }; /* row vectors of one register block in prefill */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

#define LANE_ID(l, w) l
static const vi IOTA = {LANE_LIST(LANE_ID, 0)};

INLINE vf load(const void *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(void *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_i(int32_t x) { return x - (vi){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* A NaN in b is kept, so that a broken input stays visible. */
INLINE vf vmax(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE float max_lane(vf x) {
    float m = x[0];
    UNROLL for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* Lane l of a fold with segments of 2w lanes: the first half comes from a, the second from b. */
#define FOLD_LO(l, w) ((l) % (2 * (w)) < (w) ? 0 : LANES) + (l) / (2 * (w)) * 2 * (w) + (l) % (w)
#define FOLD_HI(l, w) (FOLD_LO(l, w)) + (w)
#if defined(__clang__)
#define FOLD(a, b, w) (__builtin_shufflevector(a, b, LANE_LIST(FOLD_LO, w)) + \
                       __builtin_shufflevector(a, b, LANE_LIST(FOLD_HI, w)))
#else
#define FOLD(a, b, w) (__builtin_shuffle(a, b, (vi){LANE_LIST(FOLD_LO, w)}) + \
                       __builtin_shuffle(a, b, (vi){LANE_LIST(FOLD_HI, w)}))
#endif

/* Lane i of the result is the sum of the lanes of s[i]. */
INLINE vf sum_each(vf *s) {
#if LANES == 16
    UNROLL for (int i = 0; i < 8; i++) s[i] = FOLD(s[i], s[i + 8], 8);
#endif
#if LANES >= 8
    UNROLL for (int i = 0; i < 4; i++) s[i] = FOLD(s[i], s[i + 4], 4);
#endif
    UNROLL for (int i = 0; i < 2; i++) s[i] = FOLD(s[i], s[i + 2], 2);
    return FOLD(s[0], s[1], 1);
}

INLINE float sum_lanes(vf x) {
    UNROLL for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
}

/* 2^t for t <= 0, exactly 1 at 0 and exactly 0 at -inf. Minimax polynomials on [-1/2, 1/2] with a
 * constant term of 1: relative error 9e-8 (degree 5), 3e-6 (degree 4, enough for a p in bf16). */
INLINE vf exp2v(vf t, int degree) {
    t = vmax(splat(-127.0f), t);
    vf shifted = t + 12582912.0f; /* 1.5 * 2^23: the low bits now hold round(t) */
    vf f = t - (shifted - 12582912.0f), p;
    if (degree == 5) {
        p = f * 0.00132647273f + 0.00967151279f;
        p = p * f + 0.0555073374f;
        p = p * f + 0.240222421f;
        p = p * f + 0.693146978f;
    } else {
        p = f * 0.00958285324f + 0.0559064259f;
        p = p * f + 0.240240986f;
        p = p * f + 0.693124193f;
    }
    p = p * f + 1.0f;
    return (vf)((vu)p + ((vu)shifted << 23));
}
INLINE float exp2s(float t) { return exp2v(splat(t), 5)[0]; }

INLINE vf widen(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

/* n (1..LANES) elements starting at p, the other lanes 0; nothing past them is read. */
INLINE vf load_f32(const void *p, int n, int mode) {
    if (mode == F32) {
        vf x = {0};
        if (n >= LANES) return load(p);
        memcpy(&x, p, 4 * n);
        return x;
    }
    vh x = {0};
    if (n >= LANES) memcpy(&x, p, sizeof x);
    else memcpy(&x, p, 2 * n);
    return widen(x);
}

#if defined(__AVX512BF16__) && LANES == 16
#define HAVE_PAIRS 1
/* acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1] over 16 lanes of bf16 pairs. */
INLINE vf dot_pairs(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
INLINE vf load_bf16(const void *p, int n) { /* up to 32 elements, the rest 0 */
    if (n >= 32) return load(p);
    return (vf)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
}
INLINE void store_bf16(void *p, vf x) {
    _mm256_storeu_si256(p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#define PAIR_LO(l, w) (l) / 2 + (l) % 2 * 32
/* a0 b0 a1 b1 ...: the first or the second 16 pairs of two rows of 32 elements. */
INLINE vf interleave(vf a, vf b, int half) {
    __m512i even = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64((__m512i)a, 1)
                                              : _mm512_castsi512_si256((__m512i)a));
    __m512i odd = _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64((__m512i)b, 1)
                                             : _mm512_castsi512_si256((__m512i)b));
    return (vf)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}
/* Pairs (a[i], b[i]) rounded to bf16. */
INLINE vf round_pairs(vf a, vf b) {
    __m512i x = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)a));
    __m512i y = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)b));
    return (vf)_mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}
#else
#define HAVE_PAIRS 0
INLINE vf dot_pairs(vf acc, vf a, vf b) { return acc + a * b; } /* the rest: never called */
INLINE vf load_bf16(const void *p, int n) { return load_f32(p, n, F32); }
INLINE void store_bf16(void *p, vf x) { store(p, x); }
INLINE vf interleave(vf a, vf b, int half) { return half ? a : b; }
INLINE vf round_pairs(vf a, vf b) { return a + b; }
#endif

/* Denormals off while our loops run: part of the law above, and they are slow. */
INLINE unsigned flush_denormals(void) {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);
    return saved;
#else
    return 0;
#endif
}
INLINE void restore_denormals(unsigned saved) {
#if defined(__x86_64__)
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

/* ---- one call --------------------------------------------------------------------------------- */

typedef struct { /* filled by cpu_kernels.py with struct.pack: keep both in step; strides in elements */
    const char *q, *k, *v;
    const int32_t *seq_index, *first_block, *num_blocks, *block_table, *query_start, *kv_lens;
    float *row_max, *row_sum, *acc;
    int64_t entries, table_stride, q_token_stride, q_head_stride, k_block_stride, v_block_stride;
    int64_t heads, kv_heads, head_dim, block_size, is_bf16, threads;
    double scale;
} attend_args;

typedef struct { /* what one row of the chunk is about; positions are absolute */
    int64_t query_start, q_len, first_pos, key_begin, key_end;
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
    return x;
}

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- decode: lanes along head_dim ------------------------------------------------------------- */

typedef struct {
    int64_t entry, index; /* index: which segment of the entry */
} segment_t;

/* acc and the two scalars of one row of one segment; a multiple of a cache line. */
INLINE int64_t partial_stride(int64_t head_dim) { return ceil_div(head_dim, 32) * 32 + 16; }

INLINE vf dot_row(const char *k, const char *q, int64_t dim, int mode) {
    vf s = {0};
    if (mode == BF16_PAIRS) {
        UNROLL for (int64_t d = 0; d < dim; d += 32)
            s = dot_pairs(s, load_bf16(k + 2 * d, dim - d), load(q + 2 * d));
    } else {
        const int size = mode == F32 ? 4 : 2;
        UNROLL for (int64_t d = 0; d < dim; d += LANES)
            s += load_f32(k + size * d, dim - d, mode) * load(q + 4 * d);
    }
    return s;
}

/* Scores of one row against n keys, softmax against the carried maximum; p goes to `probs`.
 * Returns alpha, the factor for what was accumulated before. */
INLINE float decode_scores(const char *k, int64_t k_stride, int n, int visible, const char *q,
                           int64_t dim, float scale, float *row, void *probs, int mode) {
    vf s[TILE / LANES], top = splat(-INFINITY), sum = {0};
    const float log2e = 1.44269504f;
    const int vecs = ceil_div(n, LANES);
    for (int c = 0; c < vecs; c++) {
        vf each[LANES];
        UNROLL for (int i = 0; i < LANES; i++)
            each[i] = dot_row(k + min64(c * LANES + i, n - 1) * k_stride, q, dim, mode);
        s[c] = pick(IOTA + c * LANES < visible, sum_each(each), splat(-INFINITY));
        top = vmax(top, s[c]);
    }
    float old = row[0], new = max_lane(top) * scale;
    new = new > old || new != new ? new : old;
    float base = new * log2e > -1e30f || new != new ? new * log2e : -1e30f;
    for (int c = 0; c < vecs; c++) {
        vf p = exp2v(s[c] * (scale * log2e) - base, mode == F32 ? 5 : 4);
        sum += p;
        if (mode == BF16_PAIRS) store_bf16((uint16_t *)probs + c * LANES, p);
        else store((float *)probs + c * LANES, p);
    }
    float alpha = exp2s(old * log2e - base);
    row[0] = new;
    row[1] = row[1] * alpha + sum_lanes(sum);
    return alpha;
}

/* acc[r][d..] = acc * alpha + p V for `rows` rows and `vecs` vectors of head_dim (in pairs: of twice
 * LANES). `left` is how many elements remain from d on. */
INLINE void decode_values(const char *v, int64_t v_stride, int n, const float *probs, float **acc,
                          const float *alpha, int64_t d, int64_t left, const int rows, const int vecs,
                          int mode) {
    enum { MAX = 4 };
    vf a[4][2 * MAX];
    const int outs = mode == BF16_PAIRS ? 2 * vecs : vecs;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++) a[r][j] = load(acc[r] + d + j * LANES) * alpha[r] + 0.0f;
    if (mode == BF16_PAIRS) {
        for (int i = 0; i < n; i += 2) {
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
                vf x = load_f32(v + i * v_stride + size * (d + j * LANES), left - j * LANES, mode);
                UNROLL for (int r = 0; r < rows; r++) a[r][j] += x * probs[r * TILE + i];
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < outs; j++) store(acc[r] + d + j * LANES, a[r][j]);
}

INLINE void decode_values_rows(const char *v, int64_t v_stride, int n, const float *probs, float **acc,
                               const float *alpha, int64_t dim, const int rows, int mode) {
    const int wide = mode == BF16_PAIRS ? 32 : LANES, vecs = mode == BF16_PAIRS ? DVEC / 2 : DVEC;
    int64_t d = 0;
    for (; d + vecs * wide <= dim; d += vecs * wide)
        decode_values(v, v_stride, n, probs, acc, alpha, d, vecs * wide, rows, vecs, mode);
    for (; d < dim; d += wide)
        decode_values(v, v_stride, n, probs, acc, alpha, d, dim - d, rows, 1, mode);
}

/* The query rows of one kv head, padded to whole vectors: row r is (query r / group, head r % group). */
static void pack_queries(const attend_args *a, const entry_t *e, int64_t kv_head, char *out, int mode) {
    int64_t group = a->heads / a->kv_heads, dim = a->head_dim, size = a->is_bf16 ? 2 : 4;
    int64_t padded = ceil_div(dim, 32) * 32;
    for (int64_t r = 0; r < e->q_len * group; r++, out += padded * 4) {
        const char *q = a->q + size * ((e->query_start + r / group) * a->q_token_stride +
                                       (kv_head * group + r % group) * a->q_head_stride);
        memset(out, 0, padded * 4);
        if (mode != BF16_WIDE) memcpy(out, q, dim * size);
        else for (int64_t d = 0; d < dim; d += LANES) store(out + 4 * d, load_f32(q + 2 * d, dim - d, mode));
    }
}

/* Partial states of all rows of the kv heads [head0, head1) over one segment. */
INLINE void decode_segment(const attend_args *a, segment_t seg, int64_t head0, int64_t head1,
                           float *partial, char *scratch, int64_t dim, int mode) {
    const entry_t e = entry_at(a, seg.entry);
    const int64_t per_block = ceil_div(a->block_size, SEG), offset = seg.index % per_block * SEG;
    const int64_t block = seg.index / per_block, pos = e.key_begin + block * a->block_size + offset;
    const int64_t count = min64(min64(SEG, a->block_size - offset), e.key_end - pos);
    const int64_t group = a->heads / a->kv_heads, rows = e.q_len * group, size = mode == F32 ? 4 : 2;
    const int64_t key_stride = a->kv_heads * dim * size, stride = partial_stride(dim);
    const int64_t q_bytes = ceil_div(dim, 32) * 32 * 4, id = e.blocks[block];
    const char *k = a->k + size * id * a->k_block_stride + offset * key_stride;
    const char *v = a->v + size * id * a->v_block_stride + offset * key_stride;
    float *probs = (float *)(scratch + (head1 - head0) * rows * q_bytes);
    for (int64_t h = head0; h < head1; h++) {
        pack_queries(a, &e, h, scratch + (h - head0) * rows * q_bytes, mode);
        for (int64_t r = 0; r < rows; r++) {
            float *row = partial + (r / group * a->heads + h * group + r % group) * stride;
            memset(row, 0, stride * 4);
            row[stride - 16] = -INFINITY;
        }
    }
    for (int64_t t = 0; t < count; t += TILE) {
        const int n = min64(TILE, count - t);
        for (int64_t h = head0; h < head1; h++) {
            const char *kt = k + t * key_stride + h * dim * size, *vt = v + t * key_stride + h * dim * size;
            const char *q = scratch + (h - head0) * rows * q_bytes;
            for (int64_t r0 = 0; r0 < rows; r0 += 4) {
                const int nr = min64(4, rows - r0);
                float *acc[4], alpha[4];
                for (int i = 0; i < nr; i++) {
                    const int64_t r = r0 + i, last = e.first_pos + r / group;
                    acc[i] = partial + (r / group * a->heads + h * group + r % group) * stride;
                    alpha[i] = decode_scores(kt, key_stride, n, min64(n, last + 1 - pos - t), q + r * q_bytes,
                                             dim, a->scale, acc[i] + stride - 16, probs + i * TILE, mode);
                }
                switch (nr) {
                case 1: decode_values_rows(vt, key_stride, n, probs, acc, alpha, dim, 1, mode); break;
                case 2: decode_values_rows(vt, key_stride, n, probs, acc, alpha, dim, 2, mode); break;
                case 3: decode_values_rows(vt, key_stride, n, probs, acc, alpha, dim, 3, mode); break;
                default: decode_values_rows(vt, key_stride, n, probs, acc, alpha, dim, 4, mode);
                }
            }
        }
    }
}

/* state = state (+) partial, for one row; a partial that saw no key changes nothing. */
static void merge_partial(float *row_max, float *row_sum, float *acc, const float *partial, int64_t dim) {
    const float *tail = partial + partial_stride(dim) - 16, log2e = 1.44269504f;
    if (tail[0] == -INFINITY) return;
    float top = *row_max > tail[0] ? *row_max : tail[0];
    float old = exp2s((*row_max - top) * log2e), add = exp2s((tail[0] - top) * log2e);
    *row_max = top;
    *row_sum = *row_sum * old + tail[1] * add;
    for (int64_t d = 0; d < dim; d++) acc[d] = acc[d] * old + partial[d] * add + 0.0f;
}
