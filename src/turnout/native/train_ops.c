// Parts of a train step between its matrix products, one pass each: RMS norm, SiLU gate, rotary embedding, masked
// softmax and the sums of the head in bf16, forward and backward; AdamW over flat fp32 buffers.
//
// Arithmetic is in fp32; results are rounded to bf16 at the same places as in the model code of transformers,
// so that forward results agree with it bit for bit up to the summation order of the norm. NaN stays NaN.
// The references are the plain paths in turnout.train; the tests compare both.

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

// y[t][h][i] = x[t][h][i] cos[t][i] -+ x[t][h][i +- half] sin[t][i], rounded after each product as the model code does;
// x and y [rows][heads][size], cos and sin [rows][size].
void turnout_rotary(const bf16 *x, const bf16 *cos, const bf16 *sin, bf16 *y, int64_t rows, int64_t heads,
                    int64_t size) {
    int64_t half = size / 2;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows * heads; r++) {
        const bf16 *c = cos + r / heads * size, *s = sin + r / heads * size, *xr = x + r * size;
        bf16 *yr = y + r * size;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float low = wide(xr[i]), high = wide(xr[i + half]);
            yr[i] = narrow(wide(narrow(low * wide(c[i]))) + wide(narrow(-high * wide(s[i]))));
            yr[i + half] = narrow(wide(narrow(high * wide(c[i + half]))) + wide(narrow(low * wide(s[i + half]))));
        }
    }
}

void turnout_rotary_backward(const bf16 *dy, const bf16 *cos, const bf16 *sin, bf16 *dx, int64_t rows, int64_t heads,
                             int64_t size) {
    int64_t half = size / 2;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows * heads; r++) {
        const bf16 *c = cos + r / heads * size, *s = sin + r / heads * size, *d = dy + r * size;
        bf16 *out = dx + r * size;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float low = wide(d[i]), high = wide(d[i + half]);
            out[i] = narrow(low * wide(c[i]) + high * wide(s[i + half]));
            out[i + half] = narrow(high * wide(c[i + half]) - low * wide(s[i]));
        }
    }
}

// In place, scores [rows][prefix + own] to attention weights. The query of row r is the own position j = r % own; it
// sees the prefix and the own keys first[j] to j; the weights of the others are 0.
void turnout_masked_softmax(bf16 *scores, const int64_t *first, int64_t rows, int64_t own, int64_t prefix,
                            float scale) {
    int64_t keys = prefix + own;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        int64_t j = r % own, begin = prefix + first[j], end = prefix + j + 1;
        bf16 *row = scores + r * keys;
        float peak = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : peak)
        for (int64_t i = 0; i < prefix; i++) peak = wide(row[i]) > peak ? wide(row[i]) : peak;
#pragma omp simd reduction(max : peak)
        for (int64_t i = begin; i < end; i++) peak = wide(row[i]) > peak ? wide(row[i]) : peak;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < prefix; i++) sum += exp_fast((wide(row[i]) - peak) * scale);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; i++) sum += exp_fast((wide(row[i]) - peak) * scale);
        float share = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < prefix; i++) row[i] = narrow(exp_fast((wide(row[i]) - peak) * scale) * share);
#pragma omp simd
        for (int64_t i = begin; i < end; i++) row[i] = narrow(exp_fast((wide(row[i]) - peak) * scale) * share);
        memset(row + prefix, 0, sizeof(bf16) * (size_t)first[j]);
        memset(row + end, 0, sizeof(bf16) * (size_t)(keys - end));
    }
}

// In place, the gradient of the weights to that of the scores: scale * w * (d - sum(w * d)); w is 0 where not seen.
void turnout_masked_softmax_backward(const bf16 *weights, bf16 *grads, int64_t rows, int64_t keys, float scale) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *w = weights + r * keys;
        bf16 *d = grads + r * keys;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < keys; i++) dot += wide(w[i]) * wide(d[i]);
#pragma omp simd
        for (int64_t i = 0; i < keys; i++) d[i] = narrow(scale * wide(w[i]) * (wide(d[i]) - dot));
    }
}

// One block of logits z = inverse * raw [rows][words] of an online softmax: running peak, total = sum exp(z - peak),
// moment = sum exp(z - peak) (z - peak), and the logit of the target where it lies in the block (target[r] in words).
void turnout_head_sums(const bf16 *raw, const int64_t *target, float *peak, float *total, float *moment, float *chosen,
                       int64_t rows, int64_t words, float inverse) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *z = raw + r * words;
        float high = -INFINITY, sum = 0.0f, first = 0.0f;
#pragma omp simd reduction(max : high)
        for (int64_t i = 0; i < words; i++) high = wide(z[i]) > high ? wide(z[i]) : high;
        high = high * inverse > peak[r] ? high * inverse : peak[r];
#pragma omp simd reduction(+ : sum, first)
        for (int64_t i = 0; i < words; i++) {
            float x = wide(z[i]) * inverse - high, e = exp_fast(x);
            sum += e;
            first += e * x;
        }
        float old = expf(peak[r] - high), shift = total[r] > 0.0f ? peak[r] - high : 0.0f;
        moment[r] = old * (moment[r] + shift * total[r]) + first;
        total[r] = total[r] * old + sum;
        peak[r] = high;
        if (target[r] >= 0 && target[r] < words) chosen[r] = wide(z[target[r]]) * inverse;
    }
}

// In place, logits to their gradient: g (at the target) - p (g + h (log p + entropy)); h may be NULL.
void turnout_head_gradient(bf16 *raw, const int64_t *target, const float *lse, const float *entropy, const float *g,
                           const float *h, int64_t rows, int64_t words, float inverse) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *z = raw + r * words;
        float sum = lse[r], up = g[r], more = h ? h[r] : 0.0f, shift = h ? entropy[r] : 0.0f, at = 0.0f;
        int inside = target[r] >= 0 && target[r] < words;
        if (inside) at = wide(z[target[r]]) * inverse - sum;
#pragma omp simd
        for (int64_t i = 0; i < words; i++) {
            float logp = wide(z[i]) * inverse - sum;
            z[i] = narrow(-exp_fast(logp) * (up + more * (logp + shift)));
        }
        if (inside) z[target[r]] = narrow(up - expf(at) * (up + more * (at + shift)));
    }
}

// AdamW over flat buffers, one pass: gradients are scaled first (clipping); `out` gets the new parameters in bf16.
// `rate` is lr over the first moment's bias correction, `root` the root of the second's, `kept` 1 - lr * weight decay.
void turnout_adamw(float *p, float *m, float *v, const float *grad, bf16 *out, int64_t count, float keep1, float mix1,
                   float keep2, float mix2, float scale, float kept, float rate, float root, float eps) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = grad[i] * scale;
        m[i] = keep1 * m[i] + mix1 * g;
        v[i] = keep2 * v[i] + mix2 * g * g;
        float new = kept * p[i] - rate * m[i] / (sqrtf(v[i]) / root + eps);
        p[i] = new;
        out[i] = narrow(new);
    }
}
