/* Gathers between processes of one machine, through memory that they share.
 *
 * A region has a line of flags for each rank, and two slots of PIECE bytes for each rank. A call is cut
 * into pieces, the same on all ranks, which are numbered from the group's first call on. For piece n a
 * rank writes its columns into its own slot n % 2 and publishes n + 1; who reads the piece waits until
 * the others have published it.
 *
 * The law: a rank writes piece n when all ranks have published piece n - 1. They publish that after they
 * have read piece n - 2, the last one in the same slot. A reader has seen it on its way, so two slots
 * make one wait a piece enough; a rank that only writes is at most one piece ahead.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "call_tape.h"

/* Who waits spins; then lets others have the core, which costs nothing where it has one to itself; then
 * sleeps until it is woken, and looks up every SLEEP_NS. Tests have their own values of these three. */
#ifndef PIECE
#define PIECE (128 << 10) /* bytes, which stay in L2: of 16 KiB to 1 MiB the fastest for 16 MiB */
#define YIELD_NS 200000
#define SLEEP_NS 10000000
#endif
enum { SPIN_NS = 5000 };
enum { LINE = 128 }; /* bytes: CPUs fetch lines of 64 bytes in pairs */
enum { DONE, ABORTED, NOT_YET, DIFFERENT };

typedef struct {
    _Alignas(LINE) _Atomic uint32_t published; /* pieces, modulo 2^32 */
    _Atomic uint32_t sleepers;                 /* ranks that wait for `published` in the kernel */
    uint64_t shapes[2];                        /* of the calls that the pieces in the slots are of */
} flags_t;

typedef struct {
    _Alignas(LINE) _Atomic uint32_t is_aborted;
    flags_t ranks[];
} region_t;

typedef struct {
    region_t *region;
    char *slots;
    int64_t rank, size, bytes;
    int64_t passed; /* pieces of a call that has waited and has not ended */
    int is_given;   /* whether this rank has published its part of the next one */
} group_t;

typedef struct { /* one call, filled by shared_memory_group.py; strides and widths in bytes */
    group_t *group;
    const char *part; /* this rank's columns */
    char *out;        /* all columns; NULL: this rank reads nothing */
    int64_t part_stride, out_stride, rows, patience_ns;
    int64_t widths[]; /* [size] */
} call_t;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t flags_bytes(int64_t size) {
    const int64_t bytes = (int64_t)(sizeof(region_t) + (size_t)size * sizeof(flags_t));
    return (bytes + 4095) / 4096 * 4096;
}

int64_t region_bytes(int64_t size) { return flags_bytes(size) + size * 2 * PIECE; }

/* ---- open and close --------------------------------------------------------------------------- */

/* NULL if `fd` is no region for `size` ranks, or memory ran out. */
group_t *open_group(int fd, int64_t rank, int64_t size) {
    struct stat status;
    const int64_t bytes = region_bytes(size);
    if (fstat(fd, &status) || status.st_size != bytes) return NULL;
    group_t *group = malloc(sizeof *group);
    if (!group) return NULL;
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        free(group);
        return NULL;
    }
    *group = (group_t){memory, (char *)memory + flags_bytes(size), rank, size, bytes, 0, 0};
    memset(group->slots + rank * 2 * PIECE, 0, 2 * PIECE); /* who writes to a page first has it near */
    return group;
}

void close_group(group_t *group) {
    munmap(group->region, (size_t)group->bytes);
    free(group);
}

/* ---- waiting ---------------------------------------------------------------------------------- */

static void pause_a_little(void) {
    for (int i = 0; i < 8; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* While *word is `value`, until it is woken, and at most SLEEP_NS or `ns`. */
static void sleep_on(_Atomic uint32_t *word, uint32_t value, int64_t ns) {
    ns = min64(ns, SLEEP_NS);
    const struct timespec most = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

static void wake(flags_t *flags) {
    if (atomic_load(&flags->sleepers))
        syscall(SYS_futex, &flags->published, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void abort_group(group_t *group) {
    atomic_store(&group->region->is_aborted, 1);
    for (int64_t rank = 0; rank < group->size; rank++) wake(&group->region->ranks[rank]);
}

/* Whether a rank has published `pieces`, or the group has ended. Who writes `published` looks for
 * sleepers next, and a sleeper that is counted looks for `published` next: one of them sees the other. */
static int is_over(group_t *group, flags_t *flags, uint32_t pieces) {
    return (int32_t)(atomic_load(&flags->published) - pieces) >= 0 ||
           atomic_load(&group->region->is_aborted);
}

static int wait_for(group_t *group, int64_t rank, uint32_t pieces, int64_t patience_ns) {
    flags_t *flags = &group->region->ranks[rank];
    if (!is_over(group, flags, pieces)) {
        const int64_t begin = now_ns();
        int64_t waited = 0;
        while (waited < YIELD_NS && !is_over(group, flags, pieces)) {
            if (waited < SPIN_NS) pause_a_little();
            else sched_yield();
            waited = now_ns() - begin;
        }
        atomic_fetch_add(&flags->sleepers, 1);
        while (waited < patience_ns) {
            const uint32_t seen = atomic_load(&flags->published);
            if (is_over(group, flags, pieces)) break;
            sleep_on(&flags->published, seen, patience_ns - waited);
            waited = now_ns() - begin;
        }
        atomic_fetch_sub(&flags->sleepers, 1);
    }
    if (atomic_load(&group->region->is_aborted)) return ABORTED;
    return is_over(group, flags, pieces) ? DONE : NOT_YET;
}

/* ---- the gather ------------------------------------------------------------------------------- */

static uint64_t shape_of(const call_t *c) {
    uint64_t shape = (uint64_t)c->rows;
    for (int64_t q = 0; q < c->group->size; q++)
        shape = shape * 0x9e3779b97f4a7c15u + (uint64_t)c->widths[q];
    return shape;
}

static void copy_rows(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t rows,
                      int64_t width) {
    if (to_stride == width && from_stride == width) width *= rows, rows = 1;
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * to_stride, from + r * from_stride, (size_t)width);
}

/* One piece: `rows` rows from `row` on, and of every rank's columns `most` from `column` on. The result
 * is as of `gather`. */
static int64_t pass_piece(const call_t *c, uint64_t shape, int64_t row, int64_t rows, int64_t column,
                          int64_t most) {
    group_t *group = c->group;
    const int64_t size = group->size, me = group->rank;
    flags_t *mine = &group->region->ranks[me];
    const uint32_t piece = atomic_load(&mine->published) - (uint32_t)group->is_given;
    char *slots = group->slots + (piece % 2) * PIECE;
    const char *part = c->part + row * c->part_stride + column;
    const int64_t width = max64(min64(c->widths[me] - column, most), 0);
    int status;
    if (!group->is_given) {
        for (int64_t q = 0; q < size; q++)
            if ((status = wait_for(group, q, piece, c->patience_ns))) return status | q << 8;
        if (width) copy_rows(slots + me * 2 * PIECE, width, part, c->part_stride, rows, width);
        mine->shapes[piece % 2] = shape;
        atomic_store(&mine->published, piece + 1);
        wake(mine);
        group->is_given = 1;
    }
    if (!c->out) return DONE;

    char *out = c->out + row * c->out_stride + column;
    for (int64_t q = 0; q < size; out += c->widths[q++]) {
        const int64_t theirs = max64(min64(c->widths[q] - column, most), 0);
        if (q == me) {
            if (width) copy_rows(out, c->out_stride, part, c->part_stride, rows, width);
            continue;
        }
        if ((status = wait_for(group, q, piece + 1, c->patience_ns))) return status | q << 8;
        if (group->region->ranks[q].shapes[piece % 2] != shape) return DIFFERENT | q << 8;
        if (theirs) copy_rows(out, c->out_stride, slots + q * 2 * PIECE, theirs, rows, theirs);
    }
    return DONE;
}

/* DONE; else why not, and in the bits from 8 on the rank that was waited for. After NOT_YET, which is
 * said when a rank is waited for longer than `patience_ns`, the same call goes on where it was. */
int64_t gather(const call_t *c) {
    group_t *group = c->group;
    int64_t widest = 0, piece = 0;
    for (int64_t q = 0; q < group->size; q++) widest = max64(widest, c->widths[q]);
    if (widest == 0) return DONE;
    if (atomic_load(&group->region->is_aborted)) return ABORTED; /* perhaps in the middle of a call */
    const uint64_t shape = shape_of(c);
    const int64_t rows = max64(PIECE / widest, 1), columns = min64(widest, PIECE);
    for (int64_t row = 0; row < c->rows; row += rows)
        for (int64_t column = 0; column < widest; column += columns) {
            if (piece++ < group->passed) continue;
            const int64_t count = min64(rows, c->rows - row);
            const int64_t status = pass_piece(c, shape, row, count, column, columns);
            if (status) return status;
            group->passed++, group->is_given = 0;
        }
    group->passed = 0;
    return DONE;
}
