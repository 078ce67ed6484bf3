/* Codes of 3 and 4 bits that are no integers: each stands for a level, in a table. */
#ifndef NANOENGINE_CPU_LEVELS_H
#define NANOENGINE_CPU_LEVELS_H
#include "cpu_formats.h"

/* Numbers of 4 bits: a sign, 2 bits of exponent, and 1 of mantissa. */
INLINE vf e2m1(vu x) {
#if LANES == 16
    const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (vf)_mm512_permutexvar_ps((__m512i)x, numbers);
#else
    const vu size = x & 7, normal = (((size >> 1) + 126) << 23) | (size & 1) << 22;
    const vu small = size * 0x3f000000u, is_small = (vu)(size < 2);
    return (vf)((is_small & small) | (~is_small & normal) | (x & 8) << 28);
#endif
}

/* One of 16 numbers, by the lower 4 bits. */
INLINE vf one_of_16(vu x, const float *numbers) {
#if LANES == 16
    return (vf)_mm512_permutexvar_ps((__m512i)x, _mm512_loadu_ps(numbers));
#elif LANES == 8 && defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), (__m256i)x);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), (__m256i)x);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(x << 28));
#else
    vf y;
    for (int i = 0; i < LANES; i++) y[i] = numbers[x[i] & 15];
    return y;
#endif
}

/* The levels of NF4 (bitsandbytes): quantiles of a normal distribution. */
INLINE vf nf4(vu x) {
    static const float levels[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    };
    return one_of_16(x, levels);
}

/* What the codes of a format stand for, in multiples of the scale; and in multiples of a unit of that. */
typedef struct {
    float numbers[16];
    int8_t integers[16];
    float unit;
} levels_t;

/* ggml-common.h has them. Those of IQ3, IQ2 and IQ1 are what a grid may have, first above 0, then below (of IQ1: -1, 0
 * and 1, and an eighth above or below); none has the fourth of IQ2 and IQ1. Those of MXFP4 and NVFP4 are numbers of
 * 4 bits: see e2m1. */
#define IQ4_LEVELS {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}
#define IQ3_LEVELS {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}
#define E2M1_HALVES {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}
static const levels_t LEVELS[FORMATS] = {
    [MXFP4] = {{0}, E2M1_HALVES, 0.5f},
    [NVFP4] = {{0}, E2M1_HALVES, 0.5f},
    [IQ4_NL] = {IQ4_LEVELS, IQ4_LEVELS, 1},
    [IQ4_XS] = {IQ4_LEVELS, IQ4_LEVELS, 1},
    [IQ3_S] = {IQ3_LEVELS, IQ3_LEVELS, 1},
    [IQ3_XXS] = {{1, 3, 5, 7, 9, 11, 13, 15.5f, -1, -3, -5, -7, -9, -11, -13, -15.5f},
                 {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31}, 0.5f},
    [IQ2] = {{1, 3.125f, 5.375f, 7.5f, -1, -3.125f, -5.375f, -7.5f}, {8, 25, 43, 60, -8, -25, -43, -60}, 0.125f},
    [IQ1] = {{-0.875f, 0.125f, 1.125f, 2.125f, -1.125f, -0.125f, 0.875f, 1.875f},
             {-7, 1, 9, 17, -9, -1, 7, 15}, 0.125f},
};

/* What the scale of a format counts integers in. */
INLINE float unit_of(int format) { return has_levels(format) ? LEVELS[format].unit : 1.0f; }

/* A byte each, of codes in the lowest bits of bytes. */
INLINE vu level_bytes(vu x, const levels_t *of) {
    const int8_t *levels = of->integers;
    x &= 0x0f0f0f0fu;
#if LANES == 16
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
    return (vu)_mm512_shuffle_epi8(table, (__m512i)x);
#elif LANES == 8 && defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels));
    return (vu)_mm256_shuffle_epi8(table, (__m256i)x);
#elif LANES == 4 && defined(__aarch64__)
    return (vu)vqtbl1q_s8(vld1q_s8(levels), (uint8x16_t)x);
#else
    uint8_t bytes[4 * LANES];
    memcpy(bytes, &x, sizeof x);
    for (int i = 0; i < 4 * LANES; i++) bytes[i] = (uint8_t)levels[bytes[i]];
    memcpy(&x, bytes, sizeof x);
    return x;
#endif
}
#endif
