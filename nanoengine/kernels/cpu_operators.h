/* Small operators between products; a row's bits depend on that row alone. Included by cpu_kernels.c. */
#include "cpu_vectors.h"

/* f(row, mode) for every row, the mode a constant; a small call is not worth a second thread. */
#define FOR_ROWS(rows, elements, is_bf16, threads, f)                                               \
    do {                                                                                            \
        const int team = (elements) < 1 << 16 ? 1 : (int)(threads);                                 \
        _Pragma("omp parallel for num_threads(team) schedule(static)")                              \
        for (int64_t row = 0; row < (rows); row++)                                                  \
            if (is_bf16) f(row, BF16_WIDE);                                                         \
            else f(row, F32);                                                                       \
    } while (0)
typedef struct { /* as attend_args: filled by cpu_kernels.py */
    const void *x, *weight;
    void *out;
    int64_t tokens, heads, dim, x_token, x_head, out_token, out_head, is_bf16, is_weight_bf16, threads;
    double eps;
} norm_args;

INLINE void norm_row(const norm_args *a, int64_t row, int mode) {
    const int64_t token = row / a->heads, head = row % a->heads;
    const char *x = AT(a->x, token * a->x_token + head * a->x_head, mode);
    char *out = AT(a->out, token * a->out_token + head * a->out_head, mode);
    if (a->is_weight_bf16) norm(x, a->weight, out, a->dim, (float)a->eps, mode, BF16_WIDE);
    else norm(x, a->weight, out, a->dim, (float)a->eps, mode, F32);
}
int rms_norm(const norm_args *a) {
#define ROW(i, mode) norm_row(a, i, mode)
    FOR_ROWS(a->tokens * a->heads, a->tokens * a->heads * a->dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

typedef struct {
    void *q, *k;
    const void *v;
    const float *cos, *sin;
    const int64_t *k_slots, *v_slots;
    void *pool;
    int64_t tokens, heads, kv_heads, head_dim, q_token, k_token, v_token, is_bf16, threads;
} rope_args;

/* Turn the pairs (i, i + head_dim / 2) of one head; fp32, rounded once. */
INLINE void turn(void *x, const float *cos, const float *sin, int64_t dim, int mode) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf a = LOAD(x, d, mode), b = LOAD(x, dim + d, mode);
        const vf c = LOAD(cos, d, F32), s = LOAD(sin, d, F32);
        STORE(x, d, a * c - b * s, mode);
        STORE(x, dim + d, b * c + a * s, mode);
    }
}

INLINE void turn_heads(const rope_args *a, char *x, int64_t heads, int64_t row, int mode) {
    const int64_t dim = a->head_dim, half = dim / 2;
    for (int64_t h = 0; h < heads; h++)
        turn(AT(x, h * dim, mode), a->cos + row * half, a->sin + row * half, half, mode);
}

/* Where a row of k or v goes, and how long it is. */
INLINE char *place(const rope_args *a, int64_t slot, int mode) {
    return AT(a->pool, slot * a->kv_heads * a->head_dim, mode);
}

INLINE void rope_row(const rope_args *a, int64_t row, int mode) {
    enum { AHEAD = 4 }; /* a store waits for its line; those of later rows can be on their way */
    const int64_t slot = a->k_slots[row];
    const size_t bytes = a->kv_heads * a->head_dim * (mode == F32 ? 4 : 2);
    char *q = AT(a->q, row * a->q_token, mode), *k = AT(a->k, row * a->k_token, mode);
    if (row + AHEAD < a->tokens)
        for (size_t b = 0; b < bytes; b += 64) {
            __builtin_prefetch(place(a, a->k_slots[row + AHEAD], mode) + b, 1);
            if (a->v_slots) __builtin_prefetch(place(a, a->v_slots[row + AHEAD], mode) + b, 1);
        }
    turn_heads(a, q, a->heads, row, mode);
    turn_heads(a, k, a->kv_heads, row, mode);
    if (slot < 0) return;
    memcpy(place(a, slot, mode), k, bytes);
    if (!a->v_slots) return; /* k is v, too */
    memcpy(place(a, a->v_slots[row], mode), AT(a->v, row * a->v_token, mode), bytes);
}
int rope_store(const rope_args *a) {
#define ROW(i, mode) rope_row(a, i, mode)
    const int64_t width = (a->heads + 2 * a->kv_heads) * a->head_dim;
    FOR_ROWS(a->tokens, a->tokens * width, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

/* q alone. */
int rotate(const rope_args *a) {
#define ROW(i, mode) turn_heads(a, AT(a->q, (i) * a->q_token, mode), a->heads, i, mode)
    FOR_ROWS(a->tokens, a->tokens * a->heads * a->head_dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

INLINE void gate_row(const void *gate_up, void *out, int64_t row, int64_t dim, int64_t stride,
                     const int activation, int mode) {
    const char *gate = AT(gate_up, row * stride, mode), *up = AT(gate, dim, mode);
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(out, row * dim + d, gated(LOAD(gate, d, mode), LOAD(up, d, mode), activation, mode), mode);
}
INLINE void gate_row_by(const void *gate_up, void *out, int64_t row, int64_t dim, int64_t stride,
                        int64_t activation, int mode) {
    if (activation == SILU) gate_row(gate_up, out, row, dim, stride, SILU, mode);
    else if (activation == GELU) gate_row(gate_up, out, row, dim, stride, GELU, mode);
    else gate_row(gate_up, out, row, dim, stride, SWIGLU, mode);
}

typedef struct { /* of add, gate_mul and sigmoid_mul, whose members mean what their Python says */
    void *out; /* add: the sum, and a summand */
    const void *x, *gate;
    int64_t rows, dim, stride, activation, is_bf16, threads; /* stride: of the operand that may have one */
} pair_args;

int gate_mul(const pair_args *a) {
#define ROW(i, mode) gate_row_by(a->x, a->out, i, a->dim, a->stride, a->activation, mode)
    FOR_ROWS(a->rows, a->rows * a->dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

/* x * sigmoid(gate) with the sigmoid rounded first, as torch does in two steps. */
INLINE void sigmoid_row(const void *x, const void *gate, void *out, int64_t row, int64_t dim,
                        int64_t stride, int mode) {
    const char *g = AT(gate, row * stride, mode);
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf y = LOAD(g, d, mode), e = exp2v(pick(y > 0.0f, -y, y) * LOG2E);
        const vf s = pick(y > 0.0f, splat(1.0f), e) / (e + 1.0f);
        STORE(out, row * dim + d, LOAD(x, row * dim + d, mode) * rounded(s, mode), mode);
    }
}
int sigmoid_mul(const pair_args *a) {
#define ROW(i, mode) sigmoid_row(a->x, a->gate, a->out, i, a->dim, a->stride, mode)
    FOR_ROWS(a->rows, a->rows * a->dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

/* x += y, in fp32 and rounded once, as torch does; with a gate, y times its sigmoid, rounded before. */
INLINE void add_row(void *x, const void *y, const float *gate, int64_t dim, int mode) {
    const float share = gate ? (float)(1 / (1 + exp(-(double)*gate))) : 1.0f;
    for (int64_t d = 0; d < dim; d += LANES) {
        vf term = rounded(LOAD(y, d, mode) * share, mode);
        KEEP_APART(term);
        STORE(x, d, LOAD(x, d, mode) + term, mode);
    }
}
INLINE void add_to_row(const pair_args *a, int64_t row, int mode) {
    const float *gates = a->gate;
    add_row(AT(a->out, row * a->dim, mode), AT(a->x, row * a->dim, mode), gates ? gates + row : NULL, a->dim, mode);
}
int add(const pair_args *a) {
#define ROW(i, mode) add_to_row(a, i, mode)
    FOR_ROWS(a->rows, a->rows * a->dim, a->is_bf16, a->threads, ROW);
#undef ROW
    return 0;
}

/* First index of the largest value of a row; a NaN is larger than all, as in torch. */
INLINE int64_t argmax_row(const void *x, int64_t dim, int mode) {
    enum { STRETCH = 64 * LANES };
    float best = -INFINITY;
    int64_t from = 0, d = 0;
    while (d < dim && best == best) { /* the first stretch that holds the largest */
        const int64_t begin = d, end = min64(d + STRETCH, dim);
        vf top = splat(-INFINITY);
        vi is_nan = {0};
        for (; d < end; d += LANES) {
            const vf v = LOAD(x, d, mode);
            top = vmax(top, pick(IOTA + (int32_t)d < (int32_t)dim, v, splat(-INFINITY)));
            is_nan |= v != v;
        }
        float most = max_lane(top);
        UNROLL for (int i = 0; i < LANES; i++) if (is_nan[i]) most = NAN;
        if (!(most <= best)) best = most, from = begin;
    }
    for (d = from; d < dim; d++) {
        const float v = load_f32(AT(x, d, mode), 1, mode)[0];
        if (v == best || (v != v && best != best)) return d;
    }
    return 0;
}
void argmax(const void *x, int64_t *out, int64_t rows, int64_t dim, int64_t stride, int64_t is_bf16,
            int64_t threads) {
#define ROW(i, mode) out[i] = argmax_row(AT(x, (i) * stride, mode), dim, mode)
    FOR_ROWS(rows, rows * dim, is_bf16, threads, ROW);
#undef ROW
}
