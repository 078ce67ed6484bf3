/* One token drawn from each row of logits, `draw` of models/draw.py, and where a row is largest; included by
 * cpu_kernels.c. What a row gives comes from that row alone.
 *
 * Sorting a vocabulary would take longer than a decode step of a small model. Only the logits near the
 * largest one are looked at, as many as top_k and top_p need, and among these the last one that is kept is
 * found by partition (Hoare's quickselect, by number or by mass). Masses are summed in double.
 */
typedef double vd __attribute__((vector_size(8 * LANES)));
typedef struct {
    float logit, mass;
    int64_t id;
} candidate_t;
typedef struct { /* filled by cpu_kernels.py: keep both in step; a field of `rules` for each row */
    const void *logits;
    const double *rules; /* [6, rows]: temperature, top_k or 0, top_p, min_p, two halves of a key */
    int64_t *out;
    candidate_t *scratch; /* [threads, 2 * vocab] */
    int64_t rows, vocab, stride, is_bf16, threads;
} draw_args;
typedef struct { uint32_t first, second; } luck_t;
typedef struct { double temperature, top_k, top_p, min_p; luck_t key; } rules_t;
typedef struct { /* a row */
    const void *logits;
    int64_t dim;
    float top, scale; /* the largest logit; a mass is 2^((logit - top) * scale) */
} row_t;

INLINE vf masses(const row_t *r, int64_t d, int mode) {
    const int64_t dim = r->dim;
    return exp2v((LOAD(r->logits, d, mode) - r->top) * r->scale);
}

/* Bits of the lanes that are set. */
INLINE uint32_t bits_of(vi mask) {
#if LANES == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    UNROLL for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

static float largest(const void *logits, int64_t dim, int mode) {
    vf top = splat(-INFINITY);
    for (int64_t d = 0; d < dim; d += LANES)
        top = vmax(top, pick(IOTA + (int32_t)d < (int32_t)dim, LOAD(logits, d, mode), splat(-INFINITY)));
    return max_lane(top);
}

/* The mass of a row. */
INLINE double mass_of(const row_t *r, int mode) {
    vd sum = {0};
    for (int64_t d = 0; d < r->dim; d += LANES) {
        const vf mass = pick(IOTA + (int32_t)d < (int32_t)r->dim, masses(r, d, mode), splat(0.0f));
        sum += __builtin_convertvector(mass, vd);
    }
    double total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

/* ---- the race ----------------------------------------------------------------------------------- */

/* A permutation of 32 bits: Wellons's lowbias32. */
INLINE vu mixed(vu x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* In (0, 1), as `exponentials` of draw.py has them. */
INLINE vf uniforms(vi tokens, luck_t key) {
    const vu bits = mixed(mixed((vu)tokens ^ key.first) ^ key.second) >> 1;
    const vf u = (__builtin_convertvector((vi)bits, vf) + 0.5f) * 0x1p-31f, most = splat(1 - 0x1p-24f);
    return pick(u > most, most, u);
}

/* -log(1 - u) to some 1e-7 of it: by the exponent of 1 - u and 2 artanh of what is left, in which u stands by
 * itself where it is small. */
INLINE vf exponential_of(vf u) {
    const vf rest = 1.0f - u;
    const vi exponent = ((vi)rest - 0x3f3504f3) >> 23; /* so that what is left is in [sqrt(1/2), sqrt(2)) */
    const vf left = (vf)((vi)rest - (exponent << 23));
    const vf s = pick(exponent == 0, u, 1.0f - left) / (1.0f + left), z = s * s;
    const vf p = ((z * 0.111111112f + 0.142857149f) * z + 0.2f) * z + 0.333333343f;
    return 2.0f * (s + s * z * p) - __builtin_convertvector(exponent, vf) * 0.693147182f;
}

typedef struct { vf best; vi tokens; float fastest; } race_t; /* in each lane the best, and its token; of all */

/* An exponential number is no less than its u, so most vectors are out of the race by that alone. */
INLINE void run(race_t *race, vi tokens, vf mass, luck_t key) {
    const vf u = uniforms(tokens, key);
    if (!bits_of(u * race->fastest <= mass * 1.00001f)) return;
    const vf speed = mass / exponential_of(u);
    const vi is_better = speed > race->best;
    race->best = pick(is_better, speed, race->best);
    race->tokens = (is_better & tokens) | (~is_better & race->tokens);
    race->fastest = max_lane(race->best);
}

/* Of equals the first token; 0 where there are only NaN. */
INLINE int64_t winner(const race_t *race) {
    float best = -1;
    int64_t token = 0;
    UNROLL for (int i = 0; i < LANES; i++)
        if (race->best[i] > best || (race->best[i] == best && race->tokens[i] < token))
            best = race->best[i], token = race->tokens[i];
    return token;
}

INLINE int64_t draw_of_all(const row_t *r, luck_t key, int mode) {
    race_t race = {splat(-1.0f), {0}, -1};
    for (int64_t d = 0; d < r->dim; d += LANES) {
        const vi tokens = IOTA + (int32_t)d;
        run(&race, tokens, pick(tokens < (int32_t)r->dim, masses(r, d, mode), splat(-2.0f)), key);
    }
    return winner(&race);
}

static int64_t draw_of_some(const candidate_t *some, int64_t count, luck_t key) {
    race_t race = {splat(-1.0f), {0}, -1};
    for (int64_t from = 0; from < count; from += LANES) {
        vi tokens = {0};
        vf mass = splat(-2.0f);
        for (int64_t i = 0; i < min64(LANES, count - from); i++)
            tokens[i] = (int32_t)some[from + i].id, mass[i] = some[from + i].mass;
        run(&race, tokens, mass, key);
    }
    return winner(&race);
}

/* Those that are at least `least`, in the order of their tokens; returns how many. */
INLINE int64_t collect(const row_t *r, float least, candidate_t *some, int mode) {
    int64_t count = 0;
    const int64_t dim = r->dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf logits = LOAD(r->logits, d, mode);
        uint32_t bits = bits_of((logits >= least) & (IOTA + (int32_t)d < (int32_t)dim));
        if (!bits) continue;
        const vf mass = masses(r, d, mode);
        for (; bits; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            some[count++] = (candidate_t){logits[lane], mass[lane], d + lane};
        }
    }
    return count;
}

/* Larger logits come first, of equals the first token. */
static int comes_before(const candidate_t *a, const candidate_t *b) {
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void swap(candidate_t *a, candidate_t *b) {
    const candidate_t kept = *a;
    *a = *b, *b = kept;
}

/* The last of those that it takes, in that order, to reach `need`, each of which counts 1 or its mass. They
 * change places. */
static candidate_t last_of(candidate_t *some, int64_t count, double need, int by_mass) {
    candidate_t *low = some, *high = some + count; /* it is among these */
    while (high - low > 1) {
        candidate_t *middle = low + (high - low) / 2, *end = high - 1, *at = low;
        if (comes_before(middle, low)) swap(middle, low);
        if (comes_before(end, low)) swap(end, low);
        if (comes_before(end, middle)) swap(end, middle);
        swap(middle, end); /* the median of three is the pivot */
        double sum = 0;
        for (candidate_t *one = low; one < end; one++)
            if (comes_before(one, end)) sum += by_mass ? one->mass : 1, swap(one, at++);
        swap(at, end);
        if (sum >= need && at > low) {
            high = at;
            continue;
        }
        need -= sum + (by_mass ? at->mass : 1);
        if (need <= 0 || at + 1 == high) return *at;
        low = at + 1;
    }
    return *low;
}

/* Leaves what is not after `last`, in the order of tokens; returns how many. */
static int64_t cut_after(candidate_t *some, int64_t count, candidate_t last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (!comes_before(&last, &some[i])) some[kept++] = some[i];
    return kept;
}

static double mass_of_candidates(const candidate_t *some, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += some[i].mass;
    return total;
}

/* Candidates that hold all that top_k and top_p may keep. */
INLINE int64_t enough(const row_t *r, rules_t rules, double mass, candidate_t *some, int mode) {
    for (float depth = 8; depth < 100; depth *= 2) { /* of the exponent */
        const int64_t count = collect(r, r->top - depth * (float)rules.temperature, some, mode);
        if (rules.top_k ? count >= rules.top_k : mass_of_candidates(some, count) >= mass) return count;
    }
    return collect(r, -INFINITY, some, mode);
}

/* Leaves the candidates that top_k and top_p keep, in the order of tokens; returns how many. */
INLINE int64_t keep_likeliest(const row_t *r, rules_t rules, candidate_t *some, int mode) {
    double mass = rules.top_k ? 0 : rules.top_p * mass_of(r, mode);
    int64_t count = enough(r, rules, mass, some, mode);
    candidate_t *moved = some + r->dim;
    if (rules.top_k && count) {
        memcpy(moved, some, (size_t)count * sizeof *some);
        count = cut_after(some, count, last_of(moved, count, rules.top_k, 0));
    }
    if (rules.top_p < 1 && count) {
        if (rules.top_k) mass = rules.top_p * mass_of_candidates(some, count);
        memcpy(moved, some, (size_t)count * sizeof *some);
        count = cut_after(some, count, last_of(moved, count, mass, 1));
    }
    return count;
}

INLINE int64_t draw_row(const void *logits, int64_t dim, rules_t rules, candidate_t *some, int mode) {
    const row_t r = {logits, dim, largest(logits, dim, mode), LOG2E / (float)rules.temperature};
    if (rules.top_k >= dim) rules.top_k = 0;
    const int is_cut = rules.top_k || rules.top_p < 1;
    if (!is_cut && rules.min_p <= 0) return draw_of_all(&r, rules.key, mode);
    const float floor = rules.min_p > 0 ? r.top + (float)(rules.temperature * log(rules.min_p)) : -INFINITY;
    const int64_t count = is_cut ? keep_likeliest(&r, rules, some, mode) : collect(&r, floor, some, mode);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (some[i].logit >= floor) some[kept++] = some[i];
    return draw_of_some(some, kept, rules.key);
}

int draw(const draw_args *a) {
#pragma omp parallel for num_threads((int)a->threads) schedule(static) if (a->rows > 1)
    for (int64_t thread = 0; thread < a->threads; thread++)
        for (int64_t row = thread; row < a->rows; row += a->threads) {
            const double *rules = a->rules + row;
            const luck_t key = {(uint32_t)rules[4 * a->rows], (uint32_t)rules[5 * a->rows]};
            const rules_t own = {rules[0], rules[a->rows], rules[2 * a->rows], rules[3 * a->rows], key};
            candidate_t *some = a->scratch + thread * 2 * a->vocab;
            const void *logits = AT(a->logits, row * a->stride, a->is_bf16 ? BF16_WIDE : F32);
            a->out[row] = a->is_bf16 ? draw_row(logits, a->vocab, own, some, BF16_WIDE)
                                     : draw_row(logits, a->vocab, own, some, F32);
        }
    return 0;
}

/* ---- where rows are largest --------------------------------------------------------------------- */

typedef struct { /* filled by cpu_kernels.py */
    const float *x;
    int64_t *out;         /* [rows, count] */
    candidate_t *scratch; /* [threads, 2 * width] */
    int64_t rows, width, stride, count, threads;
} likeliest_args;

/* The `count` largest, larger ones first, of equals the first; of a row with a NaN: anything. */
static void likeliest_row(const float *x, int64_t width, int64_t count, candidate_t *some, int64_t *out) {
    const row_t r = {x, width, largest(x, width, F32), LOG2E};
    const rules_t rules = {.temperature = 1, .top_k = (double)count};
    const int64_t found = enough(&r, rules, 0, some, F32);
    candidate_t *kept = some + width;
    memcpy(kept, some, (size_t)found * sizeof *some);
    const int64_t left = found ? cut_after(some, found, last_of(kept, found, (double)count, 0)) : 0;
    for (int64_t i = 0; i < count; i++) out[i] = i;
    for (int64_t i = 0; i < min64(left, count); i++) { /* in the order of tokens: sorted in */
        int64_t at = i;
        for (; at > 0 && comes_before(&some[i], &kept[at - 1]); at--) kept[at] = kept[at - 1];
        kept[at] = some[i];
    }
    for (int64_t i = 0; i < min64(left, count); i++) out[i] = kept[i].id;
}

int likeliest(const likeliest_args *a) {
#pragma omp parallel for num_threads((int)a->threads) schedule(static) if (a->rows > 1)
    for (int64_t thread = 0; thread < a->threads; thread++)
        for (int64_t row = thread; row < a->rows; row += a->threads)
            likeliest_row(a->x + row * a->stride, a->width, a->count, a->scratch + thread * 2 * a->width,
                     a->out + row * a->count);
    return 0;
}
