/* How threads share out the units of a call. Cores are not equally fast: some are small, some are also another
 * program's. So a thread that has done its share takes from those of others. */
#ifndef NANOENGINE_CPU_SHARES_H
#define NANOENGINE_CPU_SHARES_H
#include "cpu_vectors.h"

enum { PARTS_LEFT = 3, LEAST_PART = 4 }; /* a part: a third of what is left, and at least so many units */

/* How many units of one thread's share are taken. No two threads write to one line, but where one helps. */
typedef struct { int64_t taken; } __attribute__((aligned(64))) share_t;

/* Takes [*begin, *end) from the share [first, last), up to an even unit or the last one; 0: nothing is left. Each part is
 * smaller than the one before, so little is left to wait for at the end. */
static int take_part(share_t *share, int64_t first, int64_t last, int64_t *begin, int64_t *end) {
    int64_t taken = __atomic_load_n(&share->taken, __ATOMIC_RELAXED);
    do {
        *begin = first + taken;
        if (*begin >= last) return 0;
        const int64_t part = max64((last - *begin) / PARTS_LEFT, LEAST_PART);
        *end = min64(last, (*begin + part) / 2 * 2);
    } while (!__atomic_compare_exchange_n(&share->taken, &taken, *end - first, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

/* As take_part, of `units`: from the thread's own share, which is in every step the same and may lie in its caches, then
 * from the next thread's. */
static int take_units(share_t *shares, int64_t units, int64_t thread, int64_t threads, int64_t *begin, int64_t *end) {
    for (int64_t i = 0; i < threads; i++) {
        const int64_t of = (thread + i) % threads, first = of * units / threads;
        if (take_part(shares + of, first, (of + 1) * units / threads, begin, end)) return 1;
    }
    return 0;
}
#endif
