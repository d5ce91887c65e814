/* Matrix products with packed bf16 weights, to be called by every thread of an OpenMP team. */
#ifndef TURNOUT_PRODUCTS_H
#define TURNOUT_PRODUCTS_H
#include <stdint.h>

#define TILE 16        /* output columns of one packed block, and rows of one tile */
#define DEPTH 32       /* inputs of one packed block */
#define BLOCK (TILE * DEPTH)
#define BLOCK_ROWS 32  /* rows that a product handles at once; inputs are padded to whole tiles of rows */

/* The blocks of up to TILE rows of k inputs, dense in `from`: all elements, and zeros as padding. */
void pack_block(const uint16_t *from, int64_t rows, int64_t k, uint16_t *block);
/* The first k inputs of such blocks, as rows `stride` apart. */
void unpack_block(const uint16_t *block, int64_t rows, int64_t k, uint16_t *to, int64_t stride);

typedef struct {
    const uint16_t *weights;  /* [blocks][depth_blocks][DEPTH / 2][TILE][2] */
    int64_t blocks, depth_blocks;
} packed_t;

typedef struct product {
    const uint16_t *input;    /* [rows padded to TILE][depth_blocks * DEPTH] bf16 */
    int64_t rows;
    packed_t matrix;
    /* Called with the sums of one strip: `columns` (16 or 32) outputs from block `block` on, for the rows
       first .. first + count; sums[row * 32 + column]. */
    void (*take)(const struct product *, const float *sums, int64_t first, int64_t count, int64_t block, int64_t columns);
    void *out;                /* for `take` */
    int64_t out_stride;
    const uint16_t *bias;     /* bf16 or null */
    int64_t real_columns;     /* outputs that exist; the padding beyond is not written */
} product_t;

/* The calling thread's share of a product; no barrier. All threads of the team must call it. */
void turnout_product_share(const product_t *p, int thread, int threads);
/* Before and after a thread's products: its tile registers are set up, and given back as they were. */
void turnout_products_begin(void *saved);
void turnout_products_end(const void *saved);
#define SAVED_BYTES 64
#endif
