/* The same products in matrix tiles; and of rows that are looked up or rounded. */
#ifndef NANOENGINE_CPU_TILED_PRODUCTS_H
#define NANOENGINE_CPU_TILED_PRODUCTS_H
#include "cpu_products.h"

/* Whether codes are looked up, and stand left: see cpu_lookup.h. Then arranged rows are [16 rows][step]
 * [pair][row]. */
INLINE int looks_up(const weight_t *w) { return w->is_tiled && stands_left((int)w->format); }

/* Arranged rows have a stride of 0. Those that numbers meet are [32 rows][step][row][32]: many rows that
 * lie a power of 2 apart would push all else out of L1. */
INLINE side_t rows_of_step(const call_t *c, int64_t row, int64_t at) {
    const int64_t steps = c->w->k / TILE_K;
    if (looks_up(c->w))
        return (side_t){c->x + (row / PAIR_ROWS * steps + at) * PAIRS_STEP, 4 * PAIR_ROWS, PAIRS_STEP};
    if (c->x_stride) return (side_t){c->x + row * c->x_stride + at * TILE_BYTES, c->x_stride, TILE_BYTES};
    return (side_t){c->x + (row / TILED_ROWS * steps + at) * STEP_BYTES, TILE_BYTES, STEP_BYTES};
}

/* Shape this thread's tiles for n rows, if they are not. That takes 50 ns. */
INLINE void shape_for(const call_t *c, int64_t n, int64_t *shaped) {
    if (*shaped == n) return;
    *shaped = n;
    if (looks_up(c->w)) shape_columns(PAIR_ROWS, PAIR_ROWS);
    else shape_tiles(min64(n, TILE_ROWS), n > TILE_ROWS ? n - TILE_ROWS : n);
}

/* sums += `steps` steps of up to 32 rows by half a panel; `numbers` are those of the steps. `is_few`: there are
 * no other rows, and up to 16 of these. */
INLINE void multiply_steps(const call_t *c, int64_t row, int64_t n, int64_t at, int64_t steps,
                           const char *numbers, ahead_t ahead, int is_few, float *sums) {
    const side_t x = rows_of_step(c, row, at), weights = {numbers, TILE_BYTES, STEP_BYTES};
    const int is_double = n > TILE_ROWS;
    if (looks_up(c->w)) {
        const product_t p = {weights, x, c->w->k / TILE_K * PAIRS_STEP, steps, 4 * TILED_ROWS};
        if (is_double) multiply_tiles(p, ahead, sums, at == 0, 1, 1, RIGHT, 0);
        else multiply_tiles(p, ahead, sums, at == 0, 1, 0, RIGHT, 0);
        return;
    }
    const product_t p = {x, weights, STEP_BYTES / 2, steps, 4 * HALF};
    if (is_double) multiply_tiles(p, ahead, sums, at == 0, 1, 1, LEFT, 0);
    else if (is_few) multiply_tiles(p, ahead, sums, at == 0, 0, 1, LEFT, 1);
    else multiply_tiles(p, ahead, sums, at == 0, 0, 1, LEFT, 0);
}

/* Sums of half a panel that stand [output][row] become [row][output]. */
static void turn_sums(float *sums, int64_t n) {
    float turned[TILED_ROWS * HALF];
    for (int v = 0; v < HALF; v += TILE_ROWS)
        for (int r = 0; r < n; r += PAIR_ROWS)
            turn((const char *)(sums + v * TILED_ROWS + r), 4 * TILED_ROWS, TILE_ROWS,
                 (char *)(turned + r * HALF + v), 4 * HALF);
    memcpy(sums, turned, (size_t)(ceil_div(n, PAIR_ROWS) * PAIR_ROWS) * 4 * HALF);
}

typedef struct { /* how the rows of a block pass by half a panel */
    int64_t groups, most_steps;   /* of up to 32 rows; of k at one time */
    int64_t distance, step_bytes; /* of what the first rows prefetch; of a step, or 0: codes prefetch by themselves */
    int takes_apart;              /* each group takes 12 bits apart by itself */
} passes_t;

static passes_t passes_of(const weight_t *w, int64_t rows) {
    const int64_t groups = ceil_div(rows, TILED_ROWS);
    switch (w->format) {
    case DENSE:
        return (passes_t){groups, CHUNK_STEPS, rows <= TILE_ROWS ? FEW_AHEAD : TILED_AHEAD, STEP_BYTES, 0};
    case BF12:
        if (groups > GROUPS_OF_12) return (passes_t){groups, CHUNK_STEPS, AHEAD_OF_12, LEAST_LINES * LINE, 0};
        return (passes_t){groups, CHUNK_OF_12 / (groups * STEP_BYTES), AHEAD_OF_12, LEAST_LINES * LINE, 1};
    default: return (passes_t){groups, groups > 1 ? CHUNK_STEPS : FEW_STEPS, 0, 0, 0};
    }
}

/* Where a step lies; all half panels are laid end to end. */
INLINE const char *step_at(const weight_t *w, int64_t step) {
    return w->format == BF12 ? line_of_block(w, step) : w->panels + step * STEP_BYTES;
}

/* What group g prefetches while it passes by `steps` steps at `from`; `before`: what the group before it would go
 * on with. Where nobody prefetched those steps the first group does; then all share the chunk after them, unless
 * rows take 12 bits apart: these have time only for what comes soon. */
static ahead_t ahead_of(const passes_t *p, int64_t g, int64_t steps, int is_warm, const char *from, const char *next,
                        ahead_t before) {
    if (g == 0 && !is_warm) return (ahead_t){from + p->distance, p->step_bytes / 64, p->step_bytes};
    if (g == 0) return every_line(next, p->step_bytes, p->groups);
    if (p->takes_apart) return (ahead_t){0};
    if (g == 1 && !is_warm) return every_line(next, p->step_bytes, p->groups - 1);
    if (before.from >= next + steps * p->step_bytes) before.lines = 0;
    return before;
}

/* As multiply_steps, of 12 bits taken apart on the way, from block `block` on; `numbers`: room for two blocks. */
static void multiply_blocks(const call_t *c, int64_t row, int64_t n, int64_t at, int64_t steps, int64_t block,
                            char *numbers, ahead_t ahead, float *sums) {
#if HAVE_BF12 && LANES == 16
    const side_t weights = {numbers, TILE_BYTES, 0};
    const product_t p = {rows_of_step(c, row, at), weights, STEP_BYTES / 2, steps, 4 * HALF};
    const bf12_t held = in_12_bits(c->w);
    if (n > TILE_ROWS) multiply_tiled_blocks(p, held, block, numbers, ahead, sums, at == 0, 1);
    else multiply_tiled_blocks(p, held, block, numbers, ahead, sums, at == 0, 0);
#else
    (void)c, (void)row, (void)n, (void)at, (void)steps, (void)block, (void)numbers, (void)ahead, (void)sums;
#endif
}

/* The rows [row, row + rows) of the half panels [half, half + count) of a tiled weight, as multiply_block.
 * A chunk of k of the rows stays in L2 for all of these. */
static void multiply_halves(const call_t *c, int64_t row, int64_t rows, int64_t half, int64_t count,
                            int64_t *shaped, scratch_t *scratch) {
    const weight_t *w = c->w;
    const passes_t p = passes_of(w, rows);
    const int64_t all = w->k / TILE_K, groups = p.groups, chunks = ceil_div(all, p.most_steps);
    /* Output rows that lie a multiple of 4 KiB apart would push each other out of L1: they are written row by
     * row, of all half panels. */
    const int is_few = rows <= TILE_ROWS, is_by_row = chunks > 1 && count > 1 && c->out_stride % 4096 == 0;
    int is_warm = 0;
    for (int64_t i = 0, at = 0, steps; i < chunks; i++, at += steps) {
        steps = (all - at) / (chunks - i);
        for (int64_t h = 0; h < count; h++) {
            const int64_t first = (half + h) * all + at;
            const char *from = step_at(w, first);
            const char *next = step_at(w, h + 1 < count ? first + all : half * all + at + steps);
            const char *numbers = w->format == DENSE ? from : scratch->numbers;
            if (w->format != DENSE && !p.takes_apart) unpack_half(w, half + h, at, at + steps, scratch->numbers);
            ahead_t ahead = {0};
            for (int64_t g = 0, r = 0; g < groups; g++, r += TILED_ROWS) {
                const int64_t n = min64(TILED_ROWS, rows - r);
                float *sums = scratch->acc + (chunks > 1 ? (h * groups + g) * TILED_ROWS * HALF : 0);
                shape_for(c, n, shaped);
                ahead = ahead_of(&p, g, steps, is_warm, from, next, ahead);
                if (p.takes_apart)
                    multiply_blocks(c, row + r, n, at, steps, first, scratch->numbers, ahead, sums);
                else multiply_steps(c, row + r, n, at, steps, numbers, ahead, is_few, sums);
                ahead.from += steps * ahead.step;
                if (i + 1 == chunks && looks_up(w)) turn_sums(sums, n);
                if (i + 1 == chunks && !is_by_row)
                    finish_rows(c, row + r, (int)n, (half + h) * HALF, HALF, sums, HALF);
            }
            is_warm = groups > 1 && !p.takes_apart;
        }
    }
    for (int64_t r = 0; r < rows && is_by_row; r++)
        for (int64_t h = 0; h < count; h++)
            finish_rows(c, row + r, 1, (half + h) * HALF, HALF,
                        scratch->acc + (h * groups * TILED_ROWS + r) * HALF, HALF);
}

/* As multiply_block, of up to 16 arranged rows of a weight that looks up, or of one row as it is. */
static void multiply_few_lookups(const call_t *c, int64_t row, int64_t rows, int64_t column,
                                 int columns, scratch_t *scratch) {
    const weight_t *w = c->w;
    const int64_t width = c->x_stride ? 1 : PAIR_ROWS, groups = w->k / GROUP;
    const int64_t at = c->x_stride ? row * c->x_stride : row / PAIR_ROWS * groups * PAIRS_STEP;
    const side_t x = {c->x + at, 4 * width, TILE_PAIRS * 4 * width};
    float *acc = scratch->acc, *turned = acc;
    multiply_looked_up(panel_of(w, column), &LEVELS[w->format], groups, column % PANEL / HALF, columns / HALF, x, width,
                       LOOKERS[layout_of((int)w->format)], scratch->numbers, acc);
    if (width > 1) turned += PANEL * PAIR_ROWS;
    for (int n = 0; n < columns && width > 1; n += TILE_ROWS)
        turn((char *)(acc + n * width), 4 * width, TILE_ROWS, (char *)(turned + n), 4 * PANEL);
    finish_rows(c, row, (int)rows, column, columns, turned, PANEL);
}

_Static_assert(!HAVE_BYTE_TILES || sizeof(byte_tiles_t) <= sizeof(((scratch_t *)0)->numbers), "no room for tiles");

/* As multiply_block, of rows that are rounded: c->x is [block of rows][group][row]. */
static void multiply_few_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                              scratch_t *scratch) {
    const weight_t *w = c->w;
    const int layout = layout_of((int)w->format);
    const levels_t *levels = &LEVELS[w->format];
    const int64_t groups = w->k / GROUP;
    const rounded_t *x = (const rounded_t *)c->x + row * groups;
    float *acc = scratch->acc;
    if (w->has_byte_tiles && rows >= LEAST_FOR_TILES)
        TILE_MULTIPLIERS[layout](panel_of(w, column), levels, groups, column % PANEL, columns, x, rows,
                                 (byte_tiles_t *)scratch->numbers, acc);
    else ROUNDED_MULTIPLIERS[layout](panel_of(w, column), levels, groups, column % PANEL, columns, x, rows, acc);
    finish_rows(c, row, (int)rows, column, columns, acc, PANEL);
}
#endif
