/* Attention over the paged cache in bfloat16, for x86 processors with AVX-512 and its bfloat16 products.
 *
 * Compiled and called by engine/compute/paged.py; engine/compute/paged.py makes the items. Reads the blocks where they lie: nothing is
 * gathered. The keys and values of up to CHUNK positions at a time are packed into the order in which the products read
 * them, then serve all rows of the item. The softmax is taken piece by piece (arXiv 1805.02867), products are summed in
 * float32, weights are rounded to bfloat16.
 *
 * Units (an item for one key head) are taken from a counter, so any number of threads may work on one call; the result
 * does not depend on how many. Nor does it depend on who shares a call: chunks begin at multiples of CHUNK, every row
 * goes through them in order, and what is hidden from a row is added to it as nothing. So common prefixes end at such
 * multiples too.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define CHUNK 128      /* positions that are packed together; a multiple of 32 */
#define GROUP 8        /* query rows that a product takes together */
#define MAX_DIM 256    /* elements of a head */
#define MAX_ROWS 512   /* query rows of an item: its rows of the batch times the heads that share a key head */

typedef uint16_t bf16;

enum { RESUMES = 1, PAUSES = 2 };  /* flags of an item */

/* Rows of the batch that attend to a run of positions of one sequence, or of a prefix that several share.
 * An item that PAUSES leaves sums in the state, where a later call's item RESUMES. */
typedef struct {
    int32_t first_row;  /* into row_index */
    int32_t num_rows;
    int32_t begin, end; /* positions of keys; a row attends to those of them that are not after its own */
    int64_t table;      /* into tables: block of position 0 */
    int32_t flags;
    int32_t unused;
} item_t;

typedef struct {
    const bf16 *query;         /* (rows, num_heads, head_dim), rows query_stride apart */
    bf16 *out;                 /* (rows, num_heads, head_dim) */
    const bf16 *cache;         /* (slots, 2, num_kv_heads, head_dim) of one layer */
    const int32_t *row_index;  /* rows of the batch of all items */
    const int32_t *positions;  /* (rows,) */
    const int32_t *tables;
    const item_t *items;
    float *state;              /* (rows, num_heads, head_dim + 2): sums, their maximum, their weight */
    int64_t num_items;
    int64_t num_heads, num_kv_heads, head_dim, block_size, query_stride;
    int64_t window;            /* positions that a row reaches back, its own included; 0 is all */
    float scale;
    int32_t unused;
    int64_t *next;             /* the counter of units */
} call_t;

typedef struct {
    uint32_t *key;     /* (head_dim / 2, CHUNK) pairs of dimensions */
    uint32_t *value;   /* (CHUNK / 2, head_dim) pairs of positions */
    float *score;      /* (GROUP, CHUNK) */
    uint32_t *weight;  /* (GROUP, CHUNK / 2) pairs of positions */
    float *sum;        /* (MAX_ROWS, head_dim) */
    float *most, *total; /* (MAX_ROWS,) */
} scratch_t;

#define INLINE static inline __attribute__((always_inline))

static __m512 exp2_of(__m512 x) {
    /* 2 ** x for x <= 0, to about 4e-6; 0 below -150, NaN for NaN */
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(0.0096181291f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.0555041087f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.2402265070f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.6931471806f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

/* 16 rows of 16 dwords, rows to columns. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Positions first .. first + count - 1 of a key head of a sequence. */
typedef struct {
    const int32_t *table;
    int head, first, count;
} run_t;

INLINE const bf16 *key_at(const call_t *call, const run_t *run, int offset) {
    const uint32_t size = (uint32_t)call->block_size, position = (uint32_t)(run->first + offset);
    const int64_t slot = (int64_t)run->table[position / size] * size + position % size;
    return call->cache + (slot * 2 * call->num_kv_heads + run->head) * call->head_dim;
}

/* Asks for 16 keys and values of a run that is packed soon: blocks lie anywhere, which no processor foresees. */
INLINE void prefetch(const call_t *call, const run_t *run, int base) {
    const int64_t value_at = call->num_kv_heads * call->head_dim;
    for (int i = base; i < base + 16 && i < run->count; i++) {
        const bf16 *key = key_at(call, run, i);
        for (int d = 0; d < call->head_dim; d += 32) {
            _mm_prefetch((const char *)(key + d), _MM_HINT_T1);
            _mm_prefetch((const char *)(key + value_at + d), _MM_HINT_T1);
        }
    }
}

/* Packs the keys and values of a run. Returns its length rounded up to 32; the padding is zero. */
static int pack(const call_t *call, const run_t *run, const run_t *next, scratch_t *to) {
    const int64_t dim = call->head_dim, value_at = call->num_kv_heads * dim;
    const int count = run->count;
    const int padded = (count + 31) & ~31;
    static const bf16 zeros[MAX_DIM];
    const bf16 *row[16];
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int base = 0; base < padded; base += 16) {
        for (int i = 0; i < 16; i++) {
            row[i] = base + i < count ? key_at(call, run, base + i) : 0;
        }
        if (next) prefetch(call, next, base);
        for (int d = 0; d < dim; d += 32) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(row[i] ? row[i] + d : zeros);
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to->key + (d / 2 + i) * CHUNK + base, r[i]);
        }
        for (int i = 0; i < 16; i += 2) {
            uint32_t *value = to->value + (base + i) / 2 * dim;
            for (int d = 0; d < dim; d += 32) {
                __m512i a = _mm512_loadu_si512(row[i] ? row[i] + value_at + d : zeros);
                __m512i b = _mm512_loadu_si512(row[i + 1] ? row[i + 1] + value_at + d : zeros);
                _mm512_store_si512(value + d, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(value + d + 16, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
    return padded;
}

#define DOT(sum, pairs, pair) \
    (sum) = _mm512_dpbf16_ps((sum), (__m512bh)(pairs), (__m512bh)_mm512_set1_epi32((int)(pair)))

/* score[r][k] = query[r] . key[k], unscaled */
INLINE void scores(const int rows, const uint32_t *const query[GROUP], const scratch_t *s, int pairs, int padded) {
    for (int k = 0; k < padded; k += 32) {
        __m512 a[GROUP], b[GROUP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) a[r] = b[r] = _mm512_setzero_ps();
        const uint32_t *key = s->key + k;
        for (int d = 0; d < pairs; d++, key += CHUNK) {
            __m512i left = _mm512_load_si512(key), right = _mm512_load_si512(key + 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                DOT(a[r], left, query[r][d]);
                DOT(b[r], right, query[r][d]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            _mm512_store_ps(s->score + r * CHUNK + k, a[r]);
            _mm512_store_ps(s->score + r * CHUNK + k + 16, b[r]);
        }
    }
}

/* sum[r] = sum[r] * shrink[r] + weight[r] . value */
INLINE void accumulate_pv(const int rows, float *sum, const float *shrink, const scratch_t *s, int dim, int padded) {
    for (int d = 0; d < dim; d += 32) {
        __m512 a[GROUP], b[GROUP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 factor = _mm512_set1_ps(shrink[r]);
            a[r] = _mm512_mul_ps(_mm512_load_ps(sum + r * dim + d), factor);
            b[r] = _mm512_mul_ps(_mm512_load_ps(sum + r * dim + d + 16), factor);
        }
        const uint32_t *value = s->value + d;
        for (int k = 0; k < padded / 2; k++, value += dim) {
            __m512i left = _mm512_load_si512(value), right = _mm512_load_si512(value + 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                DOT(a[r], left, s->weight[r * (CHUNK / 2) + k]);
                DOT(b[r], right, s->weight[r * (CHUNK / 2) + k]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            _mm512_store_ps(sum + r * dim + d, a[r]);
            _mm512_store_ps(sum + r * dim + d + 16, b[r]);
        }
    }
}

/* Turns a row's scores into weights: scaled, those outside [begin, end) hidden. Returns what older sums shrink by. */
static float online_softmax(float *score, uint32_t *weight, int padded, int begin, int end, float scale, float *most,
                    float *total) {
    const __m512 factor = _mm512_set1_ps(scale), nothing = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 peak = nothing;
    const int whole = begin <= 0 && end >= padded;
    for (int k = 0; k < padded; k += 16) {
        __m512 x = _mm512_mul_ps(_mm512_load_ps(score + k), factor);
        if (!whole) {
            __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(k));
            __mmask16 seen = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(end)) &
                             _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(begin));
            x = _mm512_mask_mov_ps(nothing, seen, x);
        }
        _mm512_store_ps(score + k, x);
        peak = _mm512_max_ps(peak, x);
    }
    float now = _mm512_reduce_max_ps(peak);
    if (!(now > *most)) now = *most;
    const float shrink = *most == -INFINITY ? 0.0f : exp2f(*most - now);
    *most = now;
    const __m512 base = _mm512_set1_ps(now == -INFINITY ? 0.0f : now);
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < padded; k += 32) {
        __m512 a = exp2_of(_mm512_sub_ps(_mm512_load_ps(score + k), base));
        __m512 b = exp2_of(_mm512_sub_ps(_mm512_load_ps(score + k + 16), base));
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        _mm512_store_si512(weight + k / 2, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

/* Where the keys of an item begin and end for its rows: chunks before all windows and keys after all rows are left out.
 * Items begin at a multiple of CHUNK, so what comes out does as well. */
static void bounds(const call_t *call, const item_t *item, int *begin, int *end) {
    const int32_t *index = call->row_index + item->first_row;
    int reach = 0, least = item->end;
    for (int i = 0; i < item->num_rows; i++) {
        int position = call->positions[index[i]];
        int first = call->window ? position + 1 - (int)call->window : 0;
        if (position + 1 > reach) reach = position + 1;
        if (first < least) least = first;
    }
    *begin = least < item->begin ? item->begin : least & ~(CHUNK - 1);
    *end = reach > item->end ? item->end : reach;
}

static run_t first_run(const call_t *call, int64_t unit) {
    const item_t *item = call->items + unit / call->num_kv_heads;
    int begin, end;
    bounds(call, item, &begin, &end);
    int count = end - begin < CHUNK ? end - begin : CHUNK;
    return (run_t){call->tables + item->table, (int)(unit % call->num_kv_heads), begin, count};
}

static void attend(const call_t *call, int64_t unit, scratch_t *s) {
    const item_t *item = call->items + unit / call->num_kv_heads;
    const int head = (int)(unit % call->num_kv_heads);
    const int dim = (int)call->head_dim, share = (int)(call->num_heads / call->num_kv_heads);
    const int rows = item->num_rows * share;
    const float scale = call->scale * 1.44269504f;
    const int32_t *index = call->row_index + item->first_row;
    const int64_t width = dim + 2;

    /* 1. Sums of nothing, or those of an earlier item. Row i is head i % share of batch row index[i / share]. */
    int least, reach;
    bounds(call, item, &least, &reach);
    for (int i = 0; i < rows; i++) {
        int64_t row = index[i / share] * call->num_heads + head * share + i % share;
        const float *old = call->state + row * width;
        int resumes = item->flags & RESUMES;
        for (int d = 0; d < dim; d++) s->sum[i * dim + d] = resumes ? old[d] : 0.0f;
        s->most[i] = resumes ? old[dim] : -INFINITY;
        s->total[i] = resumes ? old[dim + 1] : 0.0f;
    }

    /* 2. Each chunk of keys serves all rows, GROUP of them at a time. */
    for (int first = least; first < reach; first += CHUNK) {
        int count = reach - first < CHUNK ? reach - first : CHUNK;
        run_t run = {call->tables + item->table, head, first, count}, next = run;
        next.first += count;
        next.count = reach - next.first < CHUNK ? reach - next.first : CHUNK;
        int more = next.count > 0;
        if (!more && unit + 1 < call->num_items * call->num_kv_heads) {
            next = first_run(call, unit + 1);
            more = 1;
        }
        int padded = pack(call, &run, more ? &next : 0, s);
        for (int base = 0; base < rows; base += GROUP) {
            int taken = rows - base < GROUP ? rows - base : GROUP;
            const uint32_t *query[GROUP];
            float shrink[GROUP];
            int begins[GROUP], ends[GROUP], any = 0;
            for (int r = 0; r < taken; r++) {
                int i = base + r;
                int position = call->positions[index[i / share]];
                query[r] = (const uint32_t *)(call->query + index[i / share] * call->query_stride +
                                              (head * share + i % share) * dim);
                begins[r] = call->window ? position + 1 - (int)call->window - first : 0;
                ends[r] = position + 1 - first < count ? position + 1 - first : count;
                any |= ends[r] > 0 && begins[r] < count;
            }
            if (!any) continue;
            switch (taken) {
#define CASE(n) case n: scores(n, query, s, dim / 2, padded); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
            for (int r = 0; r < taken; r++)
                shrink[r] = online_softmax(s->score + r * CHUNK, s->weight + r * (CHUNK / 2), padded, begins[r], ends[r], scale,
                                   s->most + base + r, s->total + base + r);
            switch (taken) {
#define CASE(n) case n: accumulate_pv(n, s->sum + base * dim, shrink, s, dim, padded); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
        }
    }

    /* 3. Averages, or the sums for a later item. */
    for (int i = 0; i < rows; i++) {
        int64_t row = index[i / share] * call->num_heads + head * share + i % share;
        if (item->flags & PAUSES) {
            float *keep = call->state + row * width;
            for (int d = 0; d < dim; d++) keep[d] = s->sum[i * dim + d];
            keep[dim] = s->most[i];
            keep[dim + 1] = s->total[i];
        } else {
            const __m512 share_of = _mm512_set1_ps(1.0f / s->total[i]);
            bf16 *out = call->out + row * dim;
            for (int d = 0; d < dim; d += 16) {
                __m512 x = _mm512_mul_ps(_mm512_load_ps(s->sum + i * dim + d), share_of);
                _mm256_storeu_si256((__m256i *)(out + d), (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
    }
}

static void *carve(char **at, int64_t bytes) {
    void *taken = *at;
    *at += (bytes + 63) & ~(int64_t)63;
    return taken;
}

/* Works on units until none is left. Returns 0, or 1 without memory. head_dim is a multiple of 32, at most MAX_DIM.
 * Each thread keeps its scratch memory, about 1 MiB, until the process ends: to map and fault it for every layer takes
 * longer than a short attention does. */
int kvasir_attend(const call_t *call) {
    static __thread char *memory;
    const int64_t dim = MAX_DIM;
    const int64_t bytes = 4 * (dim * CHUNK + GROUP * CHUNK * 3 / 2 + MAX_ROWS * (dim + 2)) + 64 * 8;
    if (!memory && !(memory = aligned_alloc(64, (size_t)((bytes + 63) & ~(int64_t)63)))) return 1;
    char *at = memory;
    scratch_t s;
    s.key = carve(&at, 4 * dim / 2 * CHUNK);
    s.value = carve(&at, 4 * CHUNK / 2 * dim);
    s.score = carve(&at, 4 * GROUP * CHUNK);
    s.weight = carve(&at, 4 * GROUP * CHUNK / 2);
    s.most = carve(&at, 4 * MAX_ROWS);
    s.total = carve(&at, 4 * MAX_ROWS);
    s.sum = carve(&at, 4 * MAX_ROWS * dim);
    const int64_t units = call->num_items * call->num_kv_heads;
    for (;;) {
        int64_t unit = __atomic_fetch_add(call->next, 1, __ATOMIC_RELAXED);
        if (unit >= units) break;
        attend(call, unit, &s);
    }
    return 0;
}
