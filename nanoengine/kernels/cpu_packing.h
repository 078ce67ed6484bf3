/* Packs weights, and reads single rows of them; included by cpu_linear.c. */
#include <sys/mman.h>

/* A hint, before the pages are touched; where it is not understood, small pages do. */
void advise_huge_pages(void *p, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(p, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)p, (void)bytes;
#endif
}

/* Where output n of part `which` (gate 0, up 1) of a packed weight lies: its column, all panels laid
 * end to end. Gate and up take turns. */
INLINE int64_t column_of(int64_t n, int64_t is_gated, int64_t which) {
    return is_gated ? n / TURN * 2 * TURN + which * TURN + n % TURN : n;
}

/* Where word i of k of a column of numbers lies, in words. */
INLINE int64_t word_at(const weight_t *w, int64_t column, int64_t i) {
    const int64_t words = words_of(w);
    if (!w->is_tiled) return (column / PANEL * words + i) * PANEL + column % PANEL;
    const int64_t step = column / HALF * (words / TILE_PAIRS) + i / TILE_PAIRS;
    const int64_t tile = 2 * step + column % HALF / TURN;
    return (tile * TILE_PAIRS + i % TILE_PAIRS) * TURN + column % TURN;
}

/* Bytes of word i of a row; the last one of an odd row of bfloat16 has half of them. */
INLINE size_t bytes_at(const weight_t *w, int64_t i) {
    return (size_t)min64(4, w->k * ITEM - 4 * i);
}

static void pack_numbers(const weight_t *w, const char *rows, int64_t stride, int64_t which, int64_t n0) {
    const int64_t words = words_of(w);
    for (int64_t i0 = 0; i0 < words; i0 += STRIP)
        for (int64_t n = n0; n < min64(n0 + TURN, w->outputs); n++) {
            const int64_t column = column_of(n, w->activation, which);
            for (int64_t i = i0; i < min64(i0 + STRIP, words); i++)
                memcpy((char *)w->panels + 4 * word_at(w, column, i), rows + n * stride + 4 * i,
                       bytes_at(w, i));
        }
}

/* Pack the rows of a weight [outputs, k], `stride` bytes apart, as part `which`. Where no row comes, the panels
 * hold zeros before. Rows are numbers, or codes as the file has them. */
void pack(const weight_t *w, const char *rows, int64_t stride, int64_t which, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t n0 = 0; n0 < w->outputs; n0 += TURN) {
        if (w->format == DENSE) {
            pack_numbers(w, rows, stride, which, n0);
            continue;
        }
        for (int64_t n = n0; n < min64(n0 + TURN, w->outputs); n++) {
            const int64_t column = column_of(n, w->activation, which);
            const int64_t blocks = w->k / FORMAT[w->format].weights;
            const int format = (int)w->format, is_left = looks_up(w), is_sum = sums_codes(w);
            const int64_t first = is_left || is_sum ? first_scale(format) : 0;
            const int64_t last = is_left || is_sum ? last_scale(format) : FORMAT[format].words;
            char *panel = (char *)panel_of(w, column);
            pack_column(rows + n * stride, blocks, panel, column % PANEL, first, last, format);
            if (is_sum) pack_summed(rows + n * stride, blocks, panel, column % PANEL, format);
            if (is_left) LEFT_PACKERS[layout_of(format)](rows + n * stride, blocks, panel, column);
        }
    }
}

/* Whether `count` numbers of float32 are all bfloat16's, bit by bit; then `out` has them. */
int narrow_numbers(const uint32_t *numbers, uint16_t *out, int64_t count, int64_t threads) {
    uint32_t lost = 0;
#pragma omp parallel for simd num_threads((int)threads) schedule(static) reduction(| : lost)
    for (int64_t i = 0; i < count; i++) {
        lost |= numbers[i] << 16;
        out[i] = (uint16_t)(numbers[i] >> 16);
    }
    return !lost;
}

/* One row of a weight. What is not numbers becomes numbers half a panel at a time, of which one row is wanted. */
static void gather_row(const weight_t *w, int64_t id, char *to) {
    if (w->format == DENSE) {
        for (int64_t i = 0; i < words_of(w); i++)
            memcpy(to + 4 * i, w->panels + 4 * word_at(w, id, i), bytes_at(w, i));
        return;
    }
    if (sums_codes(w)) {
        for (int64_t group = 0; group < w->k / GROUP; group++, to += 2 * GROUP)
            summed_weights(panel_of(w, id), group, id % PANEL, (uint16_t *)to, (int)w->format);
        return;
    }
    char numbers[GROUP * 4 * HALF] __attribute__((aligned(64)));
    const int64_t n = id % HALF;
    for (int64_t group = 0; group < w->k / GROUP; group++, to += 4 * GROUP_WORDS) {
        if (w->is_tiled) unpack_half(w, id / HALF, group, group + 1, numbers);
        else unpack(w, id - n, HALF, group, group + 1, (unpacked_t){numbers, 4 * HALF, 4 * TURN, 0});
        if (looks_up(w)) {
            memcpy(to, numbers + n * 2 * GROUP, 2 * GROUP);
            continue;
        }
        const int64_t first = w->is_tiled ? n / TURN * STEP_BYTES / 2 + n % TURN * 4 : 4 * n;
        const int64_t stride = w->is_tiled ? TILE_BYTES : 4 * HALF;
        for (int64_t i = 0; i < GROUP_WORDS; i++) memcpy(to + 4 * i, numbers + first + i * stride, 4);
    }
}

/* out[i] = row ids[i] of a weight that is not gated. Returns 0, or -1 at an id that is no row. */
int gather_rows(const weight_t *w, const int64_t *ids, int64_t count, char *out, int64_t threads) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= w->outputs) return -1;
    if (count * w->k < 1 << 14) threads = 1;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < count; i++) gather_row(w, ids[i], out + i * w->k * ITEM);
    return 0;
}
