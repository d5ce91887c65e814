/* Draws one token per row of logits and gives its log-prob, where no filter limits what can be drawn.
 *
 * Contract, per row whatever the others and the number of threads: log-prob = log-softmax(logits / temperature) over
 * the whole vocabulary (temperature 0: of the raw logits, and the token is the lowest id with the largest); else the
 * token is where the running sum of exp(scaled - largest) passes noise x total: blocks of BLOCK first, then inside.
 * A row with a NaN gives a log-prob that is not finite. The reference is turnout/engine/sampler.py.
 */
#include "vectors.h"
#include <math.h>
#include <stdlib.h>

#define BLOCK 256

typedef struct {
    const float *logits;
    int64_t vocabulary;
    float temperature, top;
} row_t;

/* LANES scaled logits from `at` on; beyond the vocabulary -3e38, whose weight is 0. */
INLINE vec scaled(const row_t *row, int64_t at) {
    vec x;
    if (at + LANES <= row->vocabulary) {
        x = *(const vecu *)(row->logits + at);
    } else {
        float part[LANES];
        for (int i = 0; i < LANES; i++) part[i] = at + i < row->vocabulary ? row->logits[at + i] : -3.0e38f;
        x = *(const vecu *)part;
    }
    return row->temperature == 1.0f ? x : x / row->temperature;
}

static void find_top(row_t *row) {
    vec high = splat(-INFINITY);
    for (int64_t at = 0; at < row->vocabulary; at += LANES) {
        vec x = scaled(row, at);
        ivec more = x > high;
        high = (vec)(((ivec)x & more) | ((ivec)high & ~more));
    }
    row->top = high[0];
    for (int i = 1; i < LANES; i++) row->top = high[i] > row->top ? high[i] : row->top;
}

static int64_t lowest_at_top(const row_t *row) {
    for (int64_t id = 0; id < row->vocabulary; id++)
        if (row->logits[id] == row->top) return id;
    return 0;
}

static float block_sum(const row_t *row, int64_t block) {
    vec sum = {0};
    for (int64_t at = block * BLOCK; at < (block + 1) * BLOCK && at < row->vocabulary; at += LANES)
        sum += exp_vec(scaled(row, at) - row->top);
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

/* The first index whose running sum exceeds the target; where rounding leaves none, the last that grew. `before`
   receives the sum up to it. */
static int64_t passes(const float *weights, int64_t count, double target, double *before) {
    double running = 0.0;
    int64_t grown = 0;
    *before = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double next = running + (double)weights[i];
        if (next > running) grown = i, *before = running;
        if (next > target) return i;
        running = next;
    }
    return grown;
}

static int64_t invert(const row_t *row, const float *sums, int64_t blocks, double target) {
    double before, unused;
    int64_t block = passes(sums, blocks, target, &before);
    float weights[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        int64_t at = block * BLOCK + i;
        *(vecu *)(weights + i) = at < row->vocabulary ? exp_vec(scaled(row, at) - row->top) : (vec){0};
    }
    return block * BLOCK + passes(weights, BLOCK, target - before, &unused);
}

/* logits [rows][vocabulary] float; temperature, noise, token, logprob [rows]. Returns 1 where memory is missing. */
int turnout_draw(const float *logits, int64_t rows, int64_t vocabulary, const float *temperature, const double *noise,
                 int64_t *token, double *logprob) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    float *all = malloc((size_t)(rows * blocks) * sizeof(float));
    if (!all) return 1;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++) {
        row_t row = {logits + r * vocabulary, vocabulary, temperature[r] == 0.0f ? 1.0f : temperature[r], 0.0f};
        float *sums = all + r * blocks;
        find_top(&row);
        double total = 0.0;
        for (int64_t b = 0; b < blocks; b++) total += (double)(sums[b] = block_sum(&row, b));
        int64_t chosen = temperature[r] == 0.0f ? lowest_at_top(&row) : invert(&row, sums, blocks, noise[r] * total);
        token[r] = chosen < vocabulary ? chosen : vocabulary - 1;
        logprob[r] = ((double)(row.logits[token[r]] / row.temperature) - (double)row.top) - log(total);
    }
    free(all);
    return 0;
}
