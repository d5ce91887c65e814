/* What an element of a tensor counts in its digest, shared by the C files of this folder. Definition and reference:
   turnout/weights/digest.py. */
#ifndef TURNOUT_DIGEST_H
#define TURNOUT_DIGEST_H
#include <stdint.h>

#define DIGEST_RUN 1024 /* positions that share a key */

extern uint32_t turnout_digest_table[2][DIGEST_RUN];

static inline uint64_t digest_mix(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL; x ^= x >> 33;
    return x;
}

static inline uint64_t digest_key(uint64_t run, int sum) { return digest_mix(~(2 * run + (uint64_t)sum)) | 1; }

/* Sum `sum` (0 or 1) of the digest has this times the bits of the element at the flat position `at`. */
static inline uint64_t digest_factor(uint64_t at, int sum) {
    return digest_key(at / DIGEST_RUN, sum) * turnout_digest_table[sum][at % DIGEST_RUN];
}

#endif
