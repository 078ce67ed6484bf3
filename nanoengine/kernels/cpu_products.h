/* Products of some rows with half a panel or a whole one, and what is done with their sums. */
#ifndef NANOENGINE_CPU_PRODUCTS_H
#define NANOENGINE_CPU_PRODUCTS_H
#include "cpu_panels.h"

/* What to prefetch while a panel is read. Few rows wait for memory: one line in every KiB, in the page
 * after, keeps the hardware's prefetcher running across pages (33 GB/s per core; 20 with none, and 20
 * with every line, which is then all that comes). With more rows memory has time while the others use
 * the panel in L2: every line of what comes next, spread over the passes. Measured on Zen 4. With matrix
 * tiles up to 16 rows have every line 3 KiB ahead, in L1, and up to 32 a KiB ahead, in L2 (one row on two cores
 * of a Xeon with AMX: 31.5 GB/s, and 30; 27 from 4 KiB on; less by the rule for Zen 4). Those that take 12 bits
 * apart have every line 8 KiB ahead, in L2, and only the first 32 rows prefetch. */
enum { AHEAD = 4096, FEW_AHEAD = 3072, TILED_AHEAD = 1024, AHEAD_OF_12 = 8192 };

/* acc[r][v] += x[r] . w[v] over `words` words of k, `w_stride` bytes apart in w. acc is [rows][PANEL];
 * `is_first` starts at 0. `is_odd`: the last word of x is half a pair. */
INLINE void multiply(const char *w, int64_t w_stride, const char *x, int64_t x_stride, int64_t words, int is_odd,
                     int is_first, ahead_t ahead, float *acc, const int rows, const int vecs) {
    vf s[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            s[r][v] = is_first ? (vf){0} : load(acc + r * PANEL + v * LANES);
    const char *x3 = x + 3 * x_stride;
#define STEP(READ)                                                                                  \
    do {                                                                                            \
        vf b[VECS];                                                                                 \
        UNROLL for (int v = 0; v < vecs; v++) b[v] = load(w + 4 * v * LANES);                       \
        UNROLL for (int r = 0; r < rows; r++) {                                                     \
            const vf a = (vf)splat_i(READ(r < 3 ? x + r * x_stride : x3 + (r - 3) * x_stride));     \
            UNROLL for (int v = 0; v < vecs; v++)                                                   \
                s[r][v] = MODE == F32 ? fused(a, b[v], s[r][v]) : dot_pairs(s[r][v], a, b[v]);      \
        }                                                                                           \
    } while (0)
#define WHOLE(p) (*(const word_t *)(p))
#define HALF_A_PAIR(p) (*(const uint16_t *)(p))
    for (int64_t left = words - is_odd; left > 0; left -= STRIP) {
        prefetch_ahead(&ahead, 0);
        for (int64_t n = min64(left, STRIP); n > 0; n--, x += 4, x3 += 4, w += w_stride) STEP(WHOLE);
    }
    if (is_odd) STEP(HALF_A_PAIR);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) store(acc + r * PANEL + v * LANES, s[r][v]);
}

#define MULTIPLY(rows, halves)                                                                      \
    static void multiply_##rows##_##halves(const char *w, int64_t w_stride, const char *x,          \
                                           int64_t x_stride, int64_t words, int is_odd,             \
                                           int is_first, ahead_t ahead, float *acc) {               \
        const int vecs = LANES == 8 && rows > COLD_ROWS ? 2 : halves * HALF_VECS;                   \
        for (int v = 0; v < halves * HALF_VECS; v += vecs, ahead.lines = 0)                         \
            multiply(w + 4 * v * LANES, w_stride, x, x_stride, words, is_odd, is_first, ahead,      \
                     acc + v * LANES, rows, vecs);                                                  \
    }
#define MULTIPLY_BOTH(rows) MULTIPLY(rows, 1) MULTIPLY(rows, 2)
#if LANES >= 8
#define EACH_ROWS(f) f(1) f(2) f(3) f(4) f(5) f(6)
#else
#define EACH_ROWS(f) f(1) f(2) f(3)
#endif
EACH_ROWS(MULTIPLY_BOTH)
typedef void multiply_t(const char *, int64_t, const char *, int64_t, int64_t, int, int, ahead_t, float *);
#define BOTH(rows) {multiply_##rows##_1, multiply_##rows##_2},
static multiply_t *const MULTIPLIERS[ROWS][2] = {EACH_ROWS(BOTH)};

#define MULTIPLY_SLICE(rows)                                                                        \
    static void multiply_slice_##rows(const char *w, const char *x, int64_t x_stride, int64_t words, \
                                      int is_first, float *acc) {                                   \
        multiply(w, 4 * TURN, x, x_stride, words, 0, is_first, (ahead_t){0}, acc, rows, TURN / LANES); \
    }
#define SLICE(rows) multiply_slice_##rows,
#if LANES == 8
EACH_ROWS(MULTIPLY_SLICE)
static void (*const SLICE_MULTIPLIERS[ROWS])(const char *, const char *, int64_t, int64_t, int, float *) = {
    EACH_ROWS(SLICE)};
#endif

/* ---- epilogues -------------------------------------------------------------------------------- */

INLINE vf with_bias(const float *acc, const float *bias) {
    return bias ? load(acc) + load(bias) : load(acc);
}

/* Outputs [first, first + LANES) of a row, of which `left` exist. */
INLINE void put_n(char *out, vf y, int n, int64_t epilogue) {
    if (epilogue == ADD) y = load_f32(out, n, MODE) + rounded(y, MODE);
    store_n(out, y, n, epilogue == FLOAT ? F32 : MODE);
}
INLINE void put(char *out, int64_t first, int64_t left, vf y, int64_t epilogue) {
    out = AT(out, first, epilogue == FLOAT ? F32 : MODE);
    if (left >= LANES) put_n(out, y, LANES, epilogue);
    else if (left > 0) put_n(out, y, (int)left, epilogue);
}

/* Finish `rows` rows of the outputs [column, column + columns) of all the panels laid end to end. */
INLINE void finish(const call_t *c, int64_t row, int rows, int64_t column, int columns, const float *acc,
                   int64_t width, int64_t epilogue) {
    const float *bias = c->w->bias ? c->w->bias + column : NULL;
    const int activation = epilogue > FLOAT ? (int)(epilogue - FLOAT) : 0;
    const int turns = activation ? 2 : 1;
    for (int r = 0; r < rows; r++, acc += width) {
        char *out = c->out + (row + r) * c->out_stride;
        for (int at = 0; at < columns; at += turns * TURN)
            UNROLL for (int i = at; i < at + TURN; i += LANES) {
                const int64_t first = (column + at) / turns + i - at;
                vf y = with_bias(acc + i, bias ? bias + i : NULL);
                if (activation) { /* rounded on the way as the steps one by one would */
                    const vf up = with_bias(acc + i + TURN, bias ? bias + i + TURN : NULL);
                    y = gated(rounded(y, MODE), rounded(up, MODE), activation, MODE);
                }
                put(out, first, c->w->outputs - first, y, epilogue);
            }
    }
}
static void finish_rows(const call_t *c, int64_t row, int rows, int64_t column, int columns,
                        const float *acc, int64_t width) {
    switch (c->epilogue) {
    case ADD: finish(c, row, rows, column, columns, acc, width, ADD); break;
    case FLOAT: finish(c, row, rows, column, columns, acc, width, FLOAT); break;
    case SILU_MUL: finish(c, row, rows, column, columns, acc, width, SILU_MUL); break;
    case GELU_MUL: finish(c, row, rows, column, columns, acc, width, GELU_MUL); break;
    case SWIGLU_MUL: finish(c, row, rows, column, columns, acc, width, SWIGLU_MUL); break;
    default: finish(c, row, rows, column, columns, acc, width, STORE);
    }
}

/* The lines of `out` that `finish` will write: they come while the rows are multiplied. */
INLINE void prefetch_out(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns) {
    const int64_t bytes = ITEM * (c->w->activation ? columns / 2 : columns);
    const char *out = c->out + row * c->out_stride + ITEM * (c->w->activation ? column / 2 : column);
    for (; rows > 0; rows--, out += c->out_stride)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(out + at, 1);
}

/* ---- one product ------------------------------------------------------------------------------ */

/* Every line from `p` on, in `passes` passes of steps over `bytes` bytes. */
INLINE ahead_t every_line(const char *p, int64_t bytes, int64_t passes) {
    const int64_t lines = passes > 0 ? ceil_div(bytes / 64, passes) : 0;
    return (ahead_t){.from = p, .lines = lines, .step = 64 * lines};
}

/* Where a thread's codes become numbers, and its sums are. summed_row: of the block of rows whose sums of groups lie in
 * `numbers`, or -1. */
typedef struct {
    char numbers[(LANES == 8 ? SLICED_GROUPS : MANY_GROUPS) * GROUP * PANEL * 4];
    float acc[SUMS];
    int64_t summed_row;
} __attribute__((aligned(64))) scratch_t;

/* Whether so many rows go by codes, not by numbers made of them. Where vectors are short, three would go by twice;
 * numbers of 16 bits are made in one step, so more rows may make them anew. */
INLINE int go_by_codes(int64_t rows, int64_t format) {
    if (format == DENSE || format == BF12) return 0;
    if (LANES == 8 && has_numbers((int)format)) return rows <= 4 * FEW_ROWS;
    return rows <= FEW_ROWS && (LANES != 8 || rows != 3);
}

#if HAVE_PAIRS && MODE == BF16_PAIRS
/* Up to so many rows, each pass asks for a part of what comes next: or the first one waits for memory, and then memory
 * for the others (a step of 8 rows of Q4_0 on a Zen 4: 56 ms, and 46 so). Of more, one pass is little, and L2 is full
 * of rows. */
enum { SHARED_ROWS = 4 * ROWS };

/* Sums of groups that have room beside the scales of groups_at_once. */
enum { SUMS_ROOM = MANY_GROUPS * GROUP * PANEL - SCALES };

/* Groups of a row whose sums are there at a time: all, or where a row is too wide, those that scales are of. */
INLINE int64_t groups_summed(const weight_t *w) {
    const int64_t all = w->k / GROUP;
    return SUM_ROWS * sums_in_vectors(all, (int)w->format) <= SUMS_ROOM ? all : groups_at_once((int)w->format);
}
INLINE int64_t most_summed_rows(const weight_t *w) {
    return SUMS_ROOM / sums_in_vectors(groups_summed(w), (int)w->format);
}

/* The sums of the rows' groups [first, last), where the format has minimums. */
static void sum_groups(const call_t *c, int64_t row, int64_t rows, int64_t first, int64_t last, scratch_t *scratch) {
    if (has_minimum((int)c->w->format))
        sum_rows(c->x + row * c->x_stride + first * 2 * GROUP, c->x_stride, rows, last - first,
                 (float *)scratch->numbers, (int)c->w->format);
}

/* As multiply_block, of such a weight. scratch->numbers has the sums of the rows' groups, at its end room for scales.
 * has_next: the same rows meet the next panel after this one. */
static void multiply_code_sums(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns, int is_warm,
                               int has_next, scratch_t *scratch) {
    const weight_t *w = c->w;
    const int64_t groups = w->k / GROUP, at_once = groups_at_once((int)w->format);
    const int is_wide = groups_summed(w) < groups;
    const int64_t bytes = group_bytes((int)w->format), passes = num_passes(rows, columns);
    const int is_shared = rows > 2 && rows <= SHARED_ROWS; /* what comes next, among the passes */
    float *scales = rows >= least_ready((int)w->format) ? (float *)scratch->numbers + SUMS_ROOM : NULL;
    const char *panel = panel_of(w, column);
    for (int64_t first = 0, last; first < groups; first = last, is_warm = 1) {
        last = min64(first + at_once, groups);
        const int64_t after = min64(at_once, last < groups ? groups - last : has_next ? groups : 0);
        const int is_cold = !is_warm || !is_shared;
        const char *end = panel + last * bytes;
        memory_ahead_t next = {end, is_shared ? end + after * bytes : end, passes - is_cold};
        const int64_t skipped = is_wide ? 0 : first * halves_of((int)w->format);
        const int64_t stride = sums_in_vectors(is_wide ? last - first : groups, (int)w->format);
        if (is_wide) sum_groups(c, row, rows, first, last, scratch);
        if (scales) SCALE_UNPACKERS[layout_of((int)w->format)](panel, first, last, scales);
        summed_t p = {panel, &LEVELS[w->format], first, last, column % PANEL, c->x + row * c->x_stride, c->x_stride,
                      (const float *)scratch->numbers + skipped, stride, scales, is_cold, rows <= 2, NULL, 0};
        for (int64_t r = 0, n; r < rows; r += n, p.x += n * c->x_stride, p.row_sums += n * stride) {
            float *acc = scratch->acc + r * PANEL;
            n = multiply_summed(&p, rows - r, columns, &next, acc, (int)w->format);
            if (last == groups) finish_rows(c, row + r, (int)n, column, columns, acc, PANEL);
        }
    }
}

/* Before it: the sums of all groups, where they have room. */
static void sum_all_groups(const call_t *c, int64_t row, int64_t rows, scratch_t *scratch) {
    const int64_t groups = c->w->k / GROUP;
    if (groups_summed(c->w) >= groups) sum_groups(c, row, rows, 0, groups, scratch);
    scratch->summed_row = row;
}
#else
INLINE int64_t most_summed_rows(const weight_t *w) { return w->k; }
static void multiply_code_sums(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns, int is_warm,
                               int has_next, scratch_t *scratch) {
    (void)c, (void)row, (void)rows, (void)column, (void)columns, (void)is_warm, (void)has_next, (void)scratch;
}
static void sum_all_groups(const call_t *c, int64_t row, int64_t rows, scratch_t *scratch) {
    (void)c, (void)row, (void)rows, (void)scratch;
}
#endif

/* The rows [row, row + rows), few, of the outputs [column, column + columns) of a weight of codes. */
NOINLINE void multiply_few(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                           float *acc) {
    const weight_t *w = c->w;
    const char *panel = panel_of(w, column);
    for (int64_t end = row + rows, n; row < end; row += n) {
        n = end - row >= 4 ? FEW_ROWS : end - row >= 2 ? 2 : 1;
        CODE_MULTIPLIERS[layout_of((int)w->format)][n - 1](panel, &LEVELS[w->format], w->k / GROUP, column % PANEL,
                                                           columns, c->x + row * c->x_stride, c->x_stride, acc);
        finish_rows(c, row, (int)n, column, columns, acc, PANEL);
    }
}

/* Whether so many rows go by codes in runs: where vectors are short, a sum of each fits in registers beside what a code
 * needs to become a number, and no number is stored. */
INLINE int go_in_runs(int64_t rows, int64_t format) {
    const int are_some = LANES == 8 && rows > FEW_ROWS && rows <= RUN_ROWS;
    return are_some && format != DENSE && format != BF12 && !go_by_codes(rows, format);
}

/* As multiply_few, of rows that go in runs: of groups that stay in L1. */
NOINLINE void multiply_runs(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns, float *acc) {
#if LANES == 8
    enum { RUN_GROUPS = 8 };
    const weight_t *w = c->w;
    const char *panel = panel_of(w, column), *x = c->x + row * c->x_stride;
    const int64_t groups = w->k / GROUP, bytes = group_bytes((int)w->format), to_last = (rows - 1) * c->x_stride;
    multiply_run_t *const run = RUN_MULTIPLIERS[layout_of((int)w->format)][rows > 6];
    for (int64_t begin = 0, end; begin < groups; begin = end) {
        end = min64(groups, begin + RUN_GROUPS);
        memory_ahead_t next = {panel + end * bytes, panel + (end + RUN_GROUPS) * bytes, columns / LANES};
        run(panel, &LEVELS[w->format], begin, end, column % PANEL, columns, x, c->x_stride, to_last, &next, acc);
    }
    finish_rows(c, row, (int)rows, column, columns, acc, PANEL);
#else
    (void)c, (void)row, (void)rows, (void)column, (void)columns, (void)acc;
#endif
}

/* Rows of the next of `blocks` register blocks that `rows` rows go by in: an even share. But with 16 registers four
 * rows take as long as six, for GCC has each row read the weights anew: eight are three and five, and seven, whose
 * share is three, would leave four. */
INLINE int64_t rows_of_next(int64_t rows, int64_t blocks) {
    if (LANES == 8 && blocks > 1 && rows == 7) return 2;
    return LANES == 8 && blocks > 1 && rows / blocks == 4 ? 3 : rows / blocks;
}

/* The rows [row, row + rows) of the outputs [column, column + columns), which are half a panel or one.
 * `is_warm` says that the panel was prefetched. */
NOINLINE void multiply_block(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                             int is_warm, scratch_t *scratch) {
    const weight_t *w = c->w;
    const int64_t all = words_of(w);
    const int64_t groups = ceil_div(rows, w->format == DENSE && rows <= ROWS ? COLD_ROWS : ROWS);
    const int64_t at_once = groups > 1 ? MANY_GROUPS : FEW_GROUPS;
    const int64_t step = w->format == DENSE ? CHUNK : at_once * GROUP_WORDS;
    const int64_t stride = 4 * (w->format == DENSE ? PANEL : columns);
    const char *panel = panel_of(w, column) + column % PANEL * 4;
    float *acc = scratch->acc;
    for (int64_t at = 0; at < all; at += step) {
        const int64_t words = min64(step, all - at), bytes = words * PANEL * 4;
        const char *chunk = panel + at * PANEL * 4;
        const int is_last = at + words == all;
        const char *next = chunk + bytes;
        ahead_t ahead = {.from = chunk + AHEAD, .lines = 1, .step = STRIP_BYTES};
        if (is_warm) ahead = every_line(next, STRIP_BYTES, groups);
        if (w->format != DENSE) {
            chunk = scratch->numbers, ahead = (ahead_t){0};
            unpack(w, column, columns, at / GROUP_WORDS, (at + words) / GROUP_WORDS,
                   (unpacked_t){scratch->numbers, stride, 4 * TURN, GROUP_WORDS * stride});
        }
        for (int64_t g = 0, r = 0; g < groups; g++) {
            const int64_t n = rows_of_next(rows - r, groups - g);
            if (w->format == DENSE) {
                if (g == 1 && !is_warm) ahead = every_line(next, STRIP_BYTES, groups - 1);
                if (g > 0 && ahead.from >= next + bytes) ahead.lines = 0;
            }
            if (is_last) prefetch_out(c, row + r, n, column, columns);
            MULTIPLIERS[n - 1][columns / PANEL](
                chunk, stride, c->x + (row + r) * c->x_stride + 4 * at, c->x_stride, words,
                is_last && w->k * ITEM % 4, at == 0, ahead, acc + r * PANEL);
            ahead.from += ceil_div(words, STRIP) * ahead.step;
            if (is_last) finish_rows(c, row + r, n, column, columns, acc + r * PANEL, PANEL);
            r += n;
        }
        is_warm = groups > 1;
    }
}

/* As multiply_block, of many rows and a weight that is no DENSE one. Numbers of a chunk are made as slices of TURN
 * outputs, and all rows pass by a slice, which is 16 KiB in L1, before the next one: so a chunk may be long. */
NOINLINE void multiply_sliced(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                              scratch_t *scratch) {
#if LANES == 8
    const weight_t *w = c->w;
    const int64_t all = words_of(w), blocks = ceil_div(rows, ROWS);
    for (int64_t at = 0, words; at < all; at += words) {
        words = min64(SLICED_GROUPS * GROUP_WORDS, all - at);
        const int64_t slice = 4 * TURN * words;
        unpack(w, column, columns, at / GROUP_WORDS, (at + words) / GROUP_WORDS,
               (unpacked_t){scratch->numbers, 4 * TURN, slice, 4 * TURN * GROUP_WORDS});
        for (int first = 0; first < columns; first += TURN) {
            const int is_last = at + words == all && first + TURN == columns;
            const char *numbers = scratch->numbers + first / TURN * slice;
            for (int64_t b = 0, r = 0, n; b < blocks; b++, r += n) {
                n = (rows - r) / (blocks - b);
                const char *x = c->x + (row + r) * c->x_stride + 4 * at;
                float *acc = scratch->acc + r * PANEL;
                if (is_last) prefetch_out(c, row + r, n, column, columns);
                SLICE_MULTIPLIERS[n - 1](numbers, x, c->x_stride, words, at == 0, acc + first);
                if (is_last) finish_rows(c, row + r, (int)n, column, columns, acc, PANEL);
            }
        }
    }
#else
    (void)c, (void)row, (void)rows, (void)column, (void)columns, (void)scratch;
#endif
}

#if HAVE_BF12 && LANES == 8
/* Blocks from `block` on that go by together: up to `most` without others, or one that has some. */
INLINE int64_t blocks_of_run(bf12_t weight, int64_t block, int64_t most) {
    int64_t count = 0;
    while (count < most && !has_others(weight, block + count)) count++;
    return max64(count, 1);
}

/* As multiply_block, of a whole panel in 12 bits and up to FEW_OF_12 rows: five at once, or up to four at a time. A
 * block with others becomes numbers. */
NOINLINE void multiply_12_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, int has_next,
                               scratch_t *scratch) {
    const bf12_t held = in_12_bits(c->w);
    const int64_t all = c->w->k / BLOCK_K, first = column / PANEL * all, groups = rows == 5 ? 1 : ceil_div(rows, 4);
    const int64_t most = groups == 1 ? RUN_OF_12 : 2 * RUN_OF_12;
    (void)has_next; /* the next panel lies behind this one */
    memset(scratch->acc, 0, (size_t)rows * PANEL * sizeof *scratch->acc);
    for (int64_t at = 0, count; at < all; at += count) {
        const int64_t block = first + at;
        const int has_some = has_others(held, block);
        count = blocks_of_run(held, block, min64(most, all - at));
        const char *end = line_of_block(c->w, block + count);
        memory_ahead_t next = {end, end + most * LEAST_LINES * LINE, groups * passes_of_12(rows)};
        if (has_some) unpack_bf12(held, block, (unpacked_t){scratch->numbers, 4 * PANEL, 4 * TURN, 0}, 0, QUARTERS);
        for (int64_t g = 0, r = 0, n; g < groups; g++, r += n) {
            const char *x = c->x + (row + r) * c->x_stride + 4 * BLOCK_K * at;
            float *acc = scratch->acc + r * PANEL;
            n = (rows - r) / (groups - g);
            if (at == 0) prefetch_out(c, row + r, n, column, PANEL);
            if (has_some)
                MULTIPLIERS[n - 1][1](scratch->numbers, 4 * PANEL, x, c->x_stride, BLOCK_K, 0, 0, (ahead_t){0}, acc);
            else BF12_MULTIPLIERS[n - 1](held, block, block + count, x, c->x_stride, &next, acc);
            if (at + count == all) finish_rows(c, row + r, (int)n, column, PANEL, acc, PANEL);
        }
    }
}
#elif HAVE_BF12
/* As multiply_block, of a whole panel in 12 bits. Up to 12 rows take its numbers apart in registers, 6 at a
 * time; from 7 on both passes prefetch what comes next. Of more, the first ones keep the numbers for the others, whose
 * passes prefetch it. has_next: the same rows meet the next panel after this one. */
NOINLINE void multiply_12_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, int has_next,
                               scratch_t *scratch) {
    const weight_t *w = c->w;
    const bf12_t held = in_12_bits(w);
    const int64_t all = w->k / BLOCK_K, first = column / PANEL * all, groups = ceil_div(rows, ROWS);
    const int keeps = groups > 2;
    for (int64_t at = 0, count; at < all; at += count) {
        count = min64(CHUNK_BLOCKS, all - at);
        const int is_first = at == 0, is_last = at + count == all;
        const char *next = held.lines + LINE * (int64_t)held.starts[first + at + count];
        ahead_t ahead = every_line(next, STRIP * LEAST_LINES * LINE / BLOCK12_WORDS, groups - 1);
        const int64_t after = groups != 2 ? 0 : min64(CHUNK_BLOCKS, !is_last ? all - at - count : has_next ? all : 0);
        memory_ahead_t shared = {next, held.lines + LINE * (int64_t)held.starts[first + at + count + after], groups};
        for (int64_t g = 0, r = 0, n; g < groups; g++, r += n) {
            const char *x = c->x + (row + r) * c->x_stride + ITEM * BLOCK_K * at;
            float *acc = scratch->acc + r * PANEL;
            n = (rows - r) / (groups - g);
            if (is_last) prefetch_out(c, row + r, n, column, PANEL);
            if (g == 0 || !keeps)
                BF12_MULTIPLIERS[n - 1][keeps](held, first + at, first + at + count, x, c->x_stride, is_first,
                                               scratch->numbers, share_of_pass(&shared, count * BLOCK_WORDS), acc);
            else {
                if (ahead.from >= next + count * LEAST_LINES * LINE) ahead.lines = 0;
                MULTIPLIERS[n - 1][1](scratch->numbers, 4 * PANEL, x, c->x_stride, count * BLOCK12_WORDS, 0, is_first,
                                      ahead, acc);
                ahead.from += count * BLOCK12_WORDS / STRIP * ahead.step;
            }
            if (is_last) finish_rows(c, row + r, (int)n, column, PANEL, acc, PANEL);
        }
    }
}
#else
NOINLINE void multiply_12_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, int has_next,
                               scratch_t *scratch) {
    (void)c, (void)row, (void)rows, (void)column, (void)has_next, (void)scratch;
}
#endif
#endif
