/* Codes in matrix tiles, for which it pays to have the 32 inputs of a group side by side: the rows of a
 * tile's left side. So the weights stand left, the rows of the call right, and a product is [output][row],
 * which is turned at its end. An element's bits are those of the other way round: see cpu_tiles.h.
 *
 * A group of codes of 4 bits has 16 numbers at most. These are rounded once, as a table, in which one
 * instruction looks up all 32 weights. A code c of 6 bits becomes the upper bits of a mantissa, 1 + c / 64.
 *
 * The codes of a group lie where cpu_codes.h has them, in another order. Of 4 bits: [half panel][4 outputs]
 * [k], a word of 16 bits for the codes of 4 outputs, the first one lowest. Of 6 bits: [half panel][8 outputs]
 * [3][k % 16], words of 32 bits for the 16 codes that 8 outputs have of two k; see put_six_bits. Of 8 bits:
 * [half panel][output][k].
 */
#ifndef NANOENGINE_CPU_LOOKUP_H
#define NANOENGINE_CPU_LOOKUP_H
#include "cpu_codes.h"
#include "cpu_tiles.h"

enum { HALF_PANEL = PANEL / 2, FOUR_BYTES = 2 * GROUP }; /* of the codes of four outputs */

INLINE int has_table(int format) {
    return format == Q4_0 || format == Q4_1 || format == Q4_K || format == MXFP4 || format == INT4;
}
INLINE int stands_left(int format) {
    return has_table(format) || format == Q6_K || format == Q8_0 || format == INT8;
}

/* Bytes of the codes of a group of half a panel. */
INLINE int64_t left_bytes(int format) {
    return HALF_PANEL * GROUP / 8 * (has_table(format) ? 4 : format == Q6_K ? 6 : 8);
}

/* The words of a block that hold scales, not codes: [first, last). */
INLINE int64_t first_scale(int format) { return format == Q6_K ? 48 : 0; }
INLINE int64_t last_scale(int format) { return format == Q6_K ? 52 : format == Q4_K ? 3 : 0; }

/* Where the codes of group g of half a panel of a block are. */
INLINE int64_t codes_at(int64_t g, int64_t half, const int format) {
    const int64_t before = format == Q4_K ? 4 * last_scale(format) : 0;
    return PANEL * (2 * FORMAT[format].halves + before) + (2 * g + half) * left_bytes(format);
}

/* Weight k of group g in a block's codes, as the file has them. */
INLINE unsigned code_in_file(const uint8_t *codes, int64_t g, int64_t k, int format) {
    if (format == Q4_K) return codes[g / 2 * GROUP + k] >> (4 * (g % 2)) & 15;
    if (format == Q8_0 || format == INT8) return codes[k];
    if (format != Q6_K) return codes[k % 16] >> (4 * (k / 16)) & 15;
    const unsigned low = codes[g / 4 * 64 + g % 2 * 32 + k] >> (4 * (g % 4 / 2)) & 15;
    return low | (codes[128 + g / 4 * 32 + k] >> (2 * (g % 4)) & 3) << 4;
}

/* Put `bits` bits into the word of 32 bits at `to`. */
INLINE void put_bits(char *to, unsigned value, unsigned bits, int64_t shift) {
    uint32_t word;
    memcpy(&word, to, 4);
    word = (word & ~(((1u << bits) - 1) << shift)) | value << shift;
    memcpy(to, &word, 4);
}

/* Put a code of 6 bits of output n and input k where look_up_6 has it. Three words take 5 codes each, the
 * first one lowest, and 2 bits each of the last code. */
INLINE void put_six_bits(char *to, unsigned code, int64_t n, int64_t k) {
    const int64_t i = n % 8 * 2 + k / 16;
    to += n / 8 * 3 * TILE_BYTES + k % 16 * 4;
    if (i < 15) put_bits(to + i / 5 * TILE_BYTES, code, 6, i % 5 * 6);
    else
        for (int w = 0; w < 3; w++) put_bits(to + w * TILE_BYTES, code >> (2 * w) & 3, 2, 30);
}

/* Put the codes of one output's blocks, as the file has them, into its column of a panel. */
static void pack_left(const char *blocks, int64_t count, char *panel, int64_t column, int format) {
    const format_t f = FORMAT[format];
    const int64_t half = column % PANEL / HALF_PANEL, n = column % HALF_PANEL;
    for (int64_t b = 0; b < count; b++, blocks += file_bytes(format))
        for (int64_t g = 0; g < f.weights / GROUP; g++) {
            const uint8_t *codes = (const uint8_t *)blocks + f.words_at;
            char *to = panel + b * block_bytes(format) * PANEL + codes_at(g, half, format);
            if (format == Q4_K) codes += 4 * last_scale(format);
            for (int64_t k = 0; k < GROUP; k++) {
                const unsigned code = code_in_file(codes, g, k, format);
                if (format == Q8_0 || format == INT8) {
                    to[n * GROUP + k] = (char)code;
                    continue;
                }
                if (format == Q6_K) put_six_bits(to, code, n, k);
                else put_bits(to + n / 4 * FOUR_BYTES + k / 2 * 4, code, 4, k % 2 * 16 + n % 4 * 4);
            }
        }
}

#if HAVE_TILES
/* What the codes 0 to 15 stand for, before scale and minimum. */
INLINE __m512 levels_of(const int format) {
    const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512)code((vu)codes, 0, format);
}

typedef struct { float d[2][HALF_PANEL], m[2][HALF_PANEL]; } left_scales_t; /* as scales_t */

/* 4 bits: tables of two outputs each. */
INLINE void look_up_4(const char *from, const left_scales_t *s, char *to, const int format) {
    const __m512 levels = levels_of(format);
    const __m512i low = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#define NUMBERS(n) _mm512_fmadd_ps(levels, _mm512_set1_ps(s->d[0][n]), _mm512_set1_ps(s->m[0][n]))
#define TABLE(n) (__m512i)_mm512_cvtne2ps_pbh(NUMBERS(n + 1), NUMBERS(n))
#define OF_FIRST(x) _mm512_and_si512(x, low)
#define OF_SECOND(x) _mm512_ternarylogic_epi32(x, low, second, 0xea)
#define LOOK_UP(n, table, codes)                                                                    \
    _mm512_storeu_si512(to + TILE_BYTES * (n), _mm512_permutexvar_epi16(codes, table))
    UNROLL for (int n = 0; n < HALF_PANEL; n += 4, from += FOUR_BYTES) {
        const __m512i x = _mm512_loadu_si512(from), table = TABLE(n), next = TABLE(n + 2);
        LOOK_UP(n, table, OF_FIRST(x));
        LOOK_UP(n + 1, table, OF_SECOND(_mm512_srli_epi16(x, 4)));
        LOOK_UP(n + 2, next, OF_FIRST(_mm512_srli_epi16(x, 8)));
        LOOK_UP(n + 3, next, OF_SECOND(_mm512_srli_epi16(x, 12)));
    }
}

/* 6 bits, of Q6_K: d (c - 32) = 64 d (1 + c / 64) - 96 d, whose last product is exact. */
INLINE void look_up_6(const char *from, const left_scales_t *s, char *to) {
    const __m512i one = _mm512_set1_epi32(0x3f800000);
#define WITH_BITS(x, mask, y) _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), y, 0xea)
    for (int n0 = 0; n0 < HALF_PANEL; n0 += 8, from += 3 * TILE_BYTES) {
        __m512i words[3];
        UNROLL for (int w = 0; w < 3; w++) words[w] = _mm512_loadu_si512(from + w * TILE_BYTES);
        UNROLL for (int n = 0; n < 8; n++) {
            __m512i x[2];
            __m512 y[2];
            UNROLL for (int h = 0; h < 2; h++) {
                const int i = 2 * n + h, shift = 17 - 6 * (i % 5);
                const vu word = (vu)words[i < 15 ? i / 5 : 0];
                const vu moved = i == 15 ? word >> 13 : shift < 0 ? word >> -shift : word << shift;
                x[h] = WITH_BITS((__m512i)moved, i == 15 ? 0x060000 : 0x7e0000, one);
            }
            if (n == 7) {
                x[1] = WITH_BITS((__m512i)((vu)words[1] >> 11), 0x180000, x[1]);
                x[1] = WITH_BITS((__m512i)((vu)words[2] >> 9), 0x600000, x[1]);
            }
            UNROLL for (int h = 0; h < 2; h++) {
                const __m512 d = _mm512_set1_ps(s->d[h][n0 + n]), m = _mm512_set1_ps(s->m[h][n0 + n]);
                y[h] = _mm512_fmadd_ps((__m512)x[h], d, m);
            }
            _mm512_storeu_si512(to + TILE_BYTES * (n0 + n), (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
        }
    }
}

/* 8 bits with a sign. */
INLINE void look_up_8(const char *from, const left_scales_t *s, char *to) {
    UNROLL for (int n = 0; n < HALF_PANEL; n++, from += GROUP) {
        const __m512 d = _mm512_set1_ps(s->d[0][n]), m = _mm512_set1_ps(s->m[0][n]);
#define SIXTEEN(i) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + 16 * (i)))))
        const __m512 first = _mm512_fmadd_ps(SIXTEEN(0), d, m), second = _mm512_fmadd_ps(SIXTEEN(1), d, m);
        _mm512_storeu_si512(to + TILE_BYTES * n, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* Group `group` of half a panel as bfloat16, [32 outputs][32 inputs]. */
INLINE void look_up(const char *panel, int64_t group, int64_t half, char *to, const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP, g = group % per_block;
    const char *block = panel + group / per_block * block_bytes(format) * PANEL;
    const char *from = block + codes_at(g, half, format);
    left_scales_t scales;
    UNROLL for (int v = 0; v < HALF_PANEL; v += LANES) {
        const block_t b = block_at(panel, group / per_block, half * HALF_PANEL + v, format);
        const scales_t s = scales_of(b, g, format);
        UNROLL for (int h = 0; h < (format == Q6_K ? 2 : 1); h++) {
            store(scales.d[h] + v, format == Q6_K ? s.d[h] * 64.0f : s.d[h]);
            store(scales.m[h] + v, format == Q6_K ? s.d[h] * -96.0f : s.m[h]);
        }
    }
    /* A load sends a number to all lanes for nothing; without this GCC would permute registers. */
    __asm__("" : "+m"(scales));
    if (has_table(format)) look_up_4(from, &scales, to, format);
    else if (format == Q6_K) look_up_6(from, &scales, to);
    else look_up_8(from, &scales, to);
}
#else
INLINE void look_up(const char *panel, int64_t group, int64_t half, char *to, const int format) {
    (void)panel, (void)group, (void)half, (void)to, (void)format;
}
#endif

#define LOOK_UP_ALL(format)                                                                         \
    static void look_up_##format(const char *panel, int64_t group, int64_t half, char *to) {        \
        const char *next = panel + group * group_bytes(format) + CODES_AHEAD;                       \
        if (!half) prefetch_part(next, group_bytes(format));                                        \
        look_up(panel, group, half, to, format);                                                    \
    }
#if WITH_CODES
#define EACH_LEFT(f) f(Q4_0) f(Q4_1) f(Q4_K) f(MXFP4) f(INT4) f(Q6_K) f(Q8_0) f(INT8)
#else
#define EACH_LEFT(f)
#endif
EACH_LEFT(LOOK_UP_ALL)
typedef void look_up_t(const char *, int64_t, int64_t, char *);
#define LOOKER(format) [format] = look_up_##format,
static look_up_t *const LOOKERS[FORMATS] = {EACH_LEFT(LOOKER)};

/* ---- turning ---------------------------------------------------------------------------------- */

/* out[j][i] = x[i][j], 16 x 16 words of 32 bits; strides in bytes. Of x only `rows` rows are read. */
INLINE void turn(const char *x, int64_t x_stride, int64_t rows, char *out, int64_t out_stride) {
#if LANES == 16
    __m512 a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_loadu_ps(x + i * x_stride) : _mm512_setzero_ps();
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int n = 0; n < 2; n++) {
        const __m512d first = (__m512d)b[i + n], second = (__m512d)b[i + n + 2];
        a[i + 2 * n] = (__m512)_mm512_unpacklo_pd(first, second);
        a[i + 2 * n + 1] = (__m512)_mm512_unpackhi_pd(first, second);
    }
    UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int n = 0; n < 4; n++) {
        b[i + n] = _mm512_shuffle_f32x4(a[i + n], a[i + n + 4], 0x88);
        b[i + n + 4] = _mm512_shuffle_f32x4(a[i + n], a[i + n + 4], 0xdd);
    }
    UNROLL for (int n = 0; n < 8; n++) {
        const int j = n % 4 + n / 4 * 4;
        _mm512_storeu_ps(out + j * out_stride, _mm512_shuffle_f32x4(b[n], b[n + 8], 0x88));
        _mm512_storeu_ps(out + (j + 8) * out_stride, _mm512_shuffle_f32x4(b[n], b[n + 8], 0xdd));
    }
#else
    (void)x, (void)x_stride, (void)rows, (void)out, (void)out_stride;
#endif
}

/* ---- products --------------------------------------------------------------------------------- */

enum { PAIR_ROWS = 16, PAIRS_STEP = TILE_PAIRS * PAIR_ROWS * 4 };

/* out [step][pair][row] = rows [row][k], up to 16 of them; the others are 0. */
INLINE void pair_rows(const char *rows, int64_t stride, int64_t count, int64_t steps, char *out) {
    for (int64_t i = 0; i < steps; i++)
        turn(rows + i * TILE_BYTES, stride, count, out + i * PAIRS_STEP, 4 * PAIR_ROWS);
}

/* acc [output][row] of `halves` half panels from `half` on, for `width` rows, 1 to 16. numbers: 8 KiB. */
INLINE void multiply_looked_up(const char *panel, int64_t groups, int64_t half, int64_t halves,
                               side_t rows, int64_t width, look_up_t *look_up_one, char *numbers,
                               float *acc) {
#if HAVE_TILES
    enum { HALF_NUMBERS = PANEL / 2 * TILE_BYTES, TILE = TILE_ROWS * TILE_BYTES };
    shape_columns(width, width);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t g = 0; g < groups; g++, rows.at += rows.step) {
        char *to = numbers + g % 2 * 2 * HALF_NUMBERS;
        look_up_one(panel, g, half, to);
        if (halves == 2) look_up_one(panel, g, 1, to + HALF_NUMBERS);
        TILE_LOAD(6, rows.at, rows.stride);
        TILE_LOAD(4, to, TILE_BYTES);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(5, to + TILE, TILE_BYTES);
        TILE_DOT(1, 5, 6);
        if (halves == 1) continue;
        TILE_LOAD(4, to + 2 * TILE, TILE_BYTES);
        TILE_DOT(2, 4, 6);
        TILE_LOAD(5, to + 3 * TILE, TILE_BYTES);
        TILE_DOT(3, 5, 6);
    }
    char *out = (char *)acc;
    const int64_t stride = 4 * width;
    TILE_STORE(0, out, stride);
    TILE_STORE(1, out + TILE_ROWS * stride, stride);
    TILE_STORE(2, out + 2 * TILE_ROWS * stride, stride);
    TILE_STORE(3, out + 3 * TILE_ROWS * stride, stride);
#else
    (void)panel, (void)groups, (void)half, (void)halves, (void)rows;
    (void)width, (void)look_up_one, (void)numbers, (void)acc;
#endif
}
#endif
