/* Paged attention over a flat batch of query rows, and the writing of new keys and values into the pages.
 *
 * Contract. A row belongs to one sequence (its line of the page table) and has a position p; it attends to
 * keys 0..p of that sequence. Its result depends on nothing but its own query and those keys and values: the
 * order of every addition is fixed by p alone, so decode, prefill and any chunking agree bit for bit, at any
 * number of threads. A row whose sequence is -1 is padding: nothing is written, its output is zero.
 *
 * Layout. Pages hold PAGE = 16 tokens. Keys lie as [page][kv_head][head_dim][PAGE], so that one vector holds
 * one dimension of 16 keys and scores need no horizontal sums; values as [page][kv_head][PAGE][padded_dim],
 * padded_dim being head_dim rounded up to 16. Query heads that share a key head, and up to
 * MAX_QUERIES / group rows of one sequence, are walked together over the same keys.
 */
#include "attention.h"
#include "vectors.h"
#include <stdlib.h>

#define PAGE 16
#ifdef __AVX512F__
#define MAX_QUERIES 8
#else
#define MAX_QUERIES 4 /* as many as there are registers for */
#endif
#define WIDE (2 * LANES)

/* Scores of n queries with the 16 keys of one page, query q's from out + q * stride on. */
INLINE void page_scores(int n, int bf16, const float *query, int64_t dim, const void *keys, int64_t at, float *out,
                        int64_t stride) {
    for (int part = 0; part < PAGE; part += LANES) {
        vec even[MAX_QUERIES], odd[MAX_QUERIES];
        for (int q = 0; q < n; q++) even[q] = odd[q] = (vec){0};
        for (int64_t d = 0; d < dim; d += 2) {
            vec k0 = load_vec(keys, at + d * PAGE + part, bf16), k1 = load_vec(keys, at + (d + 1) * PAGE + part, bf16);
            for (int q = 0; q < n; q++) {
                even[q] += k0 * query[q * dim + d];
                odd[q] += k1 * query[q * dim + d + 1];
            }
        }
        for (int q = 0; q < n; q++) *(vecu *)(out + q * stride + part) = even[q] + odd[q];
    }
}

/* Turns scores[0..length) into exp(score - max), zero up to the next page's end; returns 1 / sum. */
static float softmax_weights(float *scores, int64_t length) {
    int64_t end = (length + PAGE - 1) / PAGE * PAGE;
    for (int64_t i = length; i < end; i++) scores[i] = -3.0e38f;
    vec *s = (vec *)scores, high = s[0], sums = {0};
    for (int64_t i = 1; i < end / LANES; i++) {
        ivec more = s[i] > high;
        high = (vec)(((ivec)s[i] & more) | ((ivec)high & ~more));
    }
    float top = high[0];
    for (int i = 1; i < LANES; i++) top = high[i] > top ? high[i] : top;
    for (int64_t i = 0; i < end / LANES; i++) {
        s[i] = exp_vec(s[i] - top);
        sums += s[i];
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return 1.0f / total;
}

/* acc[q] += weight[q][j] * value[j] for tokens [from, to) of one page, in the order of j. */
INLINE void page_values(int n, int bf16, const float *weights, int64_t stride, const void *values, int64_t at,
                        int64_t padded, int from, int to, vec *low, vec *high, int wide) {
    for (int j = from; j < to; j++) {
        vec v0 = load_vec(values, at + j * padded, bf16), v1 = wide ? load_vec(values, at + j * padded + LANES, bf16) : v0;
        for (int q = 0; q < n; q++) {
            low[q] += v0 * weights[q * stride + j];
            if (wide) high[q] += v1 * weights[q * stride + j];
        }
    }
}

/* Weighted sums over the values for dimensions [d, d + LANES) or, wide, [d, d + WIDE). `shared` tokens are seen by
 * all n queries; what a later row sees beyond them is added one query at a time, in the same order. */
INLINE void sum_values(int n, int bf16, const turnout_attention *a, const int32_t *pages, const float *weights,
                       int64_t stride, const int64_t *length, int64_t head, int64_t d, int wide, float *out) {
    int64_t padded = (a->head_dim + 15) / 16 * 16, page_size = PAGE * padded;
    int64_t shared = length[0];
    vec low[MAX_QUERIES], high[MAX_QUERIES];
    for (int q = 0; q < n; q++) low[q] = high[q] = (vec){0};
    for (int64_t page = 0; page * PAGE < shared; page++) {
        int64_t at = (pages[page] * a->kv_heads + head) * page_size + d, left = shared - page * PAGE;
        page_values(n, bf16, weights + page * PAGE, stride, a->value_pages, at, padded, 0,
                    left < PAGE ? (int)left : PAGE, low, high, wide);
    }
    for (int q = 0; q < n; q++) {
        for (int64_t j = shared; j < length[q]; j++) {
            int64_t at = (pages[j / PAGE] * a->kv_heads + head) * page_size + (j % PAGE) * padded + d;
            low[q] += load_vec(a->value_pages, at, bf16) * weights[q * stride + j];
            if (wide) high[q] += load_vec(a->value_pages, at + LANES, bf16) * weights[q * stride + j];
        }
        *(vecu *)(out + q * padded + d) = low[q];
        if (wide) *(vecu *)(out + q * padded + d + LANES) = high[q];
    }
}

/* One block of rows with `per_row` query heads of one key head: n = rows * per_row queries. */
INLINE void walk(int n, int bf16, const turnout_attention *a, block_t block, int64_t head, int64_t first_query,
                 int64_t per_row, float *scratch) {
    int64_t dim = a->head_dim, padded = (dim + 15) / 16 * 16, out_row = a->out_row ? a->out_row : a->heads * dim;
    const int32_t *pages = a->table + a->sequence[block.first_row] * a->table_width;
    int64_t length[MAX_QUERIES], longest = a->position[block.first_row + block.rows - 1] + 1;
    int64_t stride = (longest + PAGE - 1) / PAGE * PAGE;
    float *query = scratch, *out = query + MAX_QUERIES * padded, *weights = out + MAX_QUERIES * padded;
    for (int q = 0; q < n; q++) {
        int64_t row = block.first_row + q / per_row;
        int64_t from = row * a->query_row + (first_query + q % per_row) * a->query_head;
        length[q] = a->position[row] + 1;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) *(vecu *)(query + q * dim + d) = load_vec(a->query, from + d, bf16) * a->scale;
        for (; d < dim; d++)
            query[q * dim + d] = a->scale * (bf16 ? bf16_to_float(((const uint16_t *)a->query)[from + d])
                                                  : ((const float *)a->query)[from + d]);
    }
    for (int64_t page = 0; page * PAGE < longest; page++) {
        int64_t keys = (pages[page] * a->kv_heads + head) * dim * PAGE;
        page_scores(n, bf16, query, dim, a->key_pages, keys, weights + page * PAGE, stride);
    }
    float inverse[MAX_QUERIES];
    for (int q = 0; q < n; q++) inverse[q] = softmax_weights(weights + q * stride, length[q]);
    int64_t d = 0;
    for (; d + WIDE <= padded; d += WIDE)
        sum_values(n, bf16, a, pages, weights, stride, length, head, d, 1, out);
    if (d < padded) sum_values(n, bf16, a, pages, weights, stride, length, head, d, 0, out);
    for (int q = 0; q < n; q++) {
        int64_t to = (block.first_row + q / per_row) * out_row + (first_query + q % per_row) * dim;
        for (d = 0; bf16 && d + LANES <= dim; d += LANES)
            store_bf16((uint16_t *)a->out + to + d, *(const vecu *)(out + q * padded + d) * inverse[q]);
        for (d = bf16 ? dim / LANES * LANES : 0; d < dim; d++) {
            float x = out[q * padded + d] * inverse[q];
            if (bf16) ((uint16_t *)a->out)[to + d] = float_to_bf16(x);
            else ((float *)a->out)[to + d] = x;
        }
    }
}

#define WALK(n, bf16) walk(n, bf16, a, block, head, first_query, per_row, scratch)
#define CASE(n) case n: if (a->bf16) WALK(n, 1); else WALK(n, 0); break

static void walk_any(const turnout_attention *a, block_t block, int64_t head, int64_t first_query,
                     int64_t per_row, float *scratch) {
    switch (block.rows * per_row) {
        CASE(1); CASE(2); CASE(3); CASE(4);
#if MAX_QUERIES > 4
        CASE(5); CASE(6); CASE(7); CASE(8);
#endif
    }
}

/* Writes the new key and value of one row into its page. */
static void write_row(const turnout_attention *a, int64_t row) {
    if (a->sequence[row] < 0) return;
    int64_t dim = a->head_dim, padded = (dim + 15) / 16 * 16, position = a->position[row];
    int64_t page = a->table[a->sequence[row] * a->table_width + position / PAGE], slot = position % PAGE;
    for (int64_t head = 0; head < a->kv_heads; head++) {
        int64_t k = row * a->key_row + head * a->key_head, v = row * a->value_row + head * a->value_head;
        int64_t to_k = (page * a->kv_heads + head) * dim * PAGE + slot;
        int64_t to_v = ((page * a->kv_heads + head) * PAGE + slot) * padded;
        if (a->bf16) {
            for (int64_t d = 0; d < dim; d++)
                ((uint16_t *)a->key_pages)[to_k + d * PAGE] = ((const uint16_t *)a->key)[k + d];
            memcpy((uint16_t *)a->value_pages + to_v, (const uint16_t *)a->value + v, 2 * dim);
        } else {
            for (int64_t d = 0; d < dim; d++)
                ((float *)a->key_pages)[to_k + d * PAGE] = ((const float *)a->key)[k + d];
            memcpy((float *)a->value_pages + to_v, (const float *)a->value + v, 4 * dim);
        }
    }
}

/* Cuts the batch into blocks of neighbouring rows of one sequence at consecutive positions; padding rows get zeros. */
int turnout_attention_plan(const turnout_attention *a, attention_plan_t *plan) {
    int64_t group = a->heads / a->kv_heads, per_row = group < MAX_QUERIES ? group : MAX_QUERIES;
    int64_t limit = MAX_QUERIES / per_row, count = 0, longest = 0;
    block_t *blocks = malloc(sizeof(block_t) * (size_t)(a->rows + 1));
    if (!blocks) return 1;
    for (int64_t row = 0; row < a->rows;) {
        if (a->sequence[row] < 0) {
            size_t width = (size_t)(a->heads * a->head_dim) * (a->bf16 ? 2 : 4);
            memset((char *)a->out + row * width, 0, width);
            row++;
            continue;
        }
        int64_t end = row + 1;
        while (end < a->rows && end - row < limit && a->sequence[end] == a->sequence[row] &&
               a->position[end] == a->position[end - 1] + 1)
            end++;
        blocks[count++] = (block_t){row, end - row};
        if (a->position[end - 1] >= longest) longest = a->position[end - 1] + 1;
        row = end;
    }
    *plan = (attention_plan_t){blocks, count, longest};
    return 0;
}

/* Floats of scratch that one thread needs. */
int64_t turnout_attention_floats(const turnout_attention *a, const attention_plan_t *plan) {
    int64_t padded = (a->head_dim + 15) / 16 * 16;
    return MAX_QUERIES * (2 * padded + (plan->longest + PAGE - 1) / PAGE * PAGE);
}

void turnout_attention_team(const turnout_attention *a, const attention_plan_t *plan, float *scratch) {
    int64_t group = a->heads / a->kv_heads, per_row = group < MAX_QUERIES ? group : MAX_QUERIES;
    int64_t parts = (group + per_row - 1) / per_row, work = plan->count * a->kv_heads * parts;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) write_row(a, row);
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < work; item++) {
        int64_t part = item % parts, head = item / parts % a->kv_heads, done = part * per_row;
        int64_t heads_here = group - done < per_row ? group - done : per_row;
        walk_any(a, plan->blocks[item / parts / a->kv_heads], head, head * group + done, heads_here, scratch);
    }
}

/* Writes all new keys and values, then attends. Returns 0, or 1 where memory is missing. */
int turnout_paged_attention(const turnout_attention *a) {
    attention_plan_t plan;
    if (turnout_attention_plan(a, &plan)) return 1;
    size_t bytes = ((size_t)turnout_attention_floats(a, &plan) * sizeof(float) + 63) / 64 * 64;
    int missing = 0;
#pragma omp parallel
    {
        float *scratch = aligned_alloc(64, bytes);
        if (!scratch) {
#pragma omp atomic write
            missing = 1;
        }
#pragma omp barrier
        if (!missing) turnout_attention_team(a, &plan, scratch);
        free(scratch);
    }
    free(plan.blocks);
    return missing;
}
