/* Products of rows that are rounded to 8 bits, with the codes of cpu_codes.h. Lossy; see activation_dtype.
 *
 * A group of 32 inputs of a row is about scale * code: the scale is max abs / 127, codes are the nearest
 * of -127 to 127. Codes are multiplied and added as integers, which is exact. An output is one chain over
 * its groups of k, in order: s += (d * scale) * integer, and where a format has minima
 * s += m * (scale * sum of the row's codes), both by halves of a group where these have scales. So a row's bits
 * depend on no other row, and not on what the CPU multiplies bytes with.
 *
 * Instructions multiply bytes without a sign by bytes with one. So codes of a weight are held as
 * code + bias, and each integer begins at -bias * sum of the row's codes. ARM's take a sign on both sides.
 */
#ifndef NANOENGINE_CPU_INT8_H
#define NANOENGINE_CPU_INT8_H
#include "cpu_codes.h"

typedef struct { /* a group of a row */
    int8_t codes[GROUP];
    float scale, sum; /* sum: scale * the sum of the codes */
    int32_t begin;    /* of the integer */
    union { int32_t begin; float sum; } second; /* where halves have scales, those before are of the first half */
} rounded_t;

INLINE int has_minima(const int format) {
    return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K || format == Q2_K ||
           format == INT4 || format == INT8;
}
INLINE int has_signs(const int format) { return format == Q8_0 || format == INT8 || has_levels(format); }

/* ---- sums of bytes ---------------------------------------------------------------------------- */

#if defined(__ARM_FEATURE_DOTPROD) && LANES == 4
#define HAVE_ARM_DOT 1
#else
#define HAVE_ARM_DOT 0
#endif
enum { AT_ONCE = LANES == 16 || HAVE_ARM_DOT ? 2 : 1 }; /* vectors of outputs, whose codes all lie in registers */
typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

#if LANES == 16 && defined(__AVX512VNNI__)
#define DOT_BYTES(sum, codes, x) _mm512_dpbusd_epi32(sum, codes, x)
#elif LANES == 8 && defined(__AVXVNNI__)
#define DOT_BYTES(sum, codes, x) _mm256_dpbusd_avx_epi32(sum, codes, x)
#elif LANES == 16
#define ADD_PAIRS(codes, x) _mm512_maddubs_epi16(codes, x)
#define ADD_WORDS(x) _mm512_madd_epi16(x, _mm512_set1_epi16(1))
#elif LANES == 8
#define ADD_PAIRS(codes, x) _mm256_maddubs_epi16(codes, x)
#define ADD_WORDS(x) _mm256_madd_epi16(x, _mm256_set1_epi16(1))
#endif
#if LANES == 16
typedef __m512i bytes_t;
#elif LANES == 8
typedef __m256i bytes_t;
#elif HAVE_ARM_DOT
typedef int8x16_t bytes_t;
#endif

/* What makes the codes of a weight positive, where an instruction takes no sign there. Pairs are added in 16 bits,
 * where 255 * 127 * 2 has no room: there a sign goes to the other side. */
INLINE int bias_of(const int format) {
#if defined(ADD_PAIRS) || HAVE_ARM_DOT
    if (has_signs(format)) return 0;
#endif
    return has_signs(format) ? 128 : code_of_zero(format);
}

#if defined(ADD_PAIRS)
/* Pairs of products whose sum 16 bits hold: the largest code * 127 * 2 * this is below 2^15. */
INLINE int pairs_in_16_bits(const int format) {
    const int is_five = format == Q5_0 || format == Q5_1 || format == Q5_K;
    return has_signs(format) ? 1 : format == Q6_K ? 2 : is_five ? 4 : 8;
}

/* The products of `codes` and x, whose signs may be on either side. */
INLINE vs add_pairs(vu codes, vi x, const int format) {
    if (!has_signs(format)) return (vs)ADD_PAIRS((bytes_t)codes, (bytes_t)x);
#if LANES == 16
    const __mmask64 is_negative = _mm512_movepi8_mask((bytes_t)codes);
    x = (vi)_mm512_mask_sub_epi8((bytes_t)x, is_negative, _mm512_setzero_si512(), (bytes_t)x);
    return (vs)ADD_PAIRS(_mm512_abs_epi8((bytes_t)codes), (bytes_t)x);
#else
    x = (vi)_mm256_sign_epi8((bytes_t)x, (bytes_t)codes);
    return (vs)ADD_PAIRS(_mm256_abs_epi8((bytes_t)codes), (bytes_t)x);
#endif
}
#endif

#if HAVE_ARM_DOT
/* sum + codes times word `lane` of 16 bytes of a row. */
INLINE vi dot_word(vi sum, vu codes, bytes_t x, const int lane) {
#define DOT_LANE(lane) (vi)vdotq_laneq_s32((int32x4_t)sum, (bytes_t)codes, x, lane)
    return lane == 0 ? DOT_LANE(0) : lane == 1 ? DOT_LANE(1) : lane == 2 ? DOT_LANE(2) : DOT_LANE(3);
#undef DOT_LANE
}
#endif

/* sums[v] += `count` words of codes[v] times those of a row. */
INLINE void dot_codes(vu codes[][8], int first, const int8_t *x, const int count, const int format, vi *sums) {
#if defined(ADD_PAIRS)
    const int most = pairs_in_16_bits(format);
    vs pairs[AT_ONCE] = {{0}};
    UNROLL for (int i = 0; i < count; i++) {
        const vi four = splat_i(*(const word_t *)(x + 4 * i));
        UNROLL for (int v = 0; v < AT_ONCE; v++) {
            const vs products = add_pairs(codes[v][first + i], four, format);
            pairs[v] = i % most ? pairs[v] + products : products;
            if ((i + 1) % most == 0 || i + 1 == count) sums[v] += (vi)ADD_WORDS((bytes_t)pairs[v]);
        }
    }
#elif HAVE_ARM_DOT
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int v = 0; v < AT_ONCE; v++)
            sums[v] = dot_word(sums[v], codes[v][first + i], vld1q_s8(x + 16 * (i / 4)), i % 4);
#else
    UNROLL for (int i = 0; i < count; i++) {
        const vi four = splat_i(*(const word_t *)(x + 4 * i));
        UNROLL for (int v = 0; v < AT_ONCE; v++) {
            const vu its = codes[v][first + i];
#if defined(DOT_BYTES)
            sums[v] = (vi)DOT_BYTES((bytes_t)sums[v], (bytes_t)its, (bytes_t)four);
#else
            UNROLL for (int n = 0; n < 4; n++)
                sums[v] += (vi)(its >> (8 * n) & 255) * ((four << (24 - 8 * n)) >> 24);
#endif
        }
    }
#endif
}

/* ---- products --------------------------------------------------------------------------------- */

/* The codes of a group of LANES outputs, as instructions take them. */
INLINE void bytes_of(block_t b, const levels_t *levels, int64_t g, const int format, vu *codes) {
    UNROLL for (int i = 0; i < 8; i++) {
        codes[i] = four_codes(b, g, i / 4, i % 4, format);
        if (format == Q4_0 || format == Q4_1 || format == Q4_K || format == INT4) codes[i] &= 0x0f0f0f0fu;
        if (has_levels(format)) codes[i] = level_bytes(codes[i], levels);
        if (has_signs(format) && bias_of(format)) codes[i] ^= 0x80808080u;
    }
}

/* Of half h of a group, or of all of it. No format with halves has both a bias and minima. */
INLINE int32_t begin_of(const rounded_t *x, const int h, const int format) {
    return !bias_of(format) ? 0 : h ? x->second.begin : x->begin;
}
INLINE float sum_of(const rounded_t *x, const int h) { return h ? x->second.sum : x->sum; }

/* acc[r][c] = or += rows x by the codes of a group of AT_ONCE vectors of outputs. */
INLINE void add_rows(const scales_t *scales, vu codes[][8], const rounded_t *x, int64_t rows, float *acc,
                     const int is_first, const int format) {
    const int halves = halves_of(format), words = 8 / halves;
    for (int64_t r = 0; r < rows; r++, x++, acc += PANEL) {
        vi sums[2][AT_ONCE];
        vf s[AT_ONCE];
        UNROLL for (int h = 0; h < halves; h++) {
            UNROLL for (int v = 0; v < AT_ONCE; v++) sums[h][v] = splat_i(begin_of(x, h, format));
            dot_codes(codes, h * words, x->codes + 4 * h * words, words, format, sums[h]);
        }
        UNROLL for (int v = 0; v < AT_ONCE; v++) s[v] = is_first ? (vf){0} : load(acc + v * LANES);
        UNROLL for (int h = 0; h < halves; h++)
            UNROLL for (int v = 0; v < AT_ONCE; v++)
                s[v] = fused(scales[v].d[h] * x->scale, __builtin_convertvector(sums[h][v], vf), s[v]);
        UNROLL for (int v = 0; v < AT_ONCE; v++) {
            if (has_minima(format))
                UNROLL for (int h = 0; h < halves; h++) s[v] = fused(scales[v].m[h], splat(sum_of(x, h)), s[v]);
            store(acc + v * LANES, s[v]);
        }
    }
}

/* Nothing moves across: GCC would unpack many groups of a block at once, for which it lacks registers. */
INLINE void keep_groups_apart(const int format) {
    if (FORMAT[format].weights > GROUP) __asm__ volatile("" : : : "memory");
}

/* As add_rows, of group g of the blocks b: its codes stay in registers while the rows pass by. */
INLINE void add_group(const block_t *b, const levels_t *levels, const int g, const rounded_t *x, int64_t rows,
                      float *acc, int is_first, const int format) {
    scales_t scales[AT_ONCE];
    vu codes[AT_ONCE][8];
    keep_groups_apart(format);
    UNROLL for (int v = 0; v < AT_ONCE; v++) {
        scales[v] = scales_of(b[v], g, format);
        bytes_of(b[v], levels, g, format, codes[v]);
    }
    keep_groups_apart(format);
    if (is_first) add_rows(scales, codes, x, rows, acc, 1, format);
    else add_rows(scales, codes, x, rows, acc, 0, format);
}

/* As prefetch_part. Bytes are multiplied faster than memory gives them, so L1 has not as many reads under way
 * as are wanted: they go to L2, from further ahead. On a Zen 4 a core read 16 GB/s of Q4_K from L1, and 28 so.
 * A Xeon with AMX was measured with L1 alone. */
#if defined(__AMX_TILE__)
enum { BYTES_AHEAD = CODES_AHEAD };
#define prefetch_bytes prefetch_part
#else
enum { BYTES_AHEAD = 32768 };
#define prefetch_bytes prefetch_far
#endif

/* acc[r][c] = rows x of the outputs [column, column + columns) of a panel. x: [groups][rows]. Groups go first,
 * so memory is read in order. Which bits hold a group's codes and scales depends on its number in its block: where the
 * compiler knows that, shifts and masks are constants. */
INLINE void multiply_rounded(const char *panel, const levels_t *levels, int64_t groups, int64_t column, int64_t columns,
                             const rounded_t *x, int64_t rows, float *acc, const int format) {
    const int per_block = (int)(FORMAT[format].weights / GROUP);
    const int64_t part = group_bytes(format) * AT_ONCE * LANES / columns;
    const char *next = panel + BYTES_AHEAD;
    for (int64_t group = 0; group < groups; group += per_block, x += per_block * rows)
        UNROLL for (int g = 0; g < per_block; g++)
            for (int64_t c = 0; c < columns; c += AT_ONCE * LANES) {
                block_t b[AT_ONCE];
                UNROLL for (int v = 0; v < AT_ONCE; v++)
                    b[v] = block_at(panel, group / per_block, column + c + v * LANES, format);
                next = prefetch_bytes(next, part);
                add_group(b, levels, g, x + g * rows, rows, acc + c, g == 0 && group == 0, format);
            }
}

#define MULTIPLY_ROUNDED(format)                                                                    \
    static void multiply_rounded_##format(const char *panel, const levels_t *levels, int64_t groups, \
                                          int64_t column, int64_t columns, const rounded_t *x,      \
                                          int64_t rows, float *acc) {                               \
        if (IS_HELD(format))                                                                        \
            multiply_rounded(panel, levels, groups, column, columns, x, rows, acc, format);         \
    }
#if WITH_ROUNDED /* they take two fifths of what a library with them takes to compile */
#define EACH_INTEGERS(f) f(Q4_0) f(Q4_1) f(Q5_0) f(Q5_1) f(Q8_0) f(Q4_K) f(Q5_K) f(Q6_K) f(INT4) f(INT8) \
    f(IQ4_NL) f(IQ4_XS) f(Q2_K) f(Q3_K) f(IQ2)
#else
#define EACH_INTEGERS(f)
#endif
EACH_INTEGERS(MULTIPLY_ROUNDED)
typedef void multiply_rounded_t(const char *, const levels_t *, int64_t, int64_t, int64_t, const rounded_t *, int64_t,
                                float *);
#define ROUNDED_MULTIPLIER(format) [format] = multiply_rounded_##format,
static multiply_rounded_t *const ROUNDED_MULTIPLIERS[FORMATS] = {EACH_INTEGERS(ROUNDED_MULTIPLIER)};

/* ---- rounding --------------------------------------------------------------------------------- */

/* Round a row of k inputs, first normed if there is a weight for it; out: a group every `stride`, whose scale counts in
 * the unit of the weight's levels. */
INLINE void round_row(const char *x, const char *norm_weight, int norm_mode, float eps, int64_t dim,
                      int64_t format, rounded_t *out, int64_t stride) {
    const float norm_scale = norm_weight ? scale_of_norm(x, dim, eps, MODE) : 1.0f;
    const int32_t bias = bias_of((int)format);
    for (int64_t first = 0; first < dim; first += GROUP, out += stride) {
        vf y[GROUP / LANES], top = {0}, of_halves[2] = {{0}};
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            const int64_t d = first + i * LANES;
            y[i] = LOAD(x, d, MODE);
            if (norm_weight)
                y[i] = rounded(rounded(y[i] * norm_scale, norm_mode) * LOAD(norm_weight, d, norm_mode), MODE);
            top = vmax(top, pick(y[i] < 0.0f, -y[i], y[i]));
        }
        const float most = max_lane(top);
        const int is_zero = most < 1e-30f; /* 127 / most would be no number */
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            const vf inverse = splat(is_zero ? 0.0f : 127.0f / most), shift = splat(12582912.0f);
            const vf shifted = fused(y[i], inverse, shift); /* as in exp2v */
            const vb codes = __builtin_convertvector((vi)shifted - 0x4b400000, vb);
            memcpy(out->codes + i * LANES, &codes, sizeof codes);
            of_halves[i * LANES / 16] += shifted - shift; /* the codes, or NaN where a number is none */
        }
        const float sum = sum_lanes(of_halves[0] + of_halves[1]);
        out->scale = ((is_zero ? 0.0f : most / 127.0f) + (sum - sum)) * unit_of((int)format);
        const float second = halves_of((int)format) == 2 ? sum_lanes(of_halves[1]) : 0.0f, first_sum = sum - second;
        out->sum = out->scale * first_sum;
        out->begin = -bias * (int32_t)(sum == sum ? first_sum : 0.0f);
        if (has_minima((int)format)) out->second.sum = out->scale * second;
        else out->second.begin = -bias * (int32_t)(sum == sum ? second : 0.0f);
    }
}
#endif
