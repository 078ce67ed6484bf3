/* Weights as the codes of a GGUF file, of packed integers, in FP8, NVFP4 or NF4, or float32 numbers that fit 16 bits:
 * where they lie, what they stand for.
 *
 * A file stores an output as blocks of 32, 64 or 256 weights, one after the other: float16 scales, and words
 * of 32 bits that hold codes, or scales of 6 or 8 bits. Here the blocks of PANEL outputs take turns, half
 * by half and word by word: [panel][block][half][PANEL], then [word][PANEL]. So a vector has the same word
 * of LANES outputs, and no byte more is held than the file has; but for MXFP4, whose scale of 8 bits, a
 * power of two, is held as a bfloat16.
 *
 * A weight is d * code + m, where d and m belong to a group of 32 weights (Q2_K, Q3_K, Q6_K, NVFP4, IQ2, IQ1: of 16).
 * d, m and d * code are exact in fp32, or m is a multiple of d (Q3_K, Q6_K, INT4, INT8); so a fused step gives the
 * bits of the file's own arithmetic (gguf-py's quants.py and llama.cpp's ggml-quants.c say what that is). In FP8 d
 * is a float32 and m is 0: d * code is rounded once; so it is in NF4, and in NVFP4, whose d was rounded before.
 *
 * BF16 and F16 are numbers without a scale, two in a word; of MODE F32 alone. BF12 are numbers, too, of another
 * layout: see cpu_bf12.h.
 *
 * MODE is what numbers are: F32, or BF16_PAIRS. There codes of up to 6 bits are summed in vectors: cpu_code_sums.h.
 */
#ifndef NANOENGINE_CPU_CODES_H
#define NANOENGINE_CPU_CODES_H
#include "cpu_levels.h"
#include "cpu_tiles.h"

/* ---- the ways of a format ---------------------------------------------------------------------- */

/* Whether a format is multiplied in vectors as codes: see cpu_code_sums.h. */
INLINE int is_summed(const int format) {
    switch (format) {
    case Q4_0: case Q4_1: case Q4_K: case MXFP4: case INT4: case IQ4_NL: case IQ4_XS:
    case Q5_0: case Q5_1: case Q5_K: case Q6_K: case Q2_K: case Q3_K:
    case IQ3_XXS: case IQ3_S: case IQ2: case IQ1:
        return MODE == BF16_PAIRS && HAVE_PAIRS;
    default: return 0;
    }
}

/* Whether codes of a tiled weight are looked up: see cpu_lookup.h. */
INLINE int stands_left(const int format) {
    switch (format) {
    case DENSE: case FP8: case NVFP4: case NF4: case Q2_K: case Q3_K: case IQ2: case IQ1: return 0;
    case BF16: case F16: case BF12: return 0;
    default: return 1;
    }
}

/* Whether numbers are made of codes: for products, or for a row of an embedding. Functions of other formats are empty. */
INLINE int becomes_numbers(const int format) {
    return WITH_ROUNDED || !is_summed(format) || (HAVE_TILES && !stands_left(format));
}

/* ---- halves and words of LANES outputs -------------------------------------------------------- */

typedef struct { const char *halves, *words; } block_t; /* at the first of LANES outputs */

INLINE block_t block_at(const char *panel, int64_t block, int64_t column, const int format) {
    const char *at = panel + block * block_bytes(format) * PANEL;
    return (block_t){at + 2 * column, at + FORMAT[format].halves * 2 * PANEL + 4 * column};
}

INLINE vu word(block_t b, int64_t i) {
    vu x;
    memcpy(&x, b.words + i * 4 * PANEL, sizeof x);
    return x;
}

/* float16 to float32. */
INLINE vf from_float16(vh x) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)x);
#elif LANES == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)x);
#else
    const vu u = __builtin_convertvector(x, vu);
    const vf size = (vf)((u & 0x7fff) << 13) * 0x1p112f; /* also of denormals */
    return (vf)((vu)size | (u & 0x8000) << 16);
#endif
}

INLINE vf half(block_t b, int64_t i) {
    vh x;
    memcpy(&x, b.halves + i * 2 * PANEL, sizeof x);
    return from_float16(x);
}

/* The bits of a half. */
INLINE vu half_bits(block_t b, int64_t i) {
    vh x;
    memcpy(&x, b.halves + i * 2 * PANEL, sizeof x);
    return __builtin_convertvector(x, vu);
}

/* Signed byte n of the lanes, as numbers. */
INLINE vf signed_byte(vu x, int n) {
    return __builtin_convertvector((vi)(x << (24 - 8 * n)) >> 24, vf);
}

/* The FP8 number (E4M3) in the highest byte, / 256: a sign, 4 bits e of exponent, 3 bits m of mantissa. The
 * bits of e and m in their places in a float32 are (1 + m / 8) 2^(e - 15). Where e is 0, it should be
 * m / 8 * 2^-14, which is twice that less 2^-14; elsewhere that is further from 0, so one comparison
 * chooses, of both below 0. */
INLINE vf e4m3(vu x) {
    const vf no_number = (vf)splat_i(0x7fc00000), two = splat(2.0f), least = splat(0x1p-14f);
#if LANES == 16 /* GCC 12 makes two instructions of `and` and `or` */
    const __m512i places = _mm512_set1_epi32(0x07f00000), bias = _mm512_set1_epi32((int)0xb8000000);
    const __m512i bits = _mm512_ternarylogic_epi32((__m512i)(x >> 4), places, bias, 0xea);
    const __mmask16 is_number = _mm512_cmpneq_epi32_mask(bits, _mm512_set1_epi32((int)0xbff00000));
    const __m512 denormal = (__m512)fused((vf)bits, two, least);
    const vf size = (vf)_mm512_mask_max_ps((__m512)no_number, is_number, (__m512)bits, denormal);
#else
    const vu bits = (x >> 4 & 0x07f00000u) | 0xb8000000u;
    const vf larger = vmax((vf)bits, fused((vf)bits, two, least));
    const vf size = pick((vi)(bits == 0xbff00000u), no_number, larger);
#endif
    return (vf)((vu)size ^ (~x & 0x80000000u));
}

/* ---- scales ----------------------------------------------------------------------------------- */

typedef struct { vf d[2], m[2]; } scales_t; /* of the first and the last 16 weights of a group */

/* The 6-bit scale and minimum of group g that Q4_K and Q5_K keep in 3 words. */
INLINE void scale_and_minimum(block_t b, int64_t g, vf *scale, vf *minimum) {
    const int s = 8 * (int)(g % 4);
    const vu low = word(b, 0) >> s, middle = word(b, 1) >> s, high = word(b, 2) >> s;
    vu d = low & 63, m = middle & 63;
    if (g >= 4) d = (high & 15) | (low >> 6 & 3) << 4, m = (high >> 4 & 15) | (middle >> 6 & 3) << 4;
    *scale = __builtin_convertvector((vi)d, vf);
    *minimum = __builtin_convertvector((vi)m, vf);
}

/* Scale i of the four of NVFP4: in FP8, times a float32 of the whole output, or divided by one that is held
 * below 0. */
INLINE vf scale_of_four(block_t b, int i) {
    const vf scale = e4m3(word(b, 0) << (24 - 8 * i)) * 256.0f, whole = (vf)word(b, 1);
    return pick(whole < 0.0f, scale / -whole, scale * whole);
}

/* Scale j of the 16 of a block as in Q3_K: 6 bits less 32, the lower 4 in words 24 and 25, the upper 2 in word 26. */
INLINE vf scale_of_16(block_t b, int64_t j) {
    const vu low = word(b, 24 + j % 8 / 4) >> (int)(8 * (j % 4) + 4 * (j / 8)) & 15;
    const vu high = word(b, 26) >> (int)(8 * (j % 4) + 2 * (j / 4)) & 3;
    return __builtin_convertvector((vi)(low | high << 4) - 32, vf);
}

/* Scales and minima of the halves of group g, where these have their own. */
INLINE scales_t scales_of_halves(block_t b, int64_t g, const int format) {
    scales_t s;
    UNROLL for (int i = 0; i < 2; i++) {
        if (format == Q2_K) { /* 4 bits each in a byte */
            const vu both = word(b, g / 2) >> (int)(g % 2 * 16 + 8 * i);
            s.d[i] = half(b, 0) * __builtin_convertvector((vi)(both & 15), vf);
            s.m[i] = -(half(b, 1) * __builtin_convertvector((vi)(both >> 4 & 15), vf));
        } else if (is_as_q3_k(format)) {
            s.d[i] = half(b, 0) * scale_of_16(b, 2 * g + i);
            s.m[i] = s.d[i] * (float)-code_of_zero(format);
        } else {
            s.d[i] = half(b, 0) * signed_byte(word(b, 48 + g / 2) >> (int)(g % 2 * 16), i);
            s.m[i] = s.d[i] * (float)-code_of_zero(format);
        }
    }
    return s;
}

INLINE scales_t scales_of(block_t b, int64_t g, const int format) {
    scales_t s = {{{0}}};
    if (has_numbers(format)) return s;
    if (is_of_16(format)) return scales_of_halves(b, g, format);
    if (format == FP8) {
        s.d[0] = s.d[1] = (vf)word(b, 0) * 256.0f; /* see e4m3 */
        return s;
    }
    if (format == NF4) {
        s.d[0] = s.d[1] = (vf)word(b, 0);
        return s;
    }
    if (format == NVFP4) {
        UNROLL for (int i = 0; i < 2; i++) s.d[i] = scale_of_four(b, 2 * (int)g + i);
        return s;
    }
    s.d[0] = format == MXFP4 ? (vf)(half_bits(b, 0) << 16) : half(b, 0); /* a bfloat16 */
    if (format == Q4_1 || format == Q5_1) {
        s.m[0] = half(b, 1);
    } else if (format == Q4_K || format == Q5_K) {
        vf scale, minimum;
        scale_and_minimum(b, g, &scale, &minimum);
        s.d[0] *= scale, s.m[0] = -(half(b, 1) * minimum);
    } else if (format == INT4 || format == INT8) {
        s.m[0] = -(s.d[0] * half(b, 1));
    } else if (is_as_iq4_xs(format)) { /* of 6 bits, the upper two in the second half */
        const vu low = word(b, 0) >> (int)(4 * g) & 15, high = half_bits(b, 1) >> (int)(2 * g) & 3;
        s.d[0] *= __builtin_convertvector((vi)(low | high << 4) - 32, vf);
    } else {
        s.m[0] = s.d[0] * (float)-code_of_zero(format);
    }
    s.d[1] = s.d[0], s.m[1] = s.m[0];
    return s;
}

/* ---- codes ------------------------------------------------------------------------------------ */

typedef int32_t __attribute__((aligned(2), may_alias)) word_t; /* in a cast GCC ignores it */

/* What holds four weights: their codes in `x`, or two numbers in each. */
typedef struct { vu x, y; } four_t;

/* The codes of four weights of group g, 4 i and those after it in half h: a byte each, whose upper half
 * may be anything where a code has 4 bits. */
INLINE vu four_codes(block_t b, int64_t g, const int h, int i, const int format) {
    const int64_t odd = g % 2, at = 4 * h + i;
    vu low, high;
    switch (format) {
    case Q4_0:
    case MXFP4:
    case INT4:
    case IQ4_NL:
    case Q4_1: return word(b, i) >> (4 * h);
    case INT8:
    case Q8_0: return word(b, at);
    case FP8: return word(b, 1 + at);
    case NVFP4: return word(b, 2 + 4 * g + i) >> (4 * h);
    case IQ4_XS:
    case IQ3_XXS:
    case IQ3_S:
    case NF4: return word(b, 1 + 4 * g + i) >> (4 * h);
    case Q4_K: return word(b, 3 + g / 2 * 8 + at) >> (int)(4 * odd);
    case Q2_K: return word(b, 4 + g / 4 * 8 + at) >> (int)(g % 4 * 2) & 0x03030303u;
    case Q3_K:
    case IQ2:
    case IQ1:
        low = word(b, 8 + g / 4 * 8 + at) >> (int)(g % 4 * 2) & 0x03030303u;
        return low | (word(b, at) >> (int)g & 0x01010101u) << 2;
    case Q5_K:
        low = word(b, 11 + g / 2 * 8 + at) >> (int)(4 * odd);
        high = word(b, 3 + at) >> (int)g & 0x01010101u;
        break;
    case Q6_K:
        low = word(b, g / 4 * 16 + odd * 8 + at) >> (int)(g % 4 / 2 * 4);
        high = word(b, 32 + g / 4 * 8 + at) >> (int)(g % 4 * 2) & 0x03030303u;
        break;
    default: /* Q5_0, Q5_1: 4 bits of the first word go to 4 bytes */
        low = word(b, 1 + i) >> (4 * h);
        high = (word(b, 0) >> (int)(4 * at) & 15) * 0x204081u & 0x01010101u;
    }
    return (low & 0x0f0f0f0fu) | high << 4;
}

INLINE four_t four_weights(block_t b, int64_t g, const int h, int i, const int format) {
    const int64_t at = 2 * (4 * h + i);
    if (has_numbers(format)) return (four_t){word(b, at), word(b, at + 1)};
    return (four_t){four_codes(b, g, h, i, format), (vu){0}};
}

#if LANES == 8
/* Whether codes become numbers as bytes: all but floating ones, and those of 4 bits that stand for themselves, where a
 * shift and a mask did as well (a Zen 3). And whether a byte is one of 16. */
INLINE int is_of_bytes(const int format) {
    switch (format) {
    case Q4_0: case Q4_1: case Q4_K: case INT4: case FP8: case NF4: case BF16: case F16: return 0;
    default: return 1;
    }
}
INLINE int is_e2m1(const int format) { return format == MXFP4 || format == NVFP4; }
INLINE int is_looked_up(const int format) { return is_e2m1(format) || has_levels(format); }

/* 2^24 times byte n of a lane, whose sign is the lane's: so none is moved down, and no other byte is removed. */
INLINE vf upper_byte(vu four, const int n) {
    const __m256i to_top = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12,
                                            -1, -1, -1, 0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12);
    vu top = four << 24;
    if (n == 3) top = four & 0xff000000u;
    else if (n) top = (vu)_mm256_shuffle_epi8((__m256i)four, _mm256_add_epi8(to_top, _mm256_set1_epi32(n << 24)));
    return __builtin_convertvector((vi)top, vf);
}
#endif

/* What the scale is multiplied by for what `code` gives; not where it may be as small as a float32 can be. */
INLINE float unit_of_code(const levels_t *levels, const int format) {
#if LANES == 8
    if (is_of_bytes(format) && !is_e2m1(format)) return 0x1p-24f * (is_looked_up(format) ? levels->unit : 1.0f);
#endif
    return (void)levels, (void)format, 1.0f;
}

/* Code n of the four as a number, which its scale times unit_of_code makes a weight. */
INLINE vf code(vu four, int n, const levels_t *levels, const int format) {
#if LANES == 8
    const vu bytes = is_looked_up(format) ? level_bytes(four, levels) : four;
    if (is_e2m1(format)) return upper_byte(bytes, n) * (0x1p-24f * levels->unit);
    if (is_of_bytes(format)) return upper_byte(bytes, n);
#endif
    if (format == Q8_0 || format == INT8) return signed_byte(four, n);
    if (format == FP8) return e4m3(four << (24 - 8 * n));
    const vu x = four >> (8 * n);
    if (format == MXFP4 || format == NVFP4) return e2m1(x);
    if (format == NF4) return nf4(x);
    if (has_levels(format)) return one_of_16(x, levels->numbers);
    const int bits = format == Q6_K ? 6 : format == Q5_0 || format == Q5_1 || format == Q5_K ? 5 : 4;
#if LANES == 16 /* a look-up reads as many bits as its table needs */
    const __m512 low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bits == 4) return (vf)_mm512_permutexvar_ps((__m512i)x, low);
    const __m512 high = _mm512_add_ps(low, _mm512_set1_ps(16));
    if (bits == 5) return (vf)_mm512_permutex2var_ps(low, (__m512i)x, high);
#endif
    return __builtin_convertvector((vi)(x & ((1u << bits) - 1)), vf);
}

/* What will be read soon is asked for a little at a time: CPUs drop what they are asked for all at once.
 * Whoever wants another part of a panel finds it in a cache then. Zen 5 has most from 8 KiB ahead. Two
 * cores of a Xeon with AMX read 29 GB/s from 2 KiB ahead, 16 from 4 KiB on. */
#if defined(__AMX_TILE__)
enum { CODES_AHEAD = 2048 };
#else
enum { CODES_AHEAD = 8192 };
#endif
INLINE int64_t group_bytes(const int format) { /* of a panel */
    return block_bytes(format) * PANEL * GROUP / FORMAT[format].weights;
}
INLINE const char *prefetch_part(const char *next, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
    return next + bytes;
}
/* The same of what is read once in a step: other lines, such as those of Python, may stay in the caches. */
INLINE const char *prefetch_once(const char *next, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 0);
    return next + bytes;
}

/* The same into L2. */
INLINE const char *prefetch_far(const char *next, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
    return next + bytes;
}

/* ---- a group of weights ----------------------------------------------------------------------- */

/* The lower or the upper of two numbers of 16 bits. */
INLINE vf number(vu two, const int is_upper, const int format) {
    if (format == BF16) return (vf)(is_upper ? two & 0xffff0000u : two << 16);
    return from_float16(__builtin_convertvector(is_upper ? two >> 16 : two & 0xffff, vh));
}

/* As scales_of, but d is that of what `code` gives. */
INLINE scales_t scales_of_codes(block_t b, int64_t g, const levels_t *levels, const int format) {
    scales_t s = scales_of(b, g, format);
    if (LANES == 8) s.d[0] *= unit_of_code(levels, format), s.d[1] *= unit_of_code(levels, format);
    return s;
}

/* Weight n of the four as a number, or n and n + 1 as a pair of bfloat16. */
INLINE vf weights(four_t four, int n, vf d, vf m, const levels_t *levels, const int format) {
    if (has_numbers(format)) return number(n < 2 ? four.x : four.y, n % 2, format);
    const vf w = fused(d, code(four.x, n, levels, format), m);
    return MODE == F32 ? w : round_pairs(w, fused(d, code(four.x, n + 1, levels, format), m));
}

typedef struct { /* where numbers go; bytes from word to word of k, from 16 outputs to the next, from one
                    group to the next */
    char *at;
    int64_t word, vector, group;
} unpacked_t;

/* Group `group` of the outputs [column, column + columns) of a panel as numbers: float32, or pairs of
 * bfloat16. Half a panel side by side, so that memory is read in order. */
INLINE void unpack_group(const char *panel, const levels_t *levels, int64_t group, int64_t column, int64_t columns,
                         unpacked_t to, const int format) {
    enum { HALF_VECTORS = PANEL / 2 / LANES };
    const int64_t per_block = FORMAT[format].weights / GROUP, g = group % per_block;
    const char *next = panel + group * group_bytes(format) + CODES_AHEAD;
    for (int64_t c = 0; c < columns; c += PANEL / 2) {
        block_t b[HALF_VECTORS];
        scales_t s[HALF_VECTORS];
        four_t four[HALF_VECTORS];
        UNROLL for (int v = 0; v < HALF_VECTORS; v++) {
            b[v] = block_at(panel, group / per_block, column + c + v * LANES, format);
            s[v] = scales_of_codes(b[v], g, levels, format);
        }
        char *at = to.at + c / 16 * to.vector;
        UNROLL for (int h = 0; h < 2; h++)
            for (int i = 0; i < 4; i++) {
                if (column + c == 0) next = prefetch_part(next, group_bytes(format) / 8);
                UNROLL for (int v = 0; v < HALF_VECTORS; v++) four[v] = four_weights(b[v], g, h, i, format);
                UNROLL for (int n = 0; n < 4; n += MODE == F32 ? 1 : 2, at += to.word)
                    UNROLL for (int v = 0; v < HALF_VECTORS; v++)
                        store(at + v * LANES / 16 * to.vector + v * LANES % 16 * 4,
                              weights(four[v], n, s[v].d[h], s[v].m[h], levels, format));
            }
    }
}

#define EACH_FORMAT(f) f(Q4_0) f(Q4_1) f(Q5_0) f(Q5_1) f(Q8_0) f(Q4_K) f(Q5_K) f(Q6_K) \
    f(MXFP4) f(INT4) f(INT8) f(FP8) f(NVFP4) f(NF4) f(IQ4_NL) f(IQ4_XS) f(Q2_K) f(Q3_K) \
    f(IQ2) f(BF16) f(F16)
#define UNPACK(format)                                                                              \
    static void unpack_##format(const char *panel, const levels_t *levels, int64_t group,           \
                                int64_t column, int64_t columns, unpacked_t to) {                   \
        if (IS_HELD(format) && becomes_numbers(format))                                             \
            unpack_group(panel, levels, group, column, columns, to, format);                        \
    }
EACH_FORMAT(UNPACK)
typedef void unpack_t(const char *, const levels_t *, int64_t, int64_t, int64_t, unpacked_t);
#define UNPACKER(format) [format] = unpack_##format,
static unpack_t *const UNPACKERS[FORMATS] = {EACH_FORMAT(UNPACKER)};

/* ---- products of few rows --------------------------------------------------------------------- */

enum { FEW_ROWS = LANES >= 8 ? 4 : 2 };

/* Outputs of a strip, of so many rows: their sums are enough to wait for one another, and lie in registers. */
INLINE int strip_of(const int rows) { return LANES == 16 ? (rows == 1 ? 64 : 32) : rows == 4 ? 16 : 32; }

/* Whether the strips of a group follow one another, as its bytes do in memory. With more rows and fewer bits memory
 * has time (and with what a scale of Q4_K takes): there the groups of a strip do, whose sums stay in registers.
 * Measured on a Zen 3 alone: there one row of Q8_0 reads 16 GB/s on two cores, and 8 the other way. */
INLINE int goes_by_groups(const int rows, const int format) {
    return LANES == 8 && ((rows == 1 && format != Q4_K) || bits_of(format) == 8 || has_numbers(format));
}

/* Ask for the lines that begin in the next `bytes` bytes: over a run of calls, for each line once. */
INLINE const char *prefetch_lines(const char *next, int64_t bytes) {
    for (const char *line = next + (-(uintptr_t)next & 63); line < next + bytes; line += 64) __builtin_prefetch(line);
    return next + bytes;
}

/* Sums of the most rows and vectors: GCC keeps no array in registers whose size is an argument. */
enum { RUN_ROWS = 8 };
typedef struct { vf of[RUN_ROWS][PANEL / LANES]; } strip_sums_t;

/* s[r][v] += x[r] . w[v] over a group of k of the strip from `column` on, in the order of `multiply` in
 * cpu_products.h: but weights are numbers in registers only. The last row lies to_last bytes after the first one. Asks
 * for `part` bytes from `next` on, eight times, and returns what comes after them; or NULL. */
INLINE const char *add_group_of(const char *panel, const levels_t *levels, int64_t group, int64_t column, const char *x,
                                int64_t x_stride, int64_t to_last, const char *next, int64_t part, strip_sums_t *s,
                                const int rows, const int vecs, const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP, g = group % per_block;
    block_t b[PANEL / LANES];
    scales_t scales[PANEL / LANES];
    four_t four[PANEL / LANES];
    vf w[PANEL / LANES];
    UNROLL for (int v = 0; v < vecs; v++) {
        b[v] = block_at(panel, group / per_block, column + v * LANES, format);
        scales[v] = scales_of_codes(b[v], g, levels, format);
    }
    UNROLL for (int h = 0; h < 2; h++)
        for (int i = 0; i < 4; i++) {
            if (next) next = prefetch_lines(next, part);
            UNROLL for (int v = 0; v < vecs; v++) four[v] = four_weights(b[v], g, h, i, format);
            UNROLL for (int n = 0; n < 4; n += MODE == F32 ? 1 : 2, x += 4) {
                UNROLL for (int v = 0; v < vecs; v++)
                    w[v] = weights(four[v], n, scales[v].d[h], scales[v].m[h], levels, format);
                UNROLL for (int r = 0; r < rows; r++) {
                    const vf a = (vf)splat_i(*(const word_t *)(x + (r < rows - 1 ? r * x_stride : to_last)));
                    UNROLL for (int v = 0; v < vecs; v++)
                        s->of[r][v] = MODE == F32 ? fused(a, w[v], s->of[r][v]) : dot_pairs(s->of[r][v], a, w[v]);
                }
            }
        }
    return next;
}

/* acc[r][c] = x[r] . w[c] of `columns` outputs, a half panel or a whole one, over whole groups of k. */
INLINE void multiply_codes(const char *panel, const levels_t *levels, int64_t groups, int64_t column, int64_t columns,
                           const char *x, int64_t x_stride, float *acc, const int rows, const int format) {
    enum { GROUP_BYTES = GROUP * (MODE == F32 ? 4 : 2) };
    const int width = strip_of(rows), vecs = width / LANES;
    const int64_t to_last = (rows - 1) * x_stride;
    const levels_t own = *levels; /* no store may change it */
    const char *next = column == 0 ? panel + CODES_AHEAD : NULL;
#define EACH_SUM_OF_STRIP UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vecs; v++)
#define AT_STRIP (acc + r * PANEL + c + v * LANES)
    if (goes_by_groups(rows, format)) {
        const int64_t part = group_bytes(format) / 8 * width / columns;
        for (int64_t group = 0; group < groups; group++, x += GROUP_BYTES)
            for (int64_t c = 0; c < columns; c += width) {
                strip_sums_t s;
                EACH_SUM_OF_STRIP s.of[r][v] = group ? load(AT_STRIP) : (vf){0};
                next = add_group_of(panel, &own, group, column + c, x, x_stride, to_last, next, part, &s, rows, vecs,
                                    format);
                EACH_SUM_OF_STRIP store(AT_STRIP, s.of[r][v]);
            }
        return;
    }
    for (int64_t c = 0; c < columns; c += width, next = NULL) {
        strip_sums_t s;
        EACH_SUM_OF_STRIP s.of[r][v] = (vf){0};
        for (int64_t group = 0; group < groups; group++)
            next = add_group_of(panel, &own, group, column + c, x + group * GROUP_BYTES, x_stride, to_last, next,
                                group_bytes(format) / 8, &s, rows, vecs, format);
        EACH_SUM_OF_STRIP store(AT_STRIP, s.of[r][v]);
    }
#undef EACH_SUM_OF_STRIP
#undef AT_STRIP
}

#define MULTIPLY_CODES(format, rows)                                                                \
    static void multiply_##format##_##rows(const char *panel, const levels_t *levels, int64_t groups, \
                                           int64_t column, int64_t columns, const char *x,          \
                                           int64_t x_stride, float *acc) {                          \
        if (IS_HELD(format) && !is_summed(format))                                                  \
            multiply_codes(panel, levels, groups, column, columns, x, x_stride, acc, rows, format); \
    }
typedef void multiply_codes_t(const char *, const levels_t *, int64_t, int64_t, int64_t, const char *, int64_t,
                              float *);
#if LANES >= 8
#define MULTIPLIERS_OF(format) MULTIPLY_CODES(format, 1) MULTIPLY_CODES(format, 2) MULTIPLY_CODES(format, 4)
#define LISTED(format)                                                                              \
    [format] = {multiply_##format##_1, multiply_##format##_2, NULL, multiply_##format##_4},
#else
#define MULTIPLIERS_OF(format) MULTIPLY_CODES(format, 1) MULTIPLY_CODES(format, 2)
#define LISTED(format) [format] = {multiply_##format##_1, multiply_##format##_2},
#endif
EACH_FORMAT(MULTIPLIERS_OF)
/* By format, and rows - 1. */
static multiply_codes_t *const CODE_MULTIPLIERS[FORMATS][FEW_ROWS] = {EACH_FORMAT(LISTED)};

#if LANES == 8
/* acc[r][c] += x[r] . w[c] of 5 to RUN_ROWS rows over the groups [begin, end), which are in L1: the sums of LANES
 * outputs lie in registers at a time, and each LANES outputs ask for their share of what is next. `rows` is even, as GCC
 * takes half a second for each number of rows: the last row may be the one before it once more. */
INLINE void multiply_run(const char *panel, const levels_t *levels, int64_t begin, int64_t end, int64_t column,
                         int64_t columns, const char *x, int64_t x_stride, int64_t to_last, memory_ahead_t *next,
                         float *acc, const int rows, const int format) {
    const levels_t own = *levels;
    for (int64_t c = 0; c < columns; c += LANES) {
        ahead_t ahead = share_of_pass(next, end - begin);
        strip_sums_t s;
        UNROLL for (int r = 0; r < rows; r++) s.of[r][0] = begin ? load(acc + r * PANEL + c) : (vf){0};
        for (int64_t group = begin; group < end; group++) {
            prefetch_ahead(&ahead, 1);
            add_group_of(panel, &own, group, column + c, x + group * 4 * GROUP, x_stride, to_last, NULL, 0, &s, rows, 1,
                         format);
        }
        UNROLL for (int r = 0; r < rows; r++) store(acc + r * PANEL + c, s.of[r][0]);
    }
}
#define MULTIPLY_RUN(format, rows)                                                                  \
    static void multiply_run_##format##_##rows(const char *panel, const levels_t *levels, int64_t begin, \
                                               int64_t end, int64_t column, int64_t columns,        \
                                               const char *x, int64_t x_stride, int64_t to_last,    \
                                               memory_ahead_t *next, float *acc) {                  \
        if (IS_HELD(format) && !is_summed(format))                                                  \
            multiply_run(panel, levels, begin, end, column, columns, x, x_stride, to_last, next, acc,  \
                         rows, format);                                                             \
    }
#define RUNS_OF(format) MULTIPLY_RUN(format, 6) MULTIPLY_RUN(format, 8)
EACH_FORMAT(RUNS_OF)
typedef void multiply_run_t(const char *, const levels_t *, int64_t, int64_t, int64_t, int64_t, const char *, int64_t,
                            int64_t, memory_ahead_t *, float *);
#define LISTED_RUNS(format) [format] = {multiply_run_##format##_6, multiply_run_##format##_8},
/* By format, and whether rows are 7 or 8. */
static multiply_run_t *const RUN_MULTIPLIERS[FORMATS][2] = {EACH_FORMAT(LISTED_RUNS)};
#endif

/* 2^(code - 127) as a bfloat16; 255 is no number. */
INLINE uint16_t power_of(uint8_t code) { return code == 0 ? 0x40 : code == 255 ? 0x7fc0 : code << 7; }

/* Put the halves and the words [first, last) of one output's blocks, as the file has them, into its column
 * of a panel. */
INLINE void pack_column(const char *blocks, int64_t count, char *panel, int64_t column, int64_t first,
                        int64_t last, int format) {
    const format_t f = FORMAT[format];
    for (int64_t b = 0; b < count; b++, blocks += file_bytes(format)) {
        char *to = panel + b * block_bytes(format) * PANEL;
        for (int64_t i = 0; i < f.halves; i++) {
            const uint16_t scale = power_of(*(const uint8_t *)blocks);
            const void *from = format == MXFP4 ? (const void *)&scale : blocks + f.halves_at + 2 * i;
            memcpy(to + 2 * (i * PANEL + column), from, 2);
        }
        to += f.halves * 2 * PANEL;
        for (int64_t i = first; i < last; i++)
            memcpy(to + 4 * (i * PANEL + column), blocks + f.words_at + 4 * i, 4);
    }
}
#endif
