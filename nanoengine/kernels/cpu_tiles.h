/* Matrix tiles (AMX): products of bfloat16 pairs, 16 rows x 32 values of k x 16 columns in one step. Those of bytes
 * are in cpu_byte_tiles.h.
 *
 * Tiles 0 to 3 accumulate, 4 and 5 hold rows of the left side, 6 and 7 pairs of k of the right side:
 * the same [pair][column][2] layout that VDPBF16PS takes. A step adds to an element, in fp32 and with
 * denormals as 0, the sum of two chains over its 32 values of k: those at even k, and those at odd k.
 * So an element's bits depend on its own row and column alone.
 */
#ifndef NANOENGINE_CPU_TILES_H
#define NANOENGINE_CPU_TILES_H
#include "cpu_vectors.h"

/* Each CPU with AMX has the instructions of VBMI. */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && HAVE_PAIRS && defined(__AVX512VBMI__) && defined(__linux__)
#define HAVE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAVE_TILES 0
#endif
#if HAVE_TILES && defined(__AMX_INT8__)
#define HAVE_BYTE_TILES 1
#else
#define HAVE_BYTE_TILES 0
#endif

enum { TILE_ROWS = 16, TILE_COLUMNS = 16, TILE_PAIRS = 16, TILE_BYTES = 64 }; /* bytes of a row: 32 bf16 or 16 floats */
enum { NARROW = 4 };
enum { NEITHER, LEFT, RIGHT }; /* sides of a product */

typedef struct { /* what to prefetch: so many lines for every step; bytes from step to step */
    const char *from;
    int64_t lines, step;
} ahead_t;

INLINE void prefetch_ahead(ahead_t *ahead, const int is_for_l1) {
    for (int64_t i = 0; i < ahead->lines; i++)
        if (is_for_l1) __builtin_prefetch(ahead->from + 64 * i, 0, 3);
        else __builtin_prefetch(ahead->from + 64 * i, 0, 2);
    ahead->from += ahead->step;
}

typedef struct { /* memory that the next `passes` passes are to ask for, each as much as the others */
    const char *from, *end;
    int64_t passes;
} memory_ahead_t;

/* The share of one pass of so many steps. */
INLINE ahead_t share_of_pass(memory_ahead_t *m, int64_t steps) {
    const int64_t lines = m->from < m->end ? ceil_div(m->end - m->from, 64 * steps * m->passes) : 0;
    const ahead_t share = {.from = m->from, .lines = lines, .step = 64 * lines};
    m->from += steps * share.step, m->passes--;
    return share;
}

typedef struct { /* one side of a product; in bytes: from row (or pair) to row, from step to step of k */
    const char *at;
    int64_t stride, step;
} side_t;

typedef struct { /* [32 rows][k] by [k][32 columns], of which the second 16 lie `next` bytes further */
    side_t left, right;
    int64_t next, steps; /* of 32 values of k */
    int64_t out_stride;  /* bytes from row to row of the result */
} product_t;

typedef struct { /* as LDTILECFG takes it */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes_t;

#if !HAVE_TILES /* nothing calls what is made of these */
#define TILE_LOAD(tile, at, stride) ((void)(at), (void)(stride))
#define TILE_PASS(tile, at, stride) TILE_LOAD(tile, at, stride)
#define TILE_STORE(tile, at, stride) TILE_LOAD(tile, at, stride)
#define TILE_ZERO(tile) ((void)0)
#define TILE_DOT(acc, rows, columns) ((void)0)
#define TILE_DOT_BYTES(acc, rows, columns) ((void)0)
#define TILE_SHAPE(shapes) ((void)(shapes))
#define TILE_RELEASE() ((void)0)
#elif !defined(TILE_LOAD) /* tests/sanitize/emulate.h has them in C: a sanitizer sees nothing of assembly */
/* With clobbers, which not every compiler's intrinsics have. */
#define TILE_OP(op, at, stride)                                                                     \
    __asm__ volatile(op : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_LOAD(tile, at, stride) TILE_OP("tileloadd (%0,%1,1), %%tmm" #tile, at, stride)
#define TILE_PASS(tile, at, stride) TILE_OP("tileloaddt1 (%0,%1,1), %%tmm" #tile, at, stride)
#define TILE_STORE(tile, at, stride) TILE_OP("tilestored %%tmm" #tile ", (%0,%1,1)", at, stride)
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_DOT(acc, rows, columns)                                                                \
    __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #acc : :)
#define TILE_DOT_BYTES(acc, rows, columns)                                                          \
    __asm__ volatile("tdpbssd %%tmm" #columns ", %%tmm" #rows ", %%tmm" #acc : :)
#define TILE_SHAPE(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(shapes))
#define TILE_RELEASE() __asm__ volatile("tilerelease" : :)
#endif

/* Ask Linux for the tiles' state (it is large, so a process has to). Returns 0, or -1. */
int allow_tiles(void) {
#if HAVE_TILES
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? -1 : 0;
#else
    return -1;
#endif
}

/* The same for tiles of bytes; -1 too where the CPU or the compiler has none. */
int allow_byte_tiles(void) { return HAVE_BYTE_TILES ? allow_tiles() : -1; }

/* Tiles 0, 1 and 4 get rows0 rows; 2, 3 and 5 rows1; 6 and 7 all 16. Content is lost. */
INLINE void shape_tiles(int64_t rows0, int64_t rows1) {
    tile_shapes_t shapes = {.palette = 1};
    const uint8_t r0 = (uint8_t)rows0, r1 = (uint8_t)rows1, rows[8] = {r0, r0, r1, r1, r0, r1, 16, 16};
    memcpy(shapes.rows, rows, sizeof rows);
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = TILE_BYTES;
    TILE_SHAPE(shapes);
}

/* Tiles 0, 2 and 6 get columns0 columns; 1, 3 and 7 columns1; all have 16 rows. */
INLINE void shape_columns(int64_t columns0, int64_t columns1) {
    tile_shapes_t shapes = {.palette = 1, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    const int64_t columns[8] = {columns0, columns1, columns0, columns1, 16, 16, columns0, columns1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = (uint16_t)(4 * columns[i]);
    TILE_SHAPE(shapes);
}

/* The same for few rows: 0, 1 and 4 get NARROW of them; 2, 3 and 5 as many columns. */
INLINE void shape_narrow_tiles(void) {
    tile_shapes_t shapes = {.palette = 1, .rows = {NARROW, NARROW, 16, 16, NARROW, 16, 16, 16}};
    for (int i = 0; i < 8; i++)
        shapes.row_bytes[i] = i == 2 || i == 3 || i == 5 ? 4 * NARROW : TILE_BYTES;
    TILE_SHAPE(shapes);
}

/* For bytes: tiles 0 and 1 get `rows` rows of 16 sums, 4 as many of 32 bytes, 6 and 7 these by 16 columns. */
INLINE void shape_byte_tiles(int64_t rows) {
    const uint8_t n = (uint8_t)rows;
    const tile_shapes_t shapes = {.palette = 1, .row_bytes = {64, 64, 0, 0, 32, 0, 64, 64},
                                  .rows = {n, n, 0, 0, n, 0, 8, 8}};
    TILE_SHAPE(shapes);
}

INLINE void release_tiles(void) { TILE_RELEASE(); }

#define EACH_SUM(f)                                                                                 \
    f(0, acc) if (double_columns) { f(1, acc + TILE_COLUMNS) }                                      \
    if (double_rows) { f(2, acc1) if (double_columns) { f(3, acc1 + TILE_COLUMNS) } }

/* Sums are in tiles from here on; until put_sums they are not in memory. */
INLINE void take_sums(const float *acc, int64_t stride, int is_first, const int double_rows,
                      const int double_columns) {
    const float *acc1 = acc + TILE_ROWS * stride / 4;
#define START(tile, at) TILE_ZERO(tile);
#define RESUME(tile, at) TILE_LOAD(tile, at, stride);
    if (is_first) { EACH_SUM(START) } else { EACH_SUM(RESUME) }
    (void)acc1;
}
INLINE void put_sums(float *acc, int64_t stride, const int double_rows, const int double_columns) {
    float *acc1 = acc + TILE_ROWS * stride / 4;
#define FINISH(tile, at) TILE_STORE(tile, at, stride);
    EACH_SUM(FINISH)
    (void)acc1;
}

/* One step of k, on the sums in tiles. */
INLINE void multiply_step(const product_t *p, const int double_rows, const int double_columns, const int passing) {
    const char *left1 = p->left.at + TILE_ROWS * p->left.stride;
#define SIDE(tile, side, its, at)                                                                   \
    if (passing == side) TILE_PASS(tile, at, p->its.stride);                                        \
    else TILE_LOAD(tile, at, p->its.stride);
    SIDE(4, LEFT, left, p->left.at)
    SIDE(6, RIGHT, right, p->right.at)
    TILE_DOT(0, 4, 6);
    if (double_columns) {
        SIDE(7, RIGHT, right, p->right.at + p->next)
        TILE_DOT(1, 4, 7);
    }
    if (double_rows) {
        SIDE(5, LEFT, left, left1)
        TILE_DOT(2, 5, 6);
        if (double_columns) TILE_DOT(3, 5, 7);
    }
}

/* acc += left right, or = where it starts at 0. acc is [rows][columns], 32 of each that is double and
 * 16 else, as far as the tiles' shapes reach. `passing`: the side that passes L1 by. `is_for_l1`: so is what
 * is prefetched, not for L2. */
INLINE void multiply_tiles(product_t p, ahead_t ahead, float *acc, int is_first, const int double_rows,
                           const int double_columns, const int passing, const int is_for_l1) {
    take_sums(acc, p.out_stride, is_first, double_rows, double_columns);
    for (int64_t i = 0; i < p.steps; i++) {
        prefetch_ahead(&ahead, is_for_l1);
        multiply_step(&p, double_rows, double_columns, passing);
        p.left.at += p.left.step, p.right.at += p.right.step;
    }
    put_sums(acc, p.out_stride, double_rows, double_columns);
}

#if HAVE_TILES
/* Rows of `left` by [k][NARROW columns], turned: out[column][row], `width` floats apart. `rows` are up to
 * MOST, of which a multiple of 16 is read; `steps` of 32 values of k. Needs narrow tiles. */
INLINE void multiply_narrow(side_t left, int rows, const float *right, int64_t steps, float *out,
                            int64_t width) {
    enum { MOST = 64 };
    float sums[MOST * NARROW] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r += 2 * TILE_ROWS) {
        const char *at = left.at + r * left.stride, *at1 = at + TILE_ROWS * left.stride;
        const int is_double = rows - r > TILE_ROWS;
        TILE_ZERO(2);
        TILE_ZERO(5);
        for (int64_t i = 0; i < steps; i++) {
            TILE_LOAD(3, right + i * TILE_PAIRS * LANES, 4 * LANES);
            TILE_LOAD(6, at + i * left.step, left.stride);
            TILE_DOT(2, 6, 3);
            if (!is_double) continue;
            TILE_LOAD(7, at1 + i * left.step, left.stride);
            TILE_DOT(5, 7, 3);
        }
        TILE_STORE(2, sums + r * NARROW, 4 * NARROW);
        if (is_double) TILE_STORE(5, sums + (r + TILE_ROWS) * NARROW, 4 * NARROW);
    }
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    for (int r = 0; r < rows; r += TILE_ROWS)
        UNROLL for (int c = 0; c < NARROW; c += 2) { /* a vector has 4 rows of 4 columns */
            const __m512i index = _mm512_add_epi32(first, _mm512_set1_epi32(c));
#define FOUR_ROWS(n) _mm512_load_ps(sums + r * NARROW + (n) * LANES)
            const __m512 a = _mm512_permutex2var_ps(FOUR_ROWS(0), index, FOUR_ROWS(1));
            const __m512 b = _mm512_permutex2var_ps(FOUR_ROWS(2), index, FOUR_ROWS(3));
            _mm512_storeu_ps(out + r + c * width, _mm512_shuffle_f32x4(a, b, 0x44));
            _mm512_storeu_ps(out + r + (c + 1) * width, _mm512_shuffle_f32x4(a, b, 0xee));
        }
}

#else
INLINE void multiply_narrow(side_t left, int rows, const float *right, int64_t steps, float *out,
                            int64_t width) {
    (void)left, (void)rows, (void)right, (void)steps, (void)out, (void)width;
}
#endif
#endif
