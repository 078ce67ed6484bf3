/* The library of attention and small operators; cpu_attention.h states the law of their bits. */
#include "call_tape.h"
#include "cpu_attend.h"
#include "cpu_operators.h"
#include "cpu_draw.h"

const char *isa(void) {
#if HAVE_PAIRS
    return "avx512_bf16";
#elif LANES == 16
    return "avx512";
#elif LANES == 8
    return "avx2";
#else
    return "generic";
#endif
}
