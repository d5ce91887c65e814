/* Matrix products y[rows][n] = x[rows][k] w[n][k]^T with bf16 weights packed for the processor, float sums.
 *
 * Contract. A row of the result depends on its own input row only: the sums over k are made in the same order
 * whatever the number of rows, the row's place among them, and the number of threads. So no batch changes a bit.
 *
 * Packing: block (n / 16, k / 32) holds 16 pairs of k for 16 outputs, [pair][output][2], 1 KiB; zeros pad n and k.
 * That is the form of the AMX tile product (TDPBF16PS), and as good as any for plain vectors; the packed copy is
 * the only copy of the weights, so what is digested and read back is what is multiplied.
 */
#include "products.h"
#include "vectors.h"

/* ---- packing ---- */

/* Eight lines of eight words of 32 bits, transposed; steps are in elements of 16 bits. */
#ifdef __AVX2__
INLINE __m256i two_lines(const uint16_t *low, const uint16_t *high) {
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)low);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)(const void *)high), 1);
}

INLINE void transpose(const uint16_t *from, int64_t from_step, uint16_t *to, int64_t to_step) {
    for (int half = 0; half < 2; half++, from += 8, to += 4 * to_step) { /* four words of each line */
        __m256i line[4], pair[4];
        for (int r = 0; r < 4; r++) line[r] = two_lines(from + r * from_step, from + (r + 4) * from_step);
        pair[0] = _mm256_unpacklo_epi32(line[0], line[1]), pair[1] = _mm256_unpackhi_epi32(line[0], line[1]);
        pair[2] = _mm256_unpacklo_epi32(line[2], line[3]), pair[3] = _mm256_unpackhi_epi32(line[2], line[3]);
        for (int w = 0; w < 4; w++) {
            __m256i left = pair[w / 2], right = pair[w / 2 + 2];
            __m256i word = w % 2 ? _mm256_unpackhi_epi64(left, right) : _mm256_unpacklo_epi64(left, right);
            _mm256_storeu_si256((__m256i *)(void *)(to + w * to_step), word);
        }
    }
}
#else
INLINE void transpose(const uint16_t *from, int64_t from_step, uint16_t *to, int64_t to_step) {
    for (int64_t w = 0; w < 8; w++)
        for (int64_t r = 0; r < 8; r++) memcpy(to + w * to_step + 2 * r, from + r * from_step + 2 * w, 4);
}
#endif

void pack_block(const uint16_t *from, int64_t rows, int64_t k, uint16_t *block) {
    int64_t i = 0;
    if (rows < TILE || k % DEPTH) memset(block, 0, (size_t)((k + DEPTH - 1) / DEPTH * BLOCK) * 2);
    for (; rows == TILE && i + 16 <= k; i += 16)
        for (int64_t r = 0; r < TILE; r += 8) transpose(from + r * k + i, k, block + i * TILE + r * 2, TILE * 2);
    for (; i + 1 < k; i += 2) /* a pair of inputs of one row at a time: whole lines are written */
        for (int64_t r = 0; r < rows; r++) memcpy(block + i * TILE + r * 2, from + r * k + i, 4);
    if (k % 2)
        for (int64_t r = 0; r < rows; r++) block[(k - 1) * TILE + r * 2] = from[r * k + k - 1];
}

void unpack_block(const uint16_t *block, int64_t rows, int64_t k, uint16_t *to, int64_t stride) {
    int64_t i = 0;
    for (; rows == TILE && i + 16 <= k; i += 16)
        for (int64_t r = 0; r < TILE; r += 8) transpose(block + i * TILE + r * 2, TILE * 2, to + r * stride + i, stride);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = i; at < k; at++) to[r * stride + at] = block[(at / 2) * (TILE * 2) + r * 2 + at % 2];
}

void turnout_unpack(const uint16_t *from, int64_t n, int64_t k, int64_t first, int64_t step, uint16_t *to) {
    int64_t depth = (k + DEPTH - 1) / DEPTH, blocks = (n + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) if (n * k > 262144)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t rows = n - b * TILE < TILE ? n - b * TILE : TILE;
        unpack_block(from + (first + b * step) * depth * BLOCK, rows, k, to + b * TILE * k, k);
    }
}

/* ---- kernels: sums[32][32] for up to 32 rows and one or two blocks ---- */

#if defined(__AMX_BF16__) && defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int amx_allowed = -1;

/* Asks the kernel once for the tile registers (Linux, arch_prctl ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA 18);
   TURNOUT_AMX=0 forgoes them. */
static int amx(void) {
    if (amx_allowed < 0) {
        const char *wish = getenv("TURNOUT_AMX");
        amx_allowed = !(wish && !strcmp(wish, "0")) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    }
    return amx_allowed;
}

/* Palette 1: eight tiles of 16 rows of 64 bytes. Static, since the compiler's intrinsic does not tell it that all
   64 bytes are read. */
static const uint8_t config[64] __attribute__((aligned(64))) = {
    [0] = 1, [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64, [28] = 64, [30] = 64,
    [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};

void turnout_products_begin(void *saved) {
    if (!amx()) return;
    _tile_storeconfig(saved);
    _tile_loadconfig(config);
}

void turnout_products_end(const void *saved) {
    if (!amx()) return;
    if (((const uint8_t *)saved)[0]) _tile_loadconfig(saved);
    else _tile_release();
}

/* Rows in two tiles, one or two blocks of outputs. */
static void amx_wide(const uint16_t *x, int64_t stride, const uint16_t *b0, const uint16_t *b1, int64_t depth, float *sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < depth; k++) {
        _tile_loadd(4, x + k * DEPTH, stride * 2);
        _tile_loadd(6, b0 + k * BLOCK, 64);
        _tile_loadd(5, x + TILE * stride + k * DEPTH, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (b1) {
            _tile_loadd(7, b1 + k * BLOCK, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

/* Rows in one tile. */
static void amx_narrow(const uint16_t *x, int64_t stride, const uint16_t *b0, const uint16_t *b1, int64_t depth, float *sums) {
    _tile_zero(0); _tile_zero(1);
    for (int64_t k = 0; k < depth; k++) {
        _tile_loadd(4, x + k * DEPTH, stride * 2);
        _tile_loadd(6, b0 + k * BLOCK, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (b1) {
            _tile_loadd(7, b1 + k * BLOCK, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
}
#else
static int amx(void) { return 0; }
void turnout_products_begin(void *saved) { (void)saved; }
void turnout_products_end(const void *saved) { (void)saved; }
#define amx_wide plain
#define amx_narrow plain
static void plain(const uint16_t *x, int64_t stride, const uint16_t *b0, const uint16_t *b1, int64_t depth, float *sums) {
    (void)x, (void)stride, (void)b0, (void)b1, (void)depth, (void)sums;
}
#endif

#ifdef __AVX512F__
#define STRIP_ROWS 8

/* n rows against one block, even and odd inputs in sums of their own. */
INLINE void vector_rows(int n, const uint16_t *x, int64_t stride, const uint16_t *block, int64_t depth, float *sums) {
    vec even[8], odd[8];
    for (int r = 0; r < n; r++) even[r] = odd[r] = (vec){0};
    for (int64_t pair = 0; pair < depth * (DEPTH / 2); pair++) {
        uvec both = *(const uvec *)(const void *)(block + pair * TILE * 2);
        vec low = (vec)(both << 16), high = (vec)(both & 0xffff0000u);
        for (int r = 0; r < n; r++) {
            const uint16_t *at = x + r * stride + pair * 2;
            even[r] += low * bf16_to_float(at[0]);
            odd[r] += high * bf16_to_float(at[1]);
        }
    }
    for (int r = 0; r < n; r++) *(vecu *)(sums + r * 32) = even[r] + odd[r];
}
#else
/* The same with few enough registers: one sum for both; a pair of inputs comes as one word to all lanes, which are
   then its even or its odd half. */
#define PARTS (TILE / LANES)
#define STRIP_ROWS 4

INLINE void vector_rows(int n, const uint16_t *x, int64_t stride, const uint16_t *block, int64_t depth, float *sums) {
    vec sum[STRIP_ROWS][PARTS];
    for (int r = 0; r < n; r++)
        for (int p = 0; p < PARTS; p++) sum[r][p] = (vec){0};
    for (int64_t pair = 0; pair < depth * (DEPTH / 2); pair++) {
        const uvec *both = (const uvec *)(const void *)(block + pair * TILE * 2);
        vec low[PARTS], high[PARTS];
        for (int p = 0; p < PARTS; p++) low[p] = (vec)(both[p] << 16), high[p] = (vec)(both[p] & 0xffff0000u);
        for (int r = 0; r < n; r++) {
            uint32_t inputs;
            memcpy(&inputs, x + r * stride + pair * 2, 4);
            uvec two = (uvec){0} + inputs;
            vec even = (vec)(two << 16), odd = (vec)(two & 0xffff0000u);
            for (int p = 0; p < PARTS; p++) sum[r][p] += low[p] * even;
            for (int p = 0; p < PARTS; p++) sum[r][p] += high[p] * odd;
        }
    }
    for (int r = 0; r < n; r++)
        for (int p = 0; p < PARTS; p++) *(vecu *)(sums + r * 32 + p * LANES) = sum[r][p];
}
#endif

static void vector_strip(const uint16_t *x, int64_t rows, int64_t stride, const uint16_t *block, int64_t depth, float *sums) {
    int64_t r = 0;
    for (; r + STRIP_ROWS <= rows; r += STRIP_ROWS)
        vector_rows(STRIP_ROWS, x + r * stride, stride, block, depth, sums + r * 32);
    for (; r + 2 <= rows; r += 2) vector_rows(2, x + r * stride, stride, block, depth, sums + r * 32);
    for (; r < rows; r++) vector_rows(1, x + r * stride, stride, block, depth, sums + r * 32);
}

void turnout_product_share(const product_t *p, int thread, int threads) {
    int64_t depth = p->matrix.depth_blocks, stride = depth * DEPTH, strips = (p->matrix.blocks + 1) / 2;
    int64_t from = strips * thread / threads, to = strips * (thread + 1) / threads;
    float sums[BLOCK_ROWS * 32] __attribute__((aligned(64)));
    for (int64_t strip = from; strip < to; strip++) {
        const uint16_t *b0 = p->matrix.weights + strip * 2 * depth * BLOCK;
        const uint16_t *b1 = strip * 2 + 1 < p->matrix.blocks ? b0 + depth * BLOCK : 0;
        for (int64_t row = 0; row < p->rows; row += BLOCK_ROWS) {
            int64_t count = p->rows - row < BLOCK_ROWS ? p->rows - row : BLOCK_ROWS;
            const uint16_t *x = p->input + row * stride;
            if (amx()) {
                if (count > TILE) amx_wide(x, stride, b0, b1, depth, sums);
                else amx_narrow(x, stride, b0, b1, depth, sums);
            } else {
                vector_strip(x, count, stride, b0, depth, sums);
                if (b1) vector_strip(x, count, stride, b1, depth, sums + 16);
            }
            p->take(p, sums, row, count, strip * 2, b1 ? 32 : 16);
        }
    }
}

/* Which kernel this machine runs: 1 AMX tiles, 0 plain vectors. */
int turnout_products_kernel(void) { return amx(); }
