/* For builds under a sanitizer, which sees nothing of what assembly and masked instructions read and
 * write: AVX512-BF16, AMX and masked loads and stores in C, and VBMI where the CPU lacks it. So a CPU that lacks
 * these, but has AVX-512, runs their code, too. Denormals are not flushed.
 *
 * Included before a C file of ours, with __AVX512BF16__, __AMX_TILE__, __AMX_BF16__ and __AMX_INT8__ defined.
 */
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* The compiler's own header asks these whether it has to allow the instructions. */
#pragma push_macro("__AVX512BF16__")
#pragma push_macro("__AMX_BF16__")
#pragma push_macro("__AMX_INT8__")
#pragma push_macro("__AMX_TILE__")
#undef __AVX512BF16__
#undef __AMX_BF16__
#undef __AMX_INT8__
#undef __AMX_TILE__
#include <immintrin.h>
#pragma pop_macro("__AVX512BF16__")
#pragma pop_macro("__AMX_BF16__")
#pragma pop_macro("__AMX_INT8__")
#pragma pop_macro("__AMX_TILE__")

/* ---- masked loads and stores ------------------------------------------------------------------ */

static inline void copy_masked(void *to, const void *from, uint32_t mask, int size) {
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1)
            memcpy((char *)to + i * size, (const char *)from + i * size, (size_t)size);
}
static inline __m512i load_masked_512(uint32_t mask, const void *from) {
    __m512i x = _mm512_setzero_si512();
    copy_masked(&x, from, mask, 2);
    return x;
}
static inline __m256i load_masked_256(uint32_t mask, const void *from) {
    __m256i x = _mm256_setzero_si256();
    copy_masked(&x, from, mask, 2);
    return x;
}
static inline void store_masked_512(void *to, uint32_t mask, __m512 x) {
    copy_masked(to, &x, mask, 4);
}
static inline void store_masked_256(void *to, uint32_t mask, __m256i x) {
    copy_masked(to, &x, mask, 2);
}
#define _mm512_maskz_loadu_epi16(mask, from) load_masked_512(mask, from)
#define _mm256_maskz_loadu_epi16(mask, from) load_masked_256(mask, from)
#define _mm512_mask_storeu_ps(to, mask, x) store_masked_512(to, mask, x)
#define _mm256_mask_storeu_epi16(to, mask, x) store_masked_256(to, mask, x)

/* ---- AVX512-BF16 ------------------------------------------------------------------------------ */

static inline __m512 odd_halves(__m512i x) {
    return (__m512)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000));
}
static inline __m512 even_halves(__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); }

static inline __m512 dot_of_pairs(__m512 acc, __m512i a, __m512i b) {
    acc = _mm512_fmadd_ps(odd_halves(a), odd_halves(b), acc);
    return _mm512_fmadd_ps(even_halves(a), even_halves(b), acc);
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline __m256i narrow_16(__m512 x) {
    const __m512i u = (__m512i)x, one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i nan = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, nan), 16));
}
static inline __m512i narrow_32(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow_16(low)), narrow_16(high), 1);
}
#define _mm512_dpbf16_ps(acc, a, b) dot_of_pairs(acc, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtneps_pbh(x) narrow_16(x)
#define _mm512_cvtne2ps_pbh(high, low) narrow_32(high, low)

/* ---- AVX512-VBMI ------------------------------------------------------------------------------ */

#ifndef __AVX512VBMI__
#define __AVX512VBMI__ 1
static inline __m512i permuted_bytes(__m512i index, __m512i table) {
    uint8_t at[64], from[64], to[64];
    memcpy(at, &index, sizeof at), memcpy(from, &table, sizeof from);
    for (int i = 0; i < 64; i++) to[i] = from[at[i] & 63];
    return _mm512_loadu_si512(to);
}
/* Each byte: 8 bits of its 64, from the bit on that `places` says. */
static inline __m512i shifted_bytes(__m512i places, __m512i words) {
    uint8_t at[64], to[64];
    uint64_t from[8];
    memcpy(at, &places, sizeof at), memcpy(from, &words, sizeof from);
    for (int i = 0; i < 64; i++) {
        const int first = at[i] & 63;
        to[i] = (uint8_t)(from[i / 8] >> first | from[i / 8] << (64 - first) % 64);
    }
    return _mm512_loadu_si512(to);
}
#define _mm512_permutexvar_epi8(index, table) permuted_bytes(index, table)
#define _mm512_multishift_epi64_epi8(places, words) shifted_bytes(places, words)
#endif

/* ---- AMX -------------------------------------------------------------------------------------- */

typedef struct { /* rows 0: no shape yet */
    int rows, row_bytes;
    char at[16][64];
} tile_in_memory_t;
static _Thread_local tile_in_memory_t tiles_in_memory[8];

/* Where the CPU would end the process, this does. */
static inline void needs(int is_so) {
    if (!is_so) abort();
}
static inline tile_in_memory_t *shaped_tile(int tile) {
    needs(tiles_in_memory[tile].rows > 0);
    return &tiles_in_memory[tile];
}

/* From what LDTILECFG takes: a palette, 15 bytes, 16 times the bytes of a row, 16 times rows. */
static inline void tile_shape(const void *config) {
    const uint8_t *bytes = config;
    static const uint8_t none[15];
    needs(bytes[0] == 1 && !memcmp(bytes + 1, none, sizeof none));
    memset(tiles_in_memory, 0, sizeof tiles_in_memory);
    for (int i = 0; i < 8; i++) {
        tile_in_memory_t *t = &tiles_in_memory[i];
        t->rows = bytes[48 + i], t->row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
        needs(t->rows <= 16 && t->row_bytes <= 64 && !t->rows == !t->row_bytes);
    }
}
static inline void tile_zero(int tile) {
    tile_in_memory_t *t = shaped_tile(tile);
    memset(t->at, 0, sizeof t->at);
}
static inline void tile_load(int tile, const void *from, int64_t stride) {
    tile_in_memory_t *t = shaped_tile(tile);
    tile_zero(tile);
    for (int r = 0; r < t->rows; r++)
        memcpy(t->at[r], (const char *)from + r * stride, (size_t)t->row_bytes);
}
static inline void tile_store(int tile, void *to, int64_t stride) {
    const tile_in_memory_t *t = shaped_tile(tile);
    for (int r = 0; r < t->rows; r++)
        memcpy((char *)to + r * stride, t->at[r], (size_t)t->row_bytes);
}

/* Adds the sum of two chains, over what lies at even and what lies at odd k. */
static inline void tile_dot(int acc, int left, int right) {
    tile_in_memory_t *c = shaped_tile(acc);
    const tile_in_memory_t *a = shaped_tile(left), *b = shaped_tile(right);
    needs(a->row_bytes == 4 * b->rows && c->rows == a->rows && c->row_bytes == b->row_bytes);
    for (int r = 0; r < a->rows; r++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int p = 0; p < b->rows; p++) {
            int32_t pair;
            memcpy(&pair, a->at[r] + 4 * p, sizeof pair);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(b->at[p]);
            even = _mm512_fmadd_ps(even_halves(x), even_halves(y), even);
            odd = _mm512_fmadd_ps(odd_halves(x), odd_halves(y), odd);
        }
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(c->at[r]), _mm512_add_ps(even, odd));
        _mm512_storeu_ps(c->at[r], sum);
    }
}
/* Adds products of bytes, all of them with a sign. */
static inline void tile_dot_bytes(int acc, int left, int right) {
    tile_in_memory_t *c = shaped_tile(acc);
    const tile_in_memory_t *a = shaped_tile(left), *b = shaped_tile(right);
    needs(a->row_bytes == 4 * b->rows && c->rows == a->rows && c->row_bytes == b->row_bytes);
    for (int r = 0; r < a->rows; r++)
        for (int n = 0; n < c->row_bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, c->at[r] + 4 * n, sizeof sum);
            for (int k = 0; k < a->row_bytes; k++)
                sum += (int8_t)a->at[r][k] * (int8_t)b->at[k / 4][4 * n + k % 4];
            memcpy(c->at[r] + 4 * n, &sum, sizeof sum);
        }
}
#define TILE_SHAPE(shapes) tile_shape(&(shapes))
#define TILE_LOAD(tile, from, stride) tile_load(tile, from, stride)
#define TILE_PASS(tile, from, stride) tile_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) tile_store(tile, to, stride)
#define TILE_ZERO(tile) tile_zero(tile)
#define TILE_DOT(acc, left, right) tile_dot(acc, left, right)
#define TILE_DOT_BYTES(acc, left, right) tile_dot_bytes(acc, left, right)
#define TILE_RELEASE() memset(tiles_in_memory, 0, sizeof tiles_in_memory)
#define syscall(...) 0 /* allow_tiles asks Linux */
#endif
