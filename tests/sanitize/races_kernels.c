/* cpu_kernels.c and cpu_recurrence.c on two threads: for ThreadSanitizer, and against its own results on one. */
#include "team.h"

#include "cpu_kernels.c"
#include "cpu_recurrence.c"

enum { MOST_SEQS = 40 };

typedef struct { /* one batch; strides follow */
    const char *name;
    int is_bf16, block_size, kv_heads, group, head_dim, seqs, window, shared; /* shared: blocks */
    int q_lens[MOST_SEQS], kv_lens[MOST_SEQS];
} batch_t;

static const batch_t BATCHES[] = {
    {"decode", 0, 16, 2, 3, 64, 4, 0, 0, {1, 2, 4, 1}, {700, 900, 300, 40}},
    {"decode, bf16", 1, 16, 2, 3, 64, 4, 0, 9, {1, 2, 4, 1}, {700, 900, 300, 400}},
    {"decode, bf16, odd", 1, 5, 2, 3, 7, 3, 0, 0, {1, 2, 4}, {400, 300, 300}},
    {"prefill", 0, 16, 2, 3, 40, 2, 0, 0, {300, 70}, {300, 513}},
    {"prefill, bf16", 1, 16, 2, 3, 64, 2, 0, 0, {300, 70}, {300, 513}},
    {"both, window", 1, 256, 2, 2, 32, 4, 100, 0, {1, 90, 3, 64}, {600, 300, 513, 64}},
    {"both, window, float", 0, 16, 3, 1, 24, 4, 100, 0, {1, 90, 3, 64}, {600, 300, 513, 64}},
    {"more partials than a window holds", 0, 1, 8, 8, 128, 2, 0, 0, {4, 1}, {150, 9}},
};

typedef struct { float *row_max, *row_sum, *acc; char *out; float *mass; } state_t;

/* The rows of a batch and its whole KV in one call. */
static state_t attend_on(const batch_t *b, int threads) {
    int32_t seq_index[MOST_SEQS], first_block[MOST_SEQS] = {0}, num_blocks[MOST_SEQS];
    int32_t query_start[MOST_SEQS + 1] = {0};
    int64_t blocks = 0, width = 0;
    for (int s = 0; s < b->seqs; s++) {
        seq_index[s] = s, num_blocks[s] = (int32_t)ceil_div(b->kv_lens[s], b->block_size);
        query_start[s + 1] = query_start[s] + b->q_lens[s];
        blocks += num_blocks[s], width = max64(width, num_blocks[s]);
    }
    int32_t *table = calloc((size_t)(b->seqs * width), sizeof *table);
    for (int64_t s = 0, next = 0; s < b->seqs; s++)
        for (int64_t i = 0; i < num_blocks[s]; i++, next++)
            table[s * width + i] = (int32_t)(i < b->shared ? i : next);
    const int64_t heads = b->kv_heads * b->group, tokens = query_start[b->seqs], rows = tokens * heads;
    const int64_t block_stride = (int64_t)b->block_size * b->kv_heads * b->head_dim;
    random_state = 1;
    void *q = some_numbers(rows * b->head_dim, b->is_bf16);
    void *k = some_numbers(blocks * block_stride, b->is_bf16);
    void *v = some_numbers(blocks * block_stride, b->is_bf16);
    state_t s = {malloc(4 * rows), malloc(4 * rows), malloc(4 * rows * b->head_dim), NULL, NULL};
    s.out = malloc(4 * rows * b->head_dim);
    s.mass = calloc((size_t)(b->seqs * width), 4);
    float *kept = malloc(8 * rows * width);
    const attend_args args = {
        .q = q, .k = k, .v = v, .seq_index = seq_index, .first_block = first_block,
        .num_blocks = num_blocks, .block_table = table, .query_start = query_start,
        .kv_lens = b->kv_lens, .row_max = s.row_max, .row_sum = s.row_sum, .acc = s.acc, .out = s.out,
        .entries = b->seqs, .table_stride = width, .q_token_stride = heads * b->head_dim,
        .q_head_stride = b->head_dim, .k_block_stride = block_stride, .v_block_stride = block_stride,
        .tokens = tokens, .heads = heads, .kv_heads = b->kv_heads, .head_dim = b->head_dim,
        .block_size = b->block_size, .is_bf16 = b->is_bf16, .is_first = 1, .threads = threads,
        .has_tiles = allow_tiles() == 0, .window = b->window ? b->window : INT32_MAX,
        .scale = 1 / sqrt(b->head_dim), .softcap = b->window ? 1.5 : 0, .mass = b->window ? NULL : s.mass,
        .kept = kept, .sequences = b->seqs, .blocks = width, .mass_stride = width,
    };
    if (attend(&args)) abort();
    free(q), free(k), free(v), free(table), free(kept);
    return s;
}

static void check_attend(const batch_t *b) {
    const state_t one = attend_on(b, 1), two = attend_on(b, 2);
    int64_t rows = 0;
    for (int s = 0; s < b->seqs; s++) rows += b->q_lens[s] * b->kv_heads * b->group;
    expect_same(b->name, one.out, two.out, rows * b->head_dim * (b->is_bf16 ? 2 : 4));
    expect_same("  its sums", one.row_sum, two.row_sum, 4 * rows);
    expect_same("  its state", one.acc, two.acc, 4 * rows * b->head_dim);
    int64_t width = 0;
    for (int s = 0; s < b->seqs; s++) width = max64(width, ceil_div(b->kv_lens[s], b->block_size));
    expect_same("  its mass", one.mass, two.mass, 4 * b->seqs * width);
    const state_t states[] = {one, two};
    for (int i = 0; i < 2; i++)
        free(states[i].row_max), free(states[i].row_sum), free(states[i].acc), free(states[i].out),
            free(states[i].mass);
}

/* Each operator over so many rows. */
static void check_rows(int is_bf16) {
    enum { TOKENS = 70, HEADS = 6, KV_HEADS = 2, DIM = 128, ALL = HEADS + 2 * KV_HEADS };
    const int64_t size = is_bf16 ? 2 : 4, wide = ALL * DIM, half = DIM / 2;
    char *normed[2], *widely[2], *gated[2], *turned[2], *pool[2];
    int64_t highest[2][TOKENS], drawn[2][TOKENS], places[2][TOKENS * 9], slots[TOKENS], v_slots[TOKENS];
    double rules[6][TOKENS]; /* every second row is cut */
    candidate_t *scratch = malloc(2 * 2 * wide * sizeof *scratch);
    void *weight = some_numbers(wide, is_bf16), *x = some_numbers(TOKENS * wide, is_bf16);
    void *wide_weight = some_numbers(wide, 0);
    void *cos = some_numbers(TOKENS * half, 0), *sin = some_numbers(TOKENS * half, 0);
    for (int i = 0; i < TOKENS; i++) {
        slots[i] = 2 * (TOKENS - 1 - i), v_slots[i] = slots[i] + 1;
        rules[0][i] = 0.9, rules[1][i] = i % 4 * 50, rules[2][i] = i % 2 ? 0.8 : 1, rules[3][i] = 0.01;
        rules[4][i] = i, rules[5][i] = TOKENS - i;
    }
    for (int i = 0; i < 2; i++) {
        const int threads = i + 1;
        normed[i] = malloc(TOKENS * wide * size), widely[i] = malloc(TOKENS * wide * size);
        gated[i] = malloc(TOKENS * half * ALL * size);
        turned[i] = malloc(TOKENS * wide * size), pool[i] = calloc(2 * TOKENS * KV_HEADS * DIM, size);
        memcpy(turned[i], x, TOKENS * wide * size);
        norm_args norm = {x, weight, normed[i], TOKENS, 1, wide, wide, wide, wide, wide, is_bf16, is_bf16,
                          threads, 1e-5};
        rms_norm(&norm);
        norm.weight = wide_weight, norm.out = widely[i], norm.is_weight_bf16 = 0;
        rms_norm(&norm);
        add(&(pair_args){widely[i], x, cos, TOKENS, wide, wide, 0, is_bf16, threads});
        gate_mul(&(pair_args){gated[i], x, NULL, TOKENS, half * ALL, wide, SILU, is_bf16, threads});
        argmax(x, highest[i], TOKENS, wide, wide, is_bf16, threads);
        likeliest(&(likeliest_args){cos, places[i], scratch, TOKENS, half, half, 9, threads});
        draw(&(draw_args){x, rules[0], drawn[i], scratch, TOKENS, wide, wide, is_bf16, threads});
        char *k = turned[i] + HEADS * DIM * size, *v = k + KV_HEADS * DIM * size;
        const rope_args rope = {turned[i], k, v, cos, sin, slots, v_slots, pool[i], TOKENS, HEADS,
                                KV_HEADS, DIM, wide, wide, wide, is_bf16, threads};
        rope_store(&rope);
        rotate(&rope);
    }
    expect_same("rms_norm", normed[0], normed[1], TOKENS * wide * size);
    expect_same("rms_norm with a weight in float32, and add", widely[0], widely[1], TOKENS * wide * size);
    expect_same("gate_mul", gated[0], gated[1], TOKENS * half * ALL * size);
    expect_same("argmax", highest[0], highest[1], sizeof highest[0]);
    expect_same("likeliest", places[0], places[1], sizeof places[0]);
    expect_same("draw", drawn[0], drawn[1], sizeof drawn[0]);
    expect_same("rope_store: turned", turned[0], turned[1], TOKENS * wide * size);
    expect_same("rope_store: stored", pool[0], pool[1], 2 * TOKENS * KV_HEADS * DIM * size);
}

/* A recurrent layer, of new sequences and others, of one window of tokens and of several. */
static void check_recurrence(const char *name, int rule, int norm_kind, int is_bf16) {
    enum { SEQS = 4, HEADS = 4, DIM = 48, TAPS = 4, TOKENS = 97 + 1 + 33 + 2 };
    const int32_t starts[] = {0, 97, 98, 131, TOKENS}, kv_lens[] = {97, 9, 33, 40};
    const int64_t slots[] = {2, 0, 3, 1}, all = 3 * HEADS * DIM, values = HEADS * DIM;
    const int64_t wide = all + values + HEADS + (rule == KIMI ? values : HEADS);
    const int64_t size = is_bf16 ? 2 : 4, kept = SEQS * (TAPS - 1) * all, held = SEQS * values * DIM;
    void *x = some_numbers(TOKENS * wide, is_bf16), *was_input = some_numbers(kept, is_bf16);
    float *was_held = some_numbers(held, 0), *conv = some_numbers(TAPS * all, 0);
    float *norm = some_numbers(all, 0); /* and biases */
    char *out[2], *inputs[2];
    float *memory[2], decay[HEADS];
    for (int head = 0; head < HEADS; head++) decay[head] = -0.1f * (float)(head + 1);
    for (int i = 0; i < 2; i++) {
        out[i] = calloc(TOKENS * all, size), inputs[i] = malloc(kept * size), memory[i] = malloc(held * 4);
        memcpy(inputs[i], was_input, kept * size), memcpy(memory[i], was_held, held * 4);
        float *mixed = malloc(TOKENS * all * 4);
        delta_args args = {
            .x = x, .conv = conv, .decay = decay, .dt_bias = norm, .norm = norm, .inputs = inputs[i],
            .memory = memory[i], .slots = slots, .query_start = starts, .kv_lens = kv_lens, .mixed = mixed,
            .out = out[i], .conv_bias = norm, .skip = norm, .sequences = SEQS, .tokens = TOKENS,
            .x_token = wide, .key_heads = HEADS, .heads = HEADS, .key_dim = DIM, .value_dim = DIM,
            .conv_size = TAPS, .is_bf16 = is_bf16, .threads = i + 1, .rule = rule, .norm_kind = norm_kind,
            .eps = 1e-5, .gate_by = 1, .step_by = 2,
        };
        if (rule == SHORT_CONV) {
            args.key_heads = 0, args.heads = 1, args.key_dim = 0, args.value_dim = values;
            short_conv(&args);
        } else if (gated_delta(&args)) abort();
        free(mixed);
    }
    expect_same(name, out[0], out[1], TOKENS * all * size);
    expect_same("  what its convolution keeps", inputs[0], inputs[1], kept * size);
    expect_same("  its memory", memory[0], memory[1], held * 4);
    for (int i = 0; i < 2; i++) free(out[i]), free(inputs[i]), free(memory[i]);
    free(x), free(was_input), free(was_held), free(conv), free(norm);
}

int main(void) {
    for (size_t i = 0; i < sizeof BATCHES / sizeof *BATCHES; i++) check_attend(&BATCHES[i]);
    check_rows(0);
    check_rows(1);
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        check_recurrence("gated delta rule", DELTA, 0, is_bf16);
        check_recurrence("Kimi's rule", KIMI, 0, is_bf16);
        check_recurrence("Mamba-2", MAMBA, AFTER_GATE, is_bf16);
        check_recurrence("short convolution", SHORT_CONV, 0, is_bf16);
    }
    return conclude(isa(), allow_tiles() == 0);
}
