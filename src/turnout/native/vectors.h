/* Vectors of floats and bf16 conversions, shared by the C files of this folder. */
#ifndef TURNOUT_VECTORS_H
#define TURNOUT_VECTORS_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

/* VECTOR bytes are one register: what is wider a compiler keeps in memory. */
#ifdef __AVX512F__
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define LANES (VECTOR / 4)

typedef float vec __attribute__((vector_size(VECTOR)));
typedef int32_t ivec __attribute__((vector_size(VECTOR)));
typedef uint32_t uvec __attribute__((vector_size(VECTOR)));
typedef uint16_t hvec __attribute__((vector_size(VECTOR / 2)));
typedef float vecu __attribute__((vector_size(VECTOR), aligned(4)));
typedef uint16_t hvecu __attribute__((vector_size(VECTOR / 2), aligned(2)));

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
INLINE uvec widen(hvec x) { return (uvec)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE hvec low_halves(uvec x) { return (hvec)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
#include <immintrin.h>
INLINE uvec widen(hvec x) { return (uvec)_mm256_cvtepu16_epi32((__m128i)x); }
INLINE hvec low_halves(uvec x) { /* of values below 65536 */
    __m256i all = (__m256i)x;
    return (hvec)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#else
INLINE uvec widen(hvec x) { return __builtin_convertvector(x, uvec); }
INLINE hvec low_halves(uvec x) { return __builtin_convertvector(x, hvec); }
#endif

INLINE vec load_vec(const void *base, int64_t index, int bf16) {
    if (bf16) {
        hvec half = *(const hvecu *)((const uint16_t *)base + index);
        return (vec)(widen(half) << 16);
    }
    return *(const vecu *)((const float *)base + index);
}

INLINE vec splat(float x) { return (vec){0} + x; }

/* Rounds to nearest even and stores LANES bf16 values; NaN stays NaN. */
INLINE void store_bf16(uint16_t *to, vec x) {
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (rounded & ~nan) | (((bits >> 16) | 0x40u) & nan);
    *(hvecu *)to = low_halves(rounded);
}

/* exp for -87 < x < 88, 0 below; relative error under 2e-7. */
INLINE vec exp_vec(vec x) {
    ivec dead = x < splat(-87.0f);
    x = (vec)(((ivec)x & ~dead));
    vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(y * (vec)power) & ~dead);
}
#endif
