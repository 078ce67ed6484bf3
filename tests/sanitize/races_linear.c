/* cpu_linear.c on several threads: for ThreadSanitizer, and against its own results on one. With
 * -DMODE=F32 in float32, which all CPUs do; else in bfloat16.
 */
#include "team.h"

#if defined(MODE) || (defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__))
#define IS_DONE_HERE
#endif
#define HELD (1 << Q4_0)
#define WITH_ROUNDED 1
#include "cpu_linear.c"

#ifdef IS_DONE_HERE
enum { IS_BF16 = MODE != F32 };
enum { FEW = 17, TOKENS_MOST = 1500 };
enum { NUMBERS, CODES, ROUNDED, IN_12_BITS }; /* kinds of products: ROUNDED are of codes, with rounded rows */
enum { NO_NORM, NORM, WIDE_NORM }; /* with a weight as activations, and in float32 */

static int64_t panel_bytes(const weight_t *w) {
    const int64_t columns = ceil_div(w->outputs, TURN) * TURN * (w->activation ? 2 : 1);
    const int64_t row = w->format == DENSE ? 4 * words_of(w) : w->k / GROUP * block_bytes(Q4_0);
    return ceil_div(columns, PANEL) * PANEL * row;
}

/* Random codes of Q4_0, with one scale: any would do, but a NaN hides others. */
static char *some_codes(int64_t blocks) {
    char *codes = (char *)some_numbers(blocks * block_bytes(Q4_0) / 2, 1);
    for (int64_t i = 0; i < blocks; i++) memcpy(codes + i * block_bytes(Q4_0), "\x00\x20", 2);
    return codes;
}

#if HAVE_BF12
/* Gate and up have the same numbers. */
static char *some_bf12(const weight_t *w, int threads) {
    char *rows = some_numbers(w->outputs * w->k, 1);
    const int64_t stride = 2 * w->k;
    const int64_t parts = w->activation ? 2 : 1;
    const source_t source = {{rows, rows}, {stride, stride}, parts, w->outputs, w->k, w->is_tiled, threads};
    uint32_t *starts = malloc((size_t)(count_blocks(&source) + 1) * sizeof *starts);
    const size_t bytes = (size_t)measure_bf12(&source, starts);
    char *memory = aligned_alloc(64, bytes);
    memset(memory, 0, bytes);
    pack_bf12(&source, starts, memory);
    free(rows), free(starts);
    return memory;
}
#endif

/* Packed from random numbers, or codes where `kind` says so; gate and up where it is gated. */
static weight_t some_weight(int64_t outputs, int64_t k, int is_gated, int norm, int threads, int kind) {
    weight_t w = {.outputs = outputs, .k = k, .activation = is_gated ? SILU : 0,
                  .format = kind == NUMBERS ? DENSE : Q4_0, .is_rounded = kind == ROUNDED,
                  .is_norm_bf16 = IS_BF16 && norm == NORM, .eps = 1e-5};
    if (norm) w.norm_weight = some_numbers(k, w.is_norm_bf16);
    const int64_t columns = outputs * (is_gated ? 4 : 2);
    w.bias = some_numbers(ceil_div(columns, PANEL) * PANEL, 0);
    w.is_tiled = IS_BF16 && HAVE_TILES && allow_tiles() == 0 && k % TILE_K == 0 && !w.is_rounded;
    w.has_byte_tiles = w.is_rounded && allow_byte_tiles() == 0;
#if HAVE_BF12
    if (kind == IN_12_BITS) {
        w.format = BF12, w.panels = some_bf12(&w, threads);
        return w;
    }
#endif
    const int64_t bytes = panel_bytes(&w);
    char *memory = aligned_alloc(64, (size_t)ceil_div(bytes, 64) * 64);
    memset(memory, 0, (size_t)bytes);
    w.panels = memory;
    for (int which = 0; which <= is_gated; which++) {
        const int64_t stride = kind == NUMBERS ? ITEM * k : k / GROUP * block_bytes(Q4_0);
        char *rows = kind == NUMBERS ? some_numbers(outputs * k, IS_BF16) : some_codes(outputs * k / GROUP);
        pack(&w, rows, stride, which, threads);
        free(rows);
    }
    return w;
}

typedef struct { weight_t out, gate_up, down, next_qkv; int64_t width, k, inner; } layer_t;

static layer_t some_layer(int64_t width, int64_t k, int64_t inner, int threads, int kind) {
    random_state = 1;
    layer_t l = {.width = width, .k = k, .inner = inner};
    l.out = some_weight(width, k, 0, NO_NORM, threads, kind);
    l.gate_up = some_weight(inner, width, 1, NORM, threads, kind);
    l.down = some_weight(width, inner, 0, NO_NORM, threads, kind);
    l.next_qkv = some_weight(k, width, 0, WIDE_NORM, threads, kind);
    return l;
}

/* As PackedAfterAttention in packed_product.py: four products, each of which reads what others wrote. */
static char *after_attention(const layer_t *l, int64_t tokens, int threads) {
    random_state = 2;
    char *x = some_numbers(tokens * l->k, IS_BF16), *residual = some_numbers(tokens * l->width, IS_BF16);
    char *gated = malloc(tokens * l->inner * ITEM), *result = malloc(tokens * l->k * ITEM);
    const int64_t k = ITEM * l->k, width = ITEM * l->width, inner = ITEM * l->inner;
    /* one after the other makes its rows here: normed ones, and these arranged */
    char *made = malloc((2 * tokens + TILED_ROWS) * max64(max64(k, width), inner));
    struct { int64_t count; call_t calls[4]; } all = {4, {
        {&l->out, x, residual, made, k, width, tokens, ADD, threads},
        {&l->gate_up, residual, gated, made, width, inner, tokens, STORE, threads},
        {&l->down, gated, residual, made, inner, width, tokens, ADD, threads},
        {&l->next_qkv, residual, result, made, width, k, tokens, STORE, threads},
    }};
    linear((const calls_t *)&all);
    free(x), free(residual), free(gated), free(made);
    return result;
}

static void check_tokens(const layer_t *one, const layer_t *several, int64_t tokens, int threads) {
    char *alone = after_attention(one, tokens, 1), what[80];
    char *together = after_attention(several, tokens, threads);
    snprintf(what, sizeof what, "after_attention of %d tokens, k %d", (int)tokens, (int)one->k);
    expect_same(what, alone, together, tokens * ITEM * one->k);
    free(alone), free(together);
}

static void check_layer(int64_t width, int64_t k, int64_t inner, int kind) {
    static const int64_t TOKENS[] = {33, 200, TOKENS_MOST};
    const layer_t one = some_layer(width, k, inner, 1, kind), two = some_layer(width, k, inner, 2, kind);
    if (kind != IN_12_BITS) expect_same("pack", one.gate_up.panels, two.gate_up.panels, panel_bytes(&one.gate_up));
    for (int64_t tokens = 1; tokens <= FEW; tokens++) check_tokens(&one, &two, tokens, 3);
    for (size_t i = 0; i < sizeof TOKENS / sizeof *TOKENS; i++) check_tokens(&one, &two, TOKENS[i], 2);
    int64_t ids[300];
    char *rows[2];
    for (int i = 0; i < 300; i++) ids[i] = (7 * i) % width;
    for (int i = 0; i < 2; i++) {
        rows[i] = malloc(300 * k * ITEM);
        if (gather_rows(&one.out, ids, 300, rows[i], i + 1)) abort();
    }
    expect_same("gather_rows", rows[0], rows[1], 300 * k * ITEM);
}

enum { EXPERTS = 7, TOP_K = 3, ROWS_MOST = 120 };

/* As PackedExperts in packed_experts.py, by several threads in two halves; row r goes to experts r, r + 1 and r + 3,
 * and none to the last. is_apart: gate and up are two weights. */
static char *some_experts(int64_t width, int64_t inner, int64_t rows, int threads, int kind, int is_apart) {
    random_state = 3;
    weight_t gate_up[EXPERTS], up[EXPERTS], down[EXPERTS];
    const weight_t *gate_ups[EXPERTS], *ups[EXPERTS], *downs[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        gate_up[i] = some_weight(inner, width, !is_apart, NO_NORM, 1, kind), gate_ups[i] = &gate_up[i];
        up[i] = some_weight(inner, width, 0, NO_NORM, 1, kind), ups[i] = &up[i];
        down[i] = some_weight(width, inner, 0, NO_NORM, 1, kind), downs[i] = &down[i];
    }
    const int64_t choices = rows * TOP_K;
    char *x = some_numbers(rows * width, IS_BF16), *out = malloc(rows * width * ITEM);
    char *sorted = malloc(choices * width * ITEM), *gated = malloc(choices * inner * ITEM);
    char *apart = malloc(choices * 2 * inner * ITEM);
    char *made = malloc((choices + EXPERTS * PAIR_ROWS) * max64(width, inner) * ITEM);
    int64_t ids[ROWS_MOST * TOP_K], places[ROWS_MOST * TOP_K], starts[EXPERTS + 1];
    float weights[ROWS_MOST * TOP_K];
    call_t calls[3 * EXPERTS];
    for (int64_t i = 0; i < choices; i++)
        ids[i] = (i / TOP_K + (i % TOP_K + 1) * (i % TOP_K) / 2) % (EXPERTS - 1), weights[i] = 0.3f;
    experts_t e = {gate_ups, is_apart ? ups : NULL, downs, x, ids, weights, out, sorted, gated, gated, apart,
                   places, starts, calls, made, EXPERTS, TOP_K, rows, SILU, threads, threads > 1 ? GATES : BOTH};
    experts(&e);
    if (e.half == GATES) e.half = DOWNS, experts(&e);
    free(x), free(sorted), free(gated), free(apart), free(made);
    return out;
}

static void check_experts(int64_t width, int64_t inner, int kind) {
    static const int64_t ROWS[] = {1, 5, ROWS_MOST};
    for (size_t i = 0; i < 2 * sizeof ROWS / sizeof *ROWS; i++) {
        const int64_t rows = ROWS[i / 2];
        const int is_apart = (int)i % 2;
        char *alone = some_experts(width, inner, rows, 1, kind, is_apart), what[80];
        char *together = some_experts(width, inner, rows, 2 + (int)i / 2 % 2, kind, is_apart);
        snprintf(what, sizeof what, "experts of %d rows, k %d, apart %d", (int)rows, (int)width, is_apart);
        expect_same(what, alone, together, rows * ITEM * width);
        free(alone), free(together);
    }
}

enum { ROUTED = 300, CHOICES = 16, CHOSEN = 4, GROUPS = 4 };

/* Rows enough for several threads; in groups with scores by sigmoid and a bias, or with neither. */
static void check_route(int has_groups) {
    random_state = 4;
    float *logits = some_numbers(ROUTED * CHOICES, 0), *bias = some_numbers(CHOICES, 0);
    const int64_t groups = has_groups ? GROUPS : 1, scratch_bytes = ROUTED * (2 * CHOICES + groups) * 4;
    int64_t ids[2][ROUTED * CHOSEN];
    float weights[2][ROUTED * CHOSEN];
    for (int i = 0; i < 2; i++) {
        const route_t r = {logits, has_groups ? bias : NULL, has_groups ? NULL : bias, ids[i],
                           weights[i], malloc(scratch_bytes), ROUTED, CHOICES, CHOSEN, groups, 2, 2,
                           has_groups, 1, 1 + 2 * i, 2.5};
        route(&r);
        free(r.scratch);
    }
    expect_same("route: ids", ids[0], ids[1], sizeof ids[0]);
    expect_same("route: weights", weights[0], weights[1], sizeof weights[0]);
    free(logits), free(bias);
}

int main(void) {
    for (int kind = NUMBERS; kind <= (HAVE_BF12 ? IN_12_BITS : ROUNDED); kind++) {
        check_layer(160, 96, 224, kind);
        check_experts(160, 96, kind);
    }
    check_layer(131, 61, 75, NUMBERS);
    check_experts(131, 61, NUMBERS);
    check_route(0);
    check_route(1);
    return conclude(IS_BF16 ? "avx512_bf16" : "float32", IS_BF16 && HAVE_TILES);
}
#else
int main(void) {
    printf("left out: no AVX512-BF16, nor AVX-512 to do it in C\n");
    return 0;
}
#endif
