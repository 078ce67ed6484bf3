/* Recurrent layers on the CPU: a causal convolution, the gated delta rule (arXiv 2412.06464) and a gated
 * norm in one call, or the convolution alone; included by cpu_kernels.c.
 *
 * Every token is one step of the rule, in order: the bits of a row depend on its sequence alone. A column
 * of a head's matrix depends on the same column of v alone, so columns are computed in stripes that stay
 * in the first cache while a stripe goes through the tokens.
 */
enum { STRIPE = 4 }; /* vectors of columns */
enum { TOKENS = 16 }; /* whose q and k are kept */
enum { AFTER_GATE, BEFORE_GATE, NO_NORM }; /* Mamba-2's norm, as in models/mamba.py */
enum { MAMBA, DELTA, SHORT_CONV, KIMI }; /* rules: Mamba-2's, the gated delta rule, LFM2's convolution alone,
                                         * the delta rule with a decay of each channel of a key */

typedef struct { /* filled by cpu_kernels.py with struct.pack: keep both in step; strides in elements */
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
} delta_args;

typedef struct { /* one sequence of the call */
    int64_t first, count, slot, is_new;
} run_t;

INLINE run_t run_of(const delta_args *a, int64_t seq) {
    run_t r = {.first = a->query_start[seq], .slot = a->slots[seq]};
    r.count = a->query_start[seq + 1] - r.first;
    r.is_new = a->kv_lens[seq] == r.count;
    return r;
}
INLINE int64_t key_size(const delta_args *a) { return a->key_heads * a->key_dim; }
INLINE int64_t channels_of(const delta_args *a) { return 2 * key_size(a) + a->heads * a->value_dim; }

/* Channels [d, d + LANES) of the input `ago` tokens before token t of a run. */
INLINE vf input_at(const delta_args *a, const run_t *r, int64_t t, int64_t ago, int64_t d, int mode) {
    const int64_t dim = channels_of(a), kept = a->conv_size - 1;
    const char *x = AT(a->x, (r->first + t - ago) * a->x_token, mode);
    if (t >= ago && a->rule == SHORT_CONV)
        return rounded(LOAD(x, d, mode) * LOAD(x, 2 * dim + d, mode), mode);
    if (t >= ago) return LOAD(x, d, mode);
    if (r->is_new) return splat(0.0f);
    return LOAD(a->inputs, (r->slot * kept + kept + t - ago) * dim + d, mode);
}

/* LANES channels of a run: their convolution, then silu or times C, and what the next step needs of them. */
INLINE void convolve(const delta_args *a, const run_t *r, int64_t d, int mode) {
    const int64_t dim = channels_of(a), kept = a->conv_size - 1;
    const vf bias = a->conv_bias ? LOAD(a->conv_bias, d, F32) : splat(0.0f);
    for (int64_t t = 0; t < r->count; t++) {
        vf sum = bias;
        for (int64_t ago = kept; ago >= 0; ago--)
            sum = fused(input_at(a, r, t, ago, d, mode), LOAD(a->conv, (kept - ago) * dim + d, F32), sum);
        const int64_t token = r->first + t;
        sum = rounded(sum, mode);
        if (a->rule == SHORT_CONV)
            STORE(a->out, token * dim + d, sum * LOAD(a->x, token * a->x_token + dim + d, mode), mode);
        else STORE(a->mixed, token * dim + d, rounded(silu(sum), mode), F32);
    }
    for (int64_t ago = kept; ago > 0; ago--)
        STORE(a->inputs, (r->slot * kept + kept - ago) * dim + d,
              input_at(a, r, r->count, ago, d, mode), mode);
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

/* One token in `vecs` vectors of columns, of the last of which n count: s decays, learns, and is read.
 * decay: one number, or one of each row of s. */
INLINE void step_columns(float *s, int64_t stride, const float *k, const float *q, int64_t dim, float *v,
                         const float *decay, float beta, const int by_row, int vecs, int n) {
    vf said[STRIPE] = {{0}}, change[STRIPE], read[STRIPE] = {{0}};
    const float of_all = *decay;
    for (int64_t i = 0; i < dim; i++)
        UNROLL for (int c = 0; c < vecs; c++) {
            float *at = s + i * stride + c * LANES;
            const vf x = load_f32(at, n, F32) * (by_row ? decay[i] : of_all);
            store_n(at, x, n, F32);
            said[c] = fused(x, splat(k[i]), said[c]);
        }
    UNROLL for (int c = 0; c < vecs; c++) change[c] = (load_f32(v + c * LANES, n, F32) - said[c]) * beta;
    for (int64_t i = 0; i < dim; i++)
        UNROLL for (int c = 0; c < vecs; c++) {
            float *at = s + i * stride + c * LANES;
            const vf x = fused(splat(k[i]), change[c], load_f32(at, n, F32));
            store_n(at, x, n, F32);
            read[c] = fused(x, splat(q[i]), read[c]);
        }
    UNROLL for (int c = 0; c < vecs; c++) store_n(v + c * LANES, read[c], n, F32);
}

/* As step_columns, of Mamba-2: s decays, learns v at k, and is read. */
INLINE void learn_columns(float *s, int64_t stride, const float *k, const float *q, int64_t dim, float *v,
                          float decay, float by, int vecs, int n) {
    vf learnt[STRIPE], read[STRIPE] = {{0}};
    UNROLL for (int c = 0; c < vecs; c++) learnt[c] = load_f32(v + c * LANES, n, F32) * by;
    for (int64_t i = 0; i < dim; i++)
        UNROLL for (int c = 0; c < vecs; c++) {
            float *at = s + i * stride + c * LANES;
            const vf x = fused(splat(k[i]), learnt[c], load_f32(at, n, F32) * decay);
            store_n(at, x, n, F32);
            read[c] = fused(x, splat(q[i]), read[c]);
        }
    UNROLL for (int c = 0; c < vecs; c++) store_n(v + c * LANES, read[c], n, F32);
}

typedef struct { /* up to TOKENS tokens of a head, and a stripe of its matrix */
    float *q, *k, *x, *stripe, *decay, beta[TOKENS]; /* decay: of each token one, or one of each channel of k */
} head_t;

/* `count` tokens from `first` on in columns [d, d + n): in a copy of the stripe if there are many. */
INLINE void step_stripe(const delta_args *a, const head_t *h, float *s, float *v, int64_t count, int vecs,
                        int n) {
    const int64_t dim = a->key_dim, width = vecs * LANES;
    const int copied = vecs == STRIPE && count > 2;
    float *at = copied ? h->stripe : s;
    const int64_t stride = copied ? width : a->value_dim;
    if (copied)
        for (int64_t i = 0; i < dim; i++) memcpy(at + i * width, s + i * a->value_dim, 4 * width);
    for (int64_t t = 0; t < count; t++) {
        float *column = v + t * channels_of(a);
        const float *k = h->k + t * dim, *q = h->q + t * dim;
        if (a->rule == DELTA)
            step_columns(at, stride, k, q, dim, column, h->decay + t, h->beta[t], 0, vecs, n);
        else if (a->rule == KIMI)
            step_columns(at, stride, k, q, dim, column, h->decay + t * dim, h->beta[t], 1, vecs, n);
        else learn_columns(at, stride, k, q, dim, column, h->decay[t], h->beta[t], vecs, n);
    }
    if (copied)
        for (int64_t i = 0; i < dim; i++) memcpy(s + i * a->value_dim, at + i * width, 4 * width);
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

/* What a token of Mamba-2 brings to a head: q and k as they are, its decay and its step. */
INLINE void mamba_token(const delta_args *a, const head_t *h, const float *mixed, int64_t key, int64_t head,
                        int64_t t, float projected, float *decay, float *by) {
    memcpy(h->q + t * a->key_dim, mixed + key, 4 * a->key_dim);
    memcpy(h->k + t * a->key_dim, mixed + key_size(a) + key, 4 * a->key_dim);
    *by = softplus(projected * (float)a->step_by + a->dt_bias[head]);
    *decay = expf(a->decay[head] * *by);
}

/* Adds D x to what a head of Mamba-2 gives. x: a copy of v. */
INLINE void add_skip(float *v, const float *x, float skip, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(v, d, fused(LOAD(x, d, F32), splat(skip), LOAD(v, d, F32)), F32);
}

/* All tokens of a run in one head. */
INLINE void delta_head(const delta_args *a, const run_t *r, int64_t head, head_t *h, int mode) {
    const int64_t key = head / (a->heads / a->key_heads) * a->key_dim, values = a->heads * a->value_dim;
    const int64_t all = channels_of(a);
    float *s = a->memory + (r->slot * a->heads + head) * a->key_dim * a->value_dim;
    if (r->is_new) memset(s, 0, 4 * a->key_dim * a->value_dim);
    for (int64_t begin = 0; begin < r->count; begin += TOKENS) {
        const int64_t count = min64(TOKENS, r->count - begin), first = r->first + begin;
        for (int64_t t = 0; t < count; t++) {
            const float *mixed = a->mixed + (first + t) * all;
            const char *ba = AT(a->x, (first + t) * a->x_token + all + values, mode);
            if (a->rule == MAMBA) {
                const float dt = load_f32(AT(ba, head, mode), 1, mode)[0];
                mamba_token(a, h, mixed, key, head, t, dt, &h->decay[t], &h->beta[t]);
                memcpy(h->x + t * a->value_dim, mixed + 2 * key_size(a) + head * a->value_dim,
                       4 * a->value_dim);
                continue;
            }
            unit(mixed + key, h->q + t * a->key_dim, a->key_dim, 1.0f / sqrtf(a->key_dim));
            unit(mixed + key_size(a) + key, h->k + t * a->key_dim, a->key_dim, 1.0f);
            h->beta[t] = sigmoid(load_f32(AT(ba, head, mode), 1, mode)[0], mode) * (float)a->step_by;
            if (a->rule == KIMI) {
                const int64_t at = head * a->key_dim;
                decays_of(AT(ba, a->heads + at, mode), a->dt_bias + at, a->decay[head],
                          h->decay + t * a->key_dim, a->key_dim, mode);
                continue;
            }
            const float rate = load_f32(AT(ba, a->heads + head, mode), 1, mode)[0] + a->dt_bias[head];
            h->decay[t] = expf(a->decay[head] * softplus(rate));
        }
        float *v = a->mixed + first * all + 2 * key_size(a) + head * a->value_dim;
        int64_t d = 0;
        for (; d + STRIPE * LANES <= a->value_dim; d += STRIPE * LANES)
            step_stripe(a, h, s + d, v + d, count, STRIPE, LANES);
        for (; d < a->value_dim; d += LANES)
            step_stripe(a, h, s + d, v + d, count, 1, min64(a->value_dim - d, LANES));
        for (int64_t t = 0; t < count; t++)
            if (a->rule == MAMBA) add_skip(v + t * all, h->x + t * a->value_dim, a->skip[head], a->value_dim);
            else norm_head(a, first + t, head, v + t * all, mode);
    }
}

/* The convolution of all runs, by the threads of a parallel region. */
INLINE void convolve_all(const delta_args *a) {
    const int64_t blocks = ceil_div(channels_of(a), LANES);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->sequences * blocks; i++) {
        const run_t r = run_of(a, i / blocks);
        if (a->is_bf16) convolve(a, &r, i % blocks * LANES, BF16_WIDE);
        else convolve(a, &r, i % blocks * LANES, F32);
    }
}

int short_conv(const delta_args *a) {
    const int team = a->tokens * channels_of(a) * a->conv_size < 1 << 16 ? 1 : (int)a->threads;
#pragma omp parallel num_threads(team)
    {
        const unsigned saved = flush_denormals();
        convolve_all(a);
        restore_denormals(saved);
    }
    return 0;
}

int gated_delta(const delta_args *a) {
    const int64_t keys = TOKENS * a->key_dim;
    const int64_t work = a->tokens * a->heads * a->key_dim * a->value_dim;
    const int team = work < 1 << 16 ? 1 : (int)a->threads;
    const int64_t mine = ceil_div(3 * keys + STRIPE * LANES * a->key_dim + TOKENS * a->value_dim, 16) * 16;
    float *scratch = aligned_alloc(64, 4 * mine * team);
    if (!scratch) return -1;
#pragma omp parallel num_threads(team)
    {
        const unsigned saved = flush_denormals();
        float *own = scratch + omp_get_thread_num() * mine;
        head_t h = {.stripe = own, .q = own + STRIPE * LANES * a->key_dim};
        h.k = h.q + keys;
        h.decay = h.k + keys;
        h.x = h.decay + keys;
        convolve_all(a);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a->sequences * a->heads; i++) {
            const run_t r = run_of(a, i / a->heads);
            if (a->is_bf16) delta_head(a, &r, i % a->heads, &h, BF16_WIDE);
            else delta_head(a, &r, i % a->heads, &h, F32);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (a->rule == MAMBA ? a->tokens * a->key_heads : 0); i++)
            if (a->is_bf16) norm_group(a, i / a->key_heads, i % a->key_heads, BF16_WIDE);
            else norm_group(a, i / a->key_heads, i % a->key_heads, F32);
        restore_denormals(saved);
    }
    free(scratch);
    return 0;
}
