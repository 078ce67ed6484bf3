/* Weights in bfloat16 held in 12 bits each, with no bit lost.
 *
 * The upper byte of a bfloat16 is its sign and 7 bits of its exponent. Weights that lie side by side are of few
 * sizes: 16 upper bytes are mostly all that 1,024 of them have. So a block of 64 outputs x 16 inputs has a
 * table of 16 upper bytes, and of each weight the lower byte and a code of 4 bits, its place in the table. Where
 * a block has more of them, its table has the 15 most frequent ones, and the code OTHER stands for all others,
 * which follow in order at the end of the block.
 *
 * Memory: [where each block begins, and the last one ends: uint32, in lines of 64 bytes][tables][blocks], each
 * part from a whole line on. Blocks lie in the order [panel][16 inputs]. A block is, for each of 8 words of k, a
 * line of codes, those of half a panel lower, and a line of lower bytes for each half panel; then lines of others.
 * It is read from its first byte to its last: the CPU's own prefetching is all it needs, where vectors are of 512
 * bits.
 *
 * For matrix tiles a block is 32 outputs x 32 inputs, in the order [half panel][32 inputs]: where half panels take
 * turns above, words of k do here.
 *
 * Vectors decode codes of one length. DFloat11 (arXiv:2504.11651) has shorter ones of many lengths, for GPUs;
 * ZipServ (arXiv:2603.17435) has one length, too, in another layout.
 */
#ifndef NANOENGINE_CPU_BF12_H
#define NANOENGINE_CPU_BF12_H
#include "cpu_bf12_packing.h"

#if HAVE_BF12
/* ---- products --------------------------------------------------------------------------------- */

INLINE int has_others(bf12_t weight, int64_t block) {
    return weight.starts[block + 1] - weight.starts[block] > LEAST_LINES;
}

enum { STEPS = MODE == F32 ? 2 : 1 }; /* that `multiply` makes of a word of a block */

/* What step `step` takes of a word's pairs: all of it, or one of two numbers. */
INLINE vf of_step(vf pairs, int step) { return MODE == F32 ? number((vu)pairs, step, BF16) : pairs; }

#if LANES == 16
typedef struct { /* of a block: what is next to read, its table, its next others */
    const char *from;
    __m512i table;
    const char *others;
} place_t;

INLINE place_t block_of(bf12_t weight, int64_t block) {
    const char *from = weight.lines + (int64_t)weight.starts[block] * LINE;
    const __m128i *table = (const __m128i *)(weight.tables + block * UPPER_BYTES);
    return (place_t){from, _mm512_broadcast_i32x4(_mm_loadu_si128(table)), from + LEAST_LINES * LINE};
}

/* The next word of a panel, as pairs. */
INLINE void take_word(place_t *at, vf *pairs, const int with_others) {
    const __m512i four_bits = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(at->from);
    UNROLL for (int h = 0; h < 2; h++) {
        const __m512i code = _mm512_and_si512(h ? _mm512_srli_epi16(codes, 4) : codes, four_bits);
        __m512i upper = _mm512_shuffle_epi8(at->table, code);
        if (with_others) {
            const __mmask64 is_other = _mm512_cmpeq_epi8_mask(code, four_bits);
            upper = _mm512_mask_expand_epi8(upper, is_other, _mm512_loadu_si512(at->others));
            at->others += __builtin_popcountll(is_other);
        }
        const __m512i lower = _mm512_loadu_si512(at->from + (1 + h) * LINE);
        pairs[2 * h] = (vf)_mm512_unpacklo_epi8(lower, upper);
        pairs[2 * h + 1] = (vf)_mm512_unpackhi_epi8(lower, upper);
    }
    at->from += WORD_LINES * LINE;
}

enum { LOWER_HALF, UPPER_HALF, BOTH_HALVES };

/* A block as numbers, of a panel or of half of it, side by side. */
INLINE void unpack_block(place_t at, char *to, const int halves, const int with_others) {
    enum { VECTORS = PANEL / LANES };
    const int begin = halves == UPPER_HALF ? VECTORS / 2 : 0, end = halves == LOWER_HALF ? VECTORS / 2 : VECTORS;
    for (int i = 0; i < BLOCK_WORDS; i++) {
        vf pairs[VECTORS];
        take_word(&at, pairs, with_others);
        UNROLL for (int step = 0; step < STEPS; step++)
            UNROLL for (int v = begin; v < end; v++, to += LINE) store(to, of_step(pairs[v], step));
    }
}
#define UNPACK_BF12(halves)                                                                         \
    static void unpack_bf12_##halves(bf12_t weight, int64_t block, char *to) {                      \
        if (has_others(weight, block)) unpack_block(block_of(weight, block), to, halves, 1);        \
        else unpack_block(block_of(weight, block), to, halves, 0);                                  \
    }
UNPACK_BF12(LOWER_HALF) UNPACK_BF12(UPPER_HALF) UNPACK_BF12(BOTH_HALVES)
typedef void unpack_bf12_t(bf12_t, int64_t, char *);
static unpack_bf12_t *const BF12_UNPACKERS[] = {unpack_bf12_LOWER_HALF, unpack_bf12_UPPER_HALF,
                                                unpack_bf12_BOTH_HALVES};

/* A block as numbers, as matrix tiles take them: [vector of outputs][word of k]. */
INLINE void unpack_tiled_block(place_t at, char *to, const int with_others) {
    for (int i = 0; i < BLOCK_WORDS; i++, to += 2 * LINE) {
        vf pairs[PANEL / LANES];
        take_word(&at, pairs, with_others);
        UNROLL for (int n = 0; n < 2; n++)
            UNROLL for (int v = 0; v < 2; v++) store(to + n * LINE + v * NUMBERS_BYTES / 2, pairs[2 * n + v]);
    }
}
static void unpack_bf12_tiled(bf12_t weight, int64_t block, char *to) {
    if (has_others(weight, block)) unpack_tiled_block(block_of(weight, block), to, 1);
    else unpack_tiled_block(block_of(weight, block), to, 0);
}

/* As multiply_tiles, of the blocks from `block` on. While one is multiplied the next is taken apart, in half of
 * `numbers`: two blocks of 2 KiB stay in L1. */
INLINE void multiply_tiled_blocks(product_t p, bf12_t weight, int64_t block, char *numbers, ahead_t ahead,
                                  float *acc, int is_first, const int double_rows) {
    take_sums(acc, p.out_stride, is_first, double_rows, 1);
    unpack_bf12_tiled(weight, block, numbers);
    for (int64_t i = 0; i < p.steps; i++, p.left.at += p.left.step) {
        prefetch_ahead(&ahead, 0);
        if (i + 1 < p.steps) unpack_bf12_tiled(weight, block + i + 1, numbers + (i + 1) % 2 * NUMBERS_BYTES);
        p.right.at = numbers + i % 2 * NUMBERS_BYTES;
        multiply_step(&p, double_rows, 1, NEITHER);
    }
    put_sums(acc, p.out_stride, double_rows, 1);
}

/* s[r][v] += x[r] . w[v] of a block's panel; its numbers go to `kept`, where that is asked for. */
INLINE void multiply_one_bf12(place_t at, const char *x, int64_t x_stride, vf s[][PANEL / LANES], char *kept,
                              ahead_t *ahead, const int rows, const int keeps, const int with_others) {
    const char *x3 = x + 3 * x_stride;
    for (int i = 0; i < BLOCK_WORDS; i++) {
        vf pairs[PANEL / LANES], w[PANEL / LANES];
        if (!keeps) prefetch_ahead(ahead, 0);
        take_word(&at, pairs, with_others);
        UNROLL for (int step = 0; step < STEPS; step++, x += 4, x3 += 4) {
            UNROLL for (int v = 0; v < PANEL / LANES; v++) w[v] = of_step(pairs[v], step);
            UNROLL for (int v = 0; v < PANEL / LANES && keeps; v++, kept += LINE) store(kept, w[v]);
            UNROLL for (int r = 0; r < rows; r++) {
                const vf a = (vf)splat_i(*(const word_t *)(r < 3 ? x + r * x_stride : x3 + (r - 3) * x_stride));
                UNROLL for (int v = 0; v < PANEL / LANES; v++)
                    s[r][v] = MODE == F32 ? fused(a, w[v], s[r][v]) : dot_pairs(s[r][v], a, w[v]);
            }
        }
    }
}

/* As `multiply` in cpu_products.h, of the blocks [block, end) of a panel. */
INLINE void multiply_bf12(bf12_t weight, int64_t block, int64_t end, const char *x, int64_t x_stride, int is_first,
                          char *kept, ahead_t ahead, float *acc, const int rows, const int keeps) {
    enum { VECTORS = PANEL / LANES, MOST = 6 };
    vf s[MOST][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) s[r][v] = is_first ? (vf){0} : load(acc + r * PANEL + v * LANES);
    enum { X_BYTES = 4 * STEPS * BLOCK_WORDS };
    for (; block < end; block++, x += X_BYTES, kept += keeps ? PANEL * X_BYTES : 0) {
        const place_t at = block_of(weight, block);
        if (has_others(weight, block)) multiply_one_bf12(at, x, x_stride, s, kept, &ahead, rows, keeps, 1);
        else multiply_one_bf12(at, x, x_stride, s, kept, &ahead, rows, keeps, 0);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(acc + r * PANEL + v * LANES, s[r][v]);
}
#define MULTIPLY_BF12(rows, keeps)                                                                  \
    static void multiply_bf12_##rows##_##keeps(bf12_t weight, int64_t block, int64_t end,           \
                                               const char *x, int64_t x_stride, int is_first,       \
                                               char *kept, ahead_t ahead, float *acc) {             \
        multiply_bf12(weight, block, end, x, x_stride, is_first, kept, ahead, acc, rows, keeps);    \
    }
#define MULTIPLY_BF12_OF(rows) MULTIPLY_BF12(rows, 0) MULTIPLY_BF12(rows, 1)
MULTIPLY_BF12_OF(1) MULTIPLY_BF12_OF(2) MULTIPLY_BF12_OF(3)
MULTIPLY_BF12_OF(4) MULTIPLY_BF12_OF(5) MULTIPLY_BF12_OF(6)
typedef void multiply_bf12_t(bf12_t, int64_t, int64_t, const char *, int64_t, int, char *, ahead_t, float *);
#define BF12_MULTIPLIER(rows) {multiply_bf12_##rows##_0, multiply_bf12_##rows##_1},
/* By rows - 1, and whether the numbers are kept. */
static multiply_bf12_t *const BF12_MULTIPLIERS[][2] = {
    BF12_MULTIPLIER(1) BF12_MULTIPLIER(2) BF12_MULTIPLIER(3)
    BF12_MULTIPLIER(4) BF12_MULTIPLIER(5) BF12_MULTIPLIER(6)
};
#else
#include "cpu_bf12_avx2.h"
#endif
#endif
#endif
