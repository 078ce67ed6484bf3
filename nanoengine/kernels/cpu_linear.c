/* Products of activations with packed weights, x W^T: of bfloat16 for CPUs with AVX512-BF16, of float32 for
 * all. A weight lies here as numbers, as numbers in 12 bits (cpu_bf12.h), or as the codes of a GGUF file
 * (cpu_codes.h). What is not numbers becomes numbers a chunk at a time, in the caches: so a product has the bits
 * of one of the numbers. But codes of up to 6 bits, met by bfloat16 in vectors, are multiplied as they are
 * (cpu_code_sums.h).
 *
 * The law: an output element is one chain of steps over its k, in order, whatever the number of rows
 * of the call, the row's place among them and the number of threads. So a row's bits are the same
 * alone and in any batch. A step is a fused one over a word of k: one float32, or a pair of bfloat16. Or,
 * where there are matrix tiles (AMX) and k fills them, one over 32 values of k: see cpu_tiles.h. An
 * epilogue makes the same rounding steps as the operators it stands for.
 *
 * Numbers lie in panels of PANEL outputs, word by word: [panel][word][output], padded with zeros. A
 * register block is up to ROWS rows times 16 outputs, half a panel or a whole one; the panel streams past it. Work
 * is shared out in units of half a panel, so that 9 panels keep two threads busy alike; of many rows in
 * matrix tiles, in blocks of rows with all outputs. For matrix tiles a half panel is one piece of memory:
 * [half panel][step][vector][16 pairs][16 outputs][2]. Codes of 4 to 8 bits lie otherwise there, but those of FP8, NVFP4
 * and NF4: see cpu_lookup.h.
 */
#include <omp.h>

#include "cpu_tiled_products.h"
#include "cpu_router.h"
#include "cpu_shares.h"

int has_pairs(void) { return HAVE_PAIRS; }

/* For packed_weight.py, which finds room for the rows. */
int64_t stride_of_made(const weight_t *w) { return made_stride(w); }

/* ---- units of work ----------------------------------------------------------------------------- */

/* Units [begin, end): half panels, all of them for one row block after the other. */
static void multiply_units(const call_t *c, int64_t halves, int64_t block_rows, int64_t begin, int64_t end,
                           scratch_t *scratch) {
    int64_t shaped = 0;
    int is_warm = 0;
    for (int64_t u = begin, n; u < end && is_rounded(c->w); u += n) {
        const int64_t row = u / halves * block_rows, half = u % halves;
        n = half % 2 == 0 && half + 1 < halves && u + 1 < end ? 2 : 1;
        multiply_few_bits(c, row, min64(block_rows, c->rows - row), half * HALF, (int)n * HALF, scratch);
    }
    if (is_rounded(c->w)) return;
    for (int64_t u = begin, n; u < end && c->w->is_tiled; u += n) {
        const int64_t row = u / halves * block_rows, rows = min64(block_rows, c->rows - row);
        const int64_t half = u % halves;
        const int is_few = looks_up(c->w) && rows <= PAIR_ROWS;
        const int64_t most = is_few ? 2 - half % 2 : rows > TILED_ROWS ? HALVES_AT_ONCE : 1;
        n = min64(most, min64(halves - half, end - u));
        if (is_few) multiply_few_lookups(c, row, rows, half * HALF, (int)n * HALF, scratch);
        else multiply_halves(c, row, rows, half, n, &shaped, scratch);
        if (is_few) shaped = 0;
    }
    for (int64_t u = begin; u < end && !c->w->is_tiled;) {
        const int64_t row = u / halves * block_rows, half = u % halves;
        const int64_t rows = min64(block_rows, c->rows - row);
        const int by_codes = go_by_codes(rows, c->w->format);
        const int is_sliced = LANES == 8 && rows >= SLICED_ROWS && !by_codes && c->w->format != DENSE;
        const int is_12 = c->w->format == BF12 && (LANES == 16 || rows <= FEW_OF_12);
        const int is_run = go_in_runs(rows, c->w->format);
        const int is_wide = LANES == 16 || is_sliced || is_run || (LANES == 8 && (by_codes || is_12));
        const int is_whole = is_wide && half % 2 == 0 && half + 1 < halves && u + 1 < end;
        const int columns = is_whole ? PANEL : HALF;
        if (sums_codes(c->w) && row != scratch->summed_row) sum_all_groups(c, row, rows, scratch);
        /* one row of half a panel has no function of its own */
        const int is_few = by_codes && (is_whole || rows % 2 == 0 || LANES < 16);
        const int has_next = is_whole && half + 3 < halves && u + 3 < end;
        if (sums_codes(c->w)) multiply_code_sums(c, row, rows, half * HALF, columns, is_warm, has_next, scratch);
        else if (is_12 && is_whole) multiply_12_bits(c, row, rows, half * HALF, has_next, scratch);
        else if (is_sliced) multiply_sliced(c, row, rows, half * HALF, columns, scratch);
        else if (is_run) multiply_runs(c, row, rows, half * HALF, columns, scratch->acc);
        else if (is_few) multiply_few(c, row, rows, half * HALF, columns, scratch->acc);
        else multiply_block(c, row, rows, half * HALF, columns, u > begin && rows > ROWS, scratch);
        u += is_whole ? 2 : 1, is_warm = has_next;
    }
}

/* Rows of a block: what L2 holds, and less where there would be too few units for the threads. */
static int64_t choose_block_rows(const weight_t *w, int64_t rows, int64_t halves, int64_t threads) {
    const int64_t group = w->is_tiled ? TILED_ROWS : w->has_byte_tiles ? TILE_ROWS : ROWS;
    const int64_t chunk = w->format == BF12 && LANES == 16 ? CHUNK_BLOCKS * BLOCK12_WORDS : CHUNK;
    int64_t block = BLOCK_BYTES / (4 * min64(words_of(w), chunk));
    const int64_t most = LANES == 8 && w->format != DENSE ? SLICED_BLOCK : BLOCK_ROWS;
    block = min64(is_rounded(w) ? ROUNDED_ROWS : most, max64(block, 4 * ROWS));
    if (sums_codes(w)) block = min64(block, most_summed_rows(w) / ROWS * ROWS);
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
static void norm_rows(const call_t *c, int is_private, char *out, int64_t stride) {
#define NORM(r) norm_row(c->w, c->x + (r) * c->x_stride, out + (r) * stride)
    EACH_ROW(is_private, c->rows, NORM)
}
static void copy_rows(const call_t *c, int is_private, char *out, int64_t stride) {
#define COPY(r) memcpy(out + (r) * stride, c->x + (r) * c->x_stride, (size_t)(ITEM * c->w->k))
    EACH_ROW(is_private, c->rows, COPY)
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

/* A call as `multiply_units` takes it: its rows normed, rounded, copied or arranged where its weight wants that, in
 * `buffer` (BUFFER_BYTES of the thread's own) or in call->made. */
static call_t prepare_call(const call_t *call, int64_t block_rows, char *buffer) {
    const weight_t *w = call->w;
    const int64_t rows = call->rows;
    call_t c = *call;
    if (rows == 1) c.x_stride = w->k * ITEM; /* never 0 */
    if (w->activation) c.epilogue = FLOAT + w->activation;
    const int is_arranged = w->is_tiled && rows > (looks_up(w) ? 1 : TILED_ROWS);
    const int64_t width = w->k * ITEM, stride = made_stride(w); /* rounded rows take 3/4 or 3/8 of it */
    const int is_copied = stride > width && c.x_stride % CROWDED == 0 && rows > ROWS;
    if (w->norm_weight || is_rounded(w) || is_copied) {
        const int is_private = rows * width <= PRIVATE_BYTES && !is_arranged;
        char *made = is_private ? buffer : call->made;
        if (is_rounded(w)) round_rows(call, block_rows, is_private, (rounded_t *)made);
        else if (w->norm_weight) norm_rows(call, is_private, made, stride);
        else copy_rows(call, is_private, made, stride);
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
    scratch_t scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < ceil_div(rows, block_rows); i++) {
        prepare_block(call, i * block_rows, min64(block_rows, rows - i * block_rows));
        multiply_units(&c, halves, block_rows, i * halves, (i + 1) * halves, &scratch);
    }
}

/* One thread's part of a call. shares: of all threads, none taken yet. */
static void linear_in_team(const call_t *call, int64_t threads, share_t *shares) {
    const weight_t *w = call->w;
    const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF), rows = call->rows;
    const int64_t block_rows = choose_block_rows(w, rows, halves, threads);
    const int64_t blocks = ceil_div(rows, block_rows), units = blocks * halves;
    const int64_t most = (w->is_tiled || sums_codes(w)) && units >= 32 * threads ? HALVES_AT_ONCE : 2;
    const int64_t step = units < 8 * threads ? 1 : most, steps = ceil_div(halves, step);
    if (w->is_tiled && blocks > 1 && blocks % threads == 0) {
        multiply_row_blocks(call, halves, block_rows);
        return;
    }
    char buffer[BUFFER_BYTES] __attribute__((aligned(64)));
    const call_t c = prepare_call(call, block_rows, buffer);
    scratch_t scratch;
    scratch.summed_row = -1;
    if (blocks == 1) {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t begin, end; take_units(shares, units, me, team, &begin, &end);)
            multiply_units(&c, halves, block_rows, begin, end, &scratch);
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks * steps; i++) {
        const int64_t row_block = i / steps * halves, half = i % steps * step;
        multiply_units(&c, halves, block_rows, row_block + half, row_block + min64(half + step, halves), &scratch);
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
    share_t shares[2 * threads];
    memset(shares, 0, sizeof shares);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int has_tiles = 0;
        for (int64_t i = 0; i < count; i++) {
            shares[(i + 1) % 2 * threads + omp_get_thread_num()].taken = 0; /* for the next call: free since the last */
            linear_in_team(&calls[i], threads, shares + i % 2 * threads);
            has_tiles |= uses_tiles(calls[i].w);
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
        char buffer[BUFFER_BYTES] __attribute__((aligned(64)));
        const call_t c = prepare_call(call, block_rows, buffer);
        scratch_t scratch;
        scratch.summed_row = -1;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * count; i++) {
            const int64_t first = i / count * halves, half = 2 * panels[i % count];
            multiply_units(&c, halves, block_rows, first + half, first + min64(half + 2, halves), &scratch);
        }
        if (uses_tiles(w)) release_tiles();
    }
    return 0;
}

#include "cpu_experts.h"
#include "cpu_packing.h"
