/* bfloat16 in 12 bits, as cpu_bf12.h describes it, with vectors of 256 bits and activations in float32. */
#ifndef NANOENGINE_CPU_BF12_AVX2_H
#define NANOENGINE_CPU_BF12_AVX2_H

typedef struct { /* of a block: what is next to read, its table, its next others */
    const char *from;
    __m256i table;
    const uint8_t *others;
} place_t;

INLINE place_t block_of(bf12_t weight, int64_t block) {
    const char *from = weight.lines + (int64_t)weight.starts[block] * LINE;
    const __m128i *table = (const __m128i *)(weight.tables + block * UPPER_BYTES);
    const uint8_t *others = (const uint8_t *)from + LEAST_LINES * LINE;
    return (place_t){from, _mm256_broadcastsi128_si256(_mm_loadu_si128(table)), others};
}

/* The next others where codes say so; they are few. */
INLINE __m256i put_others(__m256i upper, __m256i code, const uint8_t **others) {
    uint32_t left = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, _mm256_set1_epi8(OTHER)));
    uint8_t bytes[32];
    if (!left) return upper;
    _mm256_storeu_si256((__m256i *)bytes, upper);
    for (; left; left &= left - 1) bytes[__builtin_ctz(left)] = *(*others)++;
    return _mm256_loadu_si256((const __m256i *)bytes);
}

/* Outputs of a word are taken apart by quarters of a panel: half a line of codes, shifted for the upper half panel.
 * Of a quarter's two vectors the second one lies two after the first. */
enum { QUARTERS = 4, QUARTER_VECTORS = 2, ALL_VECTORS = QUARTERS * QUARTER_VECTORS };
INLINE int vector_of(int quarter, int second) { return quarter / 2 * 4 + quarter % 2 + 2 * second; }

/* Quarter `quarter` of the word at place_t's `from`, as pairs. With others the quarters are taken in turn. */
INLINE void take_quarter(place_t *at, int quarter, vf *pairs, const int with_others) {
    const __m256i *line = (const __m256i *)at->from + quarter % 2, four_bits = _mm256_set1_epi8(15);
    const __m256i codes = _mm256_loadu_si256(line), lower = _mm256_loadu_si256(line + 2 * (1 + quarter / 2));
    const __m256i code = _mm256_and_si256(_mm256_srl_epi16(codes, _mm_cvtsi32_si128(quarter / 2 * 4)), four_bits);
    __m256i upper = _mm256_shuffle_epi8(at->table, code);
    if (with_others) upper = put_others(upper, code, &at->others);
    pairs[0] = (vf)_mm256_unpacklo_epi8(lower, upper);
    pairs[1] = (vf)_mm256_unpackhi_epi8(lower, upper);
}

/* Many rows read a panel once, while numbers are made of it: memory is asked for so far ahead. */
enum { LINES_AHEAD = 4096 };
INLINE void bring_lines(const char *from) {
    UNROLL for (int i = 0; i < WORD_LINES; i++) __builtin_prefetch(from + LINES_AHEAD + i * LINE);
}

/* A block as numbers, of the quarters [first, last). */
INLINE void unpack_block(place_t at, unpacked_t to, int first, int last, const int with_others) {
    for (int i = 0; i < BLOCK_WORDS; i++, at.from += WORD_LINES * LINE, to.at += 2 * to.word) {
        if (first == 0) bring_lines(at.from);
        const int from = with_others ? 0 : first, end = with_others ? QUARTERS : last;
        for (int q = from; q < end; q++) {
            vf pairs[QUARTER_VECTORS];
            take_quarter(&at, q, pairs, with_others);
            if (q < first || q >= last) continue; /* its others are left behind */
            UNROLL for (int v = 0; v < QUARTER_VECTORS; v++) {
                const int place = vector_of(q, v) - first * QUARTER_VECTORS; /* two vectors are 16 outputs */
                char *out = to.at + place / 2 * to.vector + place % 2 * 4 * LANES;
                UNROLL for (int n = 0; n < 2; n++) store(out + n * to.word, of_step(pairs[v], n));
            }
        }
    }
}
NOINLINE void unpack_bf12(bf12_t weight, int64_t block, unpacked_t to, int first, int last) {
    if (has_others(weight, block)) unpack_block(block_of(weight, block), to, first, last, 1);
    else unpack_block(block_of(weight, block), to, first, last, 0);
}

/* acc[r] += x[r] . w of the blocks [block, end), which have no others, in the quarters of a panel from `first` on, in
 * the order of `multiply` in cpu_products.h. */
INLINE void multiply_quarters(bf12_t weight, int64_t block, int64_t end, const char *x, int64_t x_stride, float *acc,
                              ahead_t ahead, int first, const int quarters, const int rows) {
    enum { MOST_ROWS = 5 };
    const int vectors = quarters * QUARTER_VECTORS;
    vf s[MOST_ROWS][ALL_VECTORS];
#define SUM(r, v) (acc + (r) * PANEL + vector_of(first + (v) / 2, (v) % 2) * LANES)
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) s[r][v] = load(SUM(r, v));
    for (; block < end; block++) {
        place_t at = block_of(weight, block);
        prefetch_ahead(&ahead, 1);
        for (int i = 0; i < BLOCK_WORDS; i++, x += 8, at.from += WORD_LINES * LINE) {
            vf pairs[ALL_VECTORS];
            UNROLL for (int q = 0; q < quarters; q++) take_quarter(&at, first + q, pairs + 2 * q, 0);
            UNROLL for (int n = 0; n < 2; n++) {
                vf w[ALL_VECTORS];
                UNROLL for (int v = 0; v < vectors; v++) w[v] = of_step(pairs[v], n);
                UNROLL for (int r = 0; r < rows; r++) {
                    const vf a = (vf)splat_i(*(const word_t *)(x + r * x_stride + 4 * n));
                    UNROLL for (int v = 0; v < vectors; v++) s[r][v] = fused(a, w[v], s[r][v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) store(SUM(r, v), s[r][v]);
#undef SUM
}

/* Passes over a panel: 16 registers hold the sums of two rows with half of it, and of more with a quarter. One row in
 * one pass would be slower, for the others ask for memory while they wait for none. */
INLINE int passes_of_12(int64_t rows) { return rows <= 2 ? 2 : QUARTERS; }

/* As multiply_quarters, of a panel; each pass asks for its share of what is next. */
#define MULTIPLY_BF12(rows)                                                                         \
    static void multiply_bf12_##rows(bf12_t weight, int64_t block, int64_t end, const char *x,      \
                                     int64_t x_stride, memory_ahead_t *next, float *acc) {          \
        const int quarters = QUARTERS / passes_of_12(rows);                                         \
        for (int first = 0; first < QUARTERS; first += quarters)                                    \
            multiply_quarters(weight, block, end, x, x_stride, acc, share_of_pass(next, end - block), first, \
                              quarters, rows);                                                      \
    }
MULTIPLY_BF12(1) MULTIPLY_BF12(2) MULTIPLY_BF12(3) MULTIPLY_BF12(4) MULTIPLY_BF12(5)
typedef void multiply_bf12_t(bf12_t, int64_t, int64_t, const char *, int64_t, memory_ahead_t *, float *);
static multiply_bf12_t *const BF12_MULTIPLIERS[] = {multiply_bf12_1, multiply_bf12_2, multiply_bf12_3,
                                                    multiply_bf12_4, multiply_bf12_5};
#endif
