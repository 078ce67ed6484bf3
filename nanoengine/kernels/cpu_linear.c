/* Products of activations with packed weights, x W^T: of bfloat16 for CPUs with AVX512-BF16, of float32 for
 * all. A weight lies here as numbers, as numbers in 12 bits (cpu_bf12.h), or as the codes of a GGUF file
 * (cpu_codes.h). What is not numbers becomes numbers a chunk at a time, in the caches: so a product has the bits
 * of one of the numbers.
 *
 * The law: an output element is one chain of steps over its k, in order, whatever the number of rows
 * of the call, the row's place among them and the number of threads. So a row's bits are the same
 * alone and in any batch. A step is a fused one over a word of k: one float32, or a pair of bfloat16. Or,
 * where there are matrix tiles (AMX) and k fills them, one over 32 values of k: see cpu_tiles.h. An
 * epilogue makes the same rounding steps as the operators it stands for.
 *
 * Numbers lie in panels of PANEL outputs, word by word: [panel][word][output], padded with zeros. A
 * register block is up to ROWS rows times half a panel or a whole one; the panel streams past it. Work
 * is shared out in units of half a panel, so that 9 panels keep two threads busy alike; of many rows in
 * matrix tiles, in blocks of rows with all outputs. For matrix tiles a half panel is one piece of memory:
 * [half panel][step][vector][16 pairs][16 outputs][2]. Codes, but those of FP8, lie otherwise there: see
 * cpu_lookup.h.
 */
#include <omp.h>
#include <sys/mman.h>

#ifndef MODE /* of numbers and activations: F32 or BF16_PAIRS */
#define MODE BF16_PAIRS
#endif
#include "cpu_bf12.h"
#include "cpu_int8.h"
#include "cpu_lookup.h"
#include "cpu_router.h"
#include "cpu_tiles.h"

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
enum { PRIVATE_BYTES = 64 << 10 }; /* normed or rounded rows that every thread makes for itself */
enum { ROUNDED_ROWS = 128 };       /* most of a block: their sums are in L1, or near it */
/* Groups of codes that are numbers at one time: of many rows as CHUNK, of few in L1. */
enum { MANY_GROUPS = LANES == 16 ? 16 : 4, FEW_GROUPS = 1 };
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
    int64_t is_norm_bf16; /* norm_weight is in bfloat16, else in float32 */
    double eps;
} weight_t;

typedef struct { /* one call, filled by packed_weight.py; strides in bytes */
    const weight_t *w;
    const char *x;
    char *out;
    char *made; /* [rows][k]: normed or rounded rows, where they are more than PRIVATE_BYTES; then arranged ones */
    int64_t x_stride, out_stride, rows, epilogue, threads;
} call_t;

typedef struct { int64_t count; call_t calls[]; } calls_t; /* filled by packed_product.py */

enum { ITEM = MODE == F32 ? 4 : 2, GROUP_WORDS = GROUP * ITEM / 4 }; /* bytes of a number */
/* Of 12 bits, whose blocks are 16 of k: words of k of a block as numbers, and the blocks that are 128 KiB. */
enum { BLOCK12_WORDS = BLOCK_K * ITEM / 4, CHUNK_BLOCKS = (128 << 10) / (4 * PANEL * BLOCK12_WORDS) };
INLINE int64_t words_of(const weight_t *w) { return ceil_div(w->k * ITEM, 4); }

int has_pairs(void) { return HAVE_PAIRS; }

/* ---- products --------------------------------------------------------------------------------- */

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

/* Where a thread's codes become numbers, and its sums are. */
typedef struct {
    char numbers[MANY_GROUPS * GROUP * PANEL * 4];
    float acc[SUMS];
} __attribute__((aligned(64))) scratch_t;

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

/* As `unpack`, of a weight in 12 bits; to: [word of k][column]. */
static void unpack_12_bits(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                           char *to) {
    const bf12_t held = in_12_bits(w);
    const int64_t first = column / PANEL * (w->k / BLOCK_K);
    unpack_bf12_t *const block = BF12_UNPACKERS[columns == PANEL ? BOTH_HALVES : column % PANEL / HALF];
    for (int64_t i = begin * GROUP / BLOCK_K; i < end * GROUP / BLOCK_K; i++, to += 4 * BLOCK12_WORDS * columns)
        block(held, first + i, to);
}

/* As `unpack_half`, of a weight in 12 bits. */
static void unpack_half_12_bits(const weight_t *w, int64_t begin, int64_t end, char *to) {
    const bf12_t held = in_12_bits(w);
    for (; begin < end; begin++, to += NUMBERS_BYTES) unpack_bf12_tiled(held, begin, to);
}

INLINE const char *line_of_block(const weight_t *w, int64_t block) {
    const bf12_t held = in_12_bits(w);
    return held.lines + LINE * (int64_t)held.starts[block];
}
#else
static void unpack_12_bits(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                           char *to) {
    (void)w, (void)column, (void)columns, (void)begin, (void)end, (void)to;
}
static void unpack_half_12_bits(const weight_t *w, int64_t begin, int64_t end, char *to) {
    (void)w, (void)begin, (void)end, (void)to;
}
INLINE const char *line_of_block(const weight_t *w, int64_t block) { return w->panels + block; }
#endif

/* The groups [begin, end) of k of the outputs [column, column + columns), which lie in one panel. */
static void unpack(const weight_t *w, int64_t column, int64_t columns, int64_t begin, int64_t end,
                   unpacked_t to) {
    if (w->format == BF12) {
        unpack_12_bits(w, column, columns, begin, end, to.at);
        return;
    }
    const char *panel = panel_of(w, column);
    unpack_t *const group = UNPACKERS[w->format];
    for (; begin < end; begin++, to.at += to.group)
        group(panel, begin, column % PANEL, columns, to);
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
            LOOKERS[w->format](panel_of(w, half * HALF), begin, half % 2, to);
}

/* Rows that go by codes, not by numbers made of them: where vectors are short, making these costs more. */
INLINE int64_t most_few(int64_t format) {
    if (format == DENSE || format == BF12) return 0;
    return LANES != 8 ? FEW_ROWS : has_numbers((int)format) ? 4 * FEW_ROWS : 2 * FEW_ROWS;
}

/* The rows [row, row + rows), few, of the outputs [column, column + columns) of a weight of codes. */
static void multiply_few(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                         float *acc) {
    const weight_t *w = c->w;
    const char *panel = panel_of(w, column);
    for (int64_t end = row + rows, n; row < end; row += n) {
        n = end - row >= 4 ? FEW_ROWS : end - row >= 2 ? 2 : 1;
        const int width = n == 1 && LANES == 16 ? PANEL : n == 4 && LANES == 8 ? TURN : HALF;
        multiply_codes_t *const run = CODE_MULTIPLIERS[w->format][n - 1][width / PANEL];
        const char *x = c->x + row * c->x_stride;
        for (int at = 0; at < columns; at += width)
            run(panel, w->k / GROUP, column % PANEL + at, x, c->x_stride, acc + at);
        finish_rows(c, row, (int)n, column, columns, acc, PANEL);
    }
}

/* The rows [row, row + rows) of the outputs [column, column + columns), which are half a panel or one.
 * `is_warm` says that the panel was prefetched. */
static void multiply_block(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
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
            const int64_t n = (rows - r) / (groups - g);
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

#if HAVE_BF12
/* As multiply_block, of a whole panel in 12 bits. Up to 12 rows take its numbers apart in registers, 6 at a
 * time. Of more, the first ones keep the numbers for the others, whose passes prefetch what comes next. */
static void multiply_12_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, scratch_t *scratch) {
    const weight_t *w = c->w;
    const bf12_t held = in_12_bits(w);
    const int64_t all = w->k / BLOCK_K, first = column / PANEL * all, groups = ceil_div(rows, ROWS);
    const int keeps = groups > 2;
    for (int64_t at = 0, count; at < all; at += count) {
        count = min64(CHUNK_BLOCKS, all - at);
        const int is_first = at == 0, is_last = at + count == all;
        const char *next = held.lines + LINE * (int64_t)held.starts[first + at + count];
        ahead_t ahead = every_line(next, STRIP * LEAST_LINES * LINE / BLOCK12_WORDS, groups - 1);
        for (int64_t g = 0, r = 0, n; g < groups; g++, r += n) {
            const char *x = c->x + (row + r) * c->x_stride + ITEM * BLOCK_K * at;
            float *acc = scratch->acc + r * PANEL;
            n = (rows - r) / (groups - g);
            if (is_last) prefetch_out(c, row + r, n, column, PANEL);
            if (g == 0 || !keeps)
                BF12_MULTIPLIERS[n - 1][keeps](held, first + at, first + at + count, x, c->x_stride, is_first,
                                               scratch->numbers, acc);
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
static void multiply_12_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, scratch_t *scratch) {
    (void)c, (void)row, (void)rows, (void)column, (void)scratch;
}
#endif

/* ---- in matrix tiles -------------------------------------------------------------------------- */

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
#if HAVE_BF12
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
    multiply_looked_up(panel_of(w, column), groups, column % PANEL / HALF, columns / HALF, x, width,
                       LOOKERS[w->format], scratch->numbers, acc);
    if (width > 1) turned += PANEL * PAIR_ROWS;
    for (int n = 0; n < columns && width > 1; n += TILE_ROWS)
        turn((char *)(acc + n * width), 4 * width, TILE_ROWS, (char *)(turned + n), 4 * PANEL);
    finish_rows(c, row, (int)rows, column, columns, turned, PANEL);
}

/* As multiply_block, of rows that are rounded: c->x is [block of rows][group][row]. */
static void multiply_few_bits(const call_t *c, int64_t row, int64_t rows, int64_t column, int columns,
                              float *acc) {
    const weight_t *w = c->w;
    const int64_t groups = w->k / GROUP;
    ROUNDED_MULTIPLIERS[w->format](panel_of(w, column), groups, column % PANEL, columns,
                                   (const rounded_t *)c->x + row * groups, rows, acc);
    finish_rows(c, row, (int)rows, column, columns, acc, PANEL);
}

/* Units [begin, end): half panels, all of them for one row block after the other. */
static void multiply_units(const call_t *c, int64_t halves, int64_t block_rows, int64_t begin,
                           int64_t end) {
    scratch_t scratch;
    int64_t shaped = 0;
    for (int64_t u = begin, n; u < end && c->w->is_rounded; u += n) {
        const int64_t row = u / halves * block_rows, half = u % halves;
        n = half % 2 == 0 && half + 1 < halves && u + 1 < end ? 2 : 1;
        multiply_few_bits(c, row, min64(block_rows, c->rows - row), half * HALF, (int)n * HALF, scratch.acc);
    }
    if (c->w->is_rounded) return;
    for (int64_t u = begin, n; u < end && c->w->is_tiled; u += n) {
        const int64_t row = u / halves * block_rows, rows = min64(block_rows, c->rows - row);
        const int64_t half = u % halves;
        const int is_few = looks_up(c->w) && rows <= PAIR_ROWS;
        const int64_t most = is_few ? 2 - half % 2 : rows > TILED_ROWS ? HALVES_AT_ONCE : 1;
        n = min64(most, min64(halves - half, end - u));
        if (is_few) multiply_few_lookups(c, row, rows, half * HALF, (int)n * HALF, &scratch);
        else multiply_halves(c, row, rows, half, n, &shaped, &scratch);
        if (is_few) shaped = 0;
    }
    for (int64_t u = begin; u < end && !c->w->is_tiled;) {
        const int64_t row = u / halves * block_rows, half = u % halves;
        const int is_whole = LANES == 16 && half % 2 == 0 && half + 1 < halves && u + 1 < end;
        const int64_t rows = min64(block_rows, c->rows - row);
        const int columns = is_whole ? PANEL : HALF;
        /* one row of half a panel has no function of its own */
        const int is_few = rows <= most_few(c->w->format) && (is_whole || rows % 2 == 0 || LANES < 16);
        if (c->w->format == BF12 && is_whole) multiply_12_bits(c, row, rows, half * HALF, &scratch);
        else if (is_few) multiply_few(c, row, rows, half * HALF, columns, scratch.acc);
        else multiply_block(c, row, rows, half * HALF, columns, u > begin && rows > ROWS, &scratch);
        u += is_whole ? 2 : 1;
    }
}

/* Rows of a block: what L2 holds, and less where there would be too few units for the threads. */
static int64_t choose_block_rows(const weight_t *w, int64_t rows, int64_t halves, int64_t threads) {
    const int64_t group = w->is_tiled ? TILED_ROWS : ROWS;
    const int64_t chunk = w->format == BF12 ? CHUNK_BLOCKS * BLOCK12_WORDS : CHUNK;
    int64_t block = BLOCK_BYTES / (4 * min64(words_of(w), chunk));
    block = min64(w->is_rounded ? ROUNDED_ROWS : BLOCK_ROWS, max64(block, 4 * ROWS));
    if (w->is_tiled) {
        const int is_one_chunk = w->k <= CHUNK_STEPS * TILE_K;
        block = is_one_chunk && rows >= 2 * TILED_BLOCK * threads ? 2 * TILED_BLOCK : TILED_BLOCK;
    }
    for (; block > 4 * ROWS; block /= 2) {
        const int64_t units = ceil_div(rows, block) * halves;
        if (units >= 16 * threads || (units >= 4 * threads && block <= 16 * ROWS)) break;
    }
    int64_t blocks = ceil_div(rows, block);
    if (w->is_tiled && blocks > threads) blocks = ceil_div(blocks, threads) * threads;
    return blocks > 1 ? ceil_div(ceil_div(rows, blocks), group) * group : block;
}

/* f(row) for all rows: by every thread for itself, or together where they are many. */
#define EACH_ROW(is_private, rows, f)                                                               \
    if (is_private) {                                                                               \
        for (int64_t r = 0; r < (rows); r++) f(r);                                                  \
    } else {                                                                                        \
        _Pragma("omp for schedule(static)") for (int64_t r = 0; r < (rows); r++) f(r);              \
    }

static void norm_row(const weight_t *w, const char *x, char *out) {
    if (w->is_norm_bf16) norm(x, w->norm_weight, out, w->k, (float)w->eps, MODE, BF16_WIDE);
    else norm(x, w->norm_weight, out, w->k, (float)w->eps, MODE, F32);
}
static void norm_rows(const call_t *c, int is_private, char *out) {
#define NORM(r) norm_row(c->w, c->x + (r) * c->x_stride, out + (r) * ITEM * c->w->k)
    EACH_ROW(is_private, c->rows, NORM)
}

/* Normed, where that is asked for, and rounded. out: [block of rows][group][row]. */
static void round_rows(const call_t *c, int64_t block_rows, int is_private, rounded_t *out) {
    const weight_t *w = c->w;
    const int64_t groups = w->k / GROUP;
    const int norm_mode = w->is_norm_bf16 ? BF16_WIDE : F32;
#define ROUND(r)                                                                                    \
    do {                                                                                            \
        const int64_t first = (r) / block_rows * block_rows, rows = min64(block_rows, c->rows - first); \
        round_row(c->x + (r) * c->x_stride, w->norm_weight, norm_mode, (float)w->eps, w->k,         \
                  w->format, out + first * groups + (r) - first, rows);                             \
    } while (0)
    EACH_ROW(is_private, c->rows, ROUND)
}

/* `count` rows, up to 16, at `from`, as rows_of_step takes them, as rows `row` and after it; out: of all rows,
 * with room for whole blocks. */
static void arrange_block(const weight_t *w, const char *from, int64_t stride, int64_t row, int64_t count,
                          char *out) {
    const int64_t steps = w->k / TILE_K;
    if (looks_up(w)) {
        pair_rows(from, stride, count, steps, out + row / PAIR_ROWS * steps * PAIRS_STEP);
        return;
    }
    out += row / TILED_ROWS * steps * STEP_BYTES + row % TILED_ROWS * TILE_BYTES;
    for (int64_t i = 0; i < steps; i++, from += TILE_BYTES, out += STEP_BYTES)
        for (int64_t r = 0; r < count; r++) memcpy(out + r * TILE_BYTES, from + r * stride, TILE_BYTES);
}

static void arrange_rows(const call_t *c, const char *x, int64_t stride, char *out) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < c->rows; row += PAIR_ROWS)
        arrange_block(c->w, x + row * stride, stride, row, min64(PAIR_ROWS, c->rows - row), out);
}

/* Where call->made has room for arranged rows: after the normed ones, if there are any. */
INLINE char *arranged_rows_of(const call_t *call) {
    return call->made + (call->w->norm_weight ? call->rows * call->w->k * ITEM : 0);
}

/* A call as `multiply_units` takes it: its rows normed, rounded or arranged where its weight wants that, in
 * `buffer` (PRIVATE_BYTES of the thread's own) or in call->made. */
static call_t prepare_call(const call_t *call, int64_t block_rows, char *buffer) {
    const weight_t *w = call->w;
    const int64_t rows = call->rows;
    call_t c = *call;
    if (rows == 1) c.x_stride = w->k * ITEM; /* never 0 */
    if (w->activation) c.epilogue = FLOAT + w->activation;
    const int is_arranged = w->is_tiled && rows > (looks_up(w) ? 1 : TILED_ROWS);
    if (w->norm_weight || w->is_rounded) {
        const int64_t stride = w->k * ITEM; /* rounded rows take 3/4 or 3/8 of it */
        const int is_private = rows * stride <= PRIVATE_BYTES && !is_arranged;
        char *made = is_private ? buffer : call->made;
        if (w->is_rounded) round_rows(call, block_rows, is_private, (rounded_t *)made);
        else norm_rows(call, is_private, made);
        c.x = made, c.x_stride = stride;
    }
    if (is_arranged) {
        char *arranged = arranged_rows_of(call);
        arrange_rows(call, c.x, c.x_stride, arranged);
        c.x = arranged, c.x_stride = 0;
    }
    return c;
}

/* The rows [row, row + count) as rows_of_step takes them. What is normed goes to the thread's own 16 rows of
 * call->made, then to its arranged ones. */
static void prepare_block(const call_t *call, int64_t row, int64_t count) {
    const weight_t *w = call->w;
    const int64_t width = w->k * ITEM, stride = call->x_stride;
    char *own = call->made + omp_get_thread_num() * PAIR_ROWS * width;
    char *arranged = arranged_rows_of(call);
    for (const int64_t end = row + count; row < end; row += PAIR_ROWS) {
        const int64_t rows = min64(PAIR_ROWS, end - row);
        const char *from = call->x + row * stride;
        for (int64_t r = 0; r < rows && w->norm_weight; r++) norm_row(w, from + r * stride, own + r * width);
        if (w->norm_weight) arrange_block(w, own, width, row, rows, arranged);
        else arrange_block(w, from, stride, row, rows, arranged);
    }
}

/* One thread's part of a call of many rows: blocks of them with all outputs, so that the rows stay in its L2. */
static void multiply_row_blocks(const call_t *call, int64_t halves, int64_t block_rows) {
    const int64_t rows = call->rows;
    call_t c = *call;
    if (call->w->activation) c.epilogue = FLOAT + call->w->activation;
    c.x = arranged_rows_of(call), c.x_stride = 0;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < ceil_div(rows, block_rows); i++) {
        prepare_block(call, i * block_rows, min64(block_rows, rows - i * block_rows));
        multiply_units(&c, halves, block_rows, i * halves, (i + 1) * halves);
    }
}

/* One thread's part of a call. */
static void linear_in_team(const call_t *call, int64_t threads) {
    const weight_t *w = call->w;
    const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF), rows = call->rows;
    const int64_t block_rows = choose_block_rows(w, rows, halves, threads);
    const int64_t blocks = ceil_div(rows, block_rows), units = blocks * halves;
    const int64_t most = w->is_tiled && units >= 32 * threads ? HALVES_AT_ONCE : 2;
    const int64_t step = units < 8 * threads ? 1 : most, steps = ceil_div(halves, step);
    if (w->is_tiled && blocks > 1 && blocks % threads == 0) {
        multiply_row_blocks(call, halves, block_rows);
        return;
    }
    char buffer[PRIVATE_BYTES] __attribute__((aligned(64)));
    const call_t c = prepare_call(call, block_rows, buffer);
    if (blocks == 1) {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        multiply_units(&c, halves, block_rows, me * units / team, (me + 1) * units / team);
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks * steps; i++) {
        const int64_t row_block = i / steps * halves, half = i % steps * step;
        multiply_units(&c, halves, block_rows, row_block + half, row_block + min64(half + step, halves));
    }
}

/* For each of the calls in order: out (epilogue) norm(x) W^T. A call may read what those before it
 * wrote. */
int linear(const calls_t *all) {
    const call_t *calls = all->calls;
    const int64_t count = all->count;
    int64_t products = 0;
    for (int64_t i = 0; i < count; i++) products += calls[i].rows * calls[i].w->k * calls[i].w->outputs;
    const int64_t threads = products < 1 << 16 ? 1 : calls->threads; /* some us */
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int has_tiles = 0;
        for (int64_t i = 0; i < count; i++) {
            linear_in_team(&calls[i], threads);
            has_tiles |= calls[i].w->is_tiled;
            if (i + 1 < count) {
#pragma omp barrier
            }
        }
        if (has_tiles) release_tiles();
    }
    return 0;
}

/* As one call of `linear`, of the outputs in some panels alone; the others of `out` are left as they are.
 * Returns 0, or -1 for a panel that there is not. */
int linear_in_panels(const call_t *call, const int64_t *panels, int64_t count) {
    const weight_t *w = call->w;
    const int64_t halves = ceil_div(w->outputs, HALF), threads = call->threads;
    const int64_t block_rows = choose_block_rows(w, call->rows, halves, threads);
    const int64_t blocks = ceil_div(call->rows, block_rows);
    for (int64_t i = 0; i < count; i++)
        if (panels[i] < 0 || panels[i] >= ceil_div(halves, 2)) return -1;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        char buffer[PRIVATE_BYTES] __attribute__((aligned(64)));
        const call_t c = prepare_call(call, block_rows, buffer);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * count; i++) {
            const int64_t first = i / count * halves, half = 2 * panels[i % count];
            multiply_units(&c, halves, block_rows, first + half, first + min64(half + 2, halves));
        }
        if (w->is_tiled) release_tiles();
    }
    return 0;
}

/* ---- experts ---------------------------------------------------------------------------------- */

enum { BOTH, GATES, DOWNS };

typedef struct { /* the experts of a layer for some rows, filled by packed_experts.py; rows lie side by side */
    /* [experts]; up: NULL, or gate_up is gate. With RELU2 gate_up is up, and there is no gate. */
    const weight_t *const *gate_up, *const *up, *const *down;
    const char *x;                                /* [rows][k] */
    const int64_t *ids;                           /* [rows][top_k]: the experts of each row */
    const float *weights;                         /* [rows][top_k] */
    char *out;                                    /* [rows][outputs of down] */
    char *sorted;             /* [rows * top_k][k]: by expert; then what down gives */
    char *gated;              /* [rows * top_k][inner]: by expert; of a rank, its columns */
    const char *whole;        /* the columns of all ranks: `gated`, where there is one */
    char *apart;              /* [rows * top_k][2][inner]: of gate and up, where they are two weights */
    int64_t *places, *starts; /* [rows * top_k]: of a row's choice in `sorted`; [experts + 1] */
    call_t *calls;            /* a call of each weight for each expert that rows go to */
    char *made;               /* the rows of all calls, rounded or arranged, where weights want that */
    int64_t experts, top_k, rows, activation, threads;
    int64_t half; /* BOTH; or one of them: ranks gather `gated` between the two */
} experts_t;

/* Sort the choices by expert, keeping their order; and set up the calls: of gate and up, of down, and of up
 * where it is apart. Returns how many there are of each. */
static int64_t plan_experts(const experts_t *e) {
    const int64_t choices = e->rows * e->top_k;
    memset(e->starts, 0, (size_t)(e->experts + 1) * sizeof *e->starts);
    for (int64_t i = 0; i < choices; i++) e->starts[e->ids[i] + 1]++;
    int64_t hit = 0, n = 0;
    for (int64_t id = 0; id < e->experts; id++) {
        hit += e->starts[id + 1] > 0;
        e->starts[id + 1] += e->starts[id];
    }
    for (int64_t id = 0; id < e->experts; id++) {
        const int64_t first = e->starts[id], rows = e->starts[id + 1] - first;
        if (!rows) continue;
        const weight_t *gate_up = e->gate_up[id], *down = e->down[id];
        const int64_t width = ITEM * gate_up->k, inner = ITEM * gate_up->outputs;
        const int64_t all = ITEM * down->k, given = ITEM * down->outputs;
        char *sorted = e->sorted + first * width, *gated = e->gated + first * inner;
        const int64_t epilogue = gate_up->activation ? FLOAT + gate_up->activation : STORE;
        if (e->up) {
            char *apart = e->apart + first * 2 * inner;
            e->calls[n] = (call_t){gate_up, sorted, apart, NULL, width, 2 * inner, rows, STORE, e->threads};
            e->calls[2 * hit + n] = e->calls[n];
            e->calls[2 * hit + n].w = e->up[id], e->calls[2 * hit + n].out = apart + inner;
        } else
            e->calls[n] = (call_t){gate_up, sorted, gated, NULL, width, inner, rows, epilogue, e->threads};
        e->calls[hit + n++] = (call_t){down, e->whole + first * all, e->sorted + first * given, NULL, all, given,
                                       rows, STORE, e->threads};
    }
    for (int64_t i = 0; i < choices; i++) e->places[i] = e->starts[e->ids[i]]++;
    return hit;
}

/* One thread's part of calls that read nothing of each other: a panel at a time of all of them. */
static void multiply_calls(const call_t *calls, int64_t count, int64_t threads) {
    int64_t steps = 0, at = 0, before = 0;
    for (int64_t i = 0; i < count; i++) {
        const weight_t *w = calls[i].w;
        const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF);
        const int64_t rows = choose_block_rows(w, calls[i].rows, halves, threads);
        steps += ceil_div(calls[i].rows, rows) * ceil_div(halves, 2);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t step = 0; step < steps; step++) {
        for (;; at++) { /* a thread's steps come in order */
            const weight_t *w = calls[at].w;
            const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF), panels = ceil_div(halves, 2);
            const int64_t rows = choose_block_rows(w, calls[at].rows, halves, threads);
            const int64_t own = ceil_div(calls[at].rows, rows) * panels;
            if (step >= before + own) {
                before += own;
                continue;
            }
            const int64_t first = (step - before) / panels * halves, half = (step - before) % panels * 2;
            multiply_units(&calls[at], halves, rows, first + half, first + min64(half + 2, halves));
            break;
        }
    }
}

/* The rows of each call, of `first` and those after it, rounded or arranged where its weight wants that. */
static void make_rows(const experts_t *e, call_t *calls, int64_t count, const char *first, int64_t threads) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
        call_t *c = &calls[i];
        const int64_t halves = ceil_div(c->w->outputs, c->w->activation ? TURN : HALF);
        const int64_t before = (c->x - first) / c->x_stride;
        if (c->w->is_rounded) {
            rounded_t *rounded = (rounded_t *)e->made + before * (c->w->k / GROUP);
            round_rows(c, choose_block_rows(c->w, c->rows, halves, threads), 1, rounded);
            c->x = (const char *)rounded;
        } else if (looks_up(c->w) && c->rows > 1) { /* a call's blocks may begin a block later than its rows */
            char *made = e->made + (before / PAIR_ROWS + i) * PAIR_ROWS * c->x_stride;
            for (int64_t row = 0; row < c->rows; row += PAIR_ROWS)
                arrange_block(c->w, c->x + row * c->x_stride, c->x_stride, row, min64(PAIR_ROWS, c->rows - row), made);
            c->x = made, c->x_stride = 0;
        }
    }
}

/* activation(gate) * up of a row's choice, where these are two weights. */
INLINE void gate_choice(const experts_t *e, int64_t choice, const int activation) {
    const int64_t inner = e->up[0]->outputs;
    const char *gate = e->apart + ITEM * choice * 2 * inner, *up = gate + ITEM * inner;
    for (int64_t at = 0; at < inner; at += LANES) {
        const int n = (int)min64(LANES, inner - at);
        const vf y = load_f32(gate + ITEM * at, n, MODE), z = load_f32(up + ITEM * at, n, MODE);
        store_n(e->gated + ITEM * (choice * inner + at), gated(y, z, activation, MODE), n, MODE);
    }
}
static void gate_choices(const experts_t *e, int64_t choices) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < choices; i++) {
        if (e->activation == SILU) gate_choice(e, i, SILU);
        else if (e->activation == GELU) gate_choice(e, i, GELU);
        else gate_choice(e, i, SWIGLU);
    }
}

/* relu(up) * up of a row's choice, in place, where there is no gate. */
INLINE void square_choice(const experts_t *e, int64_t choice) {
    const int64_t inner = e->gate_up[0]->outputs;
    for (int64_t at = 0; at < inner; at += LANES) {
        const int n = (int)min64(LANES, inner - at);
        char *up = e->gated + ITEM * (choice * inner + at);
        store_n(up, relu2(load_f32(up, n, MODE)), n, MODE);
    }
}

/* The results of a row's experts times their weights, added in the order of its choices. Each product is
 * rounded before it is added, as an operator by itself does. */
static void add_up(const experts_t *e, int64_t row) {
    const int64_t width = e->down[0]->outputs;
    for (int64_t at = 0; at < width; at += LANES) {
        const int n = (int)min64(LANES, width - at);
        vf total = {0};
        for (int64_t i = row * e->top_k; i < (row + 1) * e->top_k; i++) {
            vf term = load_f32(e->sorted + ITEM * (e->places[i] * width + at), n, MODE) * e->weights[i];
            KEEP_APART(term);
            total = i == row * e->top_k ? term : total + term;
        }
        store_n(e->out + ITEM * (row * width + at), total, n, MODE);
    }
}

/* One thread's part of a half: of the gates, and of the downs. */
static void multiply_gates(const experts_t *e, int64_t hit, int64_t threads) {
    const int64_t choices = e->rows * e->top_k, width = ITEM * e->gate_up[0]->k;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < choices; i++)
        memcpy(e->sorted + e->places[i] * width, e->x + i / e->top_k * width, (size_t)width);
    make_rows(e, e->calls, hit, e->sorted, threads);
    multiply_calls(e->calls, hit, threads);
    if (e->activation == RELU2) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < choices; i++) square_choice(e, i);
    }
    if (!e->up) return;
    make_rows(e, e->calls + 2 * hit, hit, e->sorted, threads);
    multiply_calls(e->calls + 2 * hit, hit, threads);
    gate_choices(e, choices);
}
static void multiply_downs(const experts_t *e, int64_t hit, int64_t threads) {
    make_rows(e, e->calls + hit, hit, e->whole, threads);
    multiply_calls(e->calls + hit, hit, threads);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < e->rows; row++) add_up(e, row);
}

/* out = for each row the sum over its experts of weight * down(activation(gate(x)) * up(x)). A half plans
 * by itself: ids are the same in both. */
int experts(const experts_t *e) {
    const int64_t hit = plan_experts(e);
    const int64_t products = e->rows * e->top_k * e->down[0]->outputs * e->down[0]->k;
    const int64_t threads = products < 1 << 16 ? 1 : e->threads;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        if (e->half != DOWNS) multiply_gates(e, hit, threads);
        if (e->half != GATES) multiply_downs(e, hit, threads);
        if (e->down[0]->is_tiled || e->gate_up[0]->is_tiled || (e->up && e->up[0]->is_tiled)) release_tiles();
    }
    return 0;
}

/* ---- memory and packing ----------------------------------------------------------------------- */

/* A hint, before the pages are touched; where it is not understood, small pages do. */
void advise_huge_pages(void *p, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(p, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

/* Where output n of part `which` (gate 0, up 1) of a packed weight lies: its column, all panels laid
 * end to end. Gate and up take turns. */
INLINE int64_t column_of(int64_t n, int64_t is_gated, int64_t which) {
    return is_gated ? n / TURN * 2 * TURN + which * TURN + n % TURN : n;
}

/* Where word i of k of a column of numbers lies, in words. */
INLINE int64_t word_at(const weight_t *w, int64_t column, int64_t i) {
    const int64_t words = words_of(w);
    if (!w->is_tiled) return (column / PANEL * words + i) * PANEL + column % PANEL;
    const int64_t step = column / HALF * (words / TILE_PAIRS) + i / TILE_PAIRS;
    const int64_t tile = 2 * step + column % HALF / TURN;
    return (tile * TILE_PAIRS + i % TILE_PAIRS) * TURN + column % TURN;
}

/* Bytes of word i of a row; the last one of an odd row of bfloat16 has half of them. */
INLINE size_t bytes_at(const weight_t *w, int64_t i) {
    return (size_t)min64(4, w->k * ITEM - 4 * i);
}

static void pack_numbers(const weight_t *w, const char *rows, int64_t stride, int64_t which, int64_t n0) {
    const int64_t words = words_of(w);
    for (int64_t i0 = 0; i0 < words; i0 += STRIP)
        for (int64_t n = n0; n < min64(n0 + TURN, w->outputs); n++) {
            const int64_t column = column_of(n, w->activation, which);
            for (int64_t i = i0; i < min64(i0 + STRIP, words); i++)
                memcpy((char *)w->panels + 4 * word_at(w, column, i), rows + n * stride + 4 * i,
                       bytes_at(w, i));
        }
}

/* Pack the rows of a weight [outputs, k], `stride` bytes apart, as part `which`. Where no row comes, the panels
 * hold zeros before. Rows are numbers, or codes as the file has them. */
void pack(const weight_t *w, const char *rows, int64_t stride, int64_t which, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t n0 = 0; n0 < w->outputs; n0 += TURN) {
        if (w->format == DENSE) {
            pack_numbers(w, rows, stride, which, n0);
            continue;
        }
        for (int64_t n = n0; n < min64(n0 + TURN, w->outputs); n++) {
            const int64_t column = column_of(n, w->activation, which);
            const int64_t blocks = w->k / FORMAT[w->format].weights;
            const int format = (int)w->format, is_left = looks_up(w);
            const int64_t first = is_left ? first_scale(format) : 0;
            const int64_t last = is_left ? last_scale(format) : FORMAT[format].words;
            char *panel = (char *)panel_of(w, column);
            pack_column(rows + n * stride, blocks, panel, column % PANEL, first, last, format);
            if (is_left) LEFT_PACKERS[format](rows + n * stride, blocks, panel, column);
        }
    }
}

/* Whether `count` numbers of float32 are all bfloat16's, bit by bit; then `out` has them. */
int narrow_numbers(const uint32_t *numbers, uint16_t *out, int64_t count, int64_t threads) {
    uint32_t lost = 0;
#pragma omp parallel for simd num_threads((int)threads) schedule(static) reduction(| : lost)
    for (int64_t i = 0; i < count; i++) {
        lost |= numbers[i] << 16;
        out[i] = (uint16_t)(numbers[i] >> 16);
    }
    return !lost;
}

/* One row of a weight. What is not numbers becomes numbers half a panel at a time, of which one row is wanted. */
static void gather_row(const weight_t *w, int64_t id, char *to) {
    if (w->format == DENSE) {
        for (int64_t i = 0; i < words_of(w); i++)
            memcpy(to + 4 * i, w->panels + 4 * word_at(w, id, i), bytes_at(w, i));
        return;
    }
    char numbers[GROUP * 4 * HALF] __attribute__((aligned(64)));
    const int64_t n = id % HALF;
    for (int64_t group = 0; group < w->k / GROUP; group++, to += 4 * GROUP_WORDS) {
        if (w->is_tiled) unpack_half(w, id / HALF, group, group + 1, numbers);
        else unpack(w, id - n, HALF, group, group + 1, (unpacked_t){numbers, 4 * HALF, 4 * TURN, 0});
        if (looks_up(w)) {
            memcpy(to, numbers + n * 2 * GROUP, 2 * GROUP);
            continue;
        }
        const int64_t first = w->is_tiled ? n / TURN * STEP_BYTES / 2 + n % TURN * 4 : 4 * n;
        const int64_t stride = w->is_tiled ? TILE_BYTES : 4 * HALF;
        for (int64_t i = 0; i < GROUP_WORDS; i++) memcpy(to + 4 * i, numbers + first + i * stride, 4);
    }
}

/* out[i] = row ids[i] of a weight that is not gated. Returns 0, or -1 at an id that is no row. */
int gather_rows(const weight_t *w, const int64_t *ids, int64_t count, char *out, int64_t threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->outputs) return -1;
    if (count * w->k < 1 << 14) threads = 1;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < count; i++) gather_row(w, ids[i], out + i * w->k * ITEM);
    return 0;
}
