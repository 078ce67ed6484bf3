/* Which experts a row goes to, and with what weights: `route` of models/experts.py in one call; included by
 * cpu_linear.c. A row's numbers come from that row alone, in the order of its experts; of equals the first
 * is taken.
 */
#include <math.h>

typedef struct { /* filled by cpu_linear.py with struct.pack: keep both in step */
    const float *logits, *bias; /* [rows, count]; [count], added for the choice alone, or NULL */
    const float *scale;         /* [count], by which the weights of the chosen are multiplied, or NULL */
    int64_t *ids; /* [rows, top_k] */
    float *weights, *scratch; /* [rows, top_k]; [rows, 2 * count + groups] */
    int64_t rows, count, top_k, groups, top_groups, group_best, by_sigmoid, by_logits, renormalises, threads;
    double scaling, least_sum; /* the second is not 0, by which nothing can be divided */
} route_t;

/* The place of the largest value, which becomes -inf; 0 if all are. */
static int64_t take(float *values, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (values[i] != -INFINITY && (best < 0 || values[i] > values[best])) best = i;
    if (best < 0) return 0;
    values[best] = -INFINITY;
    return best;
}

static void score(const route_t *r, const float *logits, float *scores) {
    double sum = 0;
    float most = -INFINITY;
    for (int64_t i = 0; i < r->count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < r->count; i++) {
        scores[i] = (float)(r->by_sigmoid ? 1 / (1 + exp(-(double)logits[i])) : exp((double)logits[i] - most));
        sum += scores[i];
    }
    for (int64_t i = 0; i < r->count && !r->by_sigmoid; i++) scores[i] = (float)(scores[i] / sum);
}

/* -inf but in the groups whose one or two best experts have the largest sum. */
static void close_groups(const route_t *r, float *choice, float *sums) {
    const int64_t size = r->count / r->groups;
    for (int64_t group = 0; group < r->groups; group++) {
        float best = -INFINITY, next = -INFINITY;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            const float low = choice[i] > best ? best : choice[i];
            best = choice[i] > best ? choice[i] : best;
            next = low > next ? low : next;
        }
        sums[group] = r->group_best == 1 ? best : best + next;
    }
    for (int64_t i = 0; i < r->top_groups; i++) take(sums, r->groups);
    for (int64_t i = 0; i < r->count; i++) /* what was taken is -inf */
        if (sums[i / size] != -INFINITY) choice[i] = -INFINITY;
}

static void route_row(const route_t *r, int64_t row) {
    float *scores = r->scratch + row * (2 * r->count + r->groups), *choice = scores + r->count;
    int64_t *ids = r->ids + row * r->top_k;
    float *weights = r->weights + row * r->top_k, total = 0;
    const float *logits = r->logits + row * r->count, *chosen_by = r->by_logits ? logits : scores;
    score(r, logits, scores);
    for (int64_t i = 0; i < r->count; i++) choice[i] = chosen_by[i] + (r->bias ? r->bias[i] : 0);
    if (r->groups > 1) close_groups(r, choice, choice + r->count);
    for (int64_t i = 0; i < r->top_k; i++) {
        ids[i] = take(choice, r->count);
        weights[i] = scores[ids[i]];
        total += weights[i] + (i ? 0 : (float)r->least_sum);
    }
    for (int64_t i = 0; i < r->top_k; i++) {
        weights[i] = (r->renormalises ? weights[i] / total : weights[i]) * (float)r->scaling;
        if (r->scale) weights[i] *= r->scale[ids[i]];
    }
}

int route(const route_t *r) {
#pragma omp parallel for num_threads((int)r->threads) schedule(static) if (r->rows * r->count > 1 << 11)
    for (int64_t row = 0; row < r->rows; row++) route_row(r, row);
    return 0;
}
