/* Changes between two states of a tensor: found, checked, written in place, and coded as gaps. Elements are `width`
   bytes (1, 2, 4, 8), compared as bits; positions are flat and ascending, int64 where `wide`, else int32. No array
   needs to be aligned. References: turnout/weights/changes.py, turnout/weights/codecs/. */

#include "digest.h"
#include "vectors.h"
#include <stdlib.h>

#define RUN 2048        /* elements whose changes are still in the first cache when the digest moves by them */
#define ALONE 262144    /* elements below which threads cost more than they save */
#define AHEAD 4096      /* bytes that are asked from memory before they are compared */
#define SKIP 0xffff     /* a gap's escape: so many elements that did not change, and the gap goes on */

INLINE uint64_t load(const char *from, int64_t i, int width) {
    uint64_t bits = 0;
    memcpy(&bits, from + i * width, width);
    return bits;
}

INLINE int64_t position(const char *from, int64_t i, int wide) {
    int64_t at64;
    int32_t at32;
    if (wide) return memcpy(&at64, from + i * 8, 8), at64;
    return memcpy(&at32, from + i * 4, 4), at32;
}

INLINE void put_position(char *to, int64_t i, int wide, int64_t at) {
    int32_t at32 = (int32_t)at;
    if (wide) memcpy(to + i * 8, &at, 8);
    else memcpy(to + i * 4, &at32, 4);
}

/* Calls f with `width` and `wide` as constants, so that it is compiled for each. */
#define WIDTHS(f, wide, ...)                                                                                \
    (width == 1 ? f(__VA_ARGS__, 1, wide) : width == 2 ? f(__VA_ARGS__, 2, wide)                             \
     : width == 4 ? f(__VA_ARGS__, 4, wide) : f(__VA_ARGS__, 8, wide))
#define COMPILED(f, ...) (wide ? WIDTHS(f, 1, __VA_ARGS__) : WIDTHS(f, 0, __VA_ARGS__))

/* Bit i: the elements i of these 64 differ. */
INLINE uint64_t differing(const char *a, const char *b, int width) {
    uint64_t mask = 0;
#ifdef __AVX512BW__
    for (int i = 0; i < width; i++) {
        __m512i x = _mm512_loadu_si512(a + 64 * i), y = _mm512_loadu_si512(b + 64 * i);
        mask |= width == 1   ? _mm512_cmpneq_epi8_mask(x, y)
                : width == 2 ? (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << (32 * i)
                : width == 4 ? (uint64_t)_mm512_cmpneq_epi32_mask(x, y) << (16 * i)
                             : (uint64_t)_mm512_cmpneq_epi64_mask(x, y) << (8 * i);
    }
#else
    uint64_t any = 0;
    for (int i = 0; i < 8 * width; i++) any |= load(a, i, 8) ^ load(b, i, 8);
    if (any)
        for (int i = 0; i < 64; i++) mask |= (uint64_t)(load(a, i, width) != load(b, i, width)) << i;
#endif
    return mask;
}

/* Moves a digest's sums by `count` <= RUN elements that went from `before` to `after`. */
INLINE void move(uint64_t *sums, const char *positions, const uint64_t *before, const uint64_t *after, int64_t count,
                 int width, int wide) {
    uint64_t lo = 0, hi = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)position(positions, i, wide);
        if (width == 8) { /* counts as two elements of 4 bytes */
            uint64_t half = 0xffffffffULL;
            uint64_t low = (after[i] & half) - (before[i] & half), high = (after[i] >> 32) - (before[i] >> 32);
            lo += digest_factor(2 * at, 0) * low + digest_factor(2 * at + 1, 0) * high;
            hi += digest_factor(2 * at, 1) * low + digest_factor(2 * at + 1, 1) * high;
        } else {
            lo += digest_factor(at, 0) * (after[i] - before[i]);
            hi += digest_factor(at, 1) * (after[i] - before[i]);
        }
    }
    sums[0] += lo;
    sums[1] += hi;
}

/* Elements [start, stop) of a tensor whose two states are at `base` and `now`. Found: `count` changes, what the
   digest's sums move by, and the changes, positions first; then where the caller wants these. */
typedef struct {
    const char *base, *now;
    int64_t start, stop, width, wide;
    int64_t count;
    uint64_t sums[2];
    char *found, *positions, *bits;
} Compared;

INLINE int compare(Compared *task, char *positions, char *bits, int width, int wide) {
    uint64_t before[RUN], after[RUN];
    const char *base = task->base, *now = task->now;
    for (int64_t i = task->start, end; i < task->stop;) {
        char *to = positions + task->count * (wide ? 8 : 4);
        int64_t count = 0;
        end = task->stop - i > RUN ? i + RUN : task->stop;
#define FOUND(at)                                                                                           \
    put_position(to, count, wide, at), before[count] = load(base, at, width),                                \
        after[count] = load(now, at, width), memcpy(bits, now + (at) * width, width), bits += width, count++
        for (; i + 64 <= end; i += 64) {
            for (int line = 0; line < width; line++) { /* the processor's own look-ahead loses its way here */
                __builtin_prefetch(base + i * width + line * 64 + AHEAD);
                __builtin_prefetch(now + i * width + line * 64 + AHEAD);
            }
            for (uint64_t mask = differing(base + i * width, now + i * width, width); mask; mask &= mask - 1)
                FOUND(i + __builtin_ctzll(mask));
        }
        for (; i < end; i++)
            if (load(base, i, width) != load(now, i, width)) FOUND(i);
        move(task->sums, to, before, after, count, width, wide);
        task->count += count;
    }
    return 1;
}

/* Fills the tasks, none of more than `longest` elements. Returns 0 where memory is short. Call turnout_take then. */
int turnout_compare(Compared *tasks, int64_t count, int64_t longest, int64_t elements) {
    int good = 1;
#pragma omp parallel reduction(& : good) if (elements > ALONE)
    {
        char *scratch = malloc(longest * 16 + 1), *bits = scratch + longest * 8;
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++) {
            Compared *task = tasks + t;
            int64_t width = task->width, wide = task->wide;
            if (!scratch) continue;
            COMPILED(compare, task, scratch, bits);
            int64_t first = task->count * (wide ? 8 : 4), second = task->count * width;
            if (!task->count || !(task->found = malloc(first + second))) continue;
            memcpy(task->found, scratch, first);
            memcpy(task->found + first, bits, second);
        }
        good = scratch != NULL;
        free(scratch);
    }
    for (int64_t t = 0; t < count; t++) good &= !tasks[t].count || tasks[t].found;
    return good;
}

/* Copies what was found to where it is wanted, if it is, and frees it. */
void turnout_take(Compared *tasks, int64_t count) {
    for (Compared *task = tasks; task < tasks + count; task++) {
        int64_t first = task->count * (task->wide ? 8 : 4);
        if (task->found && task->positions) {
            memcpy(task->positions, task->found, first);
            memcpy(task->bits, task->found + first, task->count * task->width);
        }
        free(task->found);
    }
}

/* `count` new patterns for a tensor of `elements` elements, and what its digest's sums move by. */
typedef struct {
    char *target;
    int64_t elements, width, wide;
    const char *positions, *bits;
    int64_t count;
    uint64_t sums[2];
} Written;

INLINE int inside(const Written *task, int width, int wide) {
    uint64_t largest = 0; /* a negative position is a large one */
    (void)width;
    for (int64_t i = 0; i < task->count; i++) {
        uint64_t at = (uint64_t)position(task->positions, i, wide);
        largest = at > largest ? at : largest;
    }
    return task->count == 0 || largest < (uint64_t)task->elements;
}

INLINE int overwrite(Written *task, int width, int wide) {
    uint64_t before[RUN], after[RUN];
    const char *positions = task->positions, *bits = task->bits;
    char *target = task->target;
    for (int64_t left = task->count, n; left > 0; left -= n) {
        n = left < RUN ? left : RUN;
        for (int64_t i = 0; i < n; i++) before[i] = load(target, position(positions, i, wide), width);
        for (int64_t i = 0; i < n; i++) memcpy(target + position(positions, i, wide) * width, bits + i * width, width);
        __asm__ volatile("" ::: "memory"); /* what stands there now is read, not assumed */
        for (int64_t i = 0; i < n; i++) after[i] = load(target, position(positions, i, wide), width);
        move(task->sums, positions, before, after, n, width, wide);
        positions += n * (wide ? 8 : 4);
        bits += n * width;
    }
    return 1;
}

/* Writes all tasks, `changes` in all. Returns -1; or, nothing written, the first task with a position outside. */
int turnout_overwrite(Written *tasks, int64_t count, int64_t changes) {
    int64_t wrong = count;
#pragma omp parallel if (changes > 8 * RUN)
    {
#pragma omp for schedule(dynamic) reduction(min : wrong)
        for (int64_t t = 0; t < count; t++) {
            int64_t width = tasks[t].width, wide = tasks[t].wide;
            if (!COMPILED(inside, tasks + t)) wrong = t < wrong ? t : wrong;
        }
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++) {
            int64_t width = tasks[t].width, wide = tasks[t].wide;
            if (wrong == count) COMPILED(overwrite, tasks + t);
        }
    }
    return wrong == count ? -1 : (int)wrong;
}

/* Whether the positions ascend, each one once, inside a tensor of so many elements. */
int turnout_ascending(const char *positions, int64_t count, int64_t wide, int64_t elements) {
    int wrong = count && (position(positions, 0, wide) < 0 || position(positions, count - 1, wide) >= elements);
    if (wide)
        for (int64_t i = 1; i < count; i++) wrong |= position(positions, i, 1) <= position(positions, i - 1, 1);
    else
        for (int64_t i = 1; i < count; i++) wrong |= position(positions, i, 0) <= position(positions, i - 1, 0);
    return !wrong;
}

INLINE int64_t gaps_of(const char *positions, int64_t count, char *gaps, int width, int wide) {
    int64_t next = 0, used = 0;
    (void)width;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = position(positions, i, wide), gap = at - next;
        for (next = at + 1;; gap -= SKIP) {
            uint16_t code = gap < SKIP ? (uint16_t)gap : SKIP;
            memcpy(gaps + 2 * used++, &code, 2);
            if (gap < SKIP) break;
        }
    }
    return used;
}

/* Ascending positions as gaps of 16 bits; `used` is how many. */
void turnout_gaps(const char *positions, int64_t count, int64_t wide, char *gaps, int64_t *used) {
    *used = wide ? gaps_of(positions, count, gaps, 1, 1) : gaps_of(positions, count, gaps, 1, 0);
}

INLINE int positions_of(const char *gaps, int64_t used, int64_t elements, char *positions, int64_t count, int width,
                        int wide) {
    int64_t at = -1, found = 0;
    uint16_t gap = 0;
    (void)width;
    for (int64_t i = 0; i < used; i++) {
        if (found == count) return 0;
        memcpy(&gap, gaps + 2 * i, 2);
        at += gap + (gap != SKIP);
        put_position(positions, found, wide, at);
        found += gap != SKIP;
    }
    return found == count && gap != SKIP && at < elements;
}

/* The way back. Returns 0 where the gaps do not give exactly `count` positions inside the tensor. */
int turnout_positions(const char *gaps, int64_t used, int64_t elements, char *positions, int64_t count, int64_t wide) {
    return wide ? positions_of(gaps, used, elements, positions, count, 1, 1)
                : positions_of(gaps, used, elements, positions, count, 1, 0);
}
