/* Tensor digest: two independent sums modulo 2^64 over the elements of a strong mix of (flat position, bit
   pattern). A sum, so shards add up and a change is a subtraction and an addition. The reference and the
   definition are in turnout/weights/digest.py. */

#include "digest.h"
/* Twice as fast in 512-bit vectors, which compilers do not choose by themselves. */
#if defined(__AVX512DQ__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "products.h"
#include <stddef.h>
#include <stdint.h>

#define SUM(NAME, TYPE)                                                                                   \
    void NAME(const TYPE *values, int64_t count, uint64_t start, uint64_t *out) {                         \
        uint64_t lo = 0, hi = 0;                                                                          \
        _Pragma("omp parallel for schedule(static) reduction(+ : lo, hi) if (count > 262144)")            \
        for (int64_t i = 0; i < count; i++) {                                                             \
            uint64_t x = place(start + (uint64_t)i) ^ (uint64_t)values[i];                                \
            lo += first(x);                                                                               \
            hi += second(x);                                                                              \
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

SUM(turnout_digest_u8, uint8_t)
SUM(turnout_digest_u16, uint16_t)
SUM(turnout_digest_u32, uint32_t)

/* The matrix [n][k] as native/products.c packs it: same sums as over its rows. */
void turnout_digest_packed(const uint16_t *packed, int64_t n, int64_t k, int64_t first_block, int64_t step, uint64_t *out) {
    int64_t depth = (k + DEPTH - 1) / DEPTH, blocks = (n + TILE - 1) / TILE;
    uint64_t lo = 0, hi = 0, offset[TILE * 2];
    for (int i = 0; i < TILE * 2; i++) offset[i] = (uint64_t)(i / 2) * (uint64_t)k + (uint64_t)(i % 2);
#pragma omp parallel for schedule(static) reduction(+ : lo, hi) if (n * k > 262144)
    for (int64_t b = 0; b < blocks; b++) {
        const uint16_t *block = packed + (first_block + b * step) * depth * TILE * DEPTH;
        int64_t rows = n - b * TILE < TILE ? n - b * TILE : TILE;
        for (int64_t pair = 0; pair * 2 < k; pair++) {
            uint64_t at = (uint64_t)(b * TILE * k + pair * 2);
            int64_t odd = pair * 2 + 1 == k; /* the last input of an odd number has padding beside it */
            for (int64_t i = 0; i < rows * 2; i++) {
                uint64_t x = place(at + offset[i]) ^ (uint64_t)block[pair * TILE * 2 + i];
                uint64_t live = (uint64_t)0 - (uint64_t)!(odd && i % 2);
                lo += first(x) & live;
                hi += second(x) & live;
            }
        }
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
