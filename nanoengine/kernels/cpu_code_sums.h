/* Products with codes of 2 to 6 bits in vectors, where codes are bfloat16 numbers by themselves, as small
 * integers are. So a group's codes are multiplied and added as they are, and its scale comes in once, after
 * that: no weight is made, and none is rounded. Where a group has a minimum, it comes in with the sum of the
 * row's 32 values (of Q2_K, Q3_K, Q6_K, IQ2 and IQ1 a group is two, of 16 weights each):
 *
 *     out = sum over groups of d (sum of code * x) + m (sum of x)
 *
 * The law: an output is one chain of such steps over the groups, in order; a group's sum is one chain over its
 * pairs of k. So a row's bits do not depend on the rows beside it.
 *
 * Codes lie where cpu_codes.h has them, word by word of 32 bits, in another order: the lower half of an output's
 * words has the codes of even k of a group, the upper half those of odd k, 16 of each. So one look-up by halves
 * makes a pair of bfloat16. It ignores the bits above a code's own:
 *
 *     2 bits: 2 words of 8 codes, the first one lowest
 *     3 bits: 3 words of 5 codes and a bit of the last one: codes 0 to 4; 8 to 12; 5, 6, 7, 13, 14
 *     4 bits: 4 words of 4 codes
 *     5 bits: 5 words of 3 codes and a bit of the last one
 *     6 bits: 6 words of 2 codes and 4 bits: those of the first four are the lower bits of the last four codes,
 *             those of the others have the upper ones
 */
#ifndef NANOENGINE_CPU_CODE_SUMS_H
#define NANOENGINE_CPU_CODE_SUMS_H
#include "cpu_lookup.h"

enum { GROUP_PAIRS = GROUP / 2, SUM_ROWS = 6 };

/* Where the words of a group's codes begin in a panel; an output has as many in a group as a code has bits. */
INLINE int64_t sums_at(int64_t group, const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP;
    const int64_t scales = first_scale(format) ? 0 : last_scale(format);
    return group / per_block * block_bytes(format) * PANEL + FORMAT[format].halves * 2 * PANEL +
           (scales + group % per_block * bits_of(format)) * 4 * PANEL;
}

/* ---- packing ---------------------------------------------------------------------------------- */

/* The word that has code i of 16 whole, and its place there. */
typedef struct { int word, bit; } code_place_t;
INLINE code_place_t place_of(const int i, const int bits) {
    const int in_word = 16 / bits;
    if (bits == 3 && i > 12) return (code_place_t){2, 3 * (i - 10)};
    if (bits == 3 && i > 4) return i > 7 ? (code_place_t){1, 3 * (i - 8)} : (code_place_t){2, 3 * (i - 5)};
    return (code_place_t){i / in_word, i % in_word * bits};
}

/* Put code i of 16 into halves of words of `bits` bits. */
INLINE void put_code(uint16_t *words, int i, unsigned code, const int bits) {
    const int in_word = 16 / bits, n = i - bits * in_word;
    if (n < 0) {
        words[place_of(i, bits).word] |= (uint16_t)(code << place_of(i, bits).bit);
    } else if (bits != 6) {
        for (int w = 0; w < bits; w++) words[w] |= (uint16_t)((code >> w & 1) << 15);
    } else {
        words[n] |= (uint16_t)((code & 15) << 12);
        words[4 + n / 2] |= (uint16_t)(code >> 4 << (12 + n % 2 * 2));
    }
}

/* Code i of half `half` of an output's words in a group, 4 * PANEL bytes apart. */
INLINE unsigned code_at(const char *words, int64_t half, int i, const int bits) {
    const int in_word = 16 / bits, n = i - bits * in_word;
    unsigned code = 0;
#define HALF_WORD(w) (*(const uint16_t *)(words + (w) * 4 * PANEL + 2 * half))
    if (n < 0) return HALF_WORD(place_of(i, bits).word) >> place_of(i, bits).bit & ((1u << bits) - 1);
    if (bits == 6) return HALF_WORD(n) >> 12 | (HALF_WORD(4 + n / 2) >> (12 + n % 2 * 2) & 3u) << 4;
    for (int w = 0; w < bits; w++) code |= (unsigned)(HALF_WORD(w) >> 15) << w;
#undef HALF_WORD
    return code;
}

/* Put the codes of one output's blocks, as the file has them, into its column of a panel. */
static void pack_summed(const char *blocks, int64_t count, char *panel, int64_t column, int format) {
    const format_t f = FORMAT[format];
    const int bits = bits_of(format);
    for (int64_t b = 0; b < count; b++, blocks += file_bytes(format))
        for (int64_t g = 0; g < f.weights / GROUP; g++) {
            const uint8_t *from = (const uint8_t *)blocks + f.words_at;
            char *to = panel + sums_at(b * (f.weights / GROUP) + g, format) + 4 * column;
            uint16_t words[2][6] = {{0}};
            if (!first_scale(format)) from += 4 * last_scale(format);
            for (int k = 0; k < GROUP; k++) put_code(words[k % 2], k / 2, code_in_file(from, g, k, format), bits);
            for (int w = 0; w < bits; w++)
                for (int h = 0; h < 2; h++) memcpy(to + w * 4 * PANEL + 2 * h, &words[h][w], 2);
        }
}

#if HAVE_PAIRS && MODE == BF16_PAIRS
/* ---- codes as numbers ------------------------------------------------------------------------- */

typedef struct { __m512i first, second; } numbers_t; /* of 32 codes each; those of 4 bits and less come repeatedly */

/* What the codes from `first` on stand for, in multiples of the scale. */
INLINE __m512 multiples_of(int first, const levels_t *levels, const int format) {
    const vu codes = (vu)(IOTA + first) & ((1u << bits_of(format)) - 1);
    return (__m512)(code(codes, 0, levels, format) - splat((float)code_of_zero(format)));
}
INLINE numbers_t numbers_of(const int format, const levels_t *levels) {
#define NUMBERS_OF(first, more) \
    (__m512i)_mm512_cvtne2ps_pbh(multiples_of((first) + (more), levels, format), multiples_of(first, levels, format))
    const int more = bits_of(format) <= 4 ? 0 : LANES;
    return (numbers_t){NUMBERS_OF(0, more), NUMBERS_OF(bits_of(format) == 6 ? 2 * LANES : 0, more)};
}

/* Pair i of 16 outputs as numbers. */
INLINE vf numbers_at(const char *words, int i, numbers_t numbers, const int format) {
    const int bits = bits_of(format), in_word = 16 / bits, n = i - bits * in_word;
#define WORDS(w) _mm512_loadu_si512(words + (w) * 4 * PANEL)
#define MOVED(w, by) ((by) == 0 ? WORDS(w) : _mm512_srli_epi16(WORDS(w), by))
#define WITH(x, y, mask) _mm512_ternarylogic_epi32(x, y, _mm512_set1_epi16(mask), 0xf8) /* x | y & mask */
    __m512i at;
    if (n < 0) {
        at = MOVED(place_of(i, bits).word, place_of(i, bits).bit);
    } else if (bits == 6) {
        at = WITH(MOVED(n, 12), MOVED(4 + n / 2, 8 + n % 2 * 2), 0x30);
    } else {
        at = MOVED(0, 15);
        UNROLL for (int w = 1; w < bits; w++) at = WITH(at, MOVED(w, 15 - w), 1 << w);
    }
    if (bits == 6) return (vf)_mm512_permutex2var_epi16(numbers.first, at, numbers.second);
    return (vf)_mm512_permutexvar_epi16(at, numbers.first);
#undef WORDS
#undef MOVED
#undef WITH
}

/* ---- products --------------------------------------------------------------------------------- */

INLINE int has_minimum(const int format) {
    return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K || format == Q2_K || format == INT4;
}

/* How many sums of a row that has so many groups, with what fills the last vector. */
INLINE int64_t sums_in_vectors(int64_t groups, int format) {
    return ceil_div(groups * halves_of(format), LANES) * LANES;
}

/* out[r][i] = the sum of a row's 32 values in group i, or of the 16 in half a group; a row takes sums_in_vectors of
 * its groups. */
static void sum_rows(const char *x, int64_t x_stride, int64_t rows, int64_t groups, float *out, int format) {
    const int64_t sums = groups * halves_of(format), bytes = 2 * GROUP / halves_of(format);
    const __mmask32 is_summed = is_of_16(format) ? 0xffff : 0xffffffff;
    const vf ones = (vf)splat_i(0x3f803f80);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < sums; first += LANES, out += LANES) {
            vf each[LANES];
            UNROLL for (int i = 0; i < LANES; i++) {
                const char *from = x + r * x_stride + (first + i) * bytes;
                const vf values = (vf)_mm512_maskz_loadu_epi16(first + i < sums ? is_summed : 0, from);
                each[i] = dot_pairs((vf){0}, values, ones);
            }
            store(out, sum_of_each(each));
        }
}

/* Of several rows, the first three and the others: fewer registers hold addresses. */
#define ROW(x, r) ((r) < 3 ? (x) + (r) * x_stride : (x) + 3 * x_stride + ((r) - 3) * x_stride)

typedef struct { vf of[SUM_ROWS][PANEL / LANES]; } sums_t;

/* s[r][v] += pair i of the group or, of a word's own codes, of the word at `words`; x: of pair 0 there. */
INLINE void add_pair(const char *words, const char *x, int64_t x_stride, int i, numbers_t numbers, sums_t *s,
                     const int rows, const int vecs, const int format) {
    vf c[PANEL / LANES];
    __asm__ volatile("" : : : "memory"); /* or GCC looks up many pairs at once, for which it lacks registers */
    UNROLL for (int v = 0; v < vecs; v++) c[v] = numbers_at(words + 4 * v * LANES, i, numbers, format);
    UNROLL for (int r = 0; r < rows; r++) {
        const vf a = (vf)splat_i(*(const word_t *)(ROW(x, r) + 4 * i));
        UNROLL for (int v = 0; v < vecs; v++) s->of[r][v] = dot_pairs(s->of[r][v], a, c[v]);
    }
}

/* Scales of a panel's groups as numbers, for many rows: [group][of d or m][PANEL], or [group][of d and d, m and m]. */
enum { SCALES = 2 * PANEL * 128 };
INLINE int64_t scales_in_group(const int format) { return (format == Q2_K ? 4 : 2) * PANEL; }
INLINE int64_t groups_at_once(const int format) { return SCALES / scales_in_group(format); }

/* Rows of a call from which on they are made. Four rows of Q2_K cannot do without: GCC would keep no sums in
 * registers. */
INLINE int least_ready(const int format) { return format == Q2_K ? 4 : SUM_ROWS; }

INLINE void unpack_scales(const char *panel, int64_t first, int64_t last, float *out, const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP;
    for (int64_t group = first; group < last; group++, out += scales_in_group(format))
        for (int v = 0; v < PANEL; v += LANES) {
            const scales_t s = scales_of(block_at(panel, group / per_block, v, format), group % per_block, format);
            store(out + v, s.d[0]);
            store(out + PANEL + v, is_of_16(format) ? s.d[1] : s.m[0]);
            if (format == Q2_K) store(out + 2 * PANEL + v, s.m[0]), store(out + 3 * PANEL + v, s.m[1]);
        }
}

/* A run of groups of some outputs, and rows that meet it. */
typedef struct {
    const char *panel;
    const levels_t *levels;
    int64_t first, last, column; /* groups of k; the first output's place in the panel */
    const char *x;               /* at k = 0 */
    int64_t x_stride;
    const float *row_sums;       /* of sum_rows, from group `first` on, where there are minima */
    int64_t row_sums_stride;
    const float *scales;         /* of unpack_scales, from group `first` on; NULL of fewer rows than least_ready */
    int is_cold, is_read_once;   /* nobody has asked for the run yet; no other rows meet it after these */
    const char *ahead;           /* what to ask for, and how many bytes of it with each word */
    int64_t ahead_bytes;
} summed_t;

/* out[r][v] += d s[r][v], and where there is a minimum m, m times the sum of the row's values in the group. */
INLINE void fold_in(const sums_t *s, const summed_t *p, int64_t group, const int fold, sums_t *out, const int rows,
                    const int vecs, const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP;
    const int folds = halves_of(format), is_ready = rows >= least_ready(format) || (rows == 4 && p->scales);
    UNROLL for (int v = 0; v < vecs; v++) {
        vf d, m = {0};
        if (is_ready) {
            const float *ready = p->scales + (group - p->first) * scales_in_group(format) + p->column + v * LANES;
            d = load(ready + fold * PANEL), m = load(ready + (format == Q2_K ? 2 + fold : 1) * PANEL);
        } else {
            const block_t b = block_at(p->panel, group / per_block, p->column + v * LANES, format);
            const scales_t scales = scales_of(b, group % per_block, format);
            d = scales.d[fold], m = scales.m[fold];
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const float *row_sum = p->row_sums + r * p->row_sums_stride + (group - p->first) * folds + fold;
            out->of[r][v] = fused(d, s->of[r][v], out->of[r][v]);
            if (has_minimum(format)) out->of[r][v] = fused(m, splat(*row_sum), out->of[r][v]);
        }
    }
}

/* acc[r][v] += x[r] . w[v] over a run of groups; what acc held counts if it is not the first. acc is [rows][PANEL]. */
INLINE void multiply_sums(const summed_t *p, float *acc, const int rows, const int vecs, const int format) {
    const int bits = bits_of(format), in_word = 16 / bits;
    const int folds = halves_of(format), words_before = bits == 6 ? 4 : 1; /* those of the first 16 weights */
    const int64_t x_stride = p->x_stride;
    const numbers_t numbers = numbers_of(format, p->levels);
    const char *x = p->x + p->first * 2 * GROUP, *ahead = p->ahead;
    sums_t out;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) out.of[r][v] = p->first ? load(acc + r * PANEL + v * LANES) : (vf){0};
    for (int64_t group = p->first; group < p->last; group++, x += 2 * GROUP) {
        const char *words = p->panel + sums_at(group, format) + 4 * p->column;
        UNROLL for (int fold = 0; fold < folds; fold++) {
            const int first = words_before * fold, last = folds == 2 && !fold ? words_before : bits;
            sums_t s;
            UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++) s.of[r][v] = (vf){0};
            for (int w = first; w < last; w++) {
                if (rows <= 2 && p->is_read_once) ahead = prefetch_once(ahead, group_bytes(format) / bits);
                else ahead = prefetch_far(ahead, p->ahead_bytes);
                if (bits == 3) continue;
                UNROLL for (int i = 0; i < in_word; i++)
                    add_pair(words + w * 4 * PANEL, x + w * 4 * in_word, x_stride, i, numbers, &s, rows, vecs, format);
            }
            /* pairs that lie in several words, of 3 bits all */
            const int pair = bits == 3 ? 8 * fold : bits * in_word, end = bits == 3 ? pair + 8 : GROUP_PAIRS;
            if (last == bits || bits == 3)
                UNROLL for (int i = pair; i < end; i++)
                    add_pair(words, x, x_stride, i, numbers, &s, rows, vecs, format);
            fold_in(&s, p, group, fold, &out, rows, vecs, format);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) store(acc + r * PANEL + v * LANES, out.of[r][v]);
}

typedef void multiply_sums_t(const summed_t *, float *);
#define MULTIPLY_SUMS(format, rows, columns)                                                        \
    static void sum_##format##_##rows##_##columns(const summed_t *p, float *acc) {                  \
        if (IS_HELD(format)) multiply_sums(p, acc, rows, columns / LANES, format);                  \
    }
#define SUMMED(format)                                                                              \
    static void unpack_scales_##format(const char *panel, int64_t first, int64_t last, float *out) { \
        if (IS_HELD(format)) unpack_scales(panel, first, last, out, format);                        \
    }                                                                                               \
    MULTIPLY_SUMS(format, 1, 32) MULTIPLY_SUMS(format, 2, 32) MULTIPLY_SUMS(format, 4, 32)          \
    MULTIPLY_SUMS(format, 6, 32) MULTIPLY_SUMS(format, 1, 64) MULTIPLY_SUMS(format, 2, 64)
#define LIST_SUMS(format)                                                                           \
    [format] = {[1] = {sum_##format##_1_32, sum_##format##_1_64},                                   \
                [2] = {sum_##format##_2_32, sum_##format##_2_64},                                   \
                [4] = {sum_##format##_4_32}, [6] = {sum_##format##_6_32}},
#define EACH_SUMMED(f) f(Q4_0) f(Q4_1) f(Q4_K) f(MXFP4) f(INT4) f(IQ4_NL) f(IQ4_XS) f(Q5_0) f(Q5_1) f(Q5_K) f(Q6_K) \
    f(Q2_K) f(Q3_K) f(IQ2)
EACH_SUMMED(SUMMED)
/* By layout, rows, and whether it is a whole panel. */
static multiply_sums_t *const SUM_MULTIPLIERS[FORMATS][SUM_ROWS + 1][2] = {EACH_SUMMED(LIST_SUMS)};

typedef void unpack_scales_t(const char *, int64_t, int64_t, float *);
#define LIST_SCALES(format) [format] = unpack_scales_##format,
static unpack_scales_t *const SCALE_UNPACKERS[FORMATS] = {EACH_SUMMED(LIST_SCALES)};

/* How many of `rows` rows meet a panel together: 8 are 4 and 4. */
INLINE int64_t rows_together(int64_t rows) {
    return rows >= 6 && rows != 8 ? 6 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
}

/* More than two rows meet half a panel at a time: so their outputs stay in registers. */
INLINE int width_together(int64_t rows, int columns) { return rows <= 2 ? columns : PANEL / 2; }

/* How often `rows` rows pass by half a panel or a whole one. */
INLINE int64_t num_passes(int64_t rows, int columns) {
    int64_t passes = 0;
    for (int64_t n; rows > 0; rows -= n) n = rows_together(rows), passes += columns / width_together(n, columns);
    return passes;
}

/* acc[r] += x[r] . w of 1 to SUM_ROWS rows of half a panel or a whole one; returns how many it took of `rows`. The
 * first pass of a cold run asks for all of it, and each other pass for its share of `next`. */
static int64_t multiply_summed(summed_t *p, int64_t rows, int columns, memory_ahead_t *next, float *acc, int format) {
    const int64_t n = rows_together(rows), words = (p->last - p->first) * bits_of(format);
    const int width = width_together(n, columns);
    summed_t part = *p;
    for (int at = 0; at < columns; at += width, part.column += width, p->is_cold = 0) {
        const ahead_t share = p->is_cold ? (ahead_t){p->panel + p->first * group_bytes(format) + CODES_AHEAD, 0,
                                                     group_bytes(format) / bits_of(format)}
                                         : share_of_pass(next, words);
        part.ahead = share.from, part.ahead_bytes = share.step;
        SUM_MULTIPLIERS[layout_of(format)][n][width == PANEL](&part, acc + at);
    }
    return n;
}
#endif

/* The weights of group `group` of an output as bfloat16, [32]. */
static void summed_weights(const char *panel, int64_t group, int64_t column, uint16_t *out, int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP, first = column / LANES * LANES;
    const char *words = panel + sums_at(group, format) + 4 * column;
    const scales_t scales = scales_of(block_at(panel, group / per_block, first, format), group % per_block, format);
    for (int k = 0; k < GROUP; k++) {
        const unsigned c = code_at(words, k % 2, k / 2, bits_of(format));
        const int half = k / (GROUP / 2);
        const vf w = fused(scales.d[half], code((vu)splat_i((int32_t)c), 0, &LEVELS[format], format), scales.m[half]);
        out[k] = narrow(w)[column % LANES];
    }
}
#endif
