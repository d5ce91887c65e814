/* Paged attention as one team of OpenMP threads runs it; the contract is in attention.c. */
#ifndef TURNOUT_ATTENTION_H
#define TURNOUT_ATTENTION_H
#include <stdint.h>

typedef struct {
    const void *query;        /* [rows, heads, head_dim], strides below in elements, last dimension dense */
    const void *key, *value;  /* new keys and values, [rows, kv_heads, head_dim] likewise */
    void *out;                /* [rows, heads, head_dim], rows out_row elements apart, 0: dense */
    void *key_pages, *value_pages;
    const int32_t *table;     /* [sequences, table_width]: page numbers */
    const int32_t *sequence;  /* [rows]: line of the table, -1 for padding */
    const int32_t *position;  /* [rows] */
    int64_t query_row, query_head, key_row, key_head, value_row, value_head, out_row; /* strides */
    int64_t rows, heads, kv_heads, head_dim, table_width;
    float scale;
    int32_t bf16;             /* 1: all tensors are bf16, 0: float32 */
} turnout_attention;

typedef struct {
    int64_t first_row, rows; /* neighbouring rows of one sequence */
} block_t;

/* What is the same for all layers of a step: how the rows fall into blocks of work. */
typedef struct {
    block_t *blocks;
    int64_t count, longest;
} attention_plan_t;

int turnout_attention_plan(const turnout_attention *a, attention_plan_t *plan);
int64_t turnout_attention_floats(const turnout_attention *a, const attention_plan_t *plan);
/* Called by every thread of the team with scratch of its own, 64-byte aligned; has barriers inside and at its end. */
void turnout_attention_team(const turnout_attention *a, const attention_plan_t *plan, float *scratch);
#endif
