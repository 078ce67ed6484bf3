/* A packed weight, a call that multiplies with it, and how numbers are made of a panel of codes. */
#ifndef NANOENGINE_CPU_PANELS_H
#define NANOENGINE_CPU_PANELS_H

#ifndef MODE /* of numbers and activations: F32 or BF16_PAIRS */
#define MODE BF16_PAIRS
#endif
#ifndef WITH_ROUNDED /* whether rows may be rounded to 8 bits */
#define WITH_ROUNDED 0
#endif
#include "cpu_bf12.h"
#include "cpu_code_sums.h"
#include "cpu_int8.h"
#include "cpu_lookup.h"
#include "cpu_tiles.h"
#include "cpu_byte_tiles.h"

enum { HALF = PANEL / 2, HALF_VECS = HALF / LANES, VECS = PANEL / LANES };
enum { TURN = 16 };               /* outputs of gate and up that take turns */
enum { ROWS = LANES >= 8 ? 6 : 3 }; /* 6 * 4 accumulators of 32 registers, 6 * 2 of 16, or 3 * 8 */
/* Words of k that stay in a cache while rows pass by: 256 KiB of a panel in L2, or, where there
 * are fewer registers, 16 KiB of half a panel in L1. */
enum { CHUNK = LANES == 16 ? 1024 : 128 };
enum { COLD_ROWS = LANES == 16 ? ROWS : 3 }; /* of a register block that is as wide as what memory sends */
enum { BLOCK_BYTES = 512 << 10 }; /* activations of a row block: with a panel's chunk, about L2 */
enum { BLOCK_ROWS = 64 * 6 };
enum { STRIP = 4, STRIP_BYTES = STRIP * PANEL * 4 };
enum { PRIVATE_BYTES = 64 << 10 }; /* normed, rounded or copied rows that every thread makes for itself */
/* A chunk of k of rows that lie a multiple of CROWDED apart fills few sets of L1 and L2. With 16 registers, where
 * chunks are short, made rows lie ROOM further apart: 3 to 8 % of a product of 8 rows and more on a Zen 3. */
enum { CROWDED = 2048, ROOM = 512, BUFFER_BYTES = PRIVATE_BYTES + PRIVATE_BYTES / CROWDED * ROOM };
enum { ROUNDED_ROWS = 128 };       /* most of a block: their sums are in L1, or near it */
/* Groups of codes that are numbers at one time: of many rows as CHUNK, of few in L1; of those of SLICED_ROWS on, where
 * registers are 16, as slices of TURN outputs each: see multiply_sliced. */
enum { MANY_GROUPS = LANES == 16 ? 16 : 4, FEW_GROUPS = 1, SLICED_GROUPS = 8, SLICED_ROWS = 15 };
/* Most of a block of these: as many rows as are in L2, whatever else is. On a Zen 3 products with slices reach 87 % of
 * what registers can, of 192 rows 77, and of 384 rows 70. */
enum { SLICED_BLOCK = 96 };
/* In matrix tiles: 18 steps of half a panel are 36 KiB, which stay in L1 while rows pass it by; as many of
 * 256 rows are 288 KiB, which stay in L2 with the sums of 8 half panels. Where these steps are all of k no sums
 * stay, and rows are twice as many. */
enum { TILED_ROWS = 2 * TILE_ROWS, TILE_K = 2 * TILE_PAIRS, STEP_BYTES = HALF * TILE_K * 2 };
enum { CHUNK_STEPS = 18, FEW_STEPS = 2, HALVES_AT_ONCE = 8, TILED_BLOCK = 256 };
/* Up to 192 rows each take 12 bits apart by themselves, 32 at a time, and what stays in L2 is a MiB of rows. */
enum { GROUPS_OF_12 = 6, CHUNK_OF_12 = 1 << 20 };
enum { SUMS = HAVE_TILES ? TILED_BLOCK * HALVES_AT_ONCE * HALF : BLOCK_ROWS * PANEL };
enum { STORE, ADD, FLOAT, SILU_MUL = FLOAT + SILU, GELU_MUL, SWIGLU_MUL };

typedef struct { /* one packed weight: filled by packed_weight.py */
    const char *panels;
    const float *bias;       /* [panels * PANEL] in the order of the panels, or NULL */
    const char *norm_weight; /* [k], or NULL: norm the activations first */
    int64_t outputs, k, activation, is_tiled; /* activation: of gates, or 0; is_tiled: in matrix tiles */
    int64_t format; /* DENSE, or of codes */
    int64_t is_rounded; /* rows are rounded to 8 bits: see cpu_int8.h */
    int64_t has_byte_tiles; /* many of these may be multiplied in tiles: see cpu_byte_tiles.h */
    int64_t is_norm_bf16; /* norm_weight is in bfloat16, else in float32 */
    double eps;
} weight_t;

typedef struct { /* one call, filled by packed_weight.py; strides in bytes */
    const weight_t *w;
    const char *x;
    char *out;
    /* normed, rounded or copied rows, made_stride apart, where they are more than PRIVATE_BYTES; then arranged ones */
    char *made;
    int64_t x_stride, out_stride, rows, epilogue, threads;
} call_t;

typedef struct { int64_t count; call_t calls[]; } calls_t; /* filled by packed_product.py */

enum { ITEM = MODE == F32 ? 4 : 2, GROUP_WORDS = GROUP * ITEM / 4 }; /* bytes of a number */
/* Of 12 bits, whose blocks are 16 of k: words of k of a block as numbers, and the blocks that are 128 KiB. */
enum { BLOCK12_WORDS = BLOCK_K * ITEM / 4, CHUNK_BLOCKS = (128 << 10) / (4 * PANEL * BLOCK12_WORDS) };
/* With vectors of 256 bits: up to so many rows take 12 bits apart in registers; and the blocks, of 1.5 KiB, that stay
 * in L1 while one register block of rows makes its passes. With more register blocks they are twice as many. */
enum { FEW_OF_12 = 16, RUN_OF_12 = 4 };
INLINE int64_t words_of(const weight_t *w) { return ceil_div(w->k * ITEM, 4); }

/* Whether rows are rounded to 8 bits; a constant where nothing is compiled for it. */
INLINE int is_rounded(const weight_t *w) { return WITH_ROUNDED && w->is_rounded; }

/* From one row to the next of those that are normed or copied. */
INLINE int64_t made_stride(const weight_t *w) {
    const int64_t width = w->k * ITEM;
    return LANES == 8 && !is_rounded(w) && width % CROWDED == 0 ? width + ROOM : width;
}

/* Whether a product shapes tiles, which are released when all is done. */
INLINE int uses_tiles(const weight_t *w) { return w->is_tiled || w->has_byte_tiles; }

/* Outputs of all panels, of gate and up together. */
INLINE int64_t columns_of(const weight_t *w) {
    return ceil_div(ceil_div(w->outputs, TURN) * TURN * (w->activation ? 2 : 1), PANEL) * PANEL;
}

/* Where the panel with this output begins. */
INLINE const char *panel_of(const weight_t *w, int64_t column) {
    const int64_t dense = words_of(w) * PANEL * 4, panel = column / PANEL;
    if (w->format == BF12) return w->panels; /* a block is found by itself */
    if (w->format == DENSE) return w->panels + panel * dense;
    return w->panels + panel * (w->k / FORMAT[w->format].weights) * block_bytes(w->format) * PANEL;
}

#if HAVE_BF12
INLINE bf12_t in_12_bits(const weight_t *w) { return bf12_at(w->panels, columns_of(w) / PANEL * (w->k / BLOCK_K)); }

/* As `unpack`, of a weight in 12 bits; with vectors of 512 bits numbers lie side by side. */
static void unpack_12_bits(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                           unpacked_t to) {
    const bf12_t held = in_12_bits(w);
    const int64_t first = column / PANEL * (w->k / BLOCK_K);
#if LANES == 16
    unpack_bf12_t *const block = BF12_UNPACKERS[columns == PANEL ? BOTH_HALVES : column % PANEL / HALF];
    for (int64_t i = begin * GROUP / BLOCK_K; i < end * GROUP / BLOCK_K; i++, to.at += 4 * BLOCK12_WORDS * columns)
        block(held, first + i, to.at);
#else
    enum { QUARTER = PANEL / QUARTERS };
    const int quarter = (int)(column % PANEL / QUARTER), last = quarter + (int)(columns / QUARTER);
    for (int64_t i = begin * GROUP / BLOCK_K; i < end * GROUP / BLOCK_K; i++) {
        unpack_bf12(held, first + i, to, quarter, last);
        to.at += i % 2 ? to.group - BLOCK_K * to.word : BLOCK_K * to.word; /* two blocks are a group */
    }
#endif
}

/* As `unpack_half`, of a weight in 12 bits. */
static void unpack_half_12_bits(const weight_t *w, int64_t begin, int64_t end, char *to) {
#if LANES == 16
    const bf12_t held = in_12_bits(w);
    for (; begin < end; begin++, to += NUMBERS_BYTES) unpack_bf12_tiled(held, begin, to);
#else
    (void)w, (void)begin, (void)end, (void)to; /* there are no tiles */
#endif
}

INLINE const char *line_of_block(const weight_t *w, int64_t block) {
    const bf12_t held = in_12_bits(w);
    return held.lines + LINE * (int64_t)held.starts[block];
}
#else
static void unpack_12_bits(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                           unpacked_t to) {
    (void)w, (void)column, (void)columns, (void)begin, (void)end, (void)to;
}
static void unpack_half_12_bits(const weight_t *w, int64_t begin, int64_t end, char *to) {
    (void)w, (void)begin, (void)end, (void)to;
}
INLINE const char *line_of_block(const weight_t *w, int64_t block) { return w->panels + block; }
#endif

/* Whether codes are multiplied as they are: see cpu_code_sums.h. */
INLINE int sums_codes(const weight_t *w) {
    return !w->is_tiled && !is_rounded(w) && is_summed((int)w->format);
}

/* The groups [begin, end) of k of the outputs [column, column + columns), which lie in one panel. */
static void unpack(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                   unpacked_t to) {
    if (w->format == BF12) {
        unpack_12_bits(w, column, columns, begin, end, to);
        return;
    }
    const char *panel = panel_of(w, column);
    unpack_t *const group = UNPACKERS[layout_of((int)w->format)];
    for (; begin < end; begin++, to.at += to.group)
        group(panel, &LEVELS[w->format], begin, column % PANEL, columns, to);
}

/* The steps [begin, end) of half a panel of a tiled weight. */
static void unpack_half(const weight_t *w, int64_t half, int64_t begin, int64_t end, char *to) {
    const int64_t all = w->k / TILE_K;
    if (w->format == BF12) unpack_half_12_bits(w, half * all + begin, half * all + end, to);
    else if (!stands_left((int)w->format))
        unpack(w, half * HALF, HALF, begin, end,
               (unpacked_t){to, TILE_BYTES, TILE_PAIRS * TILE_BYTES, STEP_BYTES});
    else
        for (; begin < end; begin++, to += STEP_BYTES)
            LOOKERS[layout_of((int)w->format)](panel_of(w, half * HALF), &LEVELS[w->format], begin, half % 2, to);
}
#endif
