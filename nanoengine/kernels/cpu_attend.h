/* attend: shares the work of one call out among threads. */
#include <omp.h>
#include <stdlib.h>

#include "cpu_bundles.h"

typedef struct { /* the work of one call */
    int64_t *next_segment;  /* [entries]: of a decode entry, the first that is not merged; -1: none is left */
    segment_t *segments;    /* all first ones, all second ones ...: a prefix that entries share is in
                               L2 from the second of them on */
    item_t *items;
    int64_t *last_segment; /* [entries] */
    int64_t num_segments, num_items, max_rows, rows_per_item, largest_bundle, threads;
} plan_t;

/* Where segment i of the plan lies. */
static span_t span_at(const attend_args *a, const plan_t *p, int64_t i) {
    const entry_t e = entry_at(a, p->segments[i].entry);
    return span_of(a, &e, p->segments[i].index);
}

/* Segments among the first `keys` keys of an entry: all, or those that are whole. */
static int64_t segments_of(const attend_args *a, int64_t keys, int whole) {
    const int64_t per_block = ceil_div(a->block_size, SEG), rest = keys % a->block_size;
    return keys / a->block_size * per_block + (whole ? rest / SEG : ceil_div(rest, SEG));
}

/* The first one that a query sees, and how many there are from it on. */
static int64_t first_segment(const attend_args *a, const entry_t *e) {
    return segments_of(a, e->seen_begin - e->key_begin, 1);
}
static int64_t count_segments(const attend_args *a, const entry_t *e) {
    if (e->q_len == 0 || e->seen_begin == e->key_end) return 0;
    return segments_of(a, e->key_end - e->key_begin, 0) - first_segment(a, e);
}

static int by_cost(const void *x, const void *y) { /* dearest first */
    const int64_t a = ((const item_t *)x)->cost, b = ((const item_t *)y)->cost;
    return a < b ? 1 : a > b ? -1 : 0;
}

/* How much there is of each, so that the plan is one allocation. */
static void count_work(const attend_args *a, plan_t *p) {
    const int64_t group = a->heads / a->kv_heads;
    int64_t rows = 0, entries = 0, products = 0;
    for (int64_t i = 0; i < a->entries; i++) {
        const entry_t e = entry_at(a, i);
        products += e.q_len * a->heads * (e.key_end - e.seen_begin) * a->head_dim;
        if (is_split(a, &e)) {
            p->num_segments += count_segments(a, &e);
            if (e.q_len * a->heads > p->max_rows) p->max_rows = e.q_len * a->heads;
        } else {
            entries++, rows += e.q_len * group;
        }
    }
    p->threads = products < 1 << 16 ? 1 : a->threads; /* some 3 us: not worth waking anybody */
    /* Smaller tiles when there are few: rows are independent, so this moves no bit. */
    const int64_t width = vecs_of(mode_of(a)) * LANES;
    const int64_t share = rows * a->kv_heads / (4 * p->threads) / width * width;
    p->rows_per_item = max64(width, min64(share, ROWS_PER_ITEM));
    p->num_items = (rows / p->rows_per_item + entries) * a->kv_heads;
}

/* Segments of an entry stay in order, and `last` remembers the latest of each. */
static void fill_segments(const attend_args *a, plan_t *p) {
    int64_t *last = p->last_segment, n = 0;
    for (int64_t i = 0; i < a->entries; i++) p->next_segment[i] = last[i] = -1;
    for (int64_t index = 0; n < p->num_segments; index++)
        for (int64_t i = 0; i < a->entries; i++) {
            const entry_t e = entry_at(a, i);
            if (!is_split(a, &e) || index >= count_segments(a, &e)) continue;
            *(last[i] < 0 ? &p->next_segment[i] : &p->segments[last[i]].next) = n;
            p->segments[last[i] = n++] = (segment_t){i, first_segment(a, &e) + index, -1, 1};
        }
}

/* The most segments of a bundle. */
static int64_t most_bundled(const attend_args *a, const plan_t *p) {
    const int64_t rows = p->max_rows / a->kv_heads;
    if (p->num_segments == 0) return 0;
    return max64(1, min64((mode_of(a) == BF16_TILES ? BUNDLE_ROWS : VECTOR_ROWS) / rows, a->entries));
}

/* Whether two segments lie in one place. Most do not, and their blocks tell. */
static int lie_together(const attend_args *a, const plan_t *p, int64_t i, int64_t j) {
    const int64_t index = p->segments[i].index, per_block = ceil_div(a->block_size, SEG);
    if (index != p->segments[j].index) return 0;
    const int64_t block = per_block == 1 ? index : index / per_block; /* a division takes 40 cycles */
    const int32_t *x = a->block_table + p->segments[i].entry * a->table_stride;
    const int32_t *y = a->block_table + p->segments[j].entry * a->table_stride;
    if (x[block] != y[block]) return 0;
    const span_t one = span_at(a, p, i), other = span_at(a, p, j);
    return one.pos == other.pos && one.count == other.count;
}

/* Segments that follow each other and lie in one place, of one window of the plan, at most `most` in a bundle.
 * Returns how many bundles there are. */
static int64_t fill_bundles(const attend_args *a, plan_t *p, int64_t window, int64_t most) {
    int64_t count = 0, head = 0;
    p->largest_bundle = 1;
    for (int64_t i = 0; i < p->num_segments; i++) {
        if (i % window && p->segments[head].bundle < most && lie_together(a, p, head, i)) {
            p->segments[head].bundle++, p->segments[i].bundle = 0;
            p->largest_bundle = max64(p->largest_bundle, p->segments[head].bundle);
        } else {
            head = i, count++, p->segments[i].bundle = 1;
        }
    }
    return count;
}

/* In how many pieces of some kv heads a bundle is attended. Few segments: of one head, to feed every thread.
 * Else of all heads, or of as many as fit an item, to read memory in order; but bundles in vectors take so long
 * that a last one would keep all threads waiting. */
static int64_t pieces_of(const attend_args *a, const plan_t *p, int64_t bundles) {
    const int is_tiled = mode_of(a) == BF16_TILES, is_alone = p->largest_bundle == 1;
    const int64_t rows = p->largest_bundle * p->max_rows / a->kv_heads; /* of a head, padded below */
    if (bundles == 0) return 1;
    if (bundles < 4 * p->threads && (is_tiled || is_alone)) return a->kv_heads;
    if (is_tiled) return ceil_div(a->kv_heads, ROWS_PER_ITEM / (ceil_div(rows, LANES) * LANES));
    return is_alone ? 1 : min64(a->kv_heads, ceil_div(8 * p->threads, bundles));
}

/* Whether two bundles are of the same entries. */
static int are_of_same(const segment_t *x, const segment_t *y) {
    int is_same = x->bundle == y->bundle;
    for (int64_t s = 0; s < x->bundle && is_same; s++) is_same = x[s].entry == y[s].entry;
    return is_same;
}

static void fill_plan(const attend_args *a, plan_t *p) {
    const int64_t group = a->heads / a->kv_heads;
    item_t *it = p->items;
    fill_segments(a, p);
    for (int64_t i = 0; i < a->entries; i++) {
        const entry_t e = entry_at(a, i);
        if (is_split(a, &e)) continue;
        for (int64_t r = 0; r < e.q_len * group; r += p->rows_per_item)
            for (int64_t h = 0; h < a->kv_heads; h++) {
                const int64_t rows = min64(p->rows_per_item, e.q_len * group - r);
                const int64_t seen = e.first_pos + (r + rows - 1) / group + 1;
                const int64_t begin = e.first_pos + r / group + 1 - a->window;
                const int64_t keys = min64(e.key_end, seen) - max64(e.key_begin, begin);
                if (keys > 0) *it++ = (item_t){i, h, r, rows, rows * keys};
            }
    }
    p->num_items = it - p->items;
    qsort(p->items, p->num_items, sizeof *p->items, by_cost);
}

/* Merge `rows` rows of entry i, from `row` on, with their partials of the segments [begin, end). */
static void merge_rows(const attend_args *a, const plan_t *p, int64_t i, int64_t row, int64_t rows,
                       int64_t begin, int64_t end, const float *partials) {
    const int64_t dim = a->head_dim, stride = partial_stride(dim);
    const entry_t e = entry_at(a, i);
    const int64_t at = e.query_start * a->heads + row, n = min64(rows, e.q_len * a->heads - row);
    if (n <= 0) return;
    for (int64_t s = p->next_segment[i]; s >= 0 && s < end; s = p->segments[s].next) {
        const float *partial = partials + ((s - begin) * p->max_rows + row) * stride;
        merge_partials(a->row_max + at, a->row_sum + at, a->acc + at * dim, partial, n, dim);
        if (!a->mass) continue;
        const int64_t index = p->segments[s].index, per_block = ceil_div(a->block_size, SEG);
        const int64_t block = per_block == 1 ? index : index / per_block; /* a division takes 40 cycles */
        const float *tail = partial + stride - 16;
        for (int64_t r = 0; r < n; r++, tail += stride)
            keep_state(a, at + r, a->first_block[i] + block, index == block * per_block, tail[0], tail[1]);
    }
}

/* Fold this call's keys into (row_max, row_sum, acc). Returns 0, or -1 when out of memory. */
int attend(const attend_args *a) {
    plan_t p = {0};
    count_work(a, &p);
    const int64_t segment_floats = p.max_rows * partial_stride(a->head_dim);
    int64_t window = segment_floats ? p.threads * WINDOW_BYTES / (4 * segment_floats) : 0;
    window = min64(p.num_segments, window > p.threads ? window : p.threads);
    const int64_t most = most_bundled(a, &p);
    const int tiled_decode = p.num_segments && mode_of(a) == BF16_TILES;
    int64_t scratch = tiled_decode ? 0 : decode_words(most * p.max_rows, a->head_dim);
    if (p.num_items || tiled_decode) scratch = max64(scratch, workspace_words(a->head_dim));
    scratch = up_to_line(4 * scratch) / 4;
    const size_t tables = up_to_line(2 * a->entries * sizeof(int64_t) +
                                     p.num_segments * sizeof(segment_t) + p.num_items * sizeof(item_t));
    const size_t floats = window * segment_floats + p.threads * scratch;
    char *memory = aligned_alloc(64, tables + up_to_line(4 * floats));
    if (!memory) return -1;
    p.segments = (segment_t *)memory;
    p.items = (item_t *)(p.segments + p.num_segments);
    p.next_segment = (int64_t *)(p.items + p.num_items);
    p.last_segment = p.next_segment + a->entries;
    float *partials = (float *)(memory + tables), *scratches = partials + window * segment_floats;
    fill_plan(a, &p);
    const int64_t work = p.num_segments ? fill_bundles(a, &p, window, most) : 0;
    const int64_t split = pieces_of(a, &p, work);
    const int64_t heads = ceil_div(a->kv_heads, split);
    /* Rows merged at once: their states are one vector. */
    const int64_t at_once = max64(1, min64(LANES, ceil_div(a->entries * p.max_rows, p.threads)));
    const int64_t merges = ceil_div(p.max_rows, at_once);
    /* Runs of segments, so that one can prefetch the next; short enough to share them out evenly. */
    const int64_t run = window * split / (4 * p.threads), chunk = run < 1 ? 1 : min64(run, 8);
#pragma omp parallel num_threads((int)p.threads)
    {
        const unsigned saved = flush_denormals();
        float *mine = scratches + omp_get_thread_num() * scratch;
        const segment_t *packed = NULL; /* whose queries lie there, of which share of the heads */
        int64_t packed_share = 0;
        const int tiled = tiled_decode || (p.num_items && mode_of(a) == BF16_TILES);
        if (tiled) shape_tiles(TILE_ROWS, TILE_ROWS);
        if (a->is_first) { /* read past a barrier: that of the segments, or this one */
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < a->tokens * a->heads; row++) start_row(a, row);
            if (p.num_segments == 0) {
#pragma omp barrier
            }
        }
        for (int64_t begin = 0; begin < p.num_segments; begin += window) {
            const int64_t end = min64(begin + window, p.num_segments);
            int64_t next = -1; /* what was prefetched */
#pragma omp for schedule(dynamic, chunk)
            for (int64_t i = begin * split; i < end * split; i++) {
                const int64_t seg = i / split, h0 = i % split * heads;
                const int64_t h1 = min64(h0 + heads, a->kv_heads), bundle = p.segments[seg].bundle;
                if (bundle == 0 || h0 >= h1) continue;
                const span_t after = span_at(a, &p, min64(seg + bundle, p.num_segments - 1));
                const int is_packed = packed && packed_share == i % split && are_of_same(packed, p.segments + seg);
                float *to = partials + (seg - begin) * segment_floats;
                if (tiled_decode)
                    decode_bundle(a, p.segments + seg, &after, next != i, h0, h1, to, segment_floats,
                                  mine);
                else
                    decode_segments(a, p.segments + seg, &after, next != i, is_packed, h0, h1, to,
                                    segment_floats, (char *)mine);
                next = i + bundle * split, packed = p.segments + seg, packed_share = i % split;
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < a->entries * merges; i++)
                merge_rows(a, &p, i / merges, i % merges * at_once, at_once, begin, end, partials);
            if (end == p.num_segments) break;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < a->entries; i++)
                while (p.next_segment[i] >= 0 && p.next_segment[i] < end)
                    p.next_segment[i] = p.segments[p.next_segment[i]].next;
        }
        if (p.num_items) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < p.num_items; i++) prefill_item(a, &p.items[i], mine);
        }
        if (a->mass && a->out) {
            const int64_t places = ceil_div(a->blocks, LANES);
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < a->sequences * places; i++)
                add_mass(a, i / places, i % places * LANES);
        }
        if (tiled) release_tiles();
        restore_denormals(saved);
        if (a->out) {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < a->tokens * a->heads; row++)
                if (a->is_bf16) finish_row(a->row_sum, a->acc, a->out, row, a->head_dim, BF16_WIDE);
                else finish_row(a->row_sum, a->acc, a->out, row, a->head_dim, F32);
        }
    }
    free(memory);
    return 0;
}
