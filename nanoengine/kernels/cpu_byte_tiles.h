/* The products of cpu_int8.h in matrix tiles of bytes (AMX-INT8), a group of 16 rows by 16 outputs at a time. The
 * integers are exact, and an output is the same chain over its groups: it has the bits that vectors give.
 *
 * A tile holds the codes of 16 outputs as bytes_of has them, but without the bias, for here both sides have signs. Of
 * formats where half a group has its own scale, each half is a tile, in which the other half is 0.
 */
#ifndef NANOENGINE_CPU_BYTE_TILES_H
#define NANOENGINE_CPU_BYTE_TILES_H
#include "cpu_int8.h"
#include "cpu_tiles.h"

enum { LEAST_FOR_TILES = TILE_ROWS }; /* rows; fewer are multiplied in vectors */
enum { TILED_GROUPS = 8, TILES = PANEL / TILE_COLUMNS }; /* groups that are tiles at one time, in L1 */

typedef struct { /* groups of up to a panel of outputs, and the integers of one */
    uint8_t codes[TILES][TILED_GROUPS][2][GROUP / 4][TILE_BYTES];
    float d[TILES][TILED_GROUPS][2][TILE_COLUMNS], m[TILES][TILED_GROUPS][2][TILE_COLUMNS];
    int32_t integers[2][TILE_ROWS][TILE_COLUMNS];
} __attribute__((aligned(64))) byte_tiles_t;

#if HAVE_BYTE_TILES
/* Group g of the blocks b of 16 outputs becomes group n of tiles `at`. */
INLINE void fill_tile(block_t b, const levels_t *levels, const int g, byte_tiles_t *t, int64_t at, int64_t n,
                      const int format) {
    const __m512i bias = _mm512_set1_epi8((char)bias_of(format));
    keep_groups_apart(format);
    const scales_t scales = scales_of(b, g, format);
    vu codes[8];
    bytes_of(b, levels, g, format, codes);
    UNROLL for (int i = 0; i < 8; i++) {
        const int half = i / 4 % halves_of(format);
        store(t->codes[at][n][half][i], (vf)_mm512_sub_epi8((__m512i)codes[i], bias));
        if (halves_of(format) == 2) store(t->codes[at][n][1 - half][i], (vf){0});
    }
    UNROLL for (int h = 0; h < halves_of(format); h++) {
        store(t->d[at][n][h], scales.d[h]);
        if (has_minima(format)) store(t->m[at][n][h], scales.m[h]);
    }
}

/* The groups [first, first + count), whole blocks, of the outputs [column, column + columns) of a panel. */
INLINE void fill_tiles(const char *panel, const levels_t *levels, int64_t first, int64_t count, int64_t column,
                       int64_t columns, byte_tiles_t *t, const int format) {
    const int per_block = (int)(FORMAT[format].weights / GROUP);
    const int64_t bytes = group_bytes(format);
    const char *next = panel + first * bytes + BYTES_AHEAD;
    for (int64_t n = 0; n < count; n += per_block)
        UNROLL for (int g = 0; g < per_block; g++) {
            next = prefetch_bytes(next, bytes);
            for (int64_t at = 0; at < columns / LANES; at++) {
                const block_t b = block_at(panel, (first + n) / per_block, column + at * LANES, format);
                fill_tile(b, levels, g, t, at, n + g, format);
            }
        }
}

/* s + a row's group x by tile `at` of outputs; r: where its integers are. */
INLINE vf with_group(vf s, const byte_tiles_t *t, int64_t at, int64_t n, const rounded_t *x, int64_t r,
                     const int format) {
    UNROLL for (int h = 0; h < halves_of(format); h++) {
        const vi integers = (vi)load((const float *)t->integers[h][r]);
        s = fused(load(t->d[at][n][h]) * x->scale, __builtin_convertvector(integers, vf), s);
    }
    if (has_minima(format))
        UNROLL for (int h = 0; h < halves_of(format); h++) s = fused(load(t->m[at][n][h]), splat(sum_of(x, h)), s);
    return s;
}

/* acc[r][c] = or += up to 16 rows x by `count` groups of 16 outputs; x: a group every `stride`. Sums of `is_whole`
 * 16 rows stay in registers. */
INLINE void multiply_byte_tiles(byte_tiles_t *t, int64_t at, int64_t count, const rounded_t *x, int64_t stride,
                                int64_t rows, float *acc, int is_first, const int is_whole, const int format) {
    vf s[TILE_ROWS];
    UNROLL for (int r = 0; r < TILE_ROWS && is_whole; r++) s[r] = is_first ? (vf){0} : load(acc + r * PANEL);
    for (int64_t n = 0; n < count; n++, x += stride, is_first = 0) {
        TILE_LOAD(4, x, sizeof *x);
        TILE_LOAD(6, t->codes[at][n][0], TILE_BYTES);
        TILE_ZERO(0);
        TILE_DOT_BYTES(0, 4, 6);
        TILE_STORE(0, t->integers[0], TILE_BYTES);
        if (halves_of(format) == 2) {
            TILE_LOAD(7, t->codes[at][n][1], TILE_BYTES);
            TILE_ZERO(1);
            TILE_DOT_BYTES(1, 4, 7);
            TILE_STORE(1, t->integers[1], TILE_BYTES);
        }
        UNROLL for (int r = 0; r < TILE_ROWS && is_whole; r++) s[r] = with_group(s[r], t, at, n, x + r, r, format);
        for (int64_t r = 0; r < rows && !is_whole; r++) {
            const vf before = is_first ? (vf){0} : load(acc + r * PANEL);
            store(acc + r * PANEL, with_group(before, t, at, n, x + r, r, format));
        }
    }
    UNROLL for (int r = 0; r < TILE_ROWS && is_whole; r++) store(acc + r * PANEL, s[r]);
}

/* As multiply_rounded, of a multiple of 16 rows, or of 1 to 15; `stride`: rows of x. */
INLINE void multiply_rows_in_tiles(const char *panel, const levels_t *levels, int64_t groups, int64_t column,
                                   int64_t columns, const rounded_t *x, int64_t stride, int64_t rows,
                                   byte_tiles_t *t, float *acc, const int format) {
    shape_byte_tiles(min64(rows, TILE_ROWS));
    for (int64_t first = 0, count; first < groups; first += count, x += count * stride) {
        count = min64(TILED_GROUPS, groups - first);
        fill_tiles(panel, levels, first, count, column, columns, t, format);
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            for (int64_t at = 0; at < columns / LANES; at++) {
                float *its = acc + r * PANEL + at * LANES;
                if (rows >= TILE_ROWS)
                    multiply_byte_tiles(t, at, count, x + r, stride, TILE_ROWS, its, first == 0, 1, format);
                else multiply_byte_tiles(t, at, count, x, stride, rows, its, first == 0, 0, format);
            }
    }
}

#define MULTIPLY_IN_TILES(format)                                                                   \
    static void multiply_in_tiles_##format(const char *panel, const levels_t *levels, int64_t groups, \
                                           int64_t column, int64_t columns, const rounded_t *x,     \
                                           int64_t rows, byte_tiles_t *t, float *acc) {             \
        if (!IS_HELD(format)) return;                                                               \
        const int64_t whole = rows / TILE_ROWS * TILE_ROWS;                                         \
        multiply_rows_in_tiles(panel, levels, groups, column, columns, x, rows, whole, t, acc, format); \
        if (whole < rows)                                                                           \
            multiply_rows_in_tiles(panel, levels, groups, column, columns, x + whole, rows,         \
                                   rows - whole, t, acc + whole * PANEL, format);                   \
    }
EACH_INTEGERS(MULTIPLY_IN_TILES)
#define IN_TILES(format) [format] = multiply_in_tiles_##format,
#else
#define IN_TILES(format)
#endif
typedef void multiply_in_tiles_t(const char *, const levels_t *, int64_t, int64_t, int64_t, const rounded_t *, int64_t,
                                 byte_tiles_t *, float *);
/* By format, of LEAST_FOR_TILES rows or more; only where there are such tiles. */
static multiply_in_tiles_t *const TILE_MULTIPLIERS[FORMATS] = {EACH_INTEGERS(IN_TILES)};
#endif
