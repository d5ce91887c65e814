/* The encodings `packed` and `ranked` (docs/weights.md): changed elements of a tensor to gaps and differences within
   classes of the base, those to interleaved rANS with tables shared over many tensors, and back. The reference, byte
   for byte, is in turnout/weights/codecs/ranks.py and ans.py.

   rANS: J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540); two states, 32 bits wide, that put out 16-bit words.
   Nothing here trusts its input: every read of a part is checked, and what doesn't end exactly is refused. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define PROBABILITY_BITS 12
#define LOWEST_STATE (1u << 16)
#define BLOCK 512 /* elements of a base looked at together */
#define DENSE 16            /* with more than one change in so many elements, blocks are walked element by element */
#define MAX_CLASSES 64
#define AHEAD 48            /* changes whose place in the base is fetched before its turn */
#define FIXED_TABLES 3      /* tables of counts, of steps between gap tables, of steps between value tables */
#define INLINE static inline __attribute__((always_inline))

enum { CUT = -1, FOREIGN = -2, OUTSIDE = -3 };

typedef struct {
    const void *base;           /* [elements] of `width` bytes: the state before the change */
    void *positions;            /* [count] int32, or int64 where `wide`; ascending */
    void *bits;                 /* [count] of `width` bytes: the new patterns */
    int64_t elements, count;
    int32_t width, wide, shift, mask; /* the class before clamping is (pattern >> shift) & mask */
    int32_t lowest, classes;    /* exponents up to `lowest` are class 0; there are no changes above the last class */
    int64_t *counts;            /* [classes] changes; for turnout_change_exponents [mask + 1] */
    void *gaps;                 /* [count] like positions: by class, unchanged elements of the class before each */
    void *values;               /* [count] of `width` bytes: by class, new minus old pattern */
    uint32_t *histograms;       /* [classes][2][256]: symbols of gaps, of values */
    const uint8_t *gap_tables, *value_tables; /* [classes] */
    uint8_t *part;
    int64_t size;               /* encode: in the capacity, out the size; decode: the size */
} Tensor;

typedef struct {
    int32_t gap_tables, value_tables;
    const uint32_t *encode;     /* [tables][256]: frequency | first slot << 16 */
    const uint32_t *decode;     /* [tables][4096]: symbol | (frequency - 1) << 8 | (slot - first slot) << 20 */
} Tables;

/* ---- elements ---- */

INLINE uint64_t load(int width, const void *from, int64_t i) {
    switch (width) {
    case 1: return ((const uint8_t *)from)[i];
    case 2: return ((const uint16_t *)from)[i];
    case 4: return ((const uint32_t *)from)[i];
    default: return ((const uint64_t *)from)[i];
    }
}

INLINE void store(int width, void *to, int64_t i, uint64_t value) {
    switch (width) {
    case 1: ((uint8_t *)to)[i] = (uint8_t)value; break;
    case 2: ((uint16_t *)to)[i] = (uint16_t)value; break;
    case 4: ((uint32_t *)to)[i] = (uint32_t)value; break;
    default: ((uint64_t *)to)[i] = value;
    }
}

INLINE int64_t load_position(int wide, const void *from, int64_t i) {
    return wide ? ((const int64_t *)from)[i] : (int64_t)((const uint32_t *)from)[i];
}

INLINE void store_position(int wide, void *to, int64_t i, int64_t value) {
    if (wide) ((int64_t *)to)[i] = value;
    else ((uint32_t *)to)[i] = (uint32_t)value;
}

/* ---- symbols: numbers below 2^(m+1) are their own symbol; above, exponent and m bits; the rest are raw bits ---- */

INLINE int extra_of(uint64_t value, int m) {
    return 63 - __builtin_clzll(value | (uint64_t)1 << m) - m;
}

INLINE int symbol_of(uint64_t value, int extra, int m) { return (int)(((uint64_t)extra << m) + (value >> extra)); }

INLINE int extra_bits(int symbol, int m) {
    return (symbol >> m) - (symbol >= 1 << m);
}

INLINE uint64_t smallest(int symbol, int extra, int m) { return (uint64_t)(symbol - (extra << m)) << extra; }

INLINE int value_precision(int width) { return width == 8 ? 1 : 2; }

/* A difference is its sign (the symbol's lowest bit, 1 for negative) and its magnitude less one. */
INLINE uint64_t magnitude(int width, uint64_t difference, int *negative) {
    int64_t d = (int64_t)(difference << (64 - width * 8)) >> (64 - width * 8);
    *negative = d < 0;
    return (d < 0 ? (uint64_t)0 - (uint64_t)d : (uint64_t)d) - 1;
}

/* ---- classes of a block of a base ---- */

#define CLASSES(TYPE, LANES)                                                                   \
    {                                                                                          \
        typedef TYPE vector __attribute__((vector_size(64)));                                  \
        typedef uint8_t bytes __attribute__((vector_size(LANES)));                             \
        const TYPE *from = (const TYPE *)t->base + start;                                      \
        const TYPE mask = (TYPE)t->mask, lowest = (TYPE)t->lowest;                             \
        for (; i + LANES <= n; i += LANES) { /* in vectors, since C's promotion to int is slow */ \
            vector e;                                                                          \
            memcpy(&e, from + i, 64);                                                          \
            e = (e >> (TYPE)t->shift) & mask;                                                  \
            e = (e - lowest) & (vector)(e > lowest);                                           \
            if (sizeof(TYPE) == 8) e |= (vector)(e > 255);                                     \
            bytes c = __builtin_convertvector(e, bytes);                                       \
            memcpy(out + i, &c, LANES);                                                        \
        }                                                                                      \
    }

INLINE void classes_typed(int width, const Tensor *t, int64_t start, int n, uint8_t *out) {
    int i = 0;
    for (int ahead = 0; ahead < BLOCK * width; ahead += 64) /* the next block, while this one is worked on */
        __builtin_prefetch((const uint8_t *)t->base + (start + BLOCK) * width + ahead);
    if (width == 1) CLASSES(uint8_t, 64)
    else if (width == 2) CLASSES(uint16_t, 32)
    else if (width == 4) CLASSES(uint32_t, 16)
    else CLASSES(uint64_t, 8)
    for (; i < n; i++) {
        int64_t e = (int64_t)((load(width, t->base, start + i) >> t->shift) & (uint64_t)t->mask) - t->lowest;
        out[i] = (uint8_t)(e < 0 ? 0 : e > 255 ? 255 : e);
    }
    memset(out + n, 255, (size_t)(-n & 63));
}

INLINE uint64_t equal64(const uint8_t *at, uint8_t value) {
#if defined(__AVX512BW__)
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(at), _mm512_set1_epi8((char)value));
#elif defined(__AVX2__)
    __m256i v = _mm256_set1_epi8((char)value);
    uint32_t lo = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)at), v));
    uint32_t hi = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(at + 32)), v));
    return (uint64_t)hi << 32 | lo;
#else
    uint64_t found = 0;
    for (int i = 0; i < 64; i++) found |= (uint64_t)(at[i] == value) << i;
    return found;
#endif
}

INLINE int64_t count_in(const uint8_t *block, int n, uint8_t class) {
    int64_t count = 0;
    if (n == BLOCK) { /* a loop that the compiler unrolls */
        for (int i = 0; i < BLOCK; i += 64) count += __builtin_popcountll(equal64(block + i, class));
        return count;
    }
    for (int i = 0; i < n; i += 64) count += __builtin_popcountll(equal64(block + i, class));
    return count;
}

INLINE int64_t count_before(const uint8_t *block, int at, uint8_t class) {
    int64_t count = count_in(block, at & ~63, class);
    return count + __builtin_popcountll(equal64(block + (at & ~63), class) & (((uint64_t)1 << (at & 63)) - 1));
}

/* ---- a change to gaps and differences by class ---- */

/* counts [mask + 1]: how many changed elements have each exponent. */
void turnout_change_exponents(Tensor *tensors, int32_t n) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int32_t k = 0; k < n; k++) {
        Tensor *t = &tensors[k];
        for (int64_t i = 0; i < t->count; i++) {
            int64_t ahead = load_position(t->wide, t->positions, i + AHEAD < t->count ? i + AHEAD : i);
            __builtin_prefetch((const uint8_t *)t->base + ahead * t->width);
            uint64_t pattern = load(t->width, t->base, load_position(t->wide, t->positions, i));
            t->counts[(pattern >> t->shift) & (uint64_t)t->mask]++;
        }
    }
}

typedef struct {
    int64_t seen[256];          /* elements of each class before this place */
    int64_t next[MAX_CLASSES];  /* the rank that a gap of 0 would mean */
    int64_t slot[MAX_CLASSES];  /* where the class's next change is stored */
} Split;

INLINE void put(int width, Tensor *t, Split *s, int64_t i, int64_t position, uint8_t class, int64_t rank) {
    int64_t slot = s->slot[class]++;
    uint64_t difference = load(width, t->bits, i) - load(width, t->base, position);
    store_position(t->wide, t->gaps, slot, rank - s->next[class]);
    store(width, t->values, slot, difference);
    s->next[class] = rank + 1;
}

INLINE void split_ranked(int width, Tensor *t, Split *s) {
    uint8_t block[BLOCK + 64];
    int64_t i = 0;
    for (int64_t start = 0; i < t->count; start += BLOCK) {
        int n = (int)(t->elements - start < BLOCK ? t->elements - start : BLOCK);
        int64_t end = i;
        while (end < t->count && load_position(t->wide, t->positions, end) < start + n) end++;
        classes_typed(width, t, start, n, block);
        if ((end - i) * DENSE > n) {
            for (int o = 0; o < n; o++) {
                uint8_t class = block[o];
                if (i < end && load_position(t->wide, t->positions, i) == start + o)
                    put(width, t, s, i++, start + o, class, s->seen[class]);
                s->seen[class]++;
            }
            continue;
        }
        for (; i < end; i++) {
            int64_t position = load_position(t->wide, t->positions, i);
            uint8_t class = block[position - start];
            put(width, t, s, i, position, class, s->seen[class] + count_before(block, (int)(position - start), class));
        }
        for (int c = 0; c < t->classes; c++)
            if (t->counts[c]) s->seen[c] += count_in(block, n, (uint8_t)c);
    }
}

INLINE void split_typed(int width, Tensor *t) {
    Split s;
    memset(&s, 0, sizeof s);
    for (int c = 1; c < t->classes; c++) s.slot[c] = s.slot[c - 1] + t->counts[c - 1];
    if (t->mask) split_ranked(width, t, &s);
    else
        for (int64_t i = 0; i < t->count; i++) {
            int64_t ahead = load_position(t->wide, t->positions, i + AHEAD < t->count ? i + AHEAD : i);
            int64_t position = load_position(t->wide, t->positions, i);
            __builtin_prefetch((const uint8_t *)t->base + ahead * width);
            put(width, t, &s, i, position, 0, position);
        }
    const int m = value_precision(width);
    int64_t at = 0, raw_bits = 0;
    for (int c = 0; c < t->classes; c++) {
        uint32_t *gaps = t->histograms + c * 512, *values = gaps + 256;
        for (int64_t end = at + t->counts[c]; at < end; at++) {
            uint64_t gap = (uint64_t)load_position(t->wide, t->gaps, at);
            int negative;
            uint64_t size = magnitude(width, load(width, t->values, at), &negative);
            int gap_extra = extra_of(gap, 2), size_extra = extra_of(size, m);
            gaps[symbol_of(gap, gap_extra, 2)]++;
            values[symbol_of(size, size_extra, m) * 2 + negative]++;
            raw_bits += gap_extra + size_extra;
        }
    }
    /* Raw bits, at most 12 bits for each of two symbols, what a class has in the head, and the fixed fields. */
    t->size = raw_bits / 8 + 3 * t->count + 16 * t->classes + 64;
}

/* counts [classes] in; gaps, values and histograms out, and in `size` the room that the part may need. */
void turnout_change_split(Tensor *tensors, int32_t n) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int32_t k = 0; k < n; k++) {
        Tensor *t = &tensors[k];
        switch (t->width) {
        case 1: split_typed(1, t); break;
        case 2: split_typed(2, t); break;
        case 4: split_typed(4, t); break;
        default: split_typed(8, t);
        }
    }
}

/* ---- encoding ---- */

typedef struct { uint8_t *at; uint64_t held; int filled; } BitWriter;

/* At most 32 bits. */
INLINE void put_few(BitWriter *w, uint64_t value, int bits) {
    w->held |= (value & (((uint64_t)1 << bits) - 1)) << w->filled;
    w->filled += bits;
    memcpy(w->at, &w->held, 8); /* whole bytes stay, what follows is written again */
    w->at += w->filled >> 3;
    w->held >>= w->filled & ~7;
    w->filled &= 7;
}

INLINE void put_bits(BitWriter *w, uint64_t value, int bits) {
    if (bits > 32) {
        put_few(w, value, 32);
        value >>= 32;
        bits -= 32;
    }
    put_few(w, value, bits);
}

INLINE void encode_symbol(uint32_t *state, uint8_t **to, const uint32_t *table, int symbol) {
    uint32_t entry = table[symbol], frequency = entry & 0xffff, first = entry >> 16, x = *state;
    uint16_t word = (uint16_t)x; /* written always, kept if the state was too large: no branch on data */
    int full = (uint64_t)x >= (uint64_t)frequency << (32 - PROBABILITY_BITS);
    memcpy(*to - 2, &word, 2);
    *to -= full * 2;
    x >>= full * 16;
    *state = ((x / frequency) << PROBABILITY_BITS) + x % frequency + first;
}

static uint8_t *put_varint(uint8_t *at, uint64_t value) {
    for (; value >= 128; value >>= 7) *at++ = (uint8_t)(value | 128);
    *at++ = (uint8_t)value;
    return at;
}

INLINE int step_symbol(int from, int to) { return to < from ? (from - to) * 2 - 1 : (to - from) * 2; }

INLINE void encode_typed(int width, Tensor *t, const Tables *tables) {
    const uint32_t *counts = tables->encode, *gap_tables = counts + FIXED_TABLES * 256;
    const uint32_t *value_tables = gap_tables + tables->gap_tables * 256;
    const int m = value_precision(width), classes = t->classes;
    uint8_t *head = t->part, *end = t->part + t->size, *to = end;
    int previous[MAX_CLASSES], last = -1; /* the class with changes before this one */
    for (int c = 0; c < classes; c++) {
        previous[c] = last;
        if (t->counts[c]) last = c;
    }
    uint8_t *bits = head + 24; /* moved down when the head's size is known */
    BitWriter w = {bits, 0, 0};
    for (int c = 0; c < classes; c++)
        put_bits(&w, (uint64_t)t->counts[c], extra_of((uint64_t)t->counts[c], 2));
    for (int64_t i = 0; i < t->count; i++) {
        uint64_t gap = (uint64_t)load_position(t->wide, t->gaps, i);
        int negative;
        uint64_t size = magnitude(width, load(width, t->values, i), &negative);
        put_bits(&w, gap, extra_of(gap, 2));
        put_bits(&w, size, extra_of(size, m));
    }
    w.at += w.filled > 0; /* the last byte, part filled, is there already */

    uint32_t a = LOWEST_STATE, b = LOWEST_STATE;
    int64_t i = t->count;
    for (int c = classes - 1; c >= 0; c--) {
        const uint32_t *gap_table = gap_tables + t->gap_tables[c] * 256;
        const uint32_t *value_table = value_tables + t->value_tables[c] * 256;
        for (int64_t first = i - t->counts[c]; i > first;) {
            i--;
            uint64_t gap = (uint64_t)load_position(t->wide, t->gaps, i);
            int negative;
            uint64_t size = magnitude(width, load(width, t->values, i), &negative);
            encode_symbol(&b, &to, value_table, symbol_of(size, extra_of(size, m), m) * 2 + negative);
            encode_symbol(&a, &to, gap_table, symbol_of(gap, extra_of(gap, 2), 2));
        }
    }
    for (int c = classes - 1; c >= 0; c--) {
        uint64_t count = (uint64_t)t->counts[c];
        if (count) {
            int p = previous[c];
            encode_symbol(&b, &to, counts + 512, step_symbol(p < 0 ? 0 : t->value_tables[p], t->value_tables[c]));
            encode_symbol(&a, &to, counts + 256, step_symbol(p < 0 ? 0 : t->gap_tables[p], t->gap_tables[c]));
        }
        encode_symbol(&a, &to, counts, symbol_of(count, extra_of(count, 2), 2));
    }
    int64_t bit_bytes = w.at - bits;
    head = put_varint(head, (uint64_t)t->lowest);
    head = put_varint(head, (uint64_t)classes);
    head = put_varint(head, (uint64_t)bit_bytes);
    memmove(head, bits, (size_t)bit_bytes);
    head += bit_bytes;
    memcpy(head, &a, 4);
    memcpy(head + 4, &b, 4);
    memmove(head + 8, to, (size_t)(end - to));
    t->size = head + 8 + (end - to) - t->part;
}

/* What split gave to parts; `part` has the room that split named in `size`. */
void turnout_change_encode(Tensor *tensors, int32_t n, const Tables *tables) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int32_t k = 0; k < n; k++) {
        Tensor *t = &tensors[k];
        switch (t->width) {
        case 1: encode_typed(1, t, tables); break;
        case 2: encode_typed(2, t, tables); break;
        case 4: encode_typed(4, t, tables); break;
        default: encode_typed(8, t, tables);
        }
    }
}

/* ---- decoding ---- */

/* Past the end both give zeros, and `at` or `filled` tell at the end of the part. No branch depends on the data. */
typedef struct { const uint8_t *at, *end; uint64_t held; int64_t filled; } BitReader;
typedef struct { const uint8_t *at, *end; } WordReader;

/* At most 32 bits. */
INLINE uint64_t get_few(BitReader *r, int bits) {
    if (r->end - r->at >= 8) {
        uint64_t word;
        memcpy(&word, r->at, 8);
        r->held |= word << r->filled;
        r->at += (63 - r->filled) >> 3;
        r->filled |= 56;
    } else
        for (; r->filled < bits && r->at < r->end; r->filled += 8) r->held |= (uint64_t)*r->at++ << r->filled;
    uint64_t value = r->held & (((uint64_t)1 << bits) - 1);
    r->held >>= bits;
    r->filled -= bits;
    return value;
}

INLINE uint64_t get_bits(BitReader *r, int bits) {
    if (bits <= 32) return get_few(r, bits);
    uint64_t low = get_few(r, 32);
    return low | get_few(r, bits - 32) << 32;
}

INLINE int decode_symbol(uint32_t *state, WordReader *r, const uint32_t *table) {
    uint32_t x = *state, entry = table[x & ((1u << PROBABILITY_BITS) - 1)];
    x = (((entry >> 8) & 0xfff) + 1) * (x >> PROBABILITY_BITS) + (entry >> 20);
    int refill = x < LOWEST_STATE;
    uint16_t word = 0;
    if (r->end - r->at >= 2) memcpy(&word, r->at, 2);
    r->at += refill * 2;
    *state = refill ? x << 16 | word : x;
    return (int)(entry & 0xff);
}

static int get_varint(const uint8_t **at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        if (*at == end) return CUT;
        uint8_t byte = *(*at)++;
        *value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return 0;
    }
    return FOREIGN;
}

typedef struct {
    int64_t counts[MAX_CLASSES];
    int gap_tables[MAX_CLASSES], value_tables[MAX_CLASSES];
    uint32_t a, b;
    BitReader bits;
    WordReader words;
} Part;

static int cut(const Part *p) { return p->bits.filled < 0 || p->words.at > p->words.end; }

static int unstep(int from, int symbol) { return symbol & 1 ? from - (symbol + 1) / 2 : from + symbol / 2; }

static int open_part(Tensor *t, const Tables *tables, Part *p) {
    const uint8_t *at = t->part, *end = t->part + t->size;
    uint64_t lowest, classes, bit_bytes;
    int fault = get_varint(&at, end, &lowest);
    if (!fault) fault = get_varint(&at, end, &classes);
    if (!fault) fault = get_varint(&at, end, &bit_bytes);
    if (fault) return fault;
    if (classes < 1 || classes > MAX_CLASSES || lowest + classes - 1 > (uint64_t)t->mask) return FOREIGN;
    if (end - at < 8 || bit_bytes > (uint64_t)(end - at - 8)) return CUT;
    p->bits = (BitReader){at, at + bit_bytes, 0, 0};
    memcpy(&p->a, at + bit_bytes, 4);
    memcpy(&p->b, at + bit_bytes + 4, 4);
    p->words = (WordReader){at + bit_bytes + 8, end};
    t->lowest = (int32_t)lowest;
    t->classes = (int32_t)classes;
    int gap_table = 0, value_table = 0;
    uint64_t left = (uint64_t)t->count;
    for (int c = 0; c < t->classes; c++) {
        int symbol = decode_symbol(&p->a, &p->words, tables->decode), extra = extra_bits(symbol, 2);
        uint64_t count = smallest(symbol, extra, 2) + get_bits(&p->bits, extra);
        if (count > left) return FOREIGN;
        left -= count;
        p->counts[c] = (int64_t)count;
        if (!count) continue;
        gap_table = unstep(gap_table, decode_symbol(&p->a, &p->words, tables->decode + 4096));
        value_table = unstep(value_table, decode_symbol(&p->b, &p->words, tables->decode + 8192));
        if (gap_table < 0 || gap_table >= tables->gap_tables || value_table < 0 || value_table >= tables->value_tables)
            return FOREIGN;
        p->gap_tables[c] = gap_table;
        p->value_tables[c] = value_table;
    }
    return left ? FOREIGN : cut(p) ? CUT : 0;
}

/* Ranks (in `gaps`) and differences (in `values`), by class. */
INLINE int decode_symbols(int width, Tensor *t, const Tables *tables, Part *p) {
    const uint32_t *gap_tables = tables->decode + FIXED_TABLES * 4096;
    const uint32_t *value_tables = gap_tables + tables->gap_tables * 4096;
    const int m = value_precision(width);
    int64_t i = 0;
    for (int c = 0; c < t->classes; c++) {
        if (!p->counts[c]) continue;
        const uint32_t *gap_table = gap_tables + p->gap_tables[c] * 4096;
        const uint32_t *value_table = value_tables + p->value_tables[c] * 4096;
        uint64_t rank = 0;
        for (int64_t end = i + p->counts[c]; i < end; i++) {
            int symbol = decode_symbol(&p->a, &p->words, gap_table), extra = extra_bits(symbol, 2);
            uint64_t gap = smallest(symbol, extra, 2) + get_bits(&p->bits, extra);
            if (gap >= (uint64_t)t->elements || (rank += gap) >= (uint64_t)t->elements) return OUTSIDE;
            store_position(t->wide, t->gaps, i, (int64_t)rank++);
            symbol = decode_symbol(&p->b, &p->words, value_table);
            extra = extra_bits(symbol >> 1, m);
            uint64_t size = smallest(symbol >> 1, extra, m) + get_bits(&p->bits, extra) + 1;
            store(width, t->values, i, symbol & 1 ? (uint64_t)0 - size : size);
        }
        if (cut(p)) return CUT;
    }
    int ended = p->a == LOWEST_STATE && p->b == LOWEST_STATE && p->words.at == p->words.end;
    return ended && p->bits.at == p->bits.end && !cut(p) && p->bits.filled < 8 && !p->bits.held ? 0 : FOREIGN;
}

typedef struct {
    int64_t seen[256];          /* elements of each class before this block */
    int64_t need[256];          /* the rank of the class's next change; -1: none is left */
    int64_t at[MAX_CLASSES], end[MAX_CLASSES];
    int64_t placed;
} Merge;

INLINE void take(Tensor *t, Merge *s, int class) {
    s->at[class]++;
    s->need[class] = s->at[class] < s->end[class] ? load_position(t->wide, t->gaps, s->at[class]) : -1;
}

INLINE void place(int width, Tensor *t, Merge *s, int64_t position, int64_t slot) {
    store_position(t->wide, t->positions, s->placed, position);
    store(width, t->bits, s->placed, load(width, t->base, position) + load(width, t->values, slot));
    s->placed++;
}

/* The place of the bit with so many set bits below it. */
INLINE int place_of(uint64_t bits, int below) {
#ifdef __BMI2__
    return __builtin_ctzll(_pdep_u64((uint64_t)1 << below, bits));
#else
    for (; below; below--) bits &= bits - 1;
    return __builtin_ctzll(bits);
#endif
}

INLINE void merge_sparse(int width, Tensor *t, Merge *s, const uint8_t *block, int64_t start, int n) {
    uint64_t marked[BLOCK / 64] = {0};
    int64_t slots[BLOCK];
    for (int c = 0; c < t->classes; c++) {
        if (s->need[c] < 0) continue;
        int64_t before = s->seen[c];
        s->seen[c] += count_in(block, n, (uint8_t)c);
        if (s->need[c] >= s->seen[c]) continue;
        uint64_t words[BLOCK / 64];
        int32_t until[BLOCK / 64]; /* elements of the class up to the end of each word */
        for (int word = 0, sum = 0; word < BLOCK / 64; word++) {
            words[word] = equal64(block + word * 64, (uint8_t)c);
            until[word] = sum += __builtin_popcountll(words[word]);
        }
        do {
            int32_t rank = (int32_t)(s->need[c] - before), word = 0;
            for (int w = 0; w < BLOCK / 64 - 1; w++) word += until[w] <= rank;
            int o = word * 64 + place_of(words[word], rank - (word ? until[word - 1] : 0));
            marked[word] |= (uint64_t)1 << (o & 63);
            slots[o] = s->at[c];
            take(t, s, c);
        } while (s->need[c] >= 0 && s->need[c] < s->seen[c]);
    }
    for (int word = 0; word < BLOCK / 64; word++)
        for (uint64_t left = marked[word]; left; left &= left - 1) {
            int o = word * 64 + __builtin_ctzll(left);
            place(width, t, s, start + o, slots[o]);
        }
}

INLINE void merge_dense(int width, Tensor *t, Merge *s, const uint8_t *block, int64_t start, int n) {
    for (int o = 0; o < n; o++) {
        uint8_t class = block[o];
        if (s->seen[class]++ != s->need[class]) continue;
        place(width, t, s, start + o, s->at[class]);
        take(t, s, class);
    }
}

INLINE int decode_typed(int width, Tensor *t, const Tables *tables) {
    Part p;
    Merge s;
    uint8_t block[BLOCK + 64];
    int fault = open_part(t, tables, &p);
    if (!fault) fault = decode_symbols(width, t, tables, &p);
    if (fault) return fault;
    memset(&s, 0, sizeof s);
    memset(s.need, 255, sizeof s.need);
    if (!t->mask) {
        for (int64_t i = 0; i < t->count; i++) {
            int64_t ahead = load_position(t->wide, t->gaps, i + AHEAD < t->count ? i + AHEAD : i);
            __builtin_prefetch((const uint8_t *)t->base + ahead * width);
            place(width, t, &s, load_position(t->wide, t->gaps, i), i);
        }
        return 0;
    }
    for (int c = 0; c < t->classes; c++) {
        s.at[c] = c ? s.end[c - 1] : 0;
        s.end[c] = s.at[c] + p.counts[c];
        if (p.counts[c]) s.need[c] = load_position(t->wide, t->gaps, s.at[c]);
    }
    int dense = t->count > t->elements / DENSE;
    for (int64_t start = 0; start < t->elements && s.placed < t->count; start += BLOCK) {
        int n = (int)(t->elements - start < BLOCK ? t->elements - start : BLOCK);
        classes_typed(width, t, start, n, block);
        if (dense) merge_dense(width, t, &s, block, start, n);
        else merge_sparse(width, t, &s, block, start, n);
    }
    return s.placed == t->count ? 0 : OUTSIDE;
}

/* A part back to positions and bits [count]; gaps and values [count] are scratch. 0, or why the part is refused. */
int32_t turnout_change_decode(Tensor *t, const Tables *tables) {
    switch (t->width) {
    case 1: return decode_typed(1, t, tables);
    case 2: return decode_typed(2, t, tables);
    case 4: return decode_typed(4, t, tables);
    default: return decode_typed(8, t, tables);
    }
}
