/* Vectors of floats for our C kernels, in GCC's own vector types: LANES is what the CPU has, 16, 8 or
 * 4. And the arithmetic of a row that more than one kernel does, bit for bit alike.
 *
 * Memory holds float32 (mode F32) or bfloat16; arithmetic is in fp32. BF16_PAIRS multiplies pairs of
 * bfloat16 (AVX512-BF16), BF16_TILES does so in matrix tiles (AMX), BF16_WIDE widens them first.
 */
#ifndef NANOENGINE_CPU_VECTORS_H
#define NANOENGINE_CPU_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline)) /* where it would grow a function that GCC takes long for */
#ifdef __clang__ /* it leaves GCC's out, and vectors in memory */
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define F32 0 /* not an enum: #if reads them */
#define BF16_WIDE 1
#define BF16_PAIRS 2
#define BF16_TILES 3
/* Whether what this is compiled for has a mode: functions of the others are empty. */
#define HAS_MODE(mode) ((mode) < BF16_PAIRS || ((mode) == BF16_PAIRS ? HAVE_PAIRS : HAVE_TILES))

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LANES 16
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w), X(4, w), X(5, w), X(6, w), X(7, w), \
                        X(8, w), X(9, w), X(10, w), X(11, w), X(12, w), X(13, w), X(14, w), X(15, w)
#else
#if defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w), X(4, w), X(5, w), X(6, w), X(7, w)
#else
#define LANES 4
#define LANE_LIST(X, w) X(0, w), X(1, w), X(2, w), X(3, w)
#endif
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

#define LOG2E 1.44269504f
#define LANE_ID(l, w) l
static const vi IOTA = {LANE_LIST(LANE_ID, 0)};

INLINE vf load(const void *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(void *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_i(int32_t x) { return x - (vi){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* A NaN in b is kept, so that a broken input stays visible. */
INLINE vf vmax(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

/* a * b + c with one rounding, where the CPU has that. Said in so many words wherever two loops must give
 * the same bits: which product of a sum a compiler fuses by itself depends on the loop around it. */
INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

#if defined(__clang__)
#define SHUFFLE(a, b, lane, w) __builtin_shufflevector(a, b, LANE_LIST(lane, w))
#else
#define SHUFFLE(a, b, lane, w) __builtin_shuffle(a, b, (vi){LANE_LIST(lane, w)})
#endif

/* x[i][j] becomes x[j][i]: blocks of w lanes change places, for every power of two. */
#define SWAP_LO(l, w) ((l) / (w) % 2 ? LANES - (w) : 0) + (l)
#define SWAP_HI(l, w) ((l) / (w) % 2 ? LANES : (w)) + (l)
#define SWAP(w)                                                                                     \
    UNROLL for (int i = 0; i < LANES; i++) if (i / (w) % 2 == 0) {                                  \
        const vf a = x[i], b = x[i + (w)];                                                          \
        x[i] = SHUFFLE(a, b, SWAP_LO, w), x[i + (w)] = SHUFFLE(a, b, SWAP_HI, w);                   \
    }
INLINE void transpose(vf *x) {
    SWAP(1)
    SWAP(2)
#if LANES >= 8
    SWAP(4)
#endif
#if LANES == 16
    SWAP(8)
#endif
}

/* LANES rows of LANES words, `stride` bytes apart, into columns `width` floats apart. */
INLINE void transpose_words(const char *p, int64_t stride, float *out, int64_t width) {
#if LANES == 16
    /* A quarter of the columns at a time, its rows put together as they are read: half the shuffles. The
     * compiler is kept from carrying 16 pointers through the loop around this. */
    __asm__("" : "+r"(p));
    UNROLL for (int c = 0; c < 4; c++, p += 16, out += 4 * width) {
        __m512 x[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float *row = (const float *)(p + i * stride);
#define FOUR(n) _mm_loadu_ps((const float *)((const char *)row + 4 * (n) * stride))
            x[i] = _mm512_insertf32x4(_mm512_castps128_ps512(FOUR(0)), FOUR(1), 1);
            x[i] = _mm512_insertf32x4(_mm512_insertf32x4(x[i], FOUR(2), 2), FOUR(3), 3);
#undef FOUR
        }
        const __m512d a = (__m512d)_mm512_unpacklo_ps(x[0], x[1]);
        const __m512d b = (__m512d)_mm512_unpackhi_ps(x[0], x[1]);
        const __m512d d = (__m512d)_mm512_unpacklo_ps(x[2], x[3]);
        const __m512d e = (__m512d)_mm512_unpackhi_ps(x[2], x[3]);
        store(out, (vf)_mm512_unpacklo_pd(a, d));
        store(out + width, (vf)_mm512_unpackhi_pd(a, d));
        store(out + 2 * width, (vf)_mm512_unpacklo_pd(b, e));
        store(out + 3 * width, (vf)_mm512_unpackhi_pd(b, e));
    }
#else
    vf x[LANES];
    UNROLL for (int i = 0; i < LANES; i++) x[i] = load(p + i * stride);
    transpose(x);
    UNROLL for (int i = 0; i < LANES; i++) store(out + i * width, x[i]);
#endif
}

/* The largest lane, a half at a time; of a vector with a NaN: any, or NaN. */
#define TURNED(l, w) ((l) + (w)) % LANES
INLINE float max_lane(vf x) {
#if LANES == 16
    x = vmax(x, SHUFFLE(x, x, TURNED, 8));
#endif
#if LANES >= 8
    x = vmax(x, SHUFFLE(x, x, TURNED, 4));
#endif
    x = vmax(x, SHUFFLE(x, x, TURNED, 2));
    return vmax(x, SHUFFLE(x, x, TURNED, 1))[0];
}

INLINE float sum_lanes(vf x) {
#if LANES == 16
    x += SHUFFLE(x, x, TURNED, 8);
#endif
#if LANES >= 8
    x += SHUFFLE(x, x, TURNED, 4);
#endif
    x += SHUFFLE(x, x, TURNED, 2);
    return x[0] + x[1];
}

/* The same of LANES vectors at once: lane r is max_lane or sum_lanes of x[r]. */
#define FOLD(w, f)                                                                                  \
    UNROLL for (int i = 0; i < (w); i++) {                                                          \
        const vf a = x[i], b = x[i + (w)];                                                          \
        x[i] = f(SHUFFLE(a, b, SWAP_LO, w), SHUFFLE(a, b, SWAP_HI, w));                             \
    }
#if LANES == 16
#define FOLD_ALL(f) FOLD(8, f) FOLD(4, f) FOLD(2, f) FOLD(1, f)
#elif LANES == 8
#define FOLD_ALL(f) FOLD(4, f) FOLD(2, f) FOLD(1, f)
#else
#define FOLD_ALL(f) FOLD(2, f) FOLD(1, f)
#endif
INLINE vf plus(vf a, vf b) { return a + b; }
INLINE vf max_of_each(vf *x) { FOLD_ALL(vmax) return x[0]; }
INLINE vf sum_of_each(vf *x) { FOLD_ALL(plus) return x[0]; }

/* 2^t for t <= 0, exactly 1 at 0 and exactly 0 at -inf. A minimax polynomial on [-1/2, 1/2] with a
 * constant term of 1: relative error 9e-8. */
INLINE vf exp2v(vf t) {
    t = vmax(splat(-127.0f), t);
    vf shifted = t + 12582912.0f; /* 1.5 * 2^23: the low bits now hold round(t) */
    vf f = t - (shifted - 12582912.0f);
    vf p = f * 0.00132647273f + 0.00967151279f;
    p = p * f + 0.0555073374f;
    p = p * f + 0.240222421f;
    p = p * f + 0.693146978f;
    p = p * f + 1.0f;
    return (vf)((vu)p + ((vu)shifted << 23));
}
/* The same for a result that is rounded to bf16 (2e-3): relative error 9e-5. On [0, 1). */
INLINE vf exp2_coarse(vf t) {
#if LANES == 16
    const vf f = (vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF); /* t - floor(t) */
    const vf p = ((f * 0.0770609657f + 0.227651609f) * f + 0.695115297f) * f + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)t); /* p * 2^floor(t) */
#else
    return exp2v(t);
#endif
}
/* Of a probability, in a mode. */
INLINE vf exp2_for(vf t, int mode) { return mode == F32 ? exp2v(t) : exp2_coarse(t); }

/* Relative error 3e-7. Where x is small the quotient would lose digits: there x + x^3 p(x^2), minimax. */
INLINE vf tanhv(vf x) {
    const vf size = (vf)((vi)x & INT32_MAX), square = x * x;
    vf p = fused(square, splat(-0.0057049873f), splat(0.020639088f));
    p = fused(p, square, splat(-0.053739715f));
    p = fused(p, square, splat(0.13331442f));
    p = fused(p, square, splat(-0.3333328f));
    const vf e = exp2v(size * (-2 * LOG2E)), quotient = (1.0f - e) / (e + 1.0f);
    const vf with_sign = (vf)((vi)quotient | ((vi)x & INT32_MIN));
    return pick(size < 0.625f, fused(x * square, p, x), with_sign);
}

/* A maximum as a power of 2. Finite, because -inf - -inf is NaN; and the comparison keeps the compiler
 * from fusing the product into a subtraction, which would make 2^(x - x) something else than 1. */
INLINE vf base_of(vf top) { return vmax(splat(-1e30f), top * LOG2E); }

INLINE vf widen(vh x) {
#if LANES == 16 /* GCC 12 makes five instructions of the conversion below */
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

/* n (1..LANES) elements starting at p, the other lanes 0; nothing past them is read. */
INLINE vf load_f32(const void *p, int n, int mode) {
    vf x = {0};
    vh h = {0};
    if (mode == F32) {
        if (n >= LANES) return load(p);
        memcpy(&x, p, 4 * (size_t)n);
        return x;
    }
    if (n >= LANES) memcpy(&h, p, sizeof h);
    else memcpy(&h, p, 2 * (size_t)n);
    return widen(h);
}

/* To the nearest bf16, ties to even, as torch does; NaN stays NaN. */
INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu u = (vu)x, nearest = u + 0x7fff + (u >> 16 & 1);
    return __builtin_convertvector((vu)pick(x == x, (vf)nearest, (vf)(u | 0x400000)) >> 16, vh);
#endif
}

INLINE void store_n(void *p, vf x, int n, int mode) {
    const vh h = narrow(x);
    if (n < LANES) memcpy(p, mode == F32 ? (const void *)&x : &h, (size_t)n * (mode == F32 ? 4 : 2));
    else if (mode == F32) memcpy(p, &x, sizeof x);
    else memcpy(p, &h, sizeof h);
}
INLINE vf rounded(vf x, int mode) { return mode == F32 ? x : widen(narrow(x)); }

#if defined(__AVX512BF16__) && LANES == 16
#define HAVE_PAIRS 1
/* acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1] over 16 lanes of bf16 pairs. */
INLINE vf dot_pairs(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
INLINE vf load_bf16(const void *p, int n) { /* up to 32 elements, the rest 0 */
    if (n >= 32) return load(p);
    return (vf)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
}
/* a0 b0 a1 b1 ...: the first or the second 16 pairs of two rows of 32 elements. */
INLINE vf interleave(vf a, vf b, int half) {
    const vi index = IOTA * 0x10001 + 0x200000 + half * 0x100010; /* (i, 32 + i) as two 16-bit halves */
    return (vf)_mm512_permutex2var_epi16((__m512i)a, (__m512i)index, (__m512i)b);
}
/* The same pairs in another order, which takes half the time on a Xeon with AMX: pair i of the first 16 is that
 * of element quarter_at(0, i), of the second 16 that of quarter_at(1, i). */
INLINE vf interleave_quarters(vf a, vf b, int half) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    return (vf)(half ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y));
}
/* Of 32 numbers in that order, the first or the second 16 in their own. */
INLINE vf join_quarters(vf a, vf b, int half) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), four = _mm512_set1_epi64(4);
    const __m512i index = half ? _mm512_add_epi64(first, four) : first;
    return (vf)_mm512_permutex2var_pd((__m512d)a, index, (__m512d)b);
}
/* Pairs (a[i], b[i]) rounded to bf16. */
INLINE vf round_pairs(vf a, vf b) {
    const vi index = IOTA * 0x10001 + 0x100000;
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    return (vf)_mm512_permutexvar_epi16((__m512i)index, both);
}
#else
#define HAVE_PAIRS 0
INLINE vf dot_pairs(vf acc, vf a, vf b) { return acc + a * b; } /* the rest: never called */
INLINE vf load_bf16(const void *p, int n) { return load_f32(p, n, F32); }
INLINE vf interleave(vf a, vf b, int half) { return half ? a : b; }
INLINE vf interleave_quarters(vf a, vf b, int half) { return half ? a : b; }
INLINE vf join_quarters(vf a, vf b, int half) { return half ? a : b; }
INLINE vf round_pairs(vf a, vf b) { return a + b; }
#endif

INLINE int quarter_at(int half, int i) { return i / 4 * 8 + half * 4 + i % 4; }

/* Denormals off while our loops run: part of attention's law, and they are slow. */
INLINE unsigned flush_denormals(void) {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040);
    return saved;
#else
    return 0;
#endif
}
INLINE void restore_denormals(unsigned saved) {
#if defined(__x86_64__)
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

/* ---- rows ------------------------------------------------------------------------------------- */

/* Element i of an array; and the vector from there on, as far as `dim` reaches at `d`. */
#define AT(p, i, mode) ((char *)(p) + (i) * ((mode) == F32 ? 4 : 2))
#define LOAD(p, i, mode) load_f32(AT(p, i, mode), min64(dim - d, LANES), mode)
#define STORE(p, i, x, mode) store_n(AT(p, i, mode), x, min64(dim - d, LANES), mode)

/* transformers' LlamaRMSNorm: statistics in fp32, rounded before the weight is applied; or Gemma3RMSNorm,
 * where the weight is in fp32 and only the result is rounded. */
INLINE float scale_of_norm(const void *x, int64_t dim, float eps, int mode) {
    vf squares = {0};
    for (int64_t d = 0; d < dim; d += LANES)
        squares = fused(LOAD(x, d, mode), LOAD(x, d, mode), squares);
    return 1.0f / sqrtf(sum_lanes(squares) / dim + eps);
}
INLINE void norm(const void *x, const void *weight, void *out, int64_t dim, float eps, int mode,
                 int weight_mode) {
    const float scale = scale_of_norm(x, dim, eps, mode);
    for (int64_t d = 0; d < dim; d += LANES)
        STORE(out, d, rounded(LOAD(x, d, mode) * scale, weight_mode) * LOAD(weight, d, weight_mode), mode);
}

/* x / (1 + e^-u); exp of -|u| cannot overflow. */
INLINE vf times_sigmoid(vf x, vf u) {
    const vf e = exp2v(pick(u > 0.0f, -u, u) * LOG2E);
    return x * pick(u > 0.0f, splat(1.0f), e) / (e + 1.0f);
}
INLINE vf silu(vf x) { return times_sigmoid(x, x); }

/* GELU by its formula with tanh (arXiv 1606.08415): x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). */
INLINE vf gelu(vf x) {
    const vf cube = 0.044715f * x * x;
    return times_sigmoid(x, 1.5957691216057308f * fused(cube, x, x));
}

/* gate * sigmoid(ALPHA gate) * (up + 1), clamped to LIMIT: that of gpt-oss. */
INLINE vf clamped_swiglu_of(vf gate, vf up) {
    const vf alpha = splat(1.702f), limit = splat(7.0f), low = pick(up < -limit, -limit, up);
    const vf x = pick(gate > limit, limit, gate), y = pick(low > limit, limit, low);
    return silu(alpha * x) / alpha * (y + 1.0f);
}

/* activation(gate) * up; the first is rounded first, as torch does in two steps, but in SWIGLU. */
enum { SILU = 1, GELU, SWIGLU, RELU2 }; /* RELU2 has no gate */
INLINE vf gated(vf gate, vf up, const int activation, int mode) {
    if (activation == SWIGLU) return clamped_swiglu_of(gate, up);
    return rounded(activation == GELU ? gelu(gate) : silu(gate), mode) * up;
}

/* relu(x) * x. */
INLINE vf relu2(vf x) { return pick(x < splat(0.0f), splat(0.0f), x * x); }

/* A product that no compiler fuses with the sum after it. */
#if defined(__x86_64__)
#define KEEP_APART(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define KEEP_APART(x) __asm__("" : "+w"(x))
#else
#define KEEP_APART(x) __asm__("" : "+m"(x))
#endif
#endif
