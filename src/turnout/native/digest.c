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
static int16_t factor_byte[2][4][DIGEST_RUN];
static uint64_t factors_before[2][DIGEST_RUN + 1]; /* their sum up to a position of the run */

__attribute__((constructor)) static void fill(void) {
    for (int sum = 0; sum < 2; sum++)
        for (uint64_t i = 0; i < DIGEST_RUN; i++) {
            uint32_t factor = (uint32_t)(digest_mix((uint64_t)sum * DIGEST_RUN + i + 1) >> 32);
            turnout_digest_table[sum][i] = factor;
            factors_before[sum][i + 1] = factors_before[sum][i] + factor;
            for (int byte = 0; byte < 4; byte++) factor_byte[sum][byte][i] = (int16_t)(factor >> 8 * byte & 255);
        }
}

/* SHARE adds elements of one run, the first of them at the flat position `at`. */
#define SHARE_OF(SHARE, TYPE)                                                                             \
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
    }

SHARE_OF(share_u8, uint8_t)
SHARE_OF(share_u32, uint32_t)

/* Elements of 16 bits by the products of signed 16-bit numbers that vectors have (x86: pmaddwd): an element less 32768
   times each byte of its factor. What was taken off is added for all elements at once, by the sum of the factors. */
#define CHUNK 256 /* as many such products fit 32 bits */

static inline void share_u16(const uint16_t *restrict values, int64_t count, uint64_t at, uint64_t *sums) {
    int64_t place = (int64_t)(at % DIGEST_RUN);
    uint64_t lo = (factors_before[0][place + count] - factors_before[0][place]) << 15;
    uint64_t hi = (factors_before[1][place + count] - factors_before[1][place]) << 15;
    for (int64_t from = 0; from < count; from += CHUNK) {
        int64_t end = from + CHUNK < count ? from + CHUNK : count;
        int32_t l0 = 0, l1 = 0, l2 = 0, l3 = 0, h0 = 0, h1 = 0, h2 = 0, h3 = 0;
        for (int64_t i = from; i < end; i++) {
            int16_t value = (int16_t)(values[i] ^ 0x8000);
            l0 += value * factor_byte[0][0][place + i];
            l1 += value * factor_byte[0][1][place + i];
            l2 += value * factor_byte[0][2][place + i];
            l3 += value * factor_byte[0][3][place + i];
            h0 += value * factor_byte[1][0][place + i];
            h1 += value * factor_byte[1][1][place + i];
            h2 += value * factor_byte[1][2][place + i];
            h3 += value * factor_byte[1][3][place + i];
        }
        lo += (uint64_t)(int64_t)l0 + ((uint64_t)(int64_t)l1 << 8) + ((uint64_t)(int64_t)l2 << 16) + ((uint64_t)(int64_t)l3 << 24);
        hi += (uint64_t)(int64_t)h0 + ((uint64_t)(int64_t)h1 << 8) + ((uint64_t)(int64_t)h2 << 16) + ((uint64_t)(int64_t)h3 << 24);
    }
    sums[0] += digest_key(at / DIGEST_RUN, 0) * lo;
    sums[1] += digest_key(at / DIGEST_RUN, 1) * hi;
}

#define SUM(NAME, SHARE, TYPE)                                                                            \
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

#define NONFINITE 0x7f80 /* the exponent of bf16 */

/* Adds the rows that a block's TILE rows hold, the first element at the flat position `at`; sums[2] counts those that
   are NaN or infinite. Read back from the block, DIGEST_RUN inputs at a time. */
static void digest_block(const uint16_t *block, int64_t rows, int64_t k, uint64_t at, uint64_t *sums) {
    uint16_t lines[TILE * DIGEST_RUN];
    for (int64_t i = 0; i < k; i += DIGEST_RUN) {
        int64_t width = k - i < DIGEST_RUN ? k - i : DIGEST_RUN;
        int64_t spans = width == k ? 1 : rows, count = width == k ? rows * k : width;
        unpack_block(block + i * TILE, rows, width, lines, width);
        for (int64_t s = 0; s < spans; s++)
            for (int64_t from = 0, end; from < count; from = end) {
                uint64_t start = at + (uint64_t)(s * k + i + from);
                end = from + DIGEST_RUN - (int64_t)(start % DIGEST_RUN);
                if (end > count) end = count;
                share_u16(lines + s * width + from, end - from, start, sums);
            }
        uint16_t found = 0; /* TILE * DIGEST_RUN fit 16 bits */
        for (int64_t j = 0; j < rows * width; j++) found = (uint16_t)(found + ((lines[j] & NONFINITE) == NONFINITE));
        sums[2] += found;
    }
}

/* Over the matrix [n][k] in blocks first, first + step, ... as native/products.c packs it: out[0] and out[1] are the
   sums over its rows, out[2] how many elements are NaN or infinite. `from`: it is packed from there before, block by
   block; null: it lies there. */
static void digest_packed(const uint16_t *from, int64_t n, int64_t k, int64_t first, int64_t step, uint16_t *to, uint64_t *out) {
    int64_t depth = (k + DEPTH - 1) / DEPTH, blocks = (n + TILE - 1) / TILE;
    uint64_t lo = 0, hi = 0, nonfinite = 0;
#pragma omp parallel for schedule(static) reduction(+ : lo, hi, nonfinite) if (n * k > 262144)
    for (int64_t b = 0; b < blocks; b++) {
        uint16_t *block = to + (first + b * step) * depth * BLOCK;
        int64_t rows = n - b * TILE < TILE ? n - b * TILE : TILE;
        uint64_t sums[3] = {0, 0, 0};
        if (from) pack_block(from + b * TILE * k, rows, k, block);
        digest_block(block, rows, k, (uint64_t)(b * TILE * k), sums);
        lo += sums[0];
        hi += sums[1];
        nonfinite += sums[2];
    }
    out[0] = lo;
    out[1] = hi;
    out[2] = nonfinite;
}

void turnout_digest_packed(uint16_t *packed, int64_t n, int64_t k, int64_t first, int64_t step, uint64_t *out) {
    digest_packed(0, n, k, first, step, packed, out);
}

void turnout_pack(const uint16_t *from, int64_t n, int64_t k, int64_t first, int64_t step, uint16_t *to, uint64_t *out) {
    digest_packed(from, n, k, first, step, to, out);
}
