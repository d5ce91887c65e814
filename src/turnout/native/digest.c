/* Tensor digest: two sums modulo 2^64, over all elements, of a factor of the flat position times the bit pattern.
   A sum, so shards add up and a change adds its factor times the difference. The reference and the definition are
   in turnout/weights/digest.py. */

#include "digest.h"
/* Twice as fast in 512-bit vectors, which compilers do not choose by themselves. */
#if defined(__AVX512DQ__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "products.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

uint32_t turnout_digest_table[2][DIGEST_RUN];

__attribute__((constructor)) static void fill(void) {
    for (uint64_t i = 0; i < 2 * DIGEST_RUN; i++)
        turnout_digest_table[i / DIGEST_RUN][i % DIGEST_RUN] = (uint32_t)(digest_mix(i + 1) >> 32);
}

/* SHARE adds elements of one run, the first of them at the flat position `at`. */
#define SUM(NAME, SHARE, TYPE)                                                                            \
    static inline void SHARE(const TYPE *restrict values, int64_t count, uint64_t at, uint64_t *sums) {   \
        const uint32_t *restrict one = turnout_digest_table[0] + at % DIGEST_RUN;                         \
        const uint32_t *restrict two = turnout_digest_table[1] + at % DIGEST_RUN;                         \
        uint64_t lo = 0, hi = 0;                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                             \
            lo += (uint64_t)one[i] * (uint32_t)values[i];                                                 \
            hi += (uint64_t)two[i] * (uint32_t)values[i];                                                 \
        }                                                                                                 \
        sums[0] += digest_key(at / DIGEST_RUN, 0) * lo;                                                   \
        sums[1] += digest_key(at / DIGEST_RUN, 1) * hi;                                                   \
    }                                                                                                     \
    void NAME(const TYPE *values, int64_t count, uint64_t start, uint64_t *out) {                         \
        uint64_t lo = 0, hi = 0, end = start + (uint64_t)count;                                           \
        uint64_t runs = count ? (end - 1) / DIGEST_RUN - start / DIGEST_RUN + 1 : 0;                      \
        _Pragma("omp parallel for schedule(static) reduction(+ : lo, hi) if (count > 262144)")            \
        for (uint64_t r = 0; r < runs; r++) {                                                             \
            uint64_t begin = (start / DIGEST_RUN + r) * DIGEST_RUN, stop = begin + DIGEST_RUN, sums[2] = {0, 0}; \
            if (begin < start) begin = start;                                                             \
            if (stop > end) stop = end;                                                                   \
            SHARE(values + (begin - start), (int64_t)(stop - begin), begin, sums);                        \
            lo += sums[0];                                                                                \
            hi += sums[1];                                                                                \
        }                                                                                                 \
        out[0] = lo;                                                                                      \
        out[1] = hi;                                                                                      \
    }                                                                                                     \
    /* Rows of `columns` elements, dense in memory; row r begins at the flat position start + r * stride. */ \
    void NAME##_rows(const TYPE *values, int64_t rows, int64_t columns, uint64_t start, uint64_t stride,  \
                     uint64_t *out) {                                                                     \
        uint64_t lo = 0, hi = 0, part[2];                                                                 \
        for (int64_t r = 0; r < rows; r++) {                                                              \
            NAME(values + r * columns, columns, start + (uint64_t)r * stride, part);                      \
            lo += part[0];                                                                                \
            hi += part[1];                                                                                \
        }                                                                                                 \
        out[0] = lo;                                                                                      \
        out[1] = hi;                                                                                      \
    }

SUM(turnout_digest_u8, share_u8, uint8_t)
SUM(turnout_digest_u16, share_u16, uint16_t)
SUM(turnout_digest_u32, share_u32, uint32_t)

/* The matrix [n][k] as native/products.c packs it: same sums as over its rows. */
void turnout_digest_packed(const uint16_t *packed, int64_t n, int64_t k, int64_t first_block, int64_t step, uint64_t *out) {
    int64_t depth = (k + DEPTH - 1) / DEPTH, blocks = (n + TILE - 1) / TILE;
    uint64_t lo = 0, hi = 0;
#pragma omp parallel for schedule(static) reduction(+ : lo, hi) if (n * k > 262144)
    for (int64_t b = 0; b < blocks; b++) {
        const uint16_t *block = packed + (first_block + b * step) * depth * TILE * DEPTH;
        int64_t rows = n - b * TILE < TILE ? n - b * TILE : TILE;
        uint64_t sums[2] = {0, 0};
        for (int64_t r = 0; r < rows; r++) {
            uint16_t line[DIGEST_RUN + 2]; /* what one run has of the row; it may begin with the second of a pair */
            uint64_t start = (uint64_t)((b * TILE + r) * k);
            for (int64_t i = 0, stop; i < k; i = stop) {
                uint64_t at = start + (uint64_t)i;
                int64_t left = DIGEST_RUN - (int64_t)(at % DIGEST_RUN), odd = i % 2;
                stop = i + left < k ? i + left : k;
                const uint16_t *pair = block + (i - odd) * TILE + r * 2;
                for (int64_t p = 0; p < (stop - i + odd + 1) / 2; p++) memcpy(line + 2 * p, pair + p * TILE * 2, 4);
                share_u16(line + odd, stop - i, at, sums);
            }
        }
        lo += sums[0];
        hi += sums[1];
    }
    out[0] = lo;
    out[1] = hi;
}

/* How many values have all bits of `mask` set: with the exponent's bits, those that are NaN or infinite. */
#define COUNT(NAME, TYPE)                                                                                 \
    int64_t NAME(const TYPE *values, int64_t count, TYPE mask) {                                          \
        int64_t found = 0;                                                                                \
        _Pragma("omp parallel for schedule(static) reduction(+ : found) if (count > 262144)")             \
        for (int64_t at = 0; at < count; at += 4096) {                                                    \
            int64_t end = at + 4096 < count ? at + 4096 : count;                                          \
            TYPE here = 0; /* narrow, so that whole vectors are counted; 4096 fit 16 bits */              \
            for (int64_t i = at; i < end; i++) here = (TYPE)(here + ((values[i] & mask) == mask));        \
            found += here;                                                                                \
        }                                                                                                 \
        return found;                                                                                     \
    }

COUNT(turnout_masked_u16, uint16_t)
COUNT(turnout_masked_u32, uint32_t)
