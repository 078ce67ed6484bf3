/* shared_gather.c with a thread for each rank: for ThreadSanitizer, and against what one thread puts
 * together. All threads share one mapping, for a second one would be other memory to it.
 */
#include "team.h"

#define PIECE 64
#define YIELD_NS 20000
#define SLEEP_NS 1000000
#include "shared_gather.c"

enum { RANKS = 3, ROUNDS = 20 };
enum { TO_ALL, TO_FIRST, FROM_FIRST, KINDS };

typedef struct { int64_t rows, widths[RANKS]; } shape_t;
static const shape_t SHAPES[] = {{1, {5, 0, 7}}, {40, {3, 8, 1}}, {9, {64, 30, 65}}, {2, {200, 300, 0}}};
enum { NUM_SHAPES = sizeof SHAPES / sizeof *SHAPES };

static region_t *region;
static char *outputs[RANKS][ROUNDS][NUM_SHAPES][KINDS];

static int64_t width_of(const shape_t *s) { return s->widths[0] + s->widths[1] + s->widths[2]; }

/* A rank's columns in one of the rounds. */
static char *some_columns(const shape_t *s, int rank, int round) {
    char *columns = malloc((size_t)(s->rows * s->widths[rank]) + 1);
    for (int64_t i = 0; i < s->rows * s->widths[rank]; i++)
        columns[i] = (char)(i * 31 + rank * 7 + round * 13);
    return columns;
}

static char *call(group_t *group, const shape_t *s, int round, int kind) {
    const int me = (int)group->rank, reads = kind == TO_ALL || (kind == TO_FIRST ? me == 0 : me > 0);
    char *columns = some_columns(s, me, round), *out = calloc((size_t)(s->rows * width_of(s)), 1);
    call_t *c = malloc(sizeof *c + RANKS * sizeof(int64_t));
    *c = (call_t){group, columns, reads ? out : NULL, s->widths[me], width_of(s), s->rows, 60000000000};
    for (int q = 0; q < RANKS; q++) c->widths[q] = kind == FROM_FIRST && q ? 0 : s->widths[q];
    if (kind == FROM_FIRST) c->out_stride = s->widths[0];
    const int64_t status = gather(c);
    if (status) printf("rank %d: status %d\n", me, (int)status), exit(1);
    free(columns), free(c);
    return out;
}

static void *be_rank(void *rank) {
    group_t group = {region, (char *)region + flags_bytes(RANKS), (intptr_t)rank, RANKS, 0};
    for (int round = 0; round < ROUNDS; round++)
        for (int s = 0; s < NUM_SHAPES; s++)
            for (int kind = 0; kind < KINDS; kind++)
                outputs[group.rank][round][s][kind] = call(&group, &SHAPES[s], round, kind);
    return NULL;
}

/* What `rank` must have got. */
static char *expected(const shape_t *s, int rank, int round, int kind) {
    char *out = calloc((size_t)(s->rows * width_of(s)), 1), *begin = out;
    if (kind == TO_FIRST && rank) return out;
    if (kind == FROM_FIRST) {
        char *columns = some_columns(s, 0, round);
        if (rank) memcpy(out, columns, (size_t)(s->rows * s->widths[0]));
        free(columns);
        return out;
    }
    for (int q = 0; q < RANKS; begin += s->widths[q++]) {
        char *columns = some_columns(s, q, round);
        copy_rows(begin, width_of(s), columns, s->widths[q], s->rows, s->widths[q]);
        free(columns);
    }
    return out;
}

int main(void) {
    region = aligned_alloc(4096, (size_t)(region_bytes(RANKS) + 4095) / 4096 * 4096);
    memset(region, 0, (size_t)region_bytes(RANKS));
    pthread_t ranks[RANKS];
    for (intptr_t rank = 0; rank < RANKS; rank++)
        if (pthread_create(&ranks[rank], NULL, be_rank, (void *)rank)) abort();
    for (int rank = 0; rank < RANKS; rank++) pthread_join(ranks[rank], NULL);
    for (int rank = 0; rank < RANKS; rank++)
        for (int round = 0; round < ROUNDS; round++)
            for (int s = 0; s < NUM_SHAPES; s++)
                for (int kind = 0; kind < KINDS; kind++) {
                    char what[80], *want = expected(&SHAPES[s], rank, round, kind);
                    snprintf(what, sizeof what, "kind %d, shape %d, rank %d", kind, s, rank);
                    expect_same(what, want, outputs[rank][round][s][kind],
                                SHAPES[s].rows * width_of(&SHAPES[s]));
                }
    return conclude("three ranks", 0);
}
