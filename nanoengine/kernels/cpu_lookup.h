/* Codes in matrix tiles, for which it pays to have the 32 inputs of a group side by side: the rows of a
 * tile's left side. So the weights stand left, the rows of the call right, and a product is [output][row],
 * which is turned at its end. An element's bits are those of the other way round: see cpu_tiles.h.
 *
 * A group of codes of 4 or 5 bits has 16 or 32 numbers at most. These are rounded once, as a table, in which
 * one instruction looks up all 32 weights. A code c of 6 bits becomes the upper bits of a mantissa, 1 + c / 64.
 *
 * The codes of a group lie where cpu_codes.h has them, in another order. Of 4 bits: [half panel][4 outputs]
 * [4 k][output], a word of 16 bits for the codes that an output has of 4 k, the first one lowest. Of 5 bits:
 * [half panel][16 outputs][5][4 k], words of 64 bits for the codes that 16 outputs have of 4 k; see put_five_bits.
 * Of 6 bits: [half panel][8 outputs][3][k % 16], words of 32 bits for the 16 codes that 8 outputs have of two k;
 * see put_six_bits. Of 8 bits: [half panel][output][k].
 */
#ifndef NANOENGINE_CPU_LOOKUP_H
#define NANOENGINE_CPU_LOOKUP_H
#include "cpu_codes.h"
#include "cpu_tiles.h"

enum { HALF_PANEL = PANEL / 2, FOUR_BYTES = 2 * GROUP }; /* of the codes of four outputs */

int is_left_format(int64_t format) { return stands_left((int)format); }

/* Bytes of the codes of a group of half a panel. */
INLINE int64_t left_bytes(int format) { return HALF_PANEL * GROUP / 8 * bits_of(format); }

/* Where the codes of group g of half a panel of a block are. */
INLINE int64_t codes_at(int64_t g, int64_t half, const int format) {
    const int64_t before = first_scale(format) ? 0 : 4 * last_scale(format);
    return PANEL * (2 * FORMAT[format].halves + before) + (2 * g + half) * left_bytes(format);
}

/* Weight k of group g in a block's codes, as the file has them. */
INLINE unsigned code_in_file(const uint8_t *codes, int64_t g, int64_t k, int format) {
    unsigned low, high;
    switch (format) {
    case Q8_0:
    case INT8: return codes[k];
    case Q4_K: return codes[g / 2 * GROUP + k] >> (4 * (g % 2)) & 15;
    case Q2_K: return codes[g / 4 * GROUP + k] >> (2 * (g % 4)) & 3;
    case Q3_K: case IQ2: case IQ1:
        return (codes[GROUP + g / 4 * GROUP + k] >> (2 * (g % 4)) & 3) | (codes[k] >> g & 1) << 2;
    case IQ4_XS: case IQ3_XXS: case IQ3_S: return codes[g * 16 + k % 16] >> (4 * (k / 16)) & 15;
    case Q5_K:
        low = codes[GROUP + g / 2 * GROUP + k] >> (4 * (g % 2)) & 15, high = codes[k] >> g & 1;
        break;
    case Q5_0:
    case Q5_1:
        low = codes[4 + k % 16] >> (4 * (k / 16)) & 15, high = codes[k / 8] >> (k % 8) & 1;
        break;
    case Q6_K:
        low = codes[g / 4 * 64 + g % 2 * 32 + k] >> (4 * (g % 4 / 2)) & 15;
        high = codes[128 + g / 4 * 32 + k] >> (2 * (g % 4)) & 3;
        break;
    default: return codes[k % 16] >> (4 * (k / 16)) & 15;
    }
    return low | high << 4;
}

/* What outputs before n put into the words that it shares with them: nothing before the first of `many`. */
INLINE void resume_words(void *words, const char *from, size_t bytes, int64_t n, int64_t many) {
    if (n % many) memcpy(words, from, bytes);
    else memset(words, 0, bytes);
}

/* Put the codes of output n where look_up_4 has them. */
INLINE void put_four_bits(char *to, const uint16_t *codes, int64_t n) {
    to += n / 4 * FOUR_BYTES + n % 4 * 2;
    for (int64_t k = 0; k < GROUP; k += 4, to += 8) {
        const unsigned word = codes[k] | codes[k + 1] << 4 | codes[k + 2] << 8 | codes[k + 3] << 12;
        memcpy(to, &word, 2);
    }
}

/* The same for look_up_5, after those of the outputs before. Five words take the codes of 3 outputs each, and a bit
 * each of the last one's four codes. */
INLINE void put_five_bits(char *to, const uint16_t *codes, int64_t n) {
    uint64_t words[5][GROUP / 4];
    to += n / 16 * (int64_t)sizeof words;
    resume_words(words, to, sizeof words, n, 16);
    const int64_t i = n % 16;
    for (int64_t k = 0; k < GROUP && i < 15; k++)
        words[i / 3][k / 4] |= (uint64_t)codes[k] << (i % 3 * 20 + k % 4 * 5);
    for (int64_t w = 0; w < 5 && i == 15; w++)
        for (int64_t k = 0; k < GROUP; k++) words[w][k / 4] |= (uint64_t)(codes[k] >> w & 1) << (60 + k % 4);
    memcpy(to, words, sizeof words);
}

/* The same for look_up_6. Three words take 5 codes each, the first one lowest, and 2 bits each of the last
 * code. */
INLINE void put_six_bits(char *to, const uint16_t *codes, int64_t n) {
    uint32_t words[3][GROUP / 2];
    to += n / 8 * (int64_t)sizeof words;
    resume_words(words, to, sizeof words, n, 8);
    for (int64_t h = 0; h < 2; h++, codes += GROUP / 2) {
        const int64_t i = n % 8 * 2 + h;
        for (int64_t k = 0; k < GROUP / 2 && i < 15; k++) words[i / 5][k] |= (uint32_t)codes[k] << (i % 5 * 6);
        for (int64_t w = 0; w < 3 && i == 15; w++)
            for (int64_t k = 0; k < GROUP / 2; k++) words[w][k] |= (codes[k] >> (2 * w) & 3u) << 30;
    }
    memcpy(to, words, sizeof words);
}

/* Put the codes of one output's blocks, as the file has them, into its column of a panel. */
INLINE void pack_left_of(const char *blocks, int64_t count, char *panel, int64_t column, const int format) {
    const format_t f = FORMAT[format];
    const int64_t half = column % PANEL / HALF_PANEL, n = column % HALF_PANEL;
    for (int64_t b = 0; b < count; b++, blocks += file_bytes(format))
        for (int64_t g = 0; g < f.weights / GROUP; g++) {
            const uint8_t *from = (const uint8_t *)blocks + f.words_at;
            char *to = panel + b * block_bytes(format) * PANEL + codes_at(g, half, format);
            uint16_t codes[GROUP];
            if (!first_scale(format)) from += 4 * last_scale(format);
            UNROLL for (int h = 0; h < 2; h++)
                for (int64_t k = 0; k < GROUP / 2; k++)
                    codes[16 * h + k] = (uint16_t)code_in_file(from, g, 16 * h + k, format);
            switch (bits_of(format)) {
            case 4: put_four_bits(to, codes, n); break;
            case 5: put_five_bits(to, codes, n); break;
            case 6: put_six_bits(to, codes, n); break;
            default: for (int64_t k = 0; k < GROUP; k++) to[n * GROUP + k] = (char)codes[k];
            }
        }
}

#if HAVE_TILES
/* What the codes from `first` to `first` + 15 stand for, before scale and minimum. */
INLINE __m512 levels_of(int first, const levels_t *levels, const int format) {
    const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (__m512)code((vu)_mm512_add_epi32(codes, _mm512_set1_epi32(first)), 0, levels, format);
}

typedef struct { float d[2][HALF_PANEL], m[2][HALF_PANEL]; } left_scales_t; /* as scales_t */

/* Where the codes of four numbers lie in 64 bits, for both bytes of each: from bit `first` on, `step` bits apart. */
INLINE __m512i four_places(int first, int step) {
    uint64_t bits = 0;
    UNROLL for (int i = 0; i < 4; i++) bits |= (uint64_t)((first + i * step + 64) % 64) * 0x0101 << (16 * i);
    return _mm512_set1_epi64((int64_t)bits);
}

/* Bytes are looked up, of which number c has those at 2 c and 2 c + 1: a look-up of words takes twice the time. So
 * a code is read from the bit before it on. */
#define NUMBERS(levels, n) _mm512_fmadd_ps(levels, _mm512_set1_ps(s->d[0][n]), _mm512_set1_ps(s->m[0][n]))
#define TABLE(levels, n, more, m) (__m512i)_mm512_cvtne2ps_pbh(NUMBERS(more, m), NUMBERS(levels, n))
#define CODES(words, first, step) _mm512_multishift_epi64_epi8(four_places((first) - 1, step), words)
#define WITH_BYTES(codes, mask, bytes) _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(2 * (mask)), bytes, 0xea)
#define LOOK_UP(n, table, at) _mm512_storeu_si512(to + TILE_BYTES * (n), _mm512_permutexvar_epi8(at, table))

/* 4 bits: tables of two outputs each. */
INLINE void look_up_4(const char *from, const levels_t *of, const left_scales_t *s, char *to, const int format) {
    const __m512 levels = levels_of(0, of, format);
    const __m512i bytes[2] = {_mm512_set1_epi16(0x0100), _mm512_set1_epi16(0x2120)};
    UNROLL for (int n = 0; n < HALF_PANEL; n += 2) {
        const __m512i words = _mm512_loadu_si512(from + n / 4 * FOUR_BYTES), table = TABLE(levels, n, levels, n + 1);
        UNROLL for (int i = 0; i < 2; i++)
            LOOK_UP(n + i, table, WITH_BYTES(CODES(words, 16 * (n % 4 + i), 4), 15, bytes[i]));
    }
}

/* 5 bits: a table each. */
INLINE void look_up_5(const char *from, const left_scales_t *s, char *to, const int format) {
    const __m512 low = levels_of(0, NULL, format), high = levels_of(16, NULL, format);
    const __m512i bytes = _mm512_set1_epi16(0x0100);
    for (int n0 = 0; n0 < HALF_PANEL; n0 += 16, from += 5 * TILE_BYTES) {
        __m512i words[5], last = bytes;
        UNROLL for (int w = 0; w < 5; w++) {
            words[w] = _mm512_loadu_si512(from + w * TILE_BYTES);
            last = WITH_BYTES(CODES(words[w], 60 - w, 1), 1 << w, last);
        }
        UNROLL for (int i = 0; i < 16; i++) {
            const __m512i codes = CODES(words[i < 15 ? i / 3 : 0], i % 3 * 20, 5);
            LOOK_UP(n0 + i, TABLE(low, n0 + i, high, n0 + i), i < 15 ? WITH_BYTES(codes, 31, bytes) : last);
        }
    }
}

/* Bit `first` of each word of 32 bits, and those after it, where the upper 6 bits of a mantissa are; the other bits
 * may be anything. Unlike a shift this leaves the CPU's port for fused steps alone, which is the only one as long as
 * tiles are in use. */
INLINE __m512i to_mantissas(__m512i words, int first) {
    const int64_t bits = (first + 63) % 64 << 16 | (int64_t)(first + 31) << 48;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(bits), words);
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
                const int i = 2 * n + h;
                const __m512i moved = to_mantissas(words[i < 15 ? i / 5 : 0], i < 15 ? 6 * (i % 5) : 30);
                x[h] = WITH_BITS(moved, i == 15 ? 0x060000 : 0x7e0000, one);
            }
            if (n == 7) {
                x[1] = WITH_BITS(to_mantissas(words[1], 28), 0x180000, x[1]);
                x[1] = WITH_BITS(to_mantissas(words[2], 26), 0x600000, x[1]);
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
INLINE void look_up(const char *panel, const levels_t *levels, int64_t group, int64_t half, char *to,
                    const int format) {
    const int64_t per_block = FORMAT[format].weights / GROUP, g = group % per_block;
    const char *block = panel + group / per_block * block_bytes(format) * PANEL;
    const char *from = block + codes_at(g, half, format);
    left_scales_t scales;
    UNROLL for (int v = 0; v < HALF_PANEL; v += LANES) {
        const block_t b = block_at(panel, group / per_block, half * HALF_PANEL + v, format);
        const scales_t s = scales_of(b, g, format);
        for (int h = 0; h < 1 + (format == Q6_K); h++) {
            store(scales.d[h] + v, format == Q6_K ? s.d[h] * 64.0f : s.d[h]);
            store(scales.m[h] + v, format == Q6_K ? s.d[h] * -96.0f : s.m[h]);
        }
    }
    /* A load sends a number to all lanes for nothing; without this GCC would permute registers. */
    __asm__("" : "+m"(scales));
    switch (bits_of(format)) {
    case 4: look_up_4(from, levels, &scales, to, format); break;
    case 5: look_up_5(from, &scales, to, format); break;
    case 6: look_up_6(from, &scales, to); break;
    default: look_up_8(from, &scales, to);
    }
}
#else
INLINE void look_up(const char *panel, const levels_t *levels, int64_t group, int64_t half, char *to,
                    const int format) {
    (void)panel, (void)levels, (void)group, (void)half, (void)to, (void)format;
}
#endif

#define LEFT_FUNCTIONS(format)                                                                      \
    static void look_up_##format(const char *panel, const levels_t *levels, int64_t group,          \
                                 int64_t half, char *to) {                                          \
        const char *next = panel + group * group_bytes(format) + CODES_AHEAD;                       \
        if (!half) prefetch_part(next, group_bytes(format));                                        \
        if (IS_HELD(format)) look_up(panel, levels, group, half, to, format);                       \
    }                                                                                               \
    static void pack_left_##format(const char *blocks, int64_t count, char *panel, int64_t column) { \
        if (IS_HELD(format)) pack_left_of(blocks, count, panel, column, format);                    \
    }
#if HAVE_TILES
#define EACH_LEFT(f) f(Q4_0) f(Q4_1) f(Q4_K) f(MXFP4) f(INT4) f(IQ4_NL) f(IQ4_XS) f(Q5_0) f(Q5_1) f(Q5_K) f(Q6_K) \
    f(Q8_0) f(INT8)
#else
#define EACH_LEFT(f)
#endif
EACH_LEFT(LEFT_FUNCTIONS)
typedef void look_up_t(const char *, const levels_t *, int64_t, int64_t, char *);
#define LOOKER(format) [format] = look_up_##format,
static look_up_t *const LOOKERS[FORMATS] = {EACH_LEFT(LOOKER)};
typedef void pack_left_t(const char *, int64_t, char *, int64_t);
#define LEFT_PACKER(format) [format] = pack_left_##format,
static pack_left_t *const LEFT_PACKERS[FORMATS] = {EACH_LEFT(LEFT_PACKER)};

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
INLINE void multiply_looked_up(const char *panel, const levels_t *levels, int64_t groups, int64_t half, int64_t halves,
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
        look_up_one(panel, levels, g, half, to);
        if (halves == 2) look_up_one(panel, levels, g, 1, to + HALF_NUMBERS);
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
    (void)panel, (void)levels, (void)groups, (void)half, (void)halves, (void)rows;
    (void)width, (void)look_up_one, (void)numbers, (void)acc;
#endif
}
#endif
