/* Packs weights in bfloat16 as cpu_bf12.h describes them. */
#ifndef NANOENGINE_CPU_BF12_PACKING_H
#define NANOENGINE_CPU_BF12_PACKING_H
#include "cpu_lookup.h"

enum { RUN = 16 }; /* outputs of a run */
enum { LINE = 64, UPPER_BYTES = 16, OTHER = UPPER_BYTES - 1 };
enum { BLOCK_WORDS = 8, BLOCK_K = 2 * BLOCK_WORDS, TILED_BLOCK_K = 2 * BLOCK_K };
enum { BLOCK_VECTORS = 2 * BLOCK_WORDS, NUMBERS_BYTES = 2 * LINE * BLOCK_VECTORS }; /* of 64 weights; of a block */
enum { WORD_LINES = 3, LEAST_LINES = WORD_LINES * BLOCK_WORDS };

typedef struct { /* rows to pack, of one weight or of gate and up, filled by packed_weight.py; strides in bytes */
    const char *rows[2];
    int64_t strides[2], parts, outputs, k, is_tiled, threads;
} source_t;

typedef struct { /* the memory of a packed weight */
    uint32_t *starts;
    uint8_t *tables; /* [block][UPPER_BYTES] */
    char *lines;
} bf12_t;

INLINE int64_t starts_bytes(int64_t blocks) { return ceil_div(4 * (blocks + 1), LINE) * LINE; }
INLINE int64_t tables_bytes(int64_t blocks) { return ceil_div(UPPER_BYTES * blocks, LINE) * LINE; }

INLINE bf12_t bf12_at(const char *p, int64_t blocks) {
    char *tables = (char *)p + starts_bytes(blocks);
    return (bf12_t){(uint32_t *)p, (uint8_t *)tables, tables + tables_bytes(blocks)};
}

#if (LANES == 16 && defined(__AVX512VBMI2__)) || LANES == 8
#define HAVE_BF12 1
#else
#define HAVE_BF12 0
#endif
int has_bf12(void) { return HAVE_BF12; }

#if HAVE_BF12
/* equal_bytes: a bit for each byte of a line that is `byte`. */
#if LANES == 16
typedef __m512i line_t;
INLINE uint64_t equal_bytes(line_t line, uint8_t byte) {
    return _mm512_cmpeq_epi8_mask(line, _mm512_set1_epi8((char)byte));
}
#else
typedef struct { __m256i half[2]; } line_t;
INLINE uint64_t equal_bytes(line_t line, uint8_t byte) {
    const __m256i all = _mm256_set1_epi8((char)byte);
    const uint32_t first = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(line.half[0], all));
    return first | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(line.half[1], all)) << 32;
}
#endif

/* Of a block: [word of k][half panel], or for tiles [word of k]. Bytes are in the order that
 * _mm512_unpacklo_epi8 and _mm512_unpackhi_epi8 want, or those of 256 bits twice. */
typedef struct { line_t lower[BLOCK_VECTORS], upper[BLOCK_VECTORS]; } block_bytes_t;

INLINE int64_t count_blocks(const source_t *s) {
    return ceil_div(ceil_div(s->outputs, RUN) * s->parts, PANEL / RUN) * (s->k / BLOCK_K);
}

#if LANES == 16
/* 16 words of k, from input k on, of 16 outputs, which are run `run` of all panels. Outputs that there are not
 * have zeros. */
INLINE void take_run(const source_t *s, int64_t run, int64_t k, line_t *words) {
    const int64_t part = run % s->parts, first = run / s->parts * RUN;
    const char *rows = s->rows[part] + first * s->strides[part] + 2 * k;
    turn(rows, s->strides[part], max64(0, min64(RUN, s->outputs - first)), (char *)words, LINE);
}

/* 64 weights of a block: a word of k of 16 outputs, and of 16 others. */
INLINE void split_words(block_bytes_t *bytes, int i, __m512i a, __m512i b) {
    const __m512i lower = _mm512_set1_epi16(255);
    bytes->lower[i] = _mm512_packus_epi16(_mm512_and_si512(a, lower), _mm512_and_si512(b, lower));
    bytes->upper[i] = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
}

INLINE block_bytes_t split_block(const source_t *s, int64_t block) {
    enum { RUNS = PANEL / RUN };
    const int64_t steps = s->k / BLOCK_K, run = block / steps * RUNS, k = block % steps * BLOCK_K;
    const int64_t first = k / (2 * RUN) * 2 * RUN, skipped = (k - first) / 2;
    line_t words[RUNS][RUN];
    block_bytes_t bytes;
    for (int v = 0; v < RUNS; v++) take_run(s, run + v, first, words[v]);
    UNROLL for (int i = 0; i < BLOCK_VECTORS; i++) {
        const int64_t word = skipped + i / 2, v = i % 2 * 2;
        split_words(&bytes, i, words[v][word], words[v + 1][word]);
    }
    return bytes;
}
INLINE block_bytes_t split_tiled_block(const source_t *s, int64_t block) {
    const int64_t steps = s->k / TILED_BLOCK_K, run = block / steps * 2, k = block % steps * TILED_BLOCK_K;
    line_t words[2][RUN];
    block_bytes_t bytes;
    for (int v = 0; v < 2; v++) take_run(s, run + v, k, words[v]);
    UNROLL for (int i = 0; i < BLOCK_VECTORS; i++) split_words(&bytes, i, words[0][i], words[1][i]);
    return bytes;
}
INLINE block_bytes_t block_bytes_of(const source_t *s, int64_t block) {
    return s->is_tiled ? split_tiled_block(s, block) : split_block(s, block);
}
#else
/* out[j][i] = x[i][j], 8 x 8 words of 32 bits. Of x only `rows` rows are read. */
INLINE void turn_8(const char *x, int64_t x_stride, int64_t rows, __m256 *out) {
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = i < rows ? _mm256_loadu_ps((const float *)(x + i * x_stride)) : _mm256_setzero_ps();
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int n = 0; n < 2; n++) {
        const __m256d first = (__m256d)b[i + n], second = (__m256d)b[i + n + 2];
        a[i + 2 * n] = (__m256)_mm256_unpacklo_pd(first, second);
        a[i + 2 * n + 1] = (__m256)_mm256_unpackhi_pd(first, second);
    }
    UNROLL for (int n = 0; n < 4; n++) {
        out[n] = _mm256_permute2f128_ps(a[n], a[n + 4], 0x20);
        out[n + 4] = _mm256_permute2f128_ps(a[n], a[n + 4], 0x31);
    }
}

/* The words of k of a block, of 8 outputs, which are half of a run of all panels. Outputs that there are not have
 * zeros. */
INLINE void take_words(const source_t *s, int64_t half_run, int64_t k, __m256 *words) {
    const int64_t run = half_run / 2, part = run % s->parts, first = run / s->parts * RUN + half_run % 2 * LANES;
    const char *rows = s->rows[part] + first * s->strides[part] + 2 * k;
    turn_8(rows, s->strides[part], max64(0, min64(LANES, s->outputs - first)), words);
}

INLINE block_bytes_t block_bytes_of(const source_t *s, int64_t block) {
    enum { HALF_RUNS = PANEL / LANES };
    const int64_t steps = s->k / BLOCK_K, half_run = block / steps * HALF_RUNS, k = block % steps * BLOCK_K;
    const __m256i lower = _mm256_set1_epi16(255);
    __m256 words[HALF_RUNS][BLOCK_WORDS];
    block_bytes_t bytes;
    for (int v = 0; v < HALF_RUNS; v++) take_words(s, half_run + v, k, words[v]);
    for (int i = 0; i < BLOCK_VECTORS; i++)
        UNROLL for (int h = 0; h < 2; h++) { /* a word of k of 8 outputs, and of 8 others, a run apart */
            const __m256i a = (__m256i)words[i % 2 * 4 + h][i / 2], b = (__m256i)words[i % 2 * 4 + 2 + h][i / 2];
            bytes.lower[i].half[h] = _mm256_packus_epi16(_mm256_and_si256(a, lower), _mm256_and_si256(b, lower));
            bytes.upper[i].half[h] = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        }
    return bytes;
}
#endif

/* The upper bytes of a block, in `bytes`, and how often each is there. Returns how many they are. */
INLINE int64_t count_bytes(const block_bytes_t *block, uint8_t *bytes, int64_t *counts) {
    uint64_t left[BLOCK_VECTORS];
    int64_t found = 0;
    memset(left, 255, sizeof left);
    for (int i = 0; i < BLOCK_VECTORS; i++)
        for (; left[i]; found++) {
            bytes[found] = ((const uint8_t *)&block->upper[i])[__builtin_ctzll(left[i])], counts[found] = 0;
            for (int j = i; j < BLOCK_VECTORS; j++) {
                const uint64_t equal = left[j] & equal_bytes(block->upper[j], bytes[found]);
                left[j] ^= equal, counts[found] += __builtin_popcountll(equal);
            }
        }
    return found;
}

/* The table of a block. Returns how many weights are others. */
INLINE int64_t find_table(const block_bytes_t *block, uint8_t *table) {
    int64_t counts[256], others = 0;
    uint8_t bytes[256];
    const int64_t found = count_bytes(block, bytes, counts), held = found > UPPER_BYTES ? OTHER : found;
    for (int64_t n = 0; n < held; n++) { /* the most frequent ones first */
        int64_t most = n;
        for (int64_t i = n + 1; i < found; i++)
            if (counts[i] > counts[most]) most = i;
        table[n] = bytes[most], bytes[most] = bytes[n], counts[most] = counts[n];
    }
    memset(table + held, 0, (size_t)(UPPER_BYTES - held));
    for (int64_t n = held; n < found; n++) others += counts[n];
    return others;
}

/* Write a block, of whose weights so many are others. */
#if LANES == 16
INLINE void put_block(const block_bytes_t *block, const uint8_t *table, int64_t others, char *to) {
    char last[LINE * (BLOCK_VECTORS + 1)];
    int64_t n = 0;
    memset(last, 0, sizeof last);
    for (int i = 0; i < BLOCK_VECTORS; i += 2, to += WORD_LINES * LINE) {
        __m512i codes[2];
        UNROLL for (int h = 0; h < 2; h++) {
            const __m512i upper = block->upper[i + h];
            codes[h] = _mm512_set1_epi8(OTHER);
            for (int c = UPPER_BYTES - 1 - (others > 0); c >= 0; c--) {
                const __mmask64 has_it = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)table[c]));
                codes[h] = _mm512_mask_mov_epi8(codes[h], has_it, _mm512_set1_epi8((char)c));
            }
            const __mmask64 is_other = _mm512_cmpeq_epi8_mask(codes[h], _mm512_set1_epi8(OTHER));
            _mm512_storeu_si512(last + n, _mm512_maskz_compress_epi8(is_other, upper));
            n += others ? __builtin_popcountll(is_other) : 0;
            _mm512_storeu_si512(to + (1 + h) * LINE, block->lower[i + h]);
        }
        _mm512_storeu_si512(to, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
    }
    memcpy(to, last, (size_t)(ceil_div(others, LINE) * LINE));
}
#else
INLINE void put_block(const block_bytes_t *block, const uint8_t *table, int64_t others, char *to) {
    char *last = to + LEAST_LINES * LINE;
    memset(last, 0, (size_t)(ceil_div(others, LINE) * LINE));
    for (int i = 0; i < BLOCK_VECTORS; i += 2, to += WORD_LINES * LINE) {
        __m256i codes[4];
        UNROLL for (int v = 0; v < 4; v++) codes[v] = _mm256_set1_epi8(OTHER);
        for (int c = UPPER_BYTES - 1 - (others > 0); c >= 0; c--)
            UNROLL for (int v = 0; v < 4; v++) {
                const __m256i upper = block->upper[i + v / 2].half[v % 2];
                const __m256i has_it = _mm256_cmpeq_epi8(upper, _mm256_set1_epi8((char)table[c]));
                codes[v] = _mm256_blendv_epi8(codes[v], _mm256_set1_epi8((char)c), has_it);
            }
        for (int v = 0; v < 4 && others; v++) {
            uint32_t left = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes[v], _mm256_set1_epi8(OTHER)));
            const char *upper = (const char *)&block->upper[i + v / 2].half[v % 2];
            for (; left; left &= left - 1) *last++ = upper[__builtin_ctz(left)];
        }
        UNROLL for (int h = 0; h < 2; h++)
            _mm256_storeu_si256((__m256i *)to + h, _mm256_or_si256(codes[h], _mm256_slli_epi16(codes[2 + h], 4)));
        memcpy(to + LINE, &block->lower[i], 2 * LINE);
    }
}
#endif

/* Where each block would begin, and the last one end: `starts` has room for one more than there are. Returns the
 * bytes of all, with a line to read beyond. */
int64_t measure_bf12(const source_t *s, uint32_t *starts) {
    const int64_t blocks = count_blocks(s);
#pragma omp parallel for num_threads((int)s->threads) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
        uint8_t table[UPPER_BYTES];
        const block_bytes_t bytes = block_bytes_of(s, i);
        starts[i + 1] = (uint32_t)(LEAST_LINES + ceil_div(find_table(&bytes, table), LINE));
    }
    starts[0] = 0;
    for (int64_t i = 0; i < blocks; i++) starts[i + 1] += starts[i];
    return starts_bytes(blocks) + tables_bytes(blocks) + (starts[blocks] + 1) * (int64_t)LINE;
}

/* Pack at `to`, as measured. */
void pack_bf12(const source_t *s, const uint32_t *starts, char *to) {
    const int64_t blocks = count_blocks(s);
    const bf12_t weight = bf12_at(to, blocks);
    memcpy(weight.starts, starts, (size_t)(blocks + 1) * sizeof *starts);
#pragma omp parallel for num_threads((int)s->threads) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
        uint8_t *table = weight.tables + i * UPPER_BYTES;
        const block_bytes_t bytes = block_bytes_of(s, i);
        const int64_t others = find_table(&bytes, table);
        put_block(&bytes, table, others, weight.lines + (int64_t)starts[i] * LINE);
    }
}
#endif
#endif
