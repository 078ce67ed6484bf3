/* The formats of weights: what a block has, and how a code becomes a multiple of a scale.
 *
 * IQ3_XXS, IQ3_S, IQ2 and IQ1 are a file's types whose codes choose several weights at once, from a grid. Here each
 * weight has a code of its own, which says its level: in the blocks of IQ4_XS or of Q3_K. See loading/gguf/grids.py.
 * Formats that differ in their levels alone are of one layout, and share all functions: see cpu_levels.h.
 */
#ifndef NANOENGINE_CPU_FORMATS_H
#define NANOENGINE_CPU_FORMATS_H
#include <stdint.h>

#include "cpu_vectors.h"

enum { PANEL = 64, GROUP = 32 };
enum { DENSE, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, INT4, INT8, FP8, NVFP4, NF4, IQ4_NL, IQ4_XS,
       Q2_K, Q3_K, IQ3_XXS, IQ3_S, IQ2, IQ1, BF16, F16, BF12, FORMATS };

/* The formats of weights that a library multiplies, by layout: a bit for each. Functions of others are empty, for all
 * of them take GCC longer than what else there is (8 s of 15). */
#ifndef HELD
#define HELD -1
#endif
#define IS_HELD(format) (HELD >> (format) & 1)

typedef struct { /* of a block: weights; halves and words, and the bytes where each begin in the file */
    int64_t weights, halves, words, halves_at, words_at;
} format_t;
static const format_t FORMAT[FORMATS] = {
    [Q4_0] = {32, 1, 4, 0, 2},  [Q4_1] = {32, 2, 4, 0, 4},    [Q5_0] = {32, 1, 5, 0, 2},
    [Q5_1] = {32, 2, 5, 0, 4},  [Q8_0] = {32, 1, 8, 0, 2},    [Q4_K] = {256, 2, 35, 0, 4},
    [Q5_K] = {256, 2, 43, 0, 4}, [Q6_K] = {256, 1, 52, 208, 0}, [MXFP4] = {32, 1, 4, 0, 1},
    [INT4] = {32, 2, 4, 0, 4},  [INT8] = {32, 2, 8, 0, 4},    [FP8] = {32, 0, 9, 0, 0},
    [NVFP4] = {64, 0, 10, 0, 0}, [NF4] = {64, 0, 9, 0, 0},    [IQ4_NL] = {32, 1, 4, 0, 2},
    [IQ4_XS] = {256, 2, 33, 0, 4}, [Q2_K] = {256, 2, 20, 80, 0}, [Q3_K] = {256, 1, 27, 108, 0},
    [IQ3_XXS] = {256, 2, 33, 0, 4}, [IQ3_S] = {256, 2, 33, 0, 4}, [IQ2] = {256, 1, 27, 108, 0},
    [IQ1] = {256, 1, 27, 108, 0},
    [BF16] = {32, 0, 16, 0, 0}, [F16] = {32, 0, 16, 0, 0},
};
INLINE int64_t block_bytes(int format) { return 2 * FORMAT[format].halves + 4 * FORMAT[format].words; }
INLINE int64_t file_bytes(int format) { return block_bytes(format) - (format == MXFP4); }

/* Whether a format holds numbers, two in a word. */
INLINE int has_numbers(const int format) { return format == BF16 || format == F16; }

/* Whether blocks are those of IQ4_XS, or of Q3_K. */
INLINE int is_as_iq4_xs(const int format) { return format == IQ4_XS || format == IQ3_XXS || format == IQ3_S; }
INLINE int is_as_q3_k(const int format) { return format == Q3_K || format == IQ2 || format == IQ1; }

/* The format whose functions serve. */
INLINE int layout_of(int format) { return is_as_iq4_xs(format) ? IQ4_XS : format == IQ1 ? IQ2 : format; }

/* Whether 16 weights have a scale of 4 to 8 bits, in units of that of their block. */
INLINE int is_of_16(const int format) { return format == Q2_K || format == Q6_K || is_as_q3_k(format); }
/* The parts of a group with a scale each. */
INLINE int halves_of(const int format) { return is_of_16(format) ? 2 : 1; }

/* The code that is 0, where the file says no minimum. */
INLINE int code_of_zero(const int format) {
    return format == Q3_K ? 4 : format == Q4_0 ? 8 : format == Q5_0 ? 16 : format == Q6_K ? 32 : 0;
}

/* Whether a code says a level, an integer of 8 bits. */
INLINE int has_levels(const int format) {
    return format == IQ4_NL || is_as_iq4_xs(format) || format == IQ2 || format == IQ1;
}

INLINE int bits_of(const int format) {
    switch (format) {
    case Q5_0: case Q5_1: case Q5_K: return 5;
    case Q6_K: return 6;
    case Q2_K: return 2;
    case Q3_K: case IQ2: case IQ1: return 3;
    case Q8_0: case INT8: return 8;
    default: return 4;
    }
}

/* The words of a block that hold scales, not codes: [first, last). */
INLINE int64_t first_scale(int format) { return format == Q6_K ? 48 : is_as_q3_k(format) ? 24 : 0; }
INLINE int64_t last_scale(int format) {
    switch (format) {
    case Q6_K: return 52;
    case Q3_K: case IQ2: case IQ1: return 27;
    case Q2_K: return 4;
    case Q4_K: case Q5_K: return 3;
    default: return is_as_iq4_xs(format);
    }
}
#endif
