/* The calls of a recorded pass, made again without the Python between: see call_tape.py. */
#ifndef CALL_TAPE_H
#define CALL_TAPE_H
#include <stdint.h>

typedef struct { /* filled by call_tape.py with struct.pack: keep both in step */
    int (*function)(const void *args); /* 0, or what went wrong */
    const void *args;
} taped_t;

/* The first result that is not 0; the calls after it are not made. */
int run_calls(const taped_t *calls, int64_t count) {
    int status = 0;
    for (int64_t i = 0; i < count && !status; i++) status = calls[i].function(calls[i].args);
    return status;
}
#endif
