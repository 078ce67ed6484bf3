/* The experts of a layer as calls of many weights at once; included by cpu_linear.c. */

enum { BOTH, GATES, DOWNS };
enum { RUNS = 4 }; /* of a thread, where rows are few: see multiply_calls */

typedef struct { /* the experts of a layer for some rows, filled by packed_experts.py; rows lie side by side */
    /* [experts]; up: NULL, or gate_up is gate. With RELU2 gate_up is up, and there is no gate. */
    const weight_t *const *gate_up, *const *up, *const *down;
    const char *x;                                /* [rows][k] */
    const int64_t *ids;                           /* [rows][top_k]: the experts of each row */
    const float *weights;                         /* [rows][top_k] */
    char *out;                                    /* [rows][outputs of down] */
    char *sorted;             /* [rows * top_k][k]: by expert; then what down gives */
    char *gated;              /* [rows * top_k][inner]: by expert; of a rank, its columns */
    const char *whole;        /* the columns of all ranks: `gated`, where there is one */
    char *apart;              /* [rows * top_k][2][inner]: of gate and up, where they are two weights */
    int64_t *places, *starts; /* [rows * top_k]: of a row's choice in `sorted`; [experts + 1] */
    call_t *calls;            /* a call of each weight for each expert that rows go to */
    char *made;               /* the rows of all calls, rounded or arranged, where weights want that */
    int64_t experts, top_k, rows, activation, threads;
    int64_t half; /* BOTH; or one of them: ranks gather `gated` between the two */
} experts_t;

/* Sort the choices by expert, keeping their order; and set up the calls: of gate and up, of down, and of up
 * where it is apart. Returns how many there are of each. */
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
        const int64_t width = ITEM * gate_up->k, inner = ITEM * gate_up->outputs;
        const int64_t all = ITEM * down->k, given = ITEM * down->outputs;
        char *sorted = e->sorted + first * width, *gated = e->gated + first * inner;
        const int64_t epilogue = gate_up->activation ? FLOAT + gate_up->activation : STORE;
        if (e->up) {
            char *apart = e->apart + first * 2 * inner;
            e->calls[n] = (call_t){gate_up, sorted, apart, NULL, width, 2 * inner, rows, STORE, e->threads};
            e->calls[2 * hit + n] = e->calls[n];
            e->calls[2 * hit + n].w = e->up[id], e->calls[2 * hit + n].out = apart + inner;
        } else
            e->calls[n] = (call_t){gate_up, sorted, gated, NULL, width, inner, rows, epilogue, e->threads};
        e->calls[hit + n++] = (call_t){down, e->whole + first * all, e->sorted + first * given, NULL, all, given,
                                       rows, STORE, e->threads};
    }
    for (int64_t i = 0; i < choices; i++) e->places[i] = e->starts[e->ids[i]]++;
    return hit;
}

/* One thread's part of calls that read nothing of each other: a panel at a time of all of them. Few rows wait
 * for memory, and what is prefetched belongs to the panel that comes next: so they take runs of panels. */
static void multiply_calls(const call_t *calls, int64_t count, int64_t threads) {
    int64_t steps = 0, at = 0, before = 0, all_rows = 0;
    for (int64_t i = 0; i < count; i++) {
        all_rows += calls[i].rows;
        const weight_t *w = calls[i].w;
        const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF);
        const int64_t rows = choose_block_rows(w, calls[i].rows, halves, threads);
        steps += ceil_div(calls[i].rows, rows) * ceil_div(halves, 2);
    }
    scratch_t scratch;
    scratch.summed_row = -1;
    const int64_t run = all_rows < 2 * count ? max64(1, steps / (RUNS * threads)) : 1;
#pragma omp for schedule(monotonic : dynamic, run)
    for (int64_t step = 0; step < steps; step++) {
        for (;; at++) { /* in order, as LLVM's OpenMP hands steps out only where asked */
            const weight_t *w = calls[at].w;
            const int64_t halves = ceil_div(w->outputs, w->activation ? TURN : HALF), panels = ceil_div(halves, 2);
            const int64_t rows = choose_block_rows(w, calls[at].rows, halves, threads);
            const int64_t own = ceil_div(calls[at].rows, rows) * panels;
            if (step >= before + own) {
                before += own, scratch.summed_row = -1;
                continue;
            }
            const int64_t first = (step - before) / panels * halves, half = (step - before) % panels * 2;
            multiply_units(&calls[at], halves, rows, first + half, first + min64(half + 2, halves), &scratch);
            break;
        }
    }
}

/* The rows of each call, of `first` and those after it, rounded or arranged where its weight wants that. */
static void make_rows(const experts_t *e, call_t *calls, int64_t count, const char *first, int64_t threads) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
        call_t *c = &calls[i];
        const int64_t halves = ceil_div(c->w->outputs, c->w->activation ? TURN : HALF);
        const int64_t before = (c->x - first) / c->x_stride;
        if (is_rounded(c->w)) {
            rounded_t *rounded = (rounded_t *)e->made + before * (c->w->k / GROUP);
            round_rows(c, choose_block_rows(c->w, c->rows, halves, threads), 1, rounded);
            c->x = (const char *)rounded;
        } else if (looks_up(c->w) && c->rows > 1) { /* a call's blocks may begin a block later than its rows */
            char *made = e->made + (before / PAIR_ROWS + i) * PAIR_ROWS * c->x_stride;
            for (int64_t row = 0; row < c->rows; row += PAIR_ROWS)
                arrange_block(c->w, c->x + row * c->x_stride, c->x_stride, row, min64(PAIR_ROWS, c->rows - row), made);
            c->x = made, c->x_stride = 0;
        }
    }
}

/* activation(gate) * up of a row's choice, where these are two weights. */
INLINE void gate_choice(const experts_t *e, int64_t choice, const int activation) {
    const int64_t inner = e->up[0]->outputs;
    const char *gate = e->apart + ITEM * choice * 2 * inner, *up = gate + ITEM * inner;
    for (int64_t at = 0; at < inner; at += LANES) {
        const int n = (int)min64(LANES, inner - at);
        const vf y = load_f32(gate + ITEM * at, n, MODE), z = load_f32(up + ITEM * at, n, MODE);
        store_n(e->gated + ITEM * (choice * inner + at), gated(y, z, activation, MODE), n, MODE);
    }
}
static void gate_choices(const experts_t *e, int64_t choices) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < choices; i++) {
        if (e->activation == SILU) gate_choice(e, i, SILU);
        else if (e->activation == GELU) gate_choice(e, i, GELU);
        else gate_choice(e, i, SWIGLU);
    }
}

/* relu(up) * up of a row's choice, in place, where there is no gate. */
INLINE void square_choice(const experts_t *e, int64_t choice) {
    const int64_t inner = e->gate_up[0]->outputs;
    for (int64_t at = 0; at < inner; at += LANES) {
        const int n = (int)min64(LANES, inner - at);
        char *up = e->gated + ITEM * (choice * inner + at);
        store_n(up, relu2(load_f32(up, n, MODE)), n, MODE);
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
            vf term = load_f32(e->sorted + ITEM * (e->places[i] * width + at), n, MODE) * e->weights[i];
            KEEP_APART(term);
            total = i == row * e->top_k ? term : total + term;
        }
        store_n(e->out + ITEM * (row * width + at), total, n, MODE);
    }
}

/* One thread's part of a half: of the gates, and of the downs. */
static void multiply_gates(const experts_t *e, int64_t hit, int64_t threads) {
    const int64_t choices = e->rows * e->top_k, width = ITEM * e->gate_up[0]->k;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < choices; i++)
        memcpy(e->sorted + e->places[i] * width, e->x + i / e->top_k * width, (size_t)width);
    make_rows(e, e->calls, hit, e->sorted, threads);
    multiply_calls(e->calls, hit, threads);
    if (e->activation == RELU2) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < choices; i++) square_choice(e, i);
    }
    if (!e->up) return;
    make_rows(e, e->calls + 2 * hit, hit, e->sorted, threads);
    multiply_calls(e->calls + 2 * hit, hit, threads);
    gate_choices(e, choices);
}
static void multiply_downs(const experts_t *e, int64_t hit, int64_t threads) {
    make_rows(e, e->calls + hit, hit, e->whole, threads);
    multiply_calls(e->calls + hit, hit, threads);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < e->rows; row++) add_up(e, row);
}

/* out = for each row the sum over its experts of weight * down(activation(gate(x)) * up(x)). A half plans
 * by itself: ids are the same in both. */
int experts(const experts_t *e) {
    const int64_t hit = plan_experts(e);
    const int64_t products = e->rows * e->top_k * e->down[0]->outputs * e->down[0]->k;
    const int64_t threads = products < 1 << 16 ? 1 : e->threads;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        if (e->half != DOWNS) multiply_gates(e, hit, threads);
        if (e->half != GATES) multiply_downs(e, hit, threads);
        if (uses_tiles(e->down[0]) || uses_tiles(e->gate_up[0]) || (e->up && uses_tiles(e->up[0]))) release_tiles();
    }
    return 0;
}
