/* Blocks of Q8_0 and Q4_1, as GGUF files have them, of weights that are numbers: see code_maker.py.
 *
 * A vector has the same weight of LANES blocks, so that no sum goes from lane to lane.
 */
#include "cpu_vectors.h"

enum { BLOCK = 32, TOP = 15, Q8_0_BYTES = 34, Q4_1_BYTES = 20 };

/* Where a grid begins and how long it is, in spans of a block, before least squares move it. The last
 * ones are those of files in 4 bits, of which a block uses fewer codes. */
enum { GRIDS = 8 };
static const float GRID[GRIDS][2] = {
    {0, 1}, {0.08f, 0.92f}, {0, 0.92f}, {0.05f, 0.9f},
    {0, 15 / 14.0f}, {0, 15 / 13.0f}, {0, 15 / 12.0f}, {0, 15 / 11.0f},
};

typedef struct { vf scale, minimum; } grid_t;

INLINE vf inverse(vf x) { return pick((vi)(x > splat(1e-30f)), 1 / x, (vf){0}); }

INLINE vf nearest(vf x, float least, float most) {
    const vf magic = splat(0x1.8p23f); /* beside it a float has no digits after the point */
    x = pick((vi)(x > splat(least)), x, splat(least));
    x = pick((vi)(x < splat(most)), x, splat(most));
    return (x + magic) - magic;
}

/* Bits of the nearest float16, ties to even; |x| < 65520. */
INLINE vu to_half(vf x) {
    const vu sign = (vu)x & 0x80000000u, size = (vu)x ^ sign;
    const vu small = (vu)((vf)size + splat(0.5f)) - 0x3f000000u; /* less than 2^-14: no exponent */
    const vu normal = (size + 0xc8000fffu + (size >> 13 & 1)) >> 13;
    return (vu)pick((vi)(size < 0x38800000u), (vf)small, (vf)normal) | sign >> 16;
}

INLINE vf of_half(vu bits) {
    return (vf)((vu)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
}

/* The grid with the least squared error of those tried: for the nearest codes of a grid, least squares
 * give a better one; once more for the best. llama.cpp's make_qkx2_quants takes such steps, too; there
 * codes count by their sizes. */
INLINE grid_t search(const vf *x, vf low, vf span) {
    grid_t best = {span / TOP, low};
    vf total = {0}, most = splat(-1);
    for (int i = 0; i < BLOCK; i++) total += x[i];
    for (int g = 0; g <= GRIDS; g++) {
        grid_t try = best;
        if (g < GRIDS) try = (grid_t){span * (GRID[g][1] / TOP), low + span * GRID[g][0]};
        const vf inv = inverse(try.scale);
        vf sums = {0}, squares = {0}, products = {0};
        for (int i = 0; i < BLOCK; i++) {
            const vf code = nearest((x[i] - try.minimum) * inv, 0, TOP);
            sums += code;
            squares += code * code;
            products += code * x[i];
        }
        const vf spread = squares - sums * sums / BLOCK, shared = products - sums * total / BLOCK;
        const vf scale = shared * inverse(spread);
        const vf explained = shared * scale; /* of the squares around the mean; the rest is the error */
        const vi is_better = (vi)(explained > most);
        most = pick(is_better, explained, most);
        best.scale = pick(is_better, scale, best.scale);
        best.minimum = pick(is_better, (total - scale * sums) / BLOCK, best.minimum);
    }
    return best;
}

typedef struct { vu scale, minimum; vf codes[BLOCK], error; } coded_t;

INLINE coded_t on_grid(const vf *x, grid_t grid) {
    coded_t made = {to_half(grid.scale), to_half(grid.minimum)};
    const vf scale = of_half(made.scale), minimum = of_half(made.minimum), inv = inverse(scale);
    for (int i = 0; i < BLOCK; i++) {
        made.codes[i] = nearest((x[i] - minimum) * inv, 0, TOP);
        const vf off = scale * made.codes[i] + minimum - x[i];
        made.error += off * off;
    }
    return made;
}

static void make_q4_1(const vf *x, int64_t count, uint8_t *out) {
    vf low = x[0], high = x[0];
    for (int i = 1; i < BLOCK; i++) {
        low = pick((vi)(x[i] < low), x[i], low);
        high = pick((vi)(x[i] > high), x[i], high);
    }
    const coded_t plain = on_grid(x, (grid_t){(high - low) / TOP, low});
    const coded_t found = on_grid(x, search(x, low, high - low));
    for (int64_t b = 0; b < count; b++, out += Q4_1_BYTES) {
        const coded_t *made = found.error[b] < plain.error[b] ? &found : &plain;
        const uint16_t halves[2] = {made->scale[b], made->minimum[b]};
        memcpy(out, halves, sizeof halves);
        for (int i = 0; i < BLOCK / 2; i++)
            out[4 + i] = (uint8_t)made->codes[i][b] | (uint8_t)made->codes[i + BLOCK / 2][b] << 4;
    }
}

static void make_q8_0(const vf *x, int64_t count, uint8_t *out) {
    vf most = {0};
    for (int i = 0; i < BLOCK; i++) {
        const vf size = (vf)((vu)x[i] & 0x7fffffffu);
        most = pick((vi)(size > most), size, most);
    }
    const vu bits = to_half(most / 127);
    const vf inv = inverse(of_half(bits));
    vf codes[BLOCK];
    for (int i = 0; i < BLOCK; i++) codes[i] = nearest(x[i] * inv, -127, 127);
    for (int64_t b = 0; b < count; b++, out += Q8_0_BYTES) {
        const uint16_t scale = bits[b];
        memcpy(out, &scale, sizeof scale);
        for (int i = 0; i < BLOCK; i++) out[2 + i] = (uint8_t)(int8_t)codes[i][b];
    }
}

/* Blocks [count][32] to their bytes, one after the other. */
void make_codes(const float *weights, int64_t count, int64_t bits, uint8_t *out, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t here = min64(LANES, count - first);
        vf x[BLOCK] = {0};
        for (int64_t b = 0; b < here; b++)
            for (int i = 0; i < BLOCK; i++) x[i][b] = weights[(first + b) * BLOCK + i];
        if (bits == 8)
            make_q8_0(x, here, out + first * Q8_0_BYTES);
        else
            make_q4_1(x, here, out + first * Q4_1_BYTES);
    }
}
