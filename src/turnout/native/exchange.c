/* Changed elements into live weights, and what the tensor's digest moves by: both sums of digest.c after the write,
   less those before it, from values read in the target itself. The reference is in
   turnout/engine/patches.py. */

#include "digest.h"
#include "products.h"
#include <stdint.h>

#define RUN 1024 /* elements at a time: read, written, read again and mixed while they are in the first cache */

/* index: ascending or not, each once; positions: in the whole tensor. Not `write`: what writing would move. A live
   pattern is digested as its upper part, from bit `shift` on. */
#define EXCHANGE(NAME, TYPE, AT)                                                                          \
    void NAME(TYPE *target, const AT *index, const AT *positions, const TYPE *bits, int64_t count, int write, \
              int shift, uint64_t *out) {                                                                 \
        uint64_t lo = 0, hi = 0;                                                                          \
        _Pragma("omp parallel for schedule(static) reduction(+ : lo, hi) if (count > 8192)")              \
        for (int64_t start = 0; start < count; start += RUN) {                                            \
            int64_t n = count - start < RUN ? count - start : RUN;                                        \
            TYPE before[RUN], after[RUN];                                                                 \
            for (int64_t i = 0; i < n; i++) before[i] = target[index[start + i]];                         \
            if (write) {                                                                                  \
                for (int64_t i = 0; i < n; i++) target[index[start + i]] = bits[start + i];               \
                for (int64_t i = 0; i < n; i++) after[i] = ((volatile const TYPE *)target)[index[start + i]]; \
            } else {                                                                                      \
                for (int64_t i = 0; i < n; i++) after[i] = bits[start + i];                               \
            }                                                                                             \
            for (int64_t i = 0; i < n; i++) {                                                             \
                uint64_t at = (uint64_t)positions[start + i];                                             \
                uint64_t moved = (uint64_t)(after[i] >> shift) - (uint64_t)(before[i] >> shift);          \
                lo += digest_factor(at, 0) * moved;                                                       \
                hi += digest_factor(at, 1) * moved;                                                       \
            }                                                                                             \
        }                                                                                                 \
        out[0] = lo;                                                                                      \
        out[1] = hi;                                                                                      \
    }

EXCHANGE(turnout_exchange_u16_i32, uint16_t, int32_t)
EXCHANGE(turnout_exchange_u16_i64, uint16_t, int64_t)
EXCHANGE(turnout_exchange_u32_i32, uint32_t, int32_t)
EXCHANGE(turnout_exchange_u32_i64, uint32_t, int64_t)

/* Where elements of the matrix [n][k] lie that native/products.c packs: flat ascending positions to places in the
   buffer. */
#define PLACES(NAME, AT)                                                                                  \
    void NAME(const AT *positions, int64_t count, int64_t k, int64_t first_block, int64_t step, AT *index) { \
        int64_t depth = (k + DEPTH - 1) / DEPTH, row = 0;                                                 \
        for (int64_t i = 0; i < count; i++) {                                                             \
            int64_t at = positions[i];                                                                    \
            if (at >= (row + 1) * k) row = at / k;                                                        \
            int64_t column = at - row * k, block = first_block + row / TILE * step;                       \
            index[i] = (AT)(block * depth * TILE * DEPTH + column / 2 * (TILE * 2) + row % TILE * 2 + column % 2); \
        }                                                                                                 \
    }

PLACES(turnout_packed_places_i32, int32_t)
PLACES(turnout_packed_places_i64, int64_t)
