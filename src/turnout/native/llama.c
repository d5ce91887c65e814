/* One step of a Llama-like model (Llama, Mistral, Qwen2, Qwen3) over a flat batch of rows, in one call.
 *
 * Contract. Weights and cached keys and values are bf16, everything between is float: the residual stream, norms,
 * rotary, scores and sums; a value is rounded to bf16 once, where a product takes it as input or the cache stores
 * it. A row's bits depend on its own sequence only (see products.c and attention.c; norms and rotary are per row).
 * One team of threads runs the whole step, with a barrier between its parts.
 */
#include "attention.h"
#include "products.h"
#include "vectors.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>

typedef struct {
    packed_t qkv, out, gate_up, down;   /* gate and up blocks alternate */
    const uint16_t *input_norm, *mlp_norm; /* [hidden] */
    const uint16_t *qkv_bias;           /* [heads + 2 kv_heads][head_dim] or null */
    const uint16_t *query_norm, *key_norm; /* [head_dim] or null */
} turnout_layer;

typedef struct {
    int64_t layers, hidden, inter, heads, kv_heads, head_dim;
    float eps, scale;
    const turnout_layer *layer;
    const uint16_t *norm;               /* [hidden] */
    const uint16_t *embedding;          /* [vocabulary][hidden], or packed when embedding_depth > 0 */
    int64_t embedding_depth;            /* depth blocks of the packed form */
    const float *rotary;                /* [positions][head_dim]: head_dim / 2 cosines, then as many sines */
} turnout_llama;

typedef struct {
    int64_t rows, table_width;
    const int64_t *tokens;
    const int32_t *position, *sequence, *table;
    void *const *key_pages, *const *value_pages; /* per layer */
    float *residual;                    /* [rows][hidden] */
    uint16_t *narrow;                   /* [padded rows][padded max(hidden, heads * head_dim)] */
    float *qkv;                         /* [rows][(heads + 2 kv_heads) * head_dim] */
    uint16_t *attended;                 /* [padded rows][padded heads * head_dim] */
    uint16_t *gated;                    /* [padded rows][padded inter] */
    uint16_t *heads_in;                 /* [rows][(heads + 2 kv_heads) * head_dim] */
} turnout_llama_step;

static int64_t padded(int64_t n) { return (n + DEPTH - 1) / DEPTH * DEPTH; }

/* ---- what becomes of a product's sums ---- */

static void take_float(const product_t *p, const float *sums, int64_t first, int64_t count, int64_t block, int64_t columns) {
    int64_t at = block * TILE, n = p->real_columns - at < columns ? p->real_columns - at : columns;
    for (int64_t r = 0; r < count; r++) {
        float *to = (float *)p->out + (first + r) * p->out_stride + at;
        int64_t c = 0;
        for (; c + LANES <= n; c += LANES) {
            vec sum = *(const vecu *)(sums + r * 32 + c);
            *(vecu *)(to + c) = p->bias ? sum + load_vec(p->bias, at + c, 1) : sum;
        }
        for (; c < n; c++) to[c] = sums[r * 32 + c] + (p->bias ? bf16_to_float(p->bias[at + c]) : 0.0f);
    }
}

static void take_residual(const product_t *p, const float *sums, int64_t first, int64_t count, int64_t block, int64_t columns) {
    int64_t at = block * TILE, n = p->real_columns - at < columns ? p->real_columns - at : columns;
    for (int64_t r = 0; r < count; r++) {
        float *to = (float *)p->out + (first + r) * p->out_stride + at;
        int64_t c = 0;
        for (; c + LANES <= n; c += LANES) *(vecu *)(to + c) += *(const vecu *)(sums + r * 32 + c);
        for (; c < n; c++) to[c] += sums[r * 32 + c];
    }
}

/* silu(gate) * up of one pair of blocks, rounded to bf16. */
static void take_gate(const product_t *p, const float *sums, int64_t first, int64_t count, int64_t block, int64_t columns) {
    (void)columns;
    for (int64_t r = 0; r < count; r++) {
        uint16_t *to = (uint16_t *)p->out + (first + r) * p->out_stride + block / 2 * TILE;
        for (int64_t c = 0; c < TILE; c += LANES) {
            vec gate = *(const vecu *)(sums + r * 32 + c), up = *(const vecu *)(sums + r * 32 + TILE + c);
            ivec low = gate < splat(-87.0f);
            vec safe = (vec)(((ivec)gate & ~low) | ((ivec)splat(-87.0f) & low));
            /* exp_vec wants x <= 0: silu(x) = x / (1 + e^-x) = x e^x / (1 + e^x) where x < 0 */
            ivec negative = safe < splat(0.0f);
            vec magnitude = (vec)((ivec)safe & 0x7fffffff);
            vec e = exp_vec(-magnitude);
            vec top = (vec)(((ivec)e & negative) | ((ivec)splat(1.0f) & ~negative));
            store_bf16(to + c, gate * top / (e + 1.0f) * up);
        }
    }
}

/* ---- parts of a row ---- */

static void rms_norm(const float *x, const uint16_t *weight, uint16_t *out, int64_t n, float eps) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v = *(const vecu *)(x + i);
        squares += v * v;
    }
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += squares[l];
    for (int64_t j = i; j < n; j++) sum += x[j] * x[j];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store_bf16(out + i, *(const vecu *)(x + i) * scale * load_vec(weight, i, 1));
    for (; i < n; i++) out[i] = float_to_bf16(x[i] * scale * bf16_to_float(weight[i]));
}

/* Norm where there is one, rotation, rounding: one head of queries or keys. dim is a multiple of 16. */
static void turn_head(float *x, const uint16_t *norm, const float *rotary, uint16_t *out, int64_t dim, float eps) {
    if (norm) {
        vec squares = {0};
        for (int64_t i = 0; i < dim; i += LANES) squares += *(const vecu *)(x + i) * *(const vecu *)(x + i);
        float sum = 0.0f;
        for (int l = 0; l < LANES; l++) sum += squares[l];
        float scale = 1.0f / sqrtf(sum / (float)dim + eps);
        for (int64_t i = 0; i < dim; i += LANES) *(vecu *)(x + i) = *(const vecu *)(x + i) * scale * load_vec(norm, i, 1);
    }
    int64_t half = dim / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec a = *(const vecu *)(x + i), b = *(const vecu *)(x + i + half);
        vec c = *(const vecu *)(rotary + i), s = *(const vecu *)(rotary + half + i);
        store_bf16(out + i, a * c - b * s);
        store_bf16(out + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half], c = rotary[i], s = rotary[half + i];
        out[i] = float_to_bf16(a * c - b * s);
        out[i + half] = float_to_bf16(b * c + a * s);
    }
}

static void embed(const turnout_llama *m, int64_t token, float *to) {
    if (!m->embedding_depth) {
        for (int64_t i = 0; i < m->hidden; i++) to[i] = bf16_to_float(m->embedding[token * m->hidden + i]);
        return;
    }
    const uint16_t *block = m->embedding + token / TILE * m->embedding_depth * TILE * DEPTH + token % TILE * 2;
    for (int64_t i = 0; i < m->hidden; i++) to[i] = bf16_to_float(block[i / 2 * (TILE * 2) + i % 2]);
}

static void turn_row(const turnout_llama *m, const turnout_layer *layer, const turnout_llama_step *s, int64_t row) {
    int64_t dim = m->head_dim, width = (m->heads + 2 * m->kv_heads) * dim;
    float *from = s->qkv + row * width;
    uint16_t *to = s->heads_in + row * width;
    const float *rotary = m->rotary + (int64_t)s->position[row] * dim;
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++)
        turn_head(from + h * dim, h < m->heads ? layer->query_norm : layer->key_norm, rotary, to + h * dim, dim, m->eps);
    for (int64_t i = (m->heads + m->kv_heads) * dim; i < width; i += LANES) store_bf16(to + i, *(const vecu *)(from + i));
}

/* ---- the step ---- */

typedef struct {
    int thread, threads;
    float *scratch;
} member_t;

static void share(const product_t p, member_t me) {
    turnout_product_share(&p, me.thread, me.threads);
#pragma omp barrier
}

static void layer_team(const turnout_llama *m, const turnout_llama_step *s, int64_t l, const attention_plan_t *plan, member_t me) {
    const turnout_layer *layer = m->layer + l;
    int64_t dim = m->head_dim, width = (m->heads + 2 * m->kv_heads) * dim, hidden = padded(m->hidden);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s->rows; r++)
        rms_norm(s->residual + r * m->hidden, layer->input_norm, s->narrow + r * hidden, m->hidden, m->eps);
    share((product_t){s->narrow, s->rows, layer->qkv, take_float, s->qkv, width, layer->qkv_bias, width}, me);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s->rows; r++) turn_row(m, layer, s, r);
    turnout_attention a = {
        .query = s->heads_in, .key = s->heads_in + m->heads * dim, .value = s->heads_in + (m->heads + m->kv_heads) * dim,
        .out = s->attended, .key_pages = s->key_pages[l], .value_pages = s->value_pages[l],
        .table = s->table, .sequence = s->sequence, .position = s->position,
        .query_row = width, .query_head = dim, .key_row = width, .key_head = dim, .value_row = width, .value_head = dim,
        .out_row = padded(m->heads * dim), .rows = s->rows, .heads = m->heads, .kv_heads = m->kv_heads, .head_dim = dim,
        .table_width = s->table_width, .scale = m->scale, .bf16 = 1};
    turnout_attention_team(&a, plan, me.scratch);
    share((product_t){s->attended, s->rows, layer->out, take_residual, s->residual, m->hidden, 0, m->hidden}, me);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s->rows; r++)
        rms_norm(s->residual + r * m->hidden, layer->mlp_norm, s->narrow + r * hidden, m->hidden, m->eps);
    share((product_t){s->narrow, s->rows, layer->gate_up, take_gate, s->gated, padded(m->inter), 0, 0}, me);
    share((product_t){s->gated, s->rows, layer->down, take_residual, s->residual, m->hidden, 0, m->hidden}, me);
}

/* Leaves the normed last hidden states in s->narrow, [rows][padded hidden]. Returns 1 where memory is missing. */
int turnout_llama_hidden(const turnout_llama *m, const turnout_llama_step *s) {
    turnout_attention shape = {.sequence = s->sequence, .position = s->position, .rows = s->rows, .heads = m->heads,
                               .kv_heads = m->kv_heads, .head_dim = m->head_dim, .bf16 = 1};
    attention_plan_t plan;
    if (turnout_attention_plan(&shape, &plan)) return 1;
    size_t bytes = ((size_t)turnout_attention_floats(&shape, &plan) * sizeof(float) + 63) / 64 * 64;
    int missing = 0;
#pragma omp parallel
    {
        member_t me = {omp_get_thread_num(), omp_get_num_threads(), aligned_alloc(64, bytes)};
        uint8_t saved[SAVED_BYTES] __attribute__((aligned(64))) = {0};
        if (!me.scratch) {
#pragma omp atomic write
            missing = 1;
        }
        turnout_products_begin(saved);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s->rows; r++) embed(m, s->tokens[r], s->residual + r * m->hidden);
        if (!missing) {
            for (int64_t l = 0; l < m->layers; l++) layer_team(m, s, l, &plan, me);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < s->rows; r++)
                rms_norm(s->residual + r * m->hidden, m->norm, s->narrow + r * padded(m->hidden), m->hidden, m->eps);
        }
        turnout_products_end(saved);
        free(me.scratch);
    }
    free(plan.blocks);
    return missing;
}

/* input [rows padded to TILE][depth * DEPTH] bf16 -> out [rows][columns] float. */
void turnout_llama_logits(const packed_t *head, const uint16_t *input, int64_t rows, float *out, int64_t columns) {
    product_t p = {input, rows, *head, take_float, out, columns, 0, columns};
#pragma omp parallel
    {
        uint8_t saved[SAVED_BYTES] __attribute__((aligned(64))) = {0};
        turnout_products_begin(saved);
        turnout_product_share(&p, omp_get_thread_num(), omp_get_num_threads());
        turnout_products_end(saved);
    }
}
