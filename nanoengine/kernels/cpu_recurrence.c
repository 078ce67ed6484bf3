/* Recurrent layers on the CPU: a causal convolution, the gated delta rule (arXiv 2412.06464) and a gated
 * norm in one call, or the convolution alone. A library of its own: few models want it, and it takes GCC seconds.
 *
 * Every token is one step of the rule, in order: the bits of a row depend on its sequence alone. A column
 * of a head's matrix depends on the same column of v alone, so columns are computed in stripes: of the delta
 * rule in the first cache while tokens go through, of Mamba-2, whose rows do not wait for each other, a few rows
 * at a time in registers.
 */
#include <omp.h>

#include "cpu_vectors.h"

enum { STRIPE = 4, DELTA_STRIPE = 2 }; /* vectors of columns; of the delta rule, so that three sums fit registers */
enum { ROWS_HELD = LANES == 16 ? 4 : 1 }; /* of a stripe of Mamba-2, in registers while tokens pass by */
enum { TOKENS = 16 }; /* whose q and k are kept */
enum { WINDOW = 32 }; /* tokens of a run that go through all steps before the next ones: they stay in L2 */
enum { AFTER_GATE, BEFORE_GATE, NO_NORM }; /* Mamba-2's norm, as in models/mamba.py */
enum { MAMBA, DELTA, SHORT_CONV, KIMI }; /* rules: Mamba-2's, the gated delta rule, LFM2's convolution alone,
                                         * the delta rule with a decay of each channel of a key */

typedef struct { /* filled by cpu_recurrence.py with struct.pack: keep both in step; strides in elements */
    /* [tokens, channels + values + 2 * heads]: q, k, v; z; b; a, or dt of Mamba-2. Of KIMI a is [heads,
     * key_dim], as dt_bias then is. Of a short convolution [tokens, 3 * channels]: B, C, x. */
    const void *x;
    const float *conv, *decay, *dt_bias, *norm;
    void *inputs; /* [slots, conv_size - 1, channels] */
    float *memory; /* [slots, heads, key_dim, value_dim] */
    const int64_t *slots;
    const int32_t *query_start, *kv_lens;
    float *mixed; /* [tokens, channels], for this call: after the convolution; of v the heads' results */
    void *out; /* [tokens, heads, value_dim] */
    const float *conv_bias, *skip; /* of Mamba-2 (arXiv 2405.21060); a short convolution may have the first */
    /* Channels without heads are the values of one. */
    int64_t sequences, tokens, x_token, key_heads, heads, key_dim, value_dim, conv_size, is_bf16, threads, rule;
    int64_t norm_kind;
    double eps, gate_by, step_by; /* the last two: what Mamba-2's z and dt are multiplied by, or beta */
    double least_rate; /* of KIMI: 0, or what decays' logarithms come no lower than, by a sigmoid */
} delta_args;

typedef struct { /* one sequence of the call, and its tokens [begin, end) that are in a window */
    int64_t first, count, slot, is_new, begin, end;
} run_t;

INLINE run_t run_of(const delta_args *a, int64_t seq, int64_t window) {
    run_t r = {.first = a->query_start[seq], .slot = a->slots[seq]};
    r.count = a->query_start[seq + 1] - r.first;
    r.is_new = a->kv_lens[seq] == r.count;
    r.begin = min64(window * WINDOW, r.count), r.end = min64(r.begin + WINDOW, r.count);
    return r;
}
INLINE int64_t longest_run(const delta_args *a) {
    int64_t most = 0;
    for (int64_t seq = 0; seq < a->sequences; seq++)
        most = max64(most, a->query_start[seq + 1] - a->query_start[seq]);
    return most;
}
INLINE int64_t key_size(const delta_args *a) { return a->key_heads * a->key_dim; }
INLINE int64_t channels_of(const delta_args *a) { return 2 * key_size(a) + a->heads * a->value_dim; }

/* Channels [d, d + n) of the input `ago` tokens before token t of a run. */
INLINE vf input_at(const delta_args *a, const run_t *r, int64_t t, int64_t ago, int64_t d, int n, int mode) {
    const int64_t dim = channels_of(a), kept = a->conv_size - 1;
    const char *x = AT(a->x, (r->first + t - ago) * a->x_token + d, mode);
    if (t >= ago && a->rule == SHORT_CONV)
        return rounded(load_f32(x, n, mode) * load_f32(AT(x, 2 * dim, mode), n, mode), mode);
    if (t >= ago) return load_f32(x, n, mode);
    if (r->is_new) return splat(0.0f);
    return load_f32(AT(a->inputs, (r->slot * kept + kept + t - ago) * dim + d, mode), n, mode);
}

/* n channels of a run, in a window: their convolution over `kept` inputs before each, then silu or times C, and
 * what the next step needs of them. Up to 3 such inputs, and their weights, stay in registers. */
INLINE void convolve(const delta_args *a, const run_t *r, int64_t d, int64_t kept, int n, int mode) {
    const int64_t dim = channels_of(a);
    const int is_held = kept < 4;
    const vf bias = a->conv_bias ? load_f32(a->conv_bias + d, n, F32) : splat(0.0f);
    vf input[4] = {{0}}, weight[4] = {{0}};
#define WEIGHT(ago) load_f32(a->conv + (kept - (ago)) * dim + d, n, F32)
    UNROLL for (int ago = 0; ago < 4; ago++) {
        if (is_held && ago <= kept) weight[ago] = WEIGHT(ago);
        if (is_held && ago < kept) input[ago] = input_at(a, r, r->begin, ago + 1, d, n, mode);
    }
    for (int64_t t = r->begin; t < r->end; t++) {
        vf sum = bias;
        UNROLL for (int ago = 3; ago > 0; ago--) input[ago] = input[ago - 1];
        input[0] = input_at(a, r, t, 0, d, n, mode);
        UNROLL for (int ago = 3; ago >= 0; ago--)
            if (is_held && ago <= kept) sum = fused(input[ago], weight[ago], sum);
        for (int64_t ago = is_held ? -1 : kept; ago >= 0; ago--)
            sum = fused(input_at(a, r, t, ago, d, n, mode), WEIGHT(ago), sum);
        const int64_t token = r->first + t;
        sum = rounded(sum, mode);
        if (a->rule == SHORT_CONV) {
            const vf gate = load_f32(AT(a->x, token * a->x_token + dim + d, mode), n, mode);
            store_n(AT(a->out, token * dim + d, mode), sum * gate, n, mode);
        } else store_n(a->mixed + token * dim + d, rounded(silu(sum), mode), n, F32);
    }
#undef WEIGHT
    for (int64_t ago = r->end == r->count ? kept : 0; ago > 0; ago--) {
        const vf last = input_at(a, r, r->count, ago, d, n, mode);
        store_n(AT(a->inputs, (r->slot * kept + kept - ago) * dim + d, mode), last, n, mode);
    }
}

/* The same, compiled for what models have. */
INLINE void convolve_block(const delta_args *a, const run_t *r, int64_t d, int mode) {
    const int64_t kept = a->conv_size - 1, n = min64(LANES, channels_of(a) - d);
    if (n == LANES && kept == 3) convolve(a, r, d, 3, LANES, mode);
    else if (n == LANES && kept == 2) convolve(a, r, d, 2, LANES, mode);
    else convolve(a, r, d, kept, (int)n, mode);
}

/* x / |x| * scale of a head. */
INLINE void unit(const float *x, float *out, int64_t dim, float scale) {
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += LANES) squares = fused(LOAD(x, d, F32), LOAD(x, d, F32), squares);
    const float by = scale / sqrtf(sum_lanes(squares) + 1e-6f);
    for (int64_t d = 0; d < dim; d += LANES) STORE(out, d, LOAD(x, d, F32) * by, F32);
}

INLINE float sigmoid(float x, int mode) { return rounded(splat(1.0f / (1.0f + expf(-x))), mode)[0]; }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* decay * softplus(a + bias) as a power of e, for each channel of a key. With e = e^-|x| softplus is
 * max(x, 0) + log(1 + e), and that logarithm 2 artanh(e / (2 + e)), a series. */
INLINE void decays_of(const char *a, const float *bias, float decay, float *out, int64_t dim, int mode) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf x = LOAD(a, d, mode) + LOAD(bias, d, F32);
        const vf e = exp2v(pick(x > 0.0f, -x, x) * LOG2E), y = e / (e + 2.0f), square = y * y;
        vf sum = splat(1.0f / 17);
        for (int odd = 15; odd > 0; odd -= 2) sum = fused(sum, square, splat(1.0f / odd));
        STORE(out, d, exp2v(fused(2.0f * y, sum, vmax(splat(0.0f), x)) * (decay * LOG2E)), F32);
    }
}

/* `least` times the sigmoid of -decay * (a + bias) as a power of e, for each channel of a key. */
INLINE void bounded_decays(const char *a, const float *bias, float decay, float least, float *out, int64_t dim,
                           int mode) {
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf x = (LOAD(a, d, mode) + LOAD(bias, d, F32)) * -decay;
        STORE(out, d, exp2v(times_sigmoid(splat(least * LOG2E), x)), F32);
    }
}

typedef struct { /* up to TOKENS tokens of a head, and a stripe of its matrix */
    const float *q, *k; /* of a token every k_stride */
    float *decay, *stripe, beta[TOKENS]; /* decay: of each token one, or one of each channel of k */
    int64_t count, k_stride;
} head_t;

/* A pass over the rows of a stripe in `vecs` vectors of columns, of the last of which n count: token t learns
 * and is read, then s decays for the token after it, and says what it holds there. The first pass has no t (-1),
 * the last one no token after it. So a row is loaded and stored once for both. by_row: a decay for each row. */
INLINE void pass_delta(const head_t *h, const float *from, int64_t from_stride, float *to, int64_t to_stride,
                       int64_t dim, int64_t t, const int learns, const int decays, const int by_row, const vf *change,
                       vf *read, vf *said, const int vecs, int n) {
    const float *next = h->k + (t + 1) * h->k_stride, *k = learns ? next - h->k_stride : NULL;
    const float *q = learns ? h->q + t * h->k_stride : NULL;
    const float *decay = decays ? h->decay + (t + 1) * (by_row ? dim : 1) : NULL;
    UNROLL for (int c = 0; c < vecs; c++) read[c] = said[c] = (vf){0};
    for (int64_t i = 0; i < dim; i++)
        UNROLL for (int c = 0; c < vecs; c++) {
            vf x = load_f32(from + i * from_stride + c * LANES, n, F32);
            if (learns) {
                x = fused(splat(k[i]), change[c], x);
                read[c] = fused(x, splat(q[i]), read[c]);
            }
            if (decays) {
                x *= decay[by_row ? i : 0];
                said[c] = fused(x, splat(next[i]), said[c]);
            }
            store_n(to + i * to_stride + c * LANES, x, n, F32);
        }
}

/* All tokens in `vecs` vectors of columns: s decays, learns beta of what v differs from what it says, and is
 * read, into v. v: of a token every v_stride. Between the first pass and the last the stripe is a copy. */
INLINE void step_columns(const head_t *h, float *s, int64_t stride, int64_t dim, float *v, int64_t v_stride,
                         const int by_row, const int vecs, int n) {
    const int64_t width = vecs * LANES, last = h->count - 1;
    vf change[DELTA_STRIPE], read[DELTA_STRIPE], said[DELTA_STRIPE];
    pass_delta(h, s, stride, h->stripe, width, dim, -1, 0, 1, by_row, change, read, said, vecs, n);
    for (int64_t t = 0; t <= last; t++, v += v_stride) {
        UNROLL for (int c = 0; c < vecs; c++)
            change[c] = (load_f32(v + c * LANES, n, F32) - said[c]) * h->beta[t];
        if (t < last)
            pass_delta(h, h->stripe, width, h->stripe, width, dim, t, 1, 1, by_row, change, read, said, vecs, n);
        else pass_delta(h, h->stripe, width, s, stride, dim, t, 1, 0, by_row, change, read, said, vecs, n);
        UNROLL for (int c = 0; c < vecs; c++) store_n(v + c * LANES, read[c], n, F32);
    }
}

/* `rows` rows of a stripe of Mamba-2, from row i on, which pass by all tokens: s decays, learns and is read. */
INLINE void learn_rows(const head_t *h, float *s, int64_t stride, int64_t i, const float *learnt, float *read,
                       const int rows, const int vecs, int n) {
    vf x[ROWS_HELD][STRIPE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vecs; c++) x[r][c] = load_f32(s + r * stride + c * LANES, n, F32);
    for (int64_t t = 0; t < h->count; t++, learnt += STRIPE * LANES, read += STRIPE * LANES) {
        const float *k = h->k + t * h->k_stride + i, *q = h->q + t * h->k_stride + i;
        UNROLL for (int c = 0; c < vecs; c++) {
            vf sum = i ? load(read + c * LANES) : (vf){0};
            UNROLL for (int r = 0; r < rows; r++) {
                x[r][c] = fused(splat(k[r]), load(learnt + c * LANES), x[r][c] * h->decay[t]);
                sum = fused(x[r][c], splat(q[r]), sum);
            }
            store(read + c * LANES, sum);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vecs; c++) store_n(s + r * stride + c * LANES, x[r][c], n, F32);
}

/* As step_columns, of Mamba-2: s decays, learns v at k, and is read; skip times v is added to that. */
INLINE void learn_columns(const head_t *h, float *s, int64_t stride, int64_t dim, float *v, int64_t v_stride,
                          float skip, const int vecs, int n) {
    enum { FLOATS = TOKENS * STRIPE * LANES };
    float learnt[FLOATS] __attribute__((aligned(64))), read[FLOATS] __attribute__((aligned(64)));
    for (int64_t t = 0; t < h->count; t++)
        UNROLL for (int c = 0; c < vecs; c++)
            store(learnt + (t * STRIPE + c) * LANES, load_f32(v + t * v_stride + c * LANES, n, F32) * h->beta[t]);
    int64_t i = 0;
    for (; i + ROWS_HELD <= dim; i += ROWS_HELD)
        learn_rows(h, s + i * stride, stride, i, learnt, read, ROWS_HELD, vecs, n);
    for (; i < dim; i++) learn_rows(h, s + i * stride, stride, i, learnt, read, 1, vecs, n);
    for (int64_t t = 0; t < h->count; t++, v += v_stride)
        UNROLL for (int c = 0; c < vecs; c++) {
            const vf made = fused(load_f32(v + c * LANES, n, F32), splat(skip), load(read + (t * STRIPE + c) * LANES));
            store_n(v + c * LANES, made, n, F32);
        }
}

/* The tokens in columns [d, d + n) of a head, or in `vecs` vectors. */
INLINE void step_stripe(const delta_args *a, const head_t *h, int64_t head, float *s, float *v, const int vecs,
                        int n) {
    const int64_t dim = a->key_dim, stride = a->value_dim, all = channels_of(a);
    if (a->rule == MAMBA) learn_columns(h, s, stride, dim, v, all, a->skip[head], vecs, n);
    else if (a->rule == KIMI) step_columns(h, s, stride, dim, v, all, 1, min64(vecs, DELTA_STRIPE), n);
    else step_columns(h, s, stride, dim, v, all, 0, min64(vecs, DELTA_STRIPE), n);
}

/* Functions of their own: inlined for rows of both kinds of numbers they take GCC seconds more. They have a copy of
 * h, which what they store cannot change. */
NOINLINE void step_whole_stripe(const delta_args *a, const head_t h, int64_t head, float *s, float *v) {
    step_stripe(a, &h, head, s, v, STRIPE, LANES);
}
NOINLINE void step_vector(const delta_args *a, const head_t h, int64_t head, float *s, float *v, int n) {
    step_stripe(a, &h, head, s, v, 1, n);
}

/* Of the delta rule, which rounds in between and has a gate of silu, and of KIMI, with a sigmoid. */
INLINE void norm_head(const delta_args *a, int64_t token, int64_t head, const float *x, int mode) {
    const int64_t dim = a->value_dim, place = head * dim;
    const char *z = AT(a->x, token * a->x_token + channels_of(a) + place, mode);
    char *out = AT(a->out, token * a->heads * dim + place, mode);
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf wide = rounded(LOAD(x, d, F32), mode);
        squares = fused(wide, wide, squares);
    }
    const float scale = 1.0f / sqrtf(sum_lanes(squares) / dim + (float)a->eps);
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf wide = rounded(LOAD(x, d, F32), mode) * scale, gate = LOAD(z, d, mode);
        if (a->rule == KIMI) {
            STORE(out, d, times_sigmoid(wide * LOAD(a->norm, d, F32), gate), mode);
            continue;
        }
        const vf normed = rounded(wide, mode);
        STORE(out, d, rounded(normed * LOAD(a->norm, d, F32), mode) * silu(gate), mode);
    }
}

/* Of Mamba-2: what the heads of a key head give for a token, gated, and normed together if there is a norm. */
INLINE void norm_group(const delta_args *a, int64_t token, int64_t group, int mode) {
    const int64_t dim = a->heads / a->key_heads * a->value_dim, place = group * dim;
    float *x = a->mixed + token * channels_of(a) + 2 * key_size(a) + place;
    const char *z = AT(a->x, token * a->x_token + channels_of(a) + place, mode);
    char *out = AT(a->out, token * a->heads * a->value_dim + place, mode);
    const int gates_first = a->norm_kind != BEFORE_GATE;
    const vf by = splat((float)a->gate_by);
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        vf made = LOAD(x, d, F32);
        if (gates_first) made *= silu(LOAD(z, d, mode) * by);
        STORE(x, d, made, F32);
        squares = fused(made, made, squares);
    }
    float scale = 1.0f;
    if (a->norm_kind != NO_NORM) scale /= sqrtf(sum_lanes(squares) / dim + (float)a->eps);
    for (int64_t d = 0; d < dim; d += LANES) {
        vf normed = LOAD(x, d, F32) * scale * LOAD(a->norm, place + d, F32);
        if (!gates_first) normed *= silu(LOAD(z, d, mode) * by);
        STORE(out, d, normed, mode);
    }
}

/* What a token brings to a head, given b and a, or dt: its decay and its share; and of the delta rule q and k as
 * units, of Mamba-2 as they are. */
INLINE void bring_token(const delta_args *a, int64_t token, int64_t head, int64_t t, float *q, float *k, head_t *h,
                        int mode) {
    const int64_t dim = a->key_dim, key = head / (a->heads / a->key_heads) * dim, all = channels_of(a);
    const float *mixed = a->mixed + token * all;
    const char *ba = AT(a->x, token * a->x_token + all + a->heads * a->value_dim, mode);
    const float first = load_f32(AT(ba, head, mode), 1, mode)[0];
    if (a->rule == MAMBA) {
        h->beta[t] = softplus(first * (float)a->step_by + a->dt_bias[head]);
        h->decay[t] = expf(a->decay[head] * h->beta[t]);
        return;
    }
    unit(mixed + key, q + t * dim, dim, 1.0f / sqrtf(dim));
    unit(mixed + key_size(a) + key, k + t * dim, dim, 1.0f);
    h->beta[t] = sigmoid(first, mode) * (float)a->step_by;
    if (a->rule == KIMI) {
        const int64_t at = head * dim;
        const char *rates = AT(ba, a->heads + at, mode);
        float *decays = h->decay + t * dim;
        if (a->least_rate != 0.0)
            bounded_decays(rates, a->dt_bias + at, a->decay[head], (float)a->least_rate, decays, dim, mode);
        else decays_of(rates, a->dt_bias + at, a->decay[head], decays, dim, mode);
        return;
    }
    const float rate = load_f32(AT(ba, a->heads + head, mode), 1, mode)[0] + a->dt_bias[head];
    h->decay[t] = expf(a->decay[head] * softplus(rate));
}

/* A window of a run in one head. own: floats of this thread, as many as floats_of_thread. */
INLINE void delta_head(const delta_args *a, const run_t *r, int64_t head, float *own, int mode) {
    const int64_t dim = a->key_dim, all = channels_of(a), key = head / (a->heads / a->key_heads) * dim;
    float *s = a->memory + (r->slot * a->heads + head) * dim * a->value_dim;
    float *const q = own + DELTA_STRIPE * LANES * dim, *const k = q + TOKENS * dim;
    head_t h = {.stripe = own, .q = q, .k = k, .decay = k + TOKENS * dim, .k_stride = dim};
    if (r->is_new && r->begin == 0) memset(s, 0, 4 * dim * a->value_dim);
    const int vecs = a->rule == MAMBA ? STRIPE : DELTA_STRIPE;
    for (int64_t begin = r->begin; begin < r->end; begin += TOKENS) {
        const int64_t first = r->first + begin;
        float *mixed = a->mixed + first * all, *v = mixed + 2 * key_size(a) + head * a->value_dim;
        h.count = min64(TOKENS, r->end - begin);
        if (a->rule == MAMBA) h.q = mixed + key, h.k = h.q + key_size(a), h.k_stride = all;
        for (int64_t t = 0; t < h.count; t++) bring_token(a, first + t, head, t, q, k, &h, mode);
        int64_t d = 0;
        for (; d + vecs * LANES <= a->value_dim; d += vecs * LANES)
            step_whole_stripe(a, h, head, s + d, v + d);
        for (; d < a->value_dim; d += LANES)
            step_vector(a, h, head, s + d, v + d, (int)min64(a->value_dim - d, LANES));
        for (int64_t t = 0; t < h.count && a->rule != MAMBA; t++) norm_head(a, first + t, head, v + t * all, mode);
    }
}

/* What delta_head wants: a stripe, and q, k and decays of TOKENS tokens; a whole number of lines. */
INLINE int64_t floats_of_thread(const delta_args *a) {
    return ceil_div((DELTA_STRIPE * LANES + 3 * TOKENS) * a->key_dim, 16) * 16;
}

/* The convolution of all runs in a window, by the threads of a parallel region; compiled once. */
static void convolve_all(const delta_args *a, int64_t window) {
    const int64_t blocks = ceil_div(channels_of(a), LANES);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->sequences * blocks; i++) {
        const run_t r = run_of(a, i / blocks, window);
        if (window && r.begin == r.end) continue;
        if (a->is_bf16) convolve_block(a, &r, i % blocks * LANES, BF16_WIDE);
        else convolve_block(a, &r, i % blocks * LANES, F32);
    }
}

int short_conv(const delta_args *a) {
    const int team = a->tokens * channels_of(a) * a->conv_size < 1 << 16 ? 1 : (int)a->threads;
    const int64_t longest = longest_run(a);
#pragma omp parallel num_threads(team)
    {
        const unsigned saved = flush_denormals();
        for (int64_t window = 0; window * WINDOW < longest; window++) convolve_all(a, window);
        restore_denormals(saved);
    }
    return 0;
}

/* Norms and gates of Mamba-2, of all runs in a window that is `span` tokens or less. */
INLINE void norm_groups(const delta_args *a, int64_t window, int64_t span) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->sequences * span * a->key_heads; i++) {
        const run_t r = run_of(a, i / (span * a->key_heads), window);
        const int64_t t = r.begin + i / a->key_heads % span, token = r.first + t, group = i % a->key_heads;
        if (t >= r.end) continue;
        if (a->is_bf16) norm_group(a, token, group, BF16_WIDE);
        else norm_group(a, token, group, F32);
    }
}

int gated_delta(const delta_args *a) {
    const int64_t work = a->tokens * a->heads * a->key_dim * a->value_dim, mine = floats_of_thread(a);
    const int64_t longest = longest_run(a);
    const int team = work < 1 << 16 ? 1 : (int)a->threads;
    float *scratch = aligned_alloc(64, 4 * mine * team);
    if (!scratch) return -1;
#pragma omp parallel num_threads(team)
    {
        const unsigned saved = flush_denormals();
        float *own = scratch + omp_get_thread_num() * mine;
        for (int64_t window = 0; window * WINDOW < longest; window++) {
            convolve_all(a, window);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < a->sequences * a->heads; i++) {
                const run_t r = run_of(a, i / a->heads, window);
                if (a->is_bf16) delta_head(a, &r, i % a->heads, own, BF16_WIDE);
                else delta_head(a, &r, i % a->heads, own, F32);
            }
            if (a->rule == MAMBA) norm_groups(a, window, min64(WINDOW, longest));
        }
        restore_denormals(saved);
    }
    free(scratch);
    return 0;
}
