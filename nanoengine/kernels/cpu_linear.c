/* Products of bfloat16 activations with packed weights, x W^T, for CPUs with AVX512-BF16.
 *
 * The law: an output element is one chain of steps over its k, in order, whatever the number of rows
 * of the call, the row's place among them and the number of threads. So a row's bits are the same
 * alone and in any batch. A step is a fused one over a pair of k; or, where there are matrix tiles (AMX)
 * and k fills them, one over 32 values of k: see cpu_tiles.h. An epilogue makes the same rounding steps
 * as the operators it stands for.
 *
 * Weights lie in panels of PANEL outputs, k in pairs: [panel][pair][output][2], padded with zeros. A
 * register block is up to ROWS rows times VECS vectors of 16 outputs; the panel streams past it. Work
 * is shared out in units of half a panel, so that 9 panels keep two threads busy alike. For matrix tiles
 * a half panel is one piece of memory: [half panel][step][vector][16 pairs][16 outputs][2].
 */
#include <omp.h>

int supported(void) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <sys/mman.h>

#include "cpu_tiles.h"

enum { VECS = 4, PANEL = VECS * LANES, HALF = PANEL / 2 };
enum { ROWS = 6 };                /* 6 * 4 accumulators of 32 registers */
enum { CHUNK = 1024 };            /* pairs of k: 256 KiB of a panel, which stay in L2 */
enum { BLOCK_BYTES = 512 << 10 }; /* activations of a row block: with a panel's chunk, about L2 */
enum { BLOCK_ROWS = 64 * ROWS };
enum { STRIP = 4, STRIP_BYTES = STRIP * PANEL * 4 };
enum { PRIVATE_BYTES = 64 << 10 }; /* normed rows that every thread makes for itself */
/* In matrix tiles: 18 steps of half a panel are 36 KiB, which stay in L1 while rows pass it by. */
enum { TILED_ROWS = 2 * TILE_ROWS, TILE_K = 2 * TILE_PAIRS };
enum { STEP_BYTES = HALF * TILE_K * 2, CHUNK_STEPS = 18 };
enum { STORE, ADD, FLOAT, SILU_MUL };

typedef struct { /* one packed weight: filled by cpu_linear.py */
    const uint16_t *panels;
    const float *bias;           /* [panels * PANEL] in the order of the panels, or NULL */
    const uint16_t *norm_weight; /* [k], or NULL: norm the activations first */
    int64_t outputs, k, is_gated, is_tiled; /* is_tiled: in matrix tiles */
    double eps;
} weight_t;

typedef struct { /* one call, filled by cpu_linear.py; strides in bytes */
    const weight_t *w;
    const char *x;
    char *out;
    char *normed; /* [rows][k] bf16, where there is a norm and that is more than PRIVATE_BYTES */
    int64_t x_stride, out_stride, rows, epilogue, threads;
} call_t;

typedef int32_t __attribute__((aligned(2), may_alias)) pair_t; /* in a cast GCC ignores it */

INLINE int64_t pairs_of(const weight_t *w) { return ceil_div(w->k, 2); }
INLINE __mmask16 first_lanes(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

/* ---- products --------------------------------------------------------------------------------- */

/* What to prefetch while a panel is read. Few rows wait for memory: one line in every KiB, in the page
 * after, keeps the hardware's prefetcher running across pages (33 GB/s per core; 20 with none, and 20
 * with every line, which is then all that comes). With more rows memory has time while the others use
 * the panel in L2: every line of what comes next, spread over the passes. Measured on Zen 4. With matrix
 * tiles few rows have every line a KiB ahead (two cores of Sapphire Rapids: 33 GB/s, and 29 by the rule
 * for Zen 4; further ahead is slower, too). */
enum { AHEAD = 4096, TILED_AHEAD = 1024 };

/* acc[r][v] += x[r] . w[v] over `pairs` pairs of k. acc is [rows][PANEL]; `is_first` starts at 0. */
INLINE void multiply(const uint16_t *w, const char *x, int64_t x_stride, int64_t pairs, int is_odd,
                     int is_first, ahead_t ahead, float *acc, const int rows, const int vecs) {
    __m512 s[ROWS][VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            s[r][v] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * PANEL + v * LANES);
    const char *x3 = x + 3 * x_stride;
#define STEP(READ)                                                                                  \
    do {                                                                                            \
        __m512bh b[VECS];                                                                           \
        UNROLL for (int v = 0; v < vecs; v++)                                                       \
            b[v] = (__m512bh)_mm512_loadu_si512(w + 2 * v * LANES);                                 \
        UNROLL for (int r = 0; r < rows; r++) {                                                     \
            const __m512bh a = (__m512bh)_mm512_set1_epi32(                                         \
                READ(r < 3 ? x + r * x_stride : x3 + (r - 3) * x_stride));                          \
            UNROLL for (int v = 0; v < vecs; v++) s[r][v] = _mm512_dpbf16_ps(s[r][v], a, b[v]);     \
        }                                                                                           \
    } while (0)
#define PAIR(p) (*(const pair_t *)(p))
#define LAST(p) (*(const uint16_t *)(p))
    for (int64_t left = pairs - is_odd; left > 0; left -= STRIP) {
        prefetch_ahead(&ahead);
        for (int64_t n = min64(left, STRIP); n > 0; n--, x += 4, x3 += 4, w += 2 * PANEL) STEP(PAIR);
    }
    if (is_odd) STEP(LAST);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) _mm512_storeu_ps(acc + r * PANEL + v * LANES, s[r][v]);
}

#define MULTIPLY(rows, vecs)                                                                        \
    static void multiply_##rows##_##vecs(const uint16_t *w, const char *x, int64_t x_stride,        \
                                         int64_t pairs, int is_odd, int is_first, ahead_t ahead,    \
                                         float *acc) {                                              \
        multiply(w, x, x_stride, pairs, is_odd, is_first, ahead, acc, rows, vecs);                  \
    }
#define MULTIPLY_ALL(rows) MULTIPLY(rows, 2) MULTIPLY(rows, 4)
MULTIPLY_ALL(1)
MULTIPLY_ALL(2)
MULTIPLY_ALL(3)
MULTIPLY_ALL(4)
MULTIPLY_ALL(5)
MULTIPLY_ALL(6)
typedef void multiply_t(const uint16_t *, const char *, int64_t, int64_t, int, int, ahead_t, float *);
#define BOTH(rows) {multiply_##rows##_2, multiply_##rows##_4}
static multiply_t *const MULTIPLIERS[ROWS][2] = {BOTH(1), BOTH(2), BOTH(3), BOTH(4), BOTH(5), BOTH(6)};

/* ---- epilogues -------------------------------------------------------------------------------- */

/* silu(gate) * up, each rounded to bf16 on its way as the steps one by one would. */
INLINE vf gated(vf gate, vf up) {
    return rounded(silu(rounded(gate, BF16_WIDE)), BF16_WIDE) * rounded(up, BF16_WIDE);
}

INLINE vf with_bias(const float *acc, const float *bias) {
    return bias ? load(acc) + load(bias) : load(acc);
}

/* Outputs [first, first + LANES) of a row, of which `left` exist. */
INLINE void put(char *out, int64_t first, int64_t left, vf y, int64_t epilogue) {
    const __mmask16 mask = first_lanes(left);
    if (epilogue == FLOAT) {
        _mm512_mask_storeu_ps(out + 4 * first, mask, (__m512)y);
        return;
    }
    vh h = narrow(y);
    if (epilogue == ADD)
        h = narrow(widen((vh)_mm256_maskz_loadu_epi16(mask, out + 2 * first)) + widen(h));
    _mm256_mask_storeu_epi16(out + 2 * first, mask, (__m256i)h);
}

/* Finish `rows` rows of the vectors [vec, vec + vecs) of all the panels laid end to end. */
INLINE void finish(const call_t *c, int64_t row, int rows, int64_t vec, int vecs, const float *acc,
                   int64_t width, int64_t epilogue) {
    const float *bias = c->w->bias ? c->w->bias + vec * LANES : NULL;
    const int step = epilogue == SILU_MUL ? 2 : 1;
    for (int r = 0; r < rows; r++, acc += width) {
        char *out = c->out + (row + r) * c->out_stride;
        for (int v = 0; v < vecs; v += step) {
            const int64_t first = (vec + v) / step * LANES;
            vf y = with_bias(acc + v * LANES, bias ? bias + v * LANES : NULL);
            if (epilogue == SILU_MUL) {
                const int up = (v + 1) * LANES;
                y = gated(y, with_bias(acc + up, bias ? bias + up : NULL));
            }
            put(out, first, c->w->outputs - first, y, epilogue);
        }
    }
}
static void finish_rows(const call_t *c, int64_t row, int rows, int64_t vec, int vecs,
                        const float *acc, int64_t width) {
    switch (c->epilogue) {
    case ADD: finish(c, row, rows, vec, vecs, acc, width, ADD); break;
    case FLOAT: finish(c, row, rows, vec, vecs, acc, width, FLOAT); break;
    case SILU_MUL: finish(c, row, rows, vec, vecs, acc, width, SILU_MUL); break;
    default: finish(c, row, rows, vec, vecs, acc, width, STORE);
    }
}

/* ---- one product ------------------------------------------------------------------------------ */

/* Every line from `p` on, in `passes` passes of steps over `bytes` bytes. */
INLINE ahead_t every_line(const char *p, int64_t bytes, int64_t passes) {
    const int64_t lines = passes > 0 ? ceil_div(bytes / 64, passes) : 0;
    return (ahead_t){.from = p, .lines = lines, .step = 64 * lines};
}

/* The rows [row, row + rows) of vectors [vec, vec + vecs), which lie in one panel. `is_warm` says
 * that the panel was prefetched. */
static void multiply_block(const call_t *c, int64_t row, int64_t rows, int64_t vec, int vecs,
                           int is_warm, float *acc) {
    const weight_t *w = c->w;
    const int64_t all = pairs_of(w), groups = ceil_div(rows, ROWS);
    const uint16_t *panel = w->panels + vec / VECS * all * 2 * PANEL + vec % VECS * 2 * LANES;
    for (int64_t at = 0; at < all; at += CHUNK) {
        const int64_t pairs = min64(CHUNK, all - at), bytes = pairs * PANEL * 4;
        const uint16_t *chunk = panel + at * 2 * PANEL;
        const int is_last = at + pairs == all;
        const char *here = (const char *)chunk, *next = here + bytes;
        const ahead_t sparse = {.from = here + AHEAD, .lines = 1, .step = STRIP_BYTES};
        ahead_t ahead = is_warm ? every_line(next, STRIP_BYTES, groups) : sparse;
        for (int64_t g = 0, r = 0; g < groups; g++) {
            const int64_t n = (rows - r) / (groups - g);
            if (g == 1 && !is_warm) ahead = every_line(next, STRIP_BYTES, groups - 1);
            if (g > 0 && ahead.from >= next + bytes) ahead.lines = 0;
            MULTIPLIERS[n - 1][vecs / 4](chunk, c->x + (row + r) * c->x_stride + 4 * at, c->x_stride,
                                         pairs, is_last && w->k % 2, at == 0, ahead, acc + r * PANEL);
            ahead.from += ceil_div(pairs, STRIP) * ahead.step;
            if (is_last) finish_rows(c, row + r, n, vec, vecs, acc + r * PANEL, PANEL);
            r += n;
        }
        is_warm = groups > 1;
    }
}

/* The rows [row, row + rows) of half panel `half` of a tiled weight, as multiply_block. `shaped`: rows
 * that this thread's tiles are shaped for; to shape them anew takes 50 ns. */
static void multiply_half(const call_t *c, int64_t row, int64_t rows, int64_t half, int is_warm,
                          int64_t *shaped, float *acc) {
    const int64_t all = c->w->k / TILE_K, chunks = ceil_div(all, CHUNK_STEPS);
    const int64_t groups = ceil_div(rows, TILED_ROWS);
    const char *chunk = (const char *)c->w->panels + half * all * STEP_BYTES;
    for (int64_t i = 0, at = 0, steps; i < chunks; i++, at += steps, chunk += steps * STEP_BYTES) {
        steps = (all - at) / (chunks - i);
        const char *next = chunk + steps * STEP_BYTES;
        const side_t columns = {chunk, TILE_BYTES, STEP_BYTES};
        ahead_t ahead = {chunk + TILED_AHEAD, STEP_BYTES / 64, STEP_BYTES};
        if (is_warm) ahead = every_line(next, STEP_BYTES, groups);
        for (int64_t g = 0, r = 0; g < groups; g++, r += TILED_ROWS) {
            const int64_t n = min64(TILED_ROWS, rows - r);
            const char *x = c->x + (row + r) * c->x_stride + at * TILE_BYTES;
            const product_t p = {{x, c->x_stride, TILE_BYTES}, columns, STEP_BYTES / 2, steps, HALF * 4};
            float *sums = acc + (chunks > 1 ? r * HALF : 0);
            if (*shaped != n) shape_tiles(min64(n, TILE_ROWS), n > TILE_ROWS ? n - TILE_ROWS : n);
            *shaped = n;
            if (g == 1 && !is_warm) ahead = every_line(next, STEP_BYTES, groups - 1);
            if (g > 0 && ahead.from >= next + steps * STEP_BYTES) ahead.lines = 0;
            if (n > TILE_ROWS) multiply_tiles(p, ahead, sums, at == 0, 1, 1, 1);
            else multiply_tiles(p, ahead, sums, at == 0, 0, 1, 1);
            ahead.from += steps * ahead.step;
            if (i + 1 == chunks) finish_rows(c, row + r, n, half * 2, 2, sums, HALF);
        }
        is_warm = groups > 1;
    }
}

/* Units [begin, end): half panels, all of them for one row block after the other. */
static void multiply_units(const call_t *c, int64_t halves, int64_t block_rows, int64_t begin,
                           int64_t end) {
    float acc[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t shaped = 0;
    for (int64_t u = begin; u < end && c->w->is_tiled; u++) {
        const int64_t row = u / halves * block_rows, rows = min64(block_rows, c->rows - row);
        multiply_half(c, row, rows, u % halves, u > begin && rows > TILED_ROWS, &shaped, acc);
    }
    for (int64_t u = begin; u < end && !c->w->is_tiled;) {
        const int64_t row = u / halves * block_rows, half = u % halves;
        const int is_whole = half % 2 == 0 && half + 1 < halves && u + 1 < end;
        const int64_t rows = min64(block_rows, c->rows - row);
        multiply_block(c, row, rows, half * 2, is_whole ? 4 : 2, u > begin && rows > ROWS, acc);
        u += is_whole ? 2 : 1;
    }
}

/* Rows of a block: what L2 holds, and less where there would be too few units for the threads. */
static int64_t choose_block_rows(int64_t rows, int64_t k, int64_t halves, int64_t threads,
                                 int64_t group) {
    int64_t block = BLOCK_BYTES / (2 * min64(k, 2 * CHUNK));
    block = min64(BLOCK_ROWS, block < 4 * ROWS ? 4 * ROWS : block);
    for (; block > 4 * ROWS; block /= 2) {
        const int64_t units = ceil_div(rows, block) * halves;
        if (units >= 16 * threads || (units >= 4 * threads && block <= 16 * ROWS)) break;
    }
    const int64_t blocks = ceil_div(rows, block);
    return blocks > 1 ? ceil_div(ceil_div(rows, blocks), group) * group : block;
}

/* The rows of x, normed: by every thread for itself, or together where they are many. */
static void norm_rows(const call_t *c, int is_private, char *out) {
    const float eps = (float)c->w->eps;
#define NORM(r)                                                                                     \
    norm(c->x + (r) * c->x_stride, c->w->norm_weight, out + (r) * 2 * c->w->k, c->w->k, eps, BF16_WIDE)
    if (is_private) {
        for (int64_t r = 0; r < c->rows; r++) NORM(r);
    } else {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < c->rows; r++) NORM(r);
    }
}

/* One thread's part of a call. */
static void linear_in_team(const call_t *call, int64_t threads) {
    const weight_t *w = call->w;
    const int64_t halves = ceil_div(w->outputs, w->is_gated ? LANES : HALF), rows = call->rows;
    const int64_t group = w->is_tiled ? TILED_ROWS : ROWS;
    const int64_t block_rows = choose_block_rows(rows, w->k, halves, threads, group);
    const int64_t blocks = ceil_div(rows, block_rows), units = blocks * halves;
    const int64_t step = units < 8 * threads ? 1 : 2, steps = ceil_div(halves, step);
    call_t c = *call;
    char buffer[PRIVATE_BYTES];
    if (w->is_gated) c.epilogue = SILU_MUL;
    if (w->norm_weight) {
        const int is_private = rows * w->k * 2 <= PRIVATE_BYTES;
        char *normed = is_private ? buffer : call->normed;
        norm_rows(call, is_private, normed);
        c.x = normed, c.x_stride = 2 * w->k;
    }
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
void linear(const call_t *calls, int64_t count) {
    int64_t products = 0;
    for (int64_t i = 0; i < count; i++) products += calls[i].rows * calls[i].w->k * calls[i].w->outputs;
    const int64_t threads = products < 1 << 16 ? 1 : calls->threads; /* some us */
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int has_tiles = 0;
        for (int64_t i = 0; i < count; i++) {
            linear_in_team(&calls[i], threads);
            has_tiles |= calls[i].w->is_tiled;
#pragma omp barrier
        }
        if (has_tiles) release_tiles();
    }
}

/* ---- experts ---------------------------------------------------------------------------------- */

typedef struct { /* the experts of a layer for some rows, filled by cpu_linear.py; bf16 side by side */
    const weight_t *const *gate_up, *const *down; /* [experts] */
    const char *x;                                /* [rows][k] */
    const int64_t *ids;                           /* [rows][top_k]: the experts of each row */
    const float *weights;                         /* [rows][top_k] */
    char *out;                                    /* [rows][k] */
    char *sorted, *gated;     /* [rows * top_k][k] and [rows * top_k][inner]: by expert */
    int64_t *places, *starts; /* [rows * top_k]: of a row's choice in `sorted`; [experts + 1] */
    call_t *calls;            /* two for each expert that rows go to */
    int64_t experts, top_k, rows, threads;
} experts_t;

/* Sort the choices by expert, keeping their order; and set up the calls, first of gate and up. Returns how
 * many there are of each. */
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
        const int64_t width = 2 * gate_up->k, inner = 2 * down->k;
        char *sorted = e->sorted + first * width, *gated = e->gated + first * inner;
        e->calls[n] = (call_t){gate_up, sorted, gated, NULL, width, inner, rows, SILU_MUL, e->threads};
        e->calls[hit + n++] = (call_t){down, gated, sorted, NULL, inner, width, rows, STORE, e->threads};
    }
    for (int64_t i = 0; i < choices; i++) e->places[i] = e->starts[e->ids[i]]++;
    return hit;
}

/* One thread's part of calls that read nothing of each other: a panel at a time of all of them. */
static void multiply_calls(const call_t *calls, int64_t count, int64_t threads) {
    int64_t steps = 0, at = 0, before = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t halves = ceil_div(calls[i].w->outputs, calls[i].w->is_gated ? LANES : HALF);
        const int64_t group = calls[i].w->is_tiled ? TILED_ROWS : ROWS;
        const int64_t rows = choose_block_rows(calls[i].rows, calls[i].w->k, halves, threads, group);
        steps += ceil_div(calls[i].rows, rows) * ceil_div(halves, 2);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t step = 0; step < steps; step++) {
        for (;; at++) { /* a thread's steps come in order */
            const weight_t *w = calls[at].w;
            const int64_t halves = ceil_div(w->outputs, w->is_gated ? LANES : HALF), panels = ceil_div(halves, 2);
            const int64_t group = w->is_tiled ? TILED_ROWS : ROWS;
            const int64_t rows = choose_block_rows(calls[at].rows, w->k, halves, threads, group);
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

/* The results of a row's experts times their weights, added in the order of its choices. Each product is
 * rounded before it is added, as an operator by itself does. */
static void add_up(const experts_t *e, int64_t row) {
    const int64_t width = e->down[0]->outputs;
    for (int64_t at = 0; at < width; at += LANES) {
        const int n = (int)min64(LANES, width - at);
        vf total = {0};
        for (int64_t i = row * e->top_k; i < (row + 1) * e->top_k; i++) {
            vf term = load_f32(e->sorted + 2 * (e->places[i] * width + at), n, BF16_WIDE) * e->weights[i];
            __asm__("" : "+v"(term)); /* not one fused step with the sum */
            total = i == row * e->top_k ? term : total + term;
        }
        store_n(e->out + 2 * (row * width + at), total, n, BF16_WIDE);
    }
}

/* out = for each row the sum over its experts of weight * down(silu(gate(x)) * up(x)). */
void experts(const experts_t *e) {
    const int64_t hit = plan_experts(e), width = 2 * e->down[0]->outputs;
    const int64_t choices = e->rows * e->top_k, products = choices * width * e->down[0]->k;
    const int64_t threads = products < 1 << 16 ? 1 : e->threads;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < choices; i++)
            memcpy(e->sorted + e->places[i] * width, e->x + i / e->top_k * width, (size_t)width);
        multiply_calls(e->calls, hit, threads);
        multiply_calls(e->calls + hit, hit, threads);
        if (e->down[0]->is_tiled || e->gate_up[0]->is_tiled) release_tiles();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < e->rows; row++) add_up(e, row);
    }
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
 * end to end. Gate and up take turns, a vector each. */
INLINE int64_t column_of(int64_t n, int64_t is_gated, int64_t which) {
    return is_gated ? n / LANES * 2 * LANES + which * LANES + n % LANES : n;
}

/* Where pair p of k of a column lies, in pairs. */
INLINE int64_t pair_at(const weight_t *w, int64_t column, int64_t p) {
    const int64_t pairs = pairs_of(w);
    if (!w->is_tiled) return (column / PANEL * pairs + p) * PANEL + column % PANEL;
    const int64_t step = column / HALF * (pairs / TILE_PAIRS) + p / TILE_PAIRS;
    const int64_t tile = 2 * step + column % HALF / LANES;
    return (tile * TILE_PAIRS + p % TILE_PAIRS) * LANES + column % LANES;
}

/* Pack the rows of `weight` [outputs, k] as part `which`; the panels hold zeros before. */
void pack(const weight_t *w, const uint16_t *weight, int64_t row_stride, int64_t which, int64_t threads) {
    const int64_t pairs = pairs_of(w), k = w->k;
    uint16_t *panels = (uint16_t *)w->panels;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t n0 = 0; n0 < w->outputs; n0 += LANES) {
        for (int64_t p0 = 0; p0 < pairs; p0 += STRIP) {
            for (int64_t n = n0; n < min64(n0 + LANES, w->outputs); n++) {
                const int64_t column = column_of(n, w->is_gated, which);
                const uint16_t *from = weight + n * row_stride;
                for (int64_t p = p0; p < min64(p0 + STRIP, pairs); p++) {
                    uint16_t *to = panels + 2 * pair_at(w, column, p);
                    to[0] = from[2 * p];
                    if (2 * p + 1 < k) to[1] = from[2 * p + 1];
                }
            }
        }
    }
}

/* out[i] = row ids[i] of a weight that is not gated. Returns 0, or -1 at an id that is no row. */
int gather_rows(const weight_t *w, const int64_t *ids, int64_t count, uint16_t *out, int64_t threads) {
    const int64_t k = w->k;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->outputs) return -1;
    if (count * k < 1 << 14) threads = 1;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        uint16_t *to = out + i * k;
        for (int64_t p = 0; p < k / 2; p++)
            memcpy(to + 2 * p, w->panels + 2 * pair_at(w, ids[i], p), 4);
        if (k % 2) to[k - 1] = w->panels[2 * pair_at(w, ids[i], k / 2)];
    }
    return 0;
}
#endif
