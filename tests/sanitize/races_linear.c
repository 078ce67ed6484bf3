/* cpu_linear.c on two threads: for ThreadSanitizer, and against its own results on one. */
#include "team.h"

#define WITH_CODES 1
#include "cpu_linear.c"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
enum { TOKENS_MOST = 1500 };

static int64_t panel_bytes(const weight_t *w) {
    const int64_t columns = ceil_div(w->outputs, TURN) * TURN * (w->activation ? 2 : 1);
    const int64_t row = w->format == DENSE ? ceil_div(w->k, 2) * 4 : w->k / GROUP * block_bytes(Q4_0);
    return ceil_div(columns, PANEL) * PANEL * row;
}

/* Random codes of Q4_0, with one scale: any would do, but a NaN hides others. */
static char *some_codes(int64_t blocks) {
    char *codes = (char *)some_numbers(blocks * block_bytes(Q4_0) / 2, 1);
    for (int64_t i = 0; i < blocks; i++) memcpy(codes + i * block_bytes(Q4_0), "\x00\x20", 2);
    return codes;
}

/* Packed from random numbers, or codes where `format` says so; gate and up where it is gated. */
static weight_t some_weight(int64_t outputs, int64_t k, int is_gated, int has_norm, int threads,
                            int format) {
    weight_t w = {.norm_weight = has_norm ? some_numbers(k, 1) : NULL, .outputs = outputs, .k = k,
                  .activation = is_gated ? SILU : 0, .format = format, .eps = 1e-5};
    w.is_tiled = HAVE_TILES && allow_tiles() == 0 && k % TILE_K == 0;
    const int64_t bytes = panel_bytes(&w), columns = outputs * (is_gated ? 4 : 2);
    char *memory = aligned_alloc(64, (size_t)ceil_div(bytes, 64) * 64);
    memset(memory, 0, (size_t)bytes);
    w.panels = memory, w.bias = some_numbers(ceil_div(columns, PANEL) * PANEL, 0);
    for (int which = 0; which <= is_gated; which++) {
        const int64_t stride = format == DENSE ? 2 * k : k / GROUP * block_bytes(Q4_0);
        char *rows = format == DENSE ? some_numbers(outputs * k, 1) : some_codes(outputs * k / GROUP);
        pack(&w, rows, stride, which, threads);
        free(rows);
    }
    return w;
}

typedef struct { weight_t out, gate_up, down, next_qkv; int64_t width, k, inner; } layer_t;

static layer_t some_layer(int64_t width, int64_t k, int64_t inner, int threads, int format) {
    random_state = 1;
    layer_t l = {.width = width, .k = k, .inner = inner};
    l.out = some_weight(width, k, 0, 0, threads, format);
    l.gate_up = some_weight(inner, width, 1, 1, threads, format);
    l.down = some_weight(width, inner, 0, 0, threads, format);
    l.next_qkv = some_weight(k, width, 0, 1, threads, format);
    return l;
}

/* As PackedAfterAttention in cpu_linear.py: four products, each of which reads what others wrote. */
static char *after_attention(const layer_t *l, int64_t tokens, int threads) {
    random_state = 2;
    char *x = some_numbers(tokens * l->k, 1), *residual = some_numbers(tokens * l->width, 1);
    char *gated = malloc(tokens * l->inner * 2), *result = malloc(tokens * l->k * 2);
    char *normed = malloc(tokens * l->width * 2);
    const int64_t k = 2 * l->k, width = 2 * l->width, inner = 2 * l->inner;
    const call_t calls[] = {
        {&l->out, x, residual, NULL, k, width, tokens, ADD, threads},
        {&l->gate_up, residual, gated, normed, width, inner, tokens, STORE, threads},
        {&l->down, gated, residual, NULL, inner, width, tokens, ADD, threads},
        {&l->next_qkv, residual, result, normed, width, k, tokens, STORE, threads},
    };
    linear(calls, sizeof calls / sizeof *calls);
    free(x), free(residual), free(gated), free(normed);
    return result;
}

static void check_layer(int64_t width, int64_t k, int64_t inner, int format) {
    static const int64_t TOKENS[] = {1, 7, 33, 200, TOKENS_MOST};
    const layer_t one = some_layer(width, k, inner, 1, format), two = some_layer(width, k, inner, 2, format);
    expect_same("pack", one.gate_up.panels, two.gate_up.panels, panel_bytes(&one.gate_up));
    for (size_t i = 0; i < sizeof TOKENS / sizeof *TOKENS; i++) {
        char *alone = after_attention(&one, TOKENS[i], 1), what[80];
        char *together = after_attention(&two, TOKENS[i], 2);
        snprintf(what, sizeof what, "after_attention of %d tokens, k %d", (int)TOKENS[i], (int)k);
        expect_same(what, alone, together, TOKENS[i] * 2 * k);
        free(alone), free(together);
    }
    int64_t ids[300];
    uint16_t *rows[2];
    for (int i = 0; i < 300; i++) ids[i] = (7 * i) % width;
    for (int i = 0; i < 2; i++) {
        rows[i] = malloc(300 * k * 2);
        if (gather_rows(&one.out, ids, 300, (char *)rows[i], i + 1)) abort();
    }
    expect_same("gather_rows", rows[0], rows[1], 300 * k * 2);
}

enum { EXPERTS = 7, TOP_K = 3, ROWS_MOST = 120 };

/* As PackedExperts in cpu_linear.py; row r goes to experts r, r + 1 and r + 3, and none to the last. */
static char *some_experts(int64_t width, int64_t inner, int64_t rows, int threads, int format) {
    random_state = 3;
    weight_t gate_up[EXPERTS], down[EXPERTS];
    const weight_t *gate_ups[EXPERTS], *downs[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        gate_up[i] = some_weight(inner, width, 1, 0, 1, format), gate_ups[i] = &gate_up[i];
        down[i] = some_weight(width, inner, 0, 0, 1, format), downs[i] = &down[i];
    }
    const int64_t choices = rows * TOP_K;
    char *x = some_numbers(rows * width, 1), *out = malloc(rows * width * 2);
    char *sorted = malloc(choices * width * 2), *gated = malloc(choices * inner * 2);
    int64_t ids[ROWS_MOST * TOP_K], places[ROWS_MOST * TOP_K], starts[EXPERTS + 1];
    float weights[ROWS_MOST * TOP_K];
    call_t calls[2 * EXPERTS];
    for (int64_t i = 0; i < choices; i++)
        ids[i] = (i / TOP_K + (i % TOP_K + 1) * (i % TOP_K) / 2) % (EXPERTS - 1), weights[i] = 0.3f;
    const experts_t e = {gate_ups, downs, x, ids, weights, out, sorted, gated, places, starts, calls,
                         EXPERTS, TOP_K, rows, threads};
    experts(&e);
    free(x), free(sorted), free(gated);
    return out;
}

static void check_experts(int64_t width, int64_t inner, int format) {
    static const int64_t ROWS[] = {1, 5, ROWS_MOST};
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        char *alone = some_experts(width, inner, ROWS[i], 1, format), what[80];
        char *together = some_experts(width, inner, ROWS[i], 2, format);
        snprintf(what, sizeof what, "experts of %d rows, k %d", (int)ROWS[i], (int)width);
        expect_same(what, alone, together, ROWS[i] * 2 * width);
        free(alone), free(together);
    }
}

int main(void) {
    check_layer(160, 96, 224, DENSE);
    check_layer(131, 61, 75, DENSE);
    check_layer(160, 96, 224, Q4_0);
    check_experts(160, 96, DENSE);
    check_experts(131, 61, DENSE);
    check_experts(160, 96, Q4_0);
    return conclude("avx512_bf16", HAVE_TILES);
}
#else
int main(void) {
    printf("left out: no AVX512-BF16, nor AVX-512 to do it in C\n");
    return 0;
}
#endif
