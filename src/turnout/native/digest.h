/* The mixes of an element of the tensor digest, shared by the C files of this folder. Definition and reference:
   turnout/weights/digest.py. */
#ifndef TURNOUT_DIGEST_H
#define TURNOUT_DIGEST_H
#include <stdint.h>

#define M1 0xff51afd7ed558ccdULL
#define M2 0xc4ceb9fe1a85ec53ULL
#define M3 0x9e3779b97f4a7c15ULL
#define M4 0xd6e8feb86659fd93ULL

static inline uint64_t first(uint64_t x) {
    x ^= x >> 33; x *= M1; x ^= x >> 33; x *= M2; x ^= x >> 33;
    return x;
}

static inline uint64_t second(uint64_t x) {
    x = (x + M3) * M4; x ^= x >> 32; x *= M4; x ^= x >> 29;
    return x;
}

/* What the flat position of an element gives to the mix; the element's bits are xor-ed to it. */
static inline uint64_t place(uint64_t at) { return (at << 32) ^ ((at >> 32) * M3); }

#endif
