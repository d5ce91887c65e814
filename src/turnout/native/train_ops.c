// Elementwise parts of a trainer's layers in bf16, one pass each: RMS norm and SiLU gate, forward and backward.
//
// Arithmetic is in fp32; results are rounded to bf16 at the same places as in the model code of transformers,
// so that forward results agree with it bit for bit up to the summation order of the norm. NaN stays NaN.
// The reference is turnout.train.fused's plain path; the tests compare both.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float wide(bf16 bits) {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline bf16 narrow(float f) {  // to nearest, ties to even
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (bf16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x within 2 units in the last place; a form that the compiler turns into vector code.
static inline float exp_fast(float x) {
    float limited = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = (limited * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t u = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &u, 4);
    float value = p * scale;
    return x != x ? x : value;
}

// y[r][i] = w[i] * bf16(x[r][i] * rstd[r]), rstd[r] = 1 / sqrt(mean(x[r]^2) + eps)
void turnout_rms_norm(const bf16 *x, const bf16 *w, bf16 *y, float *rstd, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *xr = x + r * n;
        bf16 *yr = y + r * n;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) {
            float v = wide(xr[i]);
            sum += v * v;
        }
        float s = 1.0f / sqrtf(sum / (float)n + eps);
        rstd[r] = s;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) yr[i] = narrow(wide(w[i]) * wide(narrow(wide(xr[i]) * s)));
    }
}

// dx, and dw as `parts` partial sums [parts][n] (zeroed by the caller), each over one fixed range of rows, so
// that the result does not depend on the number of threads.
void turnout_rms_norm_backward(const bf16 *x, const bf16 *w, const float *rstd, const bf16 *dy, bf16 *dx,
                               float *dw, int64_t rows, int64_t n, int64_t parts) {
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        float *dwp = dw + part * n;
        for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) {
            const bf16 *xr = x + r * n, *dyr = dy + r * n;
            bf16 *dxr = dx + r * n;
            float s = rstd[r], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < n; i++) dot += wide(dyr[i]) * wide(w[i]) * wide(xr[i]);
            float back = dot * s * s / (float)n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                float v = wide(xr[i]), d = wide(dyr[i]);
                dwp[i] += d * v * s;
                dxr[i] = narrow(s * (d * wide(w[i]) - v * back));
            }
        }
    }
}

// y = bf16(bf16(silu(gate)) * up)
void turnout_silu_gate(const bf16 *gate, const bf16 *up, bf16 *y, int64_t count) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = wide(gate[i]);
        y[i] = narrow(wide(narrow(g / (1.0f + exp_fast(-g)))) * wide(up[i]));
    }
}

void turnout_silu_gate_backward(const bf16 *gate, const bf16 *up, const bf16 *dy, bf16 *dgate, bf16 *dup,
                                int64_t count) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = wide(gate[i]), d = wide(dy[i]);
        float s = 1.0f / (1.0f + exp_fast(-g));
        dup[i] = narrow(d * (g * s));
        dgate[i] = narrow(d * wide(up[i]) * s * (1.0f + g * (1.0f - s)));
    }
}
