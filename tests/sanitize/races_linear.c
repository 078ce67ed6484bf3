/* cpu_linear.c on two threads: for ThreadSanitizer, and against its own results on one. */
#include "team.h"

#include "cpu_linear.c"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
enum { TOKENS_MOST = 1500 };

/* Packed from random numbers; gate and up where it is gated. */
static weight_t some_weight(int64_t outputs, int64_t k, int is_gated, int has_norm, int threads) {
    const int64_t columns = ceil_div(outputs, LANES) * LANES * (is_gated ? 2 : 1);
    const int64_t panels = ceil_div(columns, PANEL), bytes = panels * PANEL * ceil_div(k, 2) * 4;
    void *memory = aligned_alloc(64, (size_t)ceil_div(bytes, 64) * 64);
    memset(memory, 0, (size_t)bytes);
    weight_t w = {memory, some_numbers(panels * PANEL, 0), has_norm ? some_numbers(k, 1) : NULL, outputs,
                  k, is_gated, HAVE_TILES && allow_tiles() == 0 && k % TILE_K == 0, 1e-5};
    for (int which = 0; which <= is_gated; which++) {
        uint16_t *rows = some_numbers(outputs * k, 1);
        pack(&w, rows, k, which, threads);
        free(rows);
    }
    return w;
}

typedef struct { weight_t out, gate_up, down, next_qkv; int64_t width, k, inner; } layer_t;

static layer_t some_layer(int64_t width, int64_t k, int64_t inner, int threads) {
    random_state = 1;
    layer_t l = {.width = width, .k = k, .inner = inner};
    l.out = some_weight(width, k, 0, 0, threads);
    l.gate_up = some_weight(inner, width, 1, 1, threads);
    l.down = some_weight(width, inner, 0, 0, threads);
    l.next_qkv = some_weight(k, width, 0, 1, threads);
    return l;
}

static int64_t panel_bytes(const weight_t *w) {
    const int64_t columns = ceil_div(w->outputs, LANES) * LANES * (w->is_gated ? 2 : 1);
    return ceil_div(columns, PANEL) * PANEL * ceil_div(w->k, 2) * 4;
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

static void check_layer(int64_t width, int64_t k, int64_t inner) {
    static const int64_t TOKENS[] = {1, 7, 33, 200, TOKENS_MOST};
    const layer_t one = some_layer(width, k, inner, 1), two = some_layer(width, k, inner, 2);
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
        if (gather_rows(&one.out, ids, 300, rows[i], i + 1)) abort();
    }
    expect_same("gather_rows", rows[0], rows[1], 300 * k * 2);
}

enum { EXPERTS = 7, TOP_K = 3, ROWS_MOST = 120 };

/* As PackedExperts in cpu_linear.py; row r goes to experts r, r + 1 and r + 3, and none to the last. */
static char *some_experts(int64_t width, int64_t inner, int64_t rows, int threads) {
    random_state = 3;
    weight_t gate_up[EXPERTS], down[EXPERTS];
    const weight_t *gate_ups[EXPERTS], *downs[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
        gate_up[i] = some_weight(inner, width, 1, 0, 1), gate_ups[i] = &gate_up[i];
        down[i] = some_weight(width, inner, 0, 0, 1), downs[i] = &down[i];
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

static void check_experts(int64_t width, int64_t inner) {
    static const int64_t ROWS[] = {1, 5, ROWS_MOST};
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        char *alone = some_experts(width, inner, ROWS[i], 1), what[80];
        char *together = some_experts(width, inner, ROWS[i], 2);
        snprintf(what, sizeof what, "experts of %d rows, k %d", (int)ROWS[i], (int)width);
        expect_same(what, alone, together, ROWS[i] * 2 * width);
        free(alone), free(together);
    }
}

int main(void) {
    check_layer(160, 96, 224);
    check_layer(131, 61, 75);
    check_experts(160, 96);
    check_experts(131, 61);
    return conclude("avx512_bf16", HAVE_TILES);
}
#else
int main(void) {
    printf("left out: no AVX512-BF16, nor AVX-512 to do it in C\n");
    return 0;
}
#endif
