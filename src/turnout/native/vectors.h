/* Vectors of 16 floats and bf16 conversions, shared by the C files of this folder. */
#ifndef TURNOUT_VECTORS_H
#define TURNOUT_VECTORS_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v16u __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2)));

INLINE float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float out;
    memcpy(&out, &wide, 4);
    return out;
}

INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* The compiler's own conversions between 16 and 32 bits go by halves; one instruction each does it. */
#ifdef __AVX512F__
#include <immintrin.h>
INLINE u16v widen(h16 x) { return (u16v)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE h16 low_halves(u16v x) { return (h16)_mm512_cvtepi32_epi16((__m512i)x); }
#else
INLINE u16v widen(h16 x) { return __builtin_convertvector(x, u16v); }
INLINE h16 low_halves(u16v x) { return __builtin_convertvector(x, h16); }
#endif

INLINE v16 load16(const void *base, int64_t index, int bf16) {
    if (bf16) {
        h16 half = *(const h16u *)((const uint16_t *)base + index);
        return (v16)(widen(half) << 16);
    }
    return *(const v16u *)((const float *)base + index);
}

INLINE v16 splat(float x) { return (v16){0} + x; }

/* Rounds to nearest even and stores 16 bf16 values; NaN stays NaN. */
INLINE void store_bf16(uint16_t *to, v16 x) {
    u16v bits = (u16v)x;
    u16v rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    u16v nan = (u16v)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (rounded & ~nan) | (((bits >> 16) | 0x40u) & nan);
    *(h16u *)to = low_halves(rounded);
}

/* exp for -87 < x < 88, 0 below; relative error under 2e-7. */
INLINE v16 exp16(v16 x) {
    i16v dead = x < splat(-87.0f);
    x = (v16)(((i16v)x & ~dead));
    v16 n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    v16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    v16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    i16v power = (__builtin_convertvector(n, i16v) + 127) << 23;
    return (v16)((i16v)(y * (v16)power) & ~dead);
}
#endif
