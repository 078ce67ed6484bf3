/* OpenMP for a program under ThreadSanitizer: the calls that GCC makes of our C files' directives, with
 * pthreads, which it understands; of the real library, which it cannot look into, it would report every
 * barrier. Threads are ordered where OpenMP says so and nowhere else: at the begin and the end of a
 * region, at barriers and at the end of loops. A thread gets every n-th piece of a dynamic loop, which
 * is as good a turn as any, orders nothing, and gives each of them work.
 */
#ifndef NANOENGINE_TESTS_TEAM_H
#define NANOENGINE_TESTS_TEAM_H
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_THREADS = 8 };

typedef struct {
    void (*region)(void *);
    void *data;
    int size;
    pthread_barrier_t barrier;
} team_t;
typedef struct { team_t *team; int number; } member_t;

static _Thread_local member_t me;
static _Thread_local long loop_at, loop_end, loop_piece, loop_gap;

static void *be_member(void *member) {
    me = *(member_t *)member;
    me.team->region(me.team->data);
    return NULL;
}

void GOMP_parallel(void (*region)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    if (threads < 1 || threads > MOST_THREADS) abort();
    team_t team = {.region = region, .data = data, .size = (int)threads};
    member_t members[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    pthread_barrier_init(&team.barrier, NULL, threads);
    for (int i = team.size - 1; i >= 0; i--) {
        members[i] = (member_t){&team, i};
        if (i == 0) be_member(&members[0]);
        else if (pthread_create(&others[i], NULL, be_member, &members[i])) abort();
    }
    for (int i = 1; i < team.size; i++) pthread_join(others[i], NULL);
    pthread_barrier_destroy(&team.barrier);
}
int omp_get_thread_num(void) { return me.number; }
int omp_get_num_threads(void) { return me.team->size; }
void GOMP_barrier(void) { pthread_barrier_wait(&me.team->barrier); }

bool GOMP_loop_nonmonotonic_dynamic_next(long *begin, long *end) {
    if (loop_at >= loop_end) return false;
    *begin = loop_at;
    *end = loop_at + loop_piece < loop_end ? loop_at + loop_piece : loop_end;
    loop_at += loop_gap;
    return true;
}
bool GOMP_loop_nonmonotonic_dynamic_start(long first, long last, long step, long piece, long *begin,
                                          long *end) {
    if (step != 1) abort();
    loop_at = first + me.number * piece, loop_end = last;
    loop_piece = piece, loop_gap = me.team->size * piece;
    return GOMP_loop_nonmonotonic_dynamic_next(begin, end);
}
/* Of `monotonic`, which this order is. */
bool GOMP_loop_dynamic_next(long *begin, long *end) { return GOMP_loop_nonmonotonic_dynamic_next(begin, end); }
bool GOMP_loop_dynamic_start(long first, long last, long step, long piece, long *begin, long *end) {
    return GOMP_loop_nonmonotonic_dynamic_start(first, last, step, piece, begin, end);
}
void GOMP_loop_end(void) { GOMP_barrier(); }
void GOMP_loop_end_nowait(void) {}

/* ---- what the programs share ------------------------------------------------------------------ */

static uint64_t random_state = 1;

/* In [-1, 1). */
static float some_number(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random_state >> 40) / (1 << 23) - 1;
}

/* float32, or bfloat16: the upper half of one. */
static void *some_numbers(int64_t count, int is_bf16) {
    char *numbers = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        const float x = some_number();
        memcpy(numbers + i * (is_bf16 ? 2 : 4), (const char *)&x + (is_bf16 ? 2 : 0), is_bf16 ? 2 : 4);
    }
    return numbers;
}

static int results = 0, differing = 0;

/* Results of one thread and of several. */
static void expect_same(const char *what, const void *one, const void *two, int64_t bytes) {
    results++;
    if (memcmp(one, two, (size_t)bytes) == 0) return;
    printf("%s: other bits on several threads than on one\n", what);
    differing++;
}

/* The exit code of main, which tells on which build this was. */
static int conclude(const char *isa, int has_tiles) {
    printf("%d of %d results have the same bits on one thread and on several (%s%s)\n",
           results - differing, results, isa, has_tiles ? ", AMX" : "");
    return differing > 0;
}
#endif
