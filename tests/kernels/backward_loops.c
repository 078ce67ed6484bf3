/* Loaded before GCC's OpenMP: every loop of `schedule(dynamic)` hands out its steps from the last to the first, which
 * the standard allows where no `monotonic` asks for order, and LLVM's OpenMP comes near where a thread takes of another. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef _Bool start_t(long, long, long, long, long *, long *);
typedef _Bool next_t(long *, long *);

static _Thread_local long both; /* first step + end of the thread's loop */
static long loops;

static void turn(long *begin, long *end) {
    const long begins = both - *end;
    *end = both - *begin, *begin = begins;
}

_Bool GOMP_loop_nonmonotonic_dynamic_start(long first, long end, long step, long chunk, long *begin, long *stop) {
    start_t *const real = (start_t *)dlsym(RTLD_NEXT, "GOMP_loop_nonmonotonic_dynamic_start");
    if (step != 1) abort();
    __atomic_fetch_add(&loops, 1, __ATOMIC_RELAXED);
    both = first + end;
    const _Bool more = real(first, end, step, chunk, begin, stop);
    if (more) turn(begin, stop);
    return more;
}

_Bool GOMP_loop_nonmonotonic_dynamic_next(long *begin, long *stop) {
    next_t *const real = (next_t *)dlsym(RTLD_NEXT, "GOMP_loop_nonmonotonic_dynamic_next");
    const _Bool more = real(begin, stop);
    if (more) turn(begin, stop);
    return more;
}

__attribute__((destructor)) static void tell(void) { fprintf(stderr, "%ld loops ran backward\n", loops); }
