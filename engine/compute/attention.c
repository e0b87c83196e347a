/* Attention over the paged cache, for every processor: reads blocks in place through block tables, for prefill and decode.
 *
 * Compiled and called by engine/compute/kernel.py; engine/compute/paged.py makes the items. Keys are taken in tiles of
 * TILE positions, which begin at multiples of TILE. A tile is packed once, into the order in which the products read it
 * and as float32 whatever the cache holds, and serves all rows of the item: all query heads of its KV head, many tokens,
 * several sequences. Each tile gives a row a maximum, a sum of weights and a sum of values, and these are merged in the
 * order of the tiles (arXiv 1805.02867, 2205.14135), by the thread that computed them or by another one later (cascade:
 * arXiv 2402.05099; split over keys: flash decoding). So the bits of a row depend on its own prefix alone, not on who
 * shares a call, how a prompt was cut, or how many threads there are: what is hidden from a row adds exactly zero.
 *
 * The second half of this file is compiled once for each instruction set: the file includes itself with WIDTH, the
 * floats of a vector. Vectors are GCC's and clang's; the few operations that those lack are macros. On processors with
 * bfloat16 products a cache in bfloat16 is not widened, and weights are rounded to bfloat16.
 */
#ifndef WIDTH

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TILE 128      /* positions that are packed together */
#define KEY_STRIDE (TILE + 16) /* floats between rows of packed keys: a power of two would fill few sets of a cache */
#define MAX_GROUP 8   /* query rows that a product takes together */
#define MAX_DIM 256   /* elements of a head */
#define MAX_ROWS 256  /* query rows of an item: its rows of the batch times the query heads of its KV heads */
#define LOG2_E 1.44269504f

enum { PLAIN, NEON, AVX2, AVX512, AVX512_BF16, VARIANTS };
enum { FLOAT32, BFLOAT16, FLOAT16, INT8 }; /* what the cache holds; behind each key or value in INT8 lies its scale, a float */

/* Rows of the batch that attend to positions begin .. end - 1 of one sequence, or of a prefix that several share, each
 * row to those that are not after its own. Only keeps the results of its tiles for another item, or merges those of all
 * tiles of its rows: the first `kept` are there, the others it computes. */
typedef struct {
    int64_t table;       /* into tables: block of position 0 */
    int32_t first_row;   /* into row_index */
    int32_t num_rows;
    int32_t begin, end;  /* begin is a multiple of TILE, and 0 for an item that merges */
    int32_t kept;
    int32_t head, num_heads; /* KV heads */
    int32_t unused;
} item_t;

typedef struct {
    const float *query;        /* (rows, num_heads, head_dim), rows query_stride apart */
    float *out;                /* (rows, num_heads, head_dim) */
    const void *cache;         /* (slots, 2, num_kv_heads, width) of one layer; a vector past the end may be read */
    const int32_t *row_index;  /* rows of the batch of all items */
    const int32_t *positions;  /* (rows,) */
    const int32_t *tables;
    const item_t *items;       /* first those that keep, then those that merge */
    const int64_t *results_at; /* (rows,) into results: that of a row's first tile */
    float *results;            /* (results, num_heads, head_dim rounded up to 32, + 2): sums, maximum, sum of weights */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or null */
    int64_t num_keeping, num_items;
    int64_t num_heads, num_kv_heads, head_dim, width, block_size, query_stride; /* width: head_dim and, in INT8, scale */
    int64_t window;            /* positions that a row reaches back, its own included; 0 is all */
    float scale, softcap;      /* softcap 0 is none */
    int32_t kind, variant, threads, unused;
} call_t;

typedef struct {
    float *key;          /* (head_dim, KEY_STRIDE) */
    float *value;        /* (TILE, head_dim rounded up) */
    float *score;        /* (MAX_GROUP, TILE), then weights */
    float *sum;          /* (MAX_ROWS, head_dim rounded up) */
    float *most, *total; /* (MAX_ROWS,) */
    uint32_t *query;     /* (MAX_ROWS, head_dim / 2) pairs of bfloat16 */
    uint32_t *weight;    /* (MAX_GROUP, TILE / 2) pairs of bfloat16 */
    const float *values[TILE]; /* where the value of each position is: packed, or in the cache */
} scratch_t;

/* Positions first .. first + count - 1 of a KV head of a sequence. */
typedef struct {
    const int32_t *table;
    int head, first, count;
} run_t;

#define INLINE static inline __attribute__((always_inline))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, ISA)

/* Offsets in the cache of some of a run's keys. The value of each lies num_kv_heads * width behind it. */
INLINE void find_keys(const call_t *call, const run_t *run, int offset, int count, int64_t *at) {
    const uint32_t size = (uint32_t)call->block_size, position = (uint32_t)(run->first + offset);
    const int64_t step = 2 * call->num_kv_heads * call->width;
    const int32_t *block = run->table + position / size;
    uint32_t inside = position % size;
    for (int i = 0; i < count; i++) {
        at[i] = ((int64_t)*block * size + inside) * step + run->head * call->width;
        if (++inside == size) inside = 0, block++;
    }
}

/* Asks for keys and values of a run that is packed soon: blocks lie anywhere, which no processor foresees. */
INLINE void prefetch(const call_t *call, const run_t *run, int base, int most) {
    const int64_t size = call->kind == FLOAT32 ? 4 : call->kind == INT8 ? 1 : 2;
    const int64_t value_at = call->num_kv_heads * call->width * size;
    const int count = run->count - base < most ? run->count - base : most;
    int64_t at[16];
    find_keys(call, run, base, count, at);
    for (int i = 0; i < count; i++) {
        const char *key = (const char *)call->cache + at[i] * size;
        for (int64_t d = 0; d < call->width * size; d += 64) {
            __builtin_prefetch(key + d, 0, 2);
            __builtin_prefetch(key + value_at + d, 0, 2);
        }
    }
}

/* Where the keys of an item begin and end for its rows: tiles before all windows and keys after all rows are left out. */
static void bounds(const call_t *call, const item_t *item, int *begin, int *end) {
    const int32_t *index = call->row_index + item->first_row;
    int reach = 0, least = item->end;
    for (int i = 0; i < item->num_rows; i++) {
        int position = call->positions[index[i]];
        int first = call->window ? position + 1 - (int)call->window : 0;
        if (position + 1 > reach) reach = position + 1;
        if (first < least) least = first;
    }
    *begin = least < item->begin ? item->begin : least & ~(TILE - 1);
    *end = reach > item->end ? item->end : reach;
}

static run_t first_run(const call_t *call, const item_t *item) {
    int begin, end;
    bounds(call, item, &begin, &end);
    if (begin < item->kept * TILE) begin = item->kept * TILE;
    int count = end - begin < TILE ? end - begin : TILE;
    return (run_t){call->tables + item->table, item->head, begin, count};
}

/* What a key or value of the cache in INT8 is multiplied with. */
INLINE float scale_of(const call_t *call, int64_t at) {
    float scale;
    memcpy(&scale, (const char *)call->cache + at + call->width - 4, 4);
    return scale;
}

INLINE float *result_of(const call_t *call, int row, int tile, int head) {
    const int64_t width = ((call->head_dim + 31) & ~(int64_t)31) + 2;
    return call->results + ((call->results_at[row] + tile) * call->num_heads + head) * width;
}

#include "forward.c"

#define SELECT(mask, a, b) ((floats)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))

#define ISA plain
#define WIDTH 4
#define GROUP 4
#define VECTORS(rows) ((rows) == 1 ? 4 : 2)
#define TOGETHER 3
#define BESIDE(rows) 1
#define WIDE 1
#define CASES CASE(1) CASE(2) CASE(3)
#define TARGET
#define FMA(a, b, c) ((a) * (b) + (c))
#define LARGER(a, b) SELECT((a) > (b), a, b) /* b, where one is NaN */
#include "attention.c"

#if defined(__aarch64__)
#define ISA neon
#define WIDTH 4
#define GROUP 8
#define VECTORS(rows) ((rows) <= 2 ? 8 : (rows) <= 6 ? 4 : 2)
#define TOGETHER 6
#define BESIDE(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#define WIDE 1
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define TARGET
#define FMA(a, b, c) ((floats)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define LARGER(a, b) SELECT((a) > (b), a, b)
INLINE void transpose_neon(void *rows) {
    float32x4_t *r = rows;
    float32x4_t a = vzip1q_f32(r[0], r[2]), b = vzip2q_f32(r[0], r[2]);
    float32x4_t c = vzip1q_f32(r[1], r[3]), d = vzip2q_f32(r[1], r[3]);
    r[0] = vzip1q_f32(a, c);
    r[1] = vzip2q_f32(a, c);
    r[2] = vzip1q_f32(b, d);
    r[3] = vzip2q_f32(b, d);
}
#define TRANSPOSE transpose_neon
#include "attention.c"
#endif

#if defined(__x86_64__)
#define ISA avx2
#define WIDTH 8
#define GROUP 6
#define VECTORS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#define TOGETHER 6
#define BESIDE(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#define WIDE 1
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define TARGET __attribute__((target("avx2,fma")))
#define FMA(a, b, c) ((floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LARGER(a, b) ((floats)_mm256_max_ps((__m256)(a), (__m256)(b)))
/* GCC takes eight bytes apart one by one, which halves the speed of a cache in INT8. */
#define WIDEN(p) ((ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
TARGET INLINE void transpose_avx2(void *rows) {
    __m256 *r = rows, t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
#define TRANSPOSE transpose_avx2
#include "attention.c"

#define ISA avx512
#define WIDTH 16
#define GROUP 8
#define VECTORS(rows) ((rows) <= 2 ? 8 : (rows) <= 6 ? 4 : 2)
#define TOGETHER 8
#define BESIDE(rows) ((rows) <= 4 ? 4 : 2)
#define WIDE 3
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define FMA(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LARGER(a, b) ((floats)_mm512_max_ps((__m512)(a), (__m512)(b)))
TARGET INLINE void transpose_avx512(void *rows) {
    __m512i *r = rows, t[16];
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
#define TRANSPOSE transpose_avx512
#include "attention.c"

#define ISA avx512_bf16
#define WIDTH 16
#define GROUP 8
#define VECTORS(rows) 2
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")))
#define FMA(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LARGER(a, b) ((floats)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define BF16_PRODUCTS
#include "attention.c"
#endif

/* Whether this processor can run a variant on a cache: 1 or 0. */
int kvasir_supports(int variant, int kind, int64_t head_dim) {
    if (head_dim < 1 || head_dim > MAX_DIM) return 0;
    if (variant == PLAIN) return 1;
#if defined(__aarch64__)
    if (variant == NEON) return 1;
#elif defined(__x86_64__)
    __builtin_cpu_init();
    if (variant == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (variant == AVX512) return has;
    if (variant == AVX512_BF16)
        return has && __builtin_cpu_supports("avx512bf16") && kind == BFLOAT16 && head_dim % 32 == 0;
#endif
    return (void)kind, 0;
}

static void *carve(char **at, int64_t bytes) {
    void *taken = *at;
    *at += (bytes + 63) & ~(int64_t)63;
    return taken;
}

typedef struct {
    const call_t *call;
    int64_t next, end; /* items */
    int failed;
} work_t;

/* Works on items until none is left. Each thread keeps its scratch memory, less than 1 MiB, until the process ends: to
 * map and fault it for every layer takes longer than a short attention does. */
static void work(void *given) {
    static __thread char *memory;
    work_t *w = given;
    const int64_t dim = MAX_DIM;
    const int64_t floats = dim * (KEY_STRIDE + TILE) + MAX_GROUP * TILE * 3 / 2 + MAX_ROWS * (dim + dim / 2 + 2);
    if (!memory && !(memory = aligned_alloc(64, (size_t)((4 * floats + 8 * 64 + 63) & ~(int64_t)63)))) {
        __atomic_store_n(&w->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    char *at = memory;
    scratch_t s;
    s.key = carve(&at, 4 * dim * KEY_STRIDE);
    s.value = carve(&at, 4 * dim * TILE);
    s.score = carve(&at, 4 * MAX_GROUP * TILE);
    s.weight = carve(&at, 4 * MAX_GROUP * TILE / 2);
    s.sum = carve(&at, 4 * MAX_ROWS * dim);
    s.query = carve(&at, 4 * MAX_ROWS * dim / 2);
    s.most = carve(&at, 4 * MAX_ROWS);
    s.total = carve(&at, 4 * MAX_ROWS);
    for (;;) {
        const int64_t number = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (number >= w->end) return;
        switch (w->call->variant) {
#if defined(__aarch64__)
        case NEON: attend_neon(w->call, number, w->end, &s); break;
#elif defined(__x86_64__)
        case AVX2: attend_avx2(w->call, number, w->end, &s); break;
        case AVX512: attend_avx512(w->call, number, w->end, &s); break;
        case AVX512_BF16: attend_avx512_bf16(w->call, number, w->end, &s); break;
#endif
        default: attend_plain(w->call, number, w->end, &s);
        }
    }
}

/* Fills out. Returns 0, or 1 without memory. */
int kvasir_attend(const call_t *call) {
    const int64_t ends[2] = {call->num_keeping, call->num_items};
    work_t w = {call, 0, 0, 0};
    for (int phase = 0; phase < 2; phase++) {
        w.next = w.end;
        w.end = ends[phase];
        const int64_t items = w.end - w.next, threads = call->threads < items ? call->threads : items;
        if (threads > 1 && call->parallel) call->parallel(work, &w, (unsigned)threads, 0);
        else if (items) work(&w);
    }
    return w.failed;
}

/* Numbered pieces of work, of which each thread takes the next until none is left. */
typedef struct {
    void (*compute)(const void *, int64_t);
    const void *call;
    int64_t next, end;
} pieces_t;

static void take_pieces(void *given) {
    pieces_t *pieces = given;
    for (;;) {
        const int64_t number = __atomic_fetch_add(&pieces->next, 1, __ATOMIC_RELAXED);
        if (number >= pieces->end) return;
        pieces->compute(pieces->call, number);
    }
}

#if defined(__aarch64__)
#define CALL(variant, name, ...) ((variant) == NEON ? name##_neon(__VA_ARGS__) : name##_plain(__VA_ARGS__))
#elif defined(__x86_64__)
#define CALL(variant, name, ...) \
    ((variant) >= AVX512  ? name##_avx512(__VA_ARGS__) \
     : (variant) == AVX2 ? name##_avx2(__VA_ARGS__) \
                         : name##_plain(__VA_ARGS__))
#else
#define CALL(variant, name, ...) name##_plain(__VA_ARGS__)
#endif

static int64_t row_blocks(const product_t *p) { return (p->num_rows + MOST_ROWS - 1) / MOST_ROWS; }

static int64_t panels_of(const product_t *p) { return p->num_rows <= MAX_TOGETHER ? PANELS : MANY_PANELS; }

static int64_t all_panels(const product_t *p) { return (p->out_features + PANELS * PANEL - 1) / (PANELS * PANEL) * PANELS; }

static int64_t panel_blocks(const product_t *p) { return (all_panels(p) + panels_of(p) - 1) / panels_of(p); }

static void multiply(const void *call, int64_t number) {
    const product_t *p = call;
    const int64_t blocks = row_blocks(p), wide = panel_blocks(p), block = number / wide, first = number % wide * panels_of(p);
    const int64_t left = all_panels(p) - first;
    CALL(p->variant, multiply, p, p->num_rows * block / blocks, p->num_rows * (block + 1) / blocks, first * PANEL,
         left < panels_of(p) ? left : panels_of(p));
}

/* Fills out. */
void kvasir_multiply(const product_t *p) {
    pieces_t pieces = {multiply, p, 0, row_blocks(p) * panel_blocks(p)};
    if (p->threads > 1 && p->parallel && p->in_features * p->out_features >= THREAD_LEAST)
        p->parallel(take_pieces, &pieces, (unsigned)p->threads, 0);
    else take_pieces(&pieces);
}

static void turn(const void *call, int64_t number) {
    const rows_t *c = call;
    for (int64_t row = number * TURNED_ROWS; row < c->num_rows && row < (number + 1) * TURNED_ROWS; row++)
        CALL(c->variant, turn, c, row);
}

/* Fills out. */
void kvasir_turn(const rows_t *c) {
    pieces_t pieces = {turn, c, 0, (c->num_rows + TURNED_ROWS - 1) / TURNED_ROWS};
    if (c->threads > 1 && c->parallel && c->num_rows * c->heads * c->dim >= THREAD_LEAST)
        c->parallel(take_pieces, &pieces, (unsigned)c->threads, 0);
    else take_pieces(&pieces);
}

#include "layers.c"

#else /* WIDTH: one instruction set */

typedef float N(floats) __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t N(ints) __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float N(loose) __attribute__((vector_size(4 * WIDTH), may_alias, aligned(4)));
typedef int8_t N(bytes) __attribute__((vector_size(WIDTH), may_alias, aligned(1)));
typedef uint16_t N(halves) __attribute__((vector_size(2 * WIDTH), may_alias, aligned(2)));
#ifndef WIDEN
#define WIDEN(p) __builtin_convertvector(*(const N(bytes) *)(p), ints)
#endif
#define floats N(floats)
#define ints N(ints)
#define LOAD(p) (*(const N(loose) *)(p))
#define STORE(p, x) (*(N(loose) *)(p) = (x))
#define ALL(x) ((x) - (floats){0})

/* WIDTH numbers of the cache: the seam for other kinds. */
TARGET INLINE floats N(load)(const int kind, const void *cache, int64_t at) {
    if (kind == FLOAT32) return LOAD((const float *)cache + at);
    if (kind == INT8) return __builtin_convertvector(WIDEN((const int8_t *)cache + at), floats);
    ints bits = __builtin_convertvector(*(const N(halves) *)((const uint16_t *)cache + at), ints);
    if (kind == BFLOAT16) return (floats)(bits << 16);
    floats x = (floats)((bits & 0x7fff) << 13) * ALL(0x1p112f); /* exact, also for what is subnormal in float16 */
    ints special = ((bits & 0x7c00) == 0x7c00) & 0x7f800000;    /* infinity, NaN */
    return (floats)((ints)x | special | ((bits & 0x8000) << 16));
}

/* 2 ** x for x <= 0, to about 2e-7; 0 below -126.5, NaN for NaN. */
TARGET INLINE floats N(exp2_of)(floats x) {
    x = LARGER(ALL(-127.0f), x);
    floats whole = (x + ALL(12582912.0f)) - ALL(12582912.0f), part = x - whole;
    floats y = ALL(1.535336188319500e-4f);
    y = FMA(y, part, ALL(1.339887440266574e-3f));
    y = FMA(y, part, ALL(9.618437357674640e-3f));
    y = FMA(y, part, ALL(5.550332471162809e-2f));
    y = FMA(y, part, ALL(2.402264791363012e-1f));
    y = FMA(y, part, ALL(6.931472028550421e-1f));
    y = FMA(y, part, ALL(1.0f));
    return y * (floats)((__builtin_convertvector(whole, ints) + 127) << 23);
}

TARGET INLINE floats N(tanh_of)(floats x) {
    ints sign = (ints)x & (int32_t)0x80000000;
    floats size = (floats)((ints)x ^ sign), square = x * x;
    floats y = ALL(-5.70498872745e-3f);
    y = FMA(y, square, ALL(2.06390887954e-2f));
    y = FMA(y, square, ALL(-5.37397155531e-2f));
    y = FMA(y, square, ALL(1.33314422036e-1f));
    y = FMA(y, square, ALL(-3.33332819422e-1f));
    y = FMA(y * square, x, x);
    floats shrunk = N(exp2_of)(size * ALL(-2.0f * LOG2_E));
    floats far = (ALL(1.0f) - shrunk) / (ALL(1.0f) + shrunk);
    return SELECT(size < ALL(0.625f), y, (floats)((ints)far | sign));
}

TARGET INLINE float N(reduce_max)(floats x) {
    float part[WIDTH];
    memcpy(part, &x, sizeof part);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

TARGET INLINE float N(reduce_add)(floats x) {
    float part[WIDTH];
    memcpy(part, &x, sizeof part);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* Turns a row's scores into weights, those outside [begin, end) into zeros. */
TARGET static void N(weigh)(const call_t *call, float *score, int padded, int begin, int end, float *most, float *total) {
    const float factor = call->softcap ? call->scale / call->softcap : call->scale * LOG2_E;
    const floats nothing = ALL(-INFINITY);
    floats peak = nothing, sum = {0};
    ints lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    const int whole = begin <= 0 && end >= padded;
    for (int k = 0; k < padded; k += WIDTH) {
        floats x = LOAD(score + k) * ALL(factor);
        if (call->softcap) x = N(tanh_of)(x) * ALL(call->softcap * LOG2_E);
        if (!whole) x = SELECT((lanes + k < end) & (lanes + k >= begin), x, nothing);
        STORE(score + k, x);
        peak = LARGER(x, peak);
    }
    *most = N(reduce_max)(peak);
    const floats base = ALL(*most == -INFINITY ? 0.0f : *most);
    for (int k = 0; k < padded; k += WIDTH) {
        floats x = N(exp2_of)(LOAD(score + k) - base);
        sum += x;
        STORE(score + k, x);
    }
    *total = N(reduce_add)(sum);
}

/* What becomes of the sums of a group of rows over a tile: kept as they are, or merged with those of the tiles before. */
typedef struct {
    float *sum[MAX_GROUP];
    float old[2 * MAX_GROUP], *now; /* what both sums are multiplied with: now is the second half */
    int merges;
} N(target);

TARGET INLINE void N(put)(const N(target) *to, int r, int d, floats x) {
    floats before = LOAD(to->sum[r] + d);
    if (to->merges) x = FMA(x, ALL(to->now[r]), before * ALL(to->old[r]));
    STORE(to->sum[r] + d, x);
}

#ifndef BF16_PRODUCTS

#define KEYS_MULTIPLE (2 * WIDTH)

/* `count` of WIDTH keys that begin at `base`; what pads them is zero. */
TARGET INLINE void N(pack_keys)(const int kind, const call_t *call, const int64_t *at, int count, float *key) {
    const int dim = (int)call->head_dim;
    for (int d = 0; d < dim; d += WIDTH) {
        floats r[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            r[i] = i < count ? N(load)(kind, call->cache, at[i] + d) : (floats){0};
            if (kind == INT8 && i < count) r[i] *= ALL(scale_of(call, at[i]));
        }
        const int rows = dim - d < WIDTH ? dim - d : WIDTH;
#ifdef TRANSPOSE
        TRANSPOSE(r);
        for (int i = 0; i < rows; i++) STORE(key + (d + i) * KEY_STRIDE, r[i]);
#else
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < WIDTH; j++) key[(d + i) * KEY_STRIDE + j] = r[j][i];
#endif
    }
}

TARGET INLINE void N(pack_kind)(const int kind, const call_t *call, const run_t *run, const run_t *next, int padded,
                                int rows, scratch_t *to) {
    const int dim = (int)call->head_dim, wide = (dim + 2 * WIDTH - 1) & ~(2 * WIDTH - 1);
    const int64_t value_at = call->num_kv_heads * call->width;
    for (int base = 0; base < padded; base += WIDTH) {
        int64_t at[WIDTH];
        const int count = run->count - base < WIDTH ? run->count - base : WIDTH;
        find_keys(call, run, base, count, at);
        if (next) prefetch(call, next, base, WIDTH);
        if (count == WIDTH) N(pack_keys)(kind, call, at, WIDTH, to->key + base);
        else N(pack_keys)(kind, call, at, count, to->key + base);
        for (int i = 0; i < count; i++) {
            float *value = to->value + (base + i) * wide;
            to->values[base + i] = value;
            if (kind == FLOAT32 && rows <= 2 * GROUP) {
                to->values[base + i] = (const float *)call->cache + at[i] + value_at;
                continue;
            }
            const floats scale = ALL(kind == INT8 ? scale_of(call, at[i] + value_at) : 1.0f);
            for (int d = 0; d < wide; d += WIDTH) {
                floats x = N(load)(kind, call->cache, at[i] + value_at + d);
                if (kind == INT8) x *= scale;
                STORE(value + d, x);
            }
        }
    }
}

/* Packs the keys and values of a run; beyond the head's elements there may be anything. Values that are already in
 * float32 stay where they are if few rows read them. */
TARGET static void N(pack)(const call_t *call, const run_t *run, const run_t *next, int padded, int rows, scratch_t *to) {
    switch (call->kind) {
    case FLOAT32: N(pack_kind)(FLOAT32, call, run, next, padded, rows, to); break;
    case BFLOAT16: N(pack_kind)(BFLOAT16, call, run, next, padded, rows, to); break;
    case INT8: N(pack_kind)(INT8, call, run, next, padded, rows, to); break;
    default: N(pack_kind)(FLOAT16, call, run, next, padded, rows, to);
    }
}

TARGET INLINE void N(dots_of)(const int rows, const int vectors, const float *const *query, scratch_t *s, int k, int dim) {
    floats sum[MAX_GROUP][8];
    const float *key = s->key + k;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = (floats){0};
    for (int d = 0; d < dim; d++, key += KEY_STRIDE) {
        floats part[8];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) part[v] = LOAD(key + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            floats one = ALL(query[r][d]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[r][v] = FMA(one, part[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) STORE(s->score + r * TILE + k + v * WIDTH, sum[r][v]);
}

/* score[r][k] = query[r] . key[k], unscaled */
TARGET INLINE void N(dots)(const int rows, const float *const *query, int first, scratch_t *s, int padded, int dim) {
    int k = 0;
    (void)first;
    for (; k + VECTORS(rows) * WIDTH <= padded; k += VECTORS(rows) * WIDTH)
        N(dots_of)(rows, VECTORS(rows), query, s, k, dim);
    for (; k < padded; k += 2 * WIDTH) N(dots_of)(rows, 2, query, s, k, dim);
}

TARGET INLINE void N(sums_of)(const int rows, const int vectors, const N(target) *to, const scratch_t *s, int d, int begin,
                              int end) {
    floats sum[MAX_GROUP][8];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = (floats){0};
    for (int k = begin; k < end; k++) {
        const float *value = s->values[k] + d;
        floats part[8];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) part[v] = LOAD(value + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            floats one = ALL(s->score[r * TILE + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[r][v] = FMA(one, part[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) N(put)(to, r, d + v * WIDTH, sum[r][v]);
}

/* weight[r] . value, over keys begin .. end - 1 */
TARGET INLINE void N(sums)(const int rows, const N(target) *to, scratch_t *s, int dim, int begin, int end) {
    const int wide = (dim + 2 * WIDTH - 1) & ~(2 * WIDTH - 1);
    int d = 0;
    for (; d + VECTORS(rows) * WIDTH <= wide; d += VECTORS(rows) * WIDTH)
        N(sums_of)(rows, VECTORS(rows), to, s, d, begin, end);
    for (; d < wide; d += 2 * WIDTH) N(sums_of)(rows, 2, to, s, d, begin, end);
}

#else /* BF16_PRODUCTS: pairs of neighbours, of which a product takes two at once */

#define KEYS_MULTIPLE 32

TARGET static void N(pack)(const call_t *call, const run_t *run, const run_t *next, int padded, int rows, scratch_t *to) {
    (void)rows;
    const int64_t dim = call->head_dim, value_at = call->num_kv_heads * dim;
    const uint16_t *cache = call->cache, *row[16];
    static const uint16_t zeros[32];
    uint32_t *keys = (uint32_t *)to->key, *values = (uint32_t *)to->value;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int base = 0; base < padded; base += 16) {
        int64_t at[16];
        const int count = run->count - base < 16 ? run->count - base : 16;
        find_keys(call, run, base, count, at);
        for (int i = 0; i < 16; i++) row[i] = i < count ? cache + at[i] : 0;
        if (next) prefetch(call, next, base, 16);
        for (int d = 0; d < dim; d += 32) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(row[i] ? row[i] + d : zeros);
            transpose_avx512(r);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(keys + (d / 2 + i) * KEY_STRIDE + base, r[i]);
        }
        for (int i = 0; i < 16; i += 2) {
            uint32_t *value = values + (base + i) / 2 * dim;
            for (int d = 0; d < dim; d += 32) {
                __m512i a = _mm512_loadu_si512(row[i] ? row[i] + value_at + d : zeros);
                __m512i b = _mm512_loadu_si512(row[i + 1] ? row[i + 1] + value_at + d : zeros);
                _mm512_storeu_si512(value + d, _mm512_permutex2var_epi16(a, low, b));
                _mm512_storeu_si512(value + d + 16, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
}

#define DOT(sum, pairs, pair) \
    ((floats)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(pairs), (__m512bh)_mm512_set1_epi32((int)(pair))))

TARGET INLINE void N(dots)(const int rows, const float *const *query, int first, scratch_t *s, int padded, int dim) {
    (void)query;
    const uint32_t *pairs = s->query + first * (dim / 2);
    for (int k = 0; k < padded; k += 32) {
        floats a[GROUP], b[GROUP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) a[r] = b[r] = (floats){0};
        const uint32_t *key = (const uint32_t *)s->key + k;
        for (int d = 0; d < dim / 2; d++, key += KEY_STRIDE) {
            __m512i left = _mm512_loadu_si512(key), right = _mm512_loadu_si512(key + 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                a[r] = DOT(a[r], left, pairs[r * (dim / 2) + d]);
                b[r] = DOT(b[r], right, pairs[r * (dim / 2) + d]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            STORE(s->score + r * TILE + k, a[r]);
            STORE(s->score + r * TILE + k + 16, b[r]);
        }
    }
}

TARGET INLINE void N(sums)(const int rows, const N(target) *to, scratch_t *s, int dim, int begin, int end) {
    begin &= ~31;
    end = (end + 31) & ~31;
    for (int r = 0; r < rows; r++)
        for (int k = begin; k < end; k += 32) {
            __m512 left = (__m512)LOAD(s->score + r * TILE + k), right = (__m512)LOAD(s->score + r * TILE + k + 16);
            _mm512_storeu_si512(s->weight + (r * TILE + k) / 2, (__m512i)_mm512_cvtne2ps_pbh(right, left));
        }
    for (int d = 0; d < dim; d += 32) {
        floats a[GROUP], b[GROUP];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) a[r] = b[r] = (floats){0};
        const uint32_t *value = (const uint32_t *)s->value + begin / 2 * dim + d;
        for (int k = begin / 2; k < end / 2; k++, value += dim) {
            __m512i left = _mm512_loadu_si512(value), right = _mm512_loadu_si512(value + 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                a[r] = DOT(a[r], left, s->weight[r * (TILE / 2) + k]);
                b[r] = DOT(b[r], right, s->weight[r * (TILE / 2) + k]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            N(put)(to, r, d, a[r]);
            N(put)(to, r, d + 16, b[r]);
        }
    }
}

#endif /* BF16_PRODUCTS */

/* The multipliers that merge: from differences of maxima, in place. */
TARGET INLINE void N(shrink)(float *differences, int count) {
    for (int i = 0; i < count; i += WIDTH) STORE(differences + i, N(exp2_of)(LOAD(differences + i)));
}

TARGET static void N(attend)(const call_t *call, int64_t number, int64_t num_items, scratch_t *s) {
    const item_t *item = call->items + number;
    const int keeps = number < call->num_keeping;
    const int dim = (int)call->head_dim, share = (int)(call->num_heads / call->num_kv_heads);
    const int wide = (dim + 31) & ~31, rows = item->num_rows * share, all = rows * item->num_heads;
    const int32_t *index = call->row_index + item->first_row;
    int least, reach;

    /* 1. Sums of nothing. Of each KV head, row i is its query head i % share of batch row index[i / share]. */
    bounds(call, item, &least, &reach);
    if (!keeps) {
        memset(s->sum, 0, sizeof(float) * all * wide);
        memset(s->total, 0, sizeof(float) * all);
        for (int i = 0; i < all; i++) s->most[i] = -INFINITY;
    }
#ifdef BF16_PRODUCTS
    for (int i = 0; i < all; i++) {
        const int head = (item->head + i / rows) * share + i % rows % share;
        const float *query = call->query + index[i % rows / share] * call->query_stride + head * dim;
        for (int d = 0; d < dim; d += 16)
            _mm256_storeu_si256((__m256i *)(s->query + (i * dim + d) / 2),
                                (__m256i)_mm512_cvtneps_pbh((__m512)LOAD(query + d)));
    }
#endif

    /* 2. Each tile of keys serves all rows, GROUP of them at a time. */
    for (int step = 0;; step++) {
        const int first = least + step / item->num_heads * TILE, nth = step % item->num_heads;
        if (first >= reach) break;
        const int head = item->head + nth, start = nth * rows;
        const int count = reach - first < TILE ? reach - first : TILE;
        const int padded = (count + KEYS_MULTIPLE - 1) & ~(KEYS_MULTIPLE - 1);
        const int is_kept = !keeps && first < item->kept * TILE;
        if (!is_kept) {
            run_t run = {call->tables + item->table, head, first, count}, next = run;
            next.first += count;
            next.count = reach - next.first < TILE ? reach - next.first : TILE;
            if (next.count <= 0 && number + 1 < num_items) next = first_run(call, item + 1);
            N(pack)(call, &run, next.count > 0 ? &next : 0, padded, rows, s);
        }
        for (int base = 0; base < rows; base += GROUP) {
            const int taken = rows - base < GROUP ? rows - base : GROUP;
            const float *query[MAX_GROUP];
            int begins[MAX_GROUP], ends[MAX_GROUP], begin = TILE, end = 0;
            for (int r = 0; r < taken; r++) {
                const int i = base + r, row = index[i / share], position = call->positions[row];
                query[r] = call->query + row * call->query_stride + (head * share + i % share) * dim;
                begins[r] = call->window ? position + 1 - (int)call->window - first : 0;
                ends[r] = position + 1 - first < count ? position + 1 - first : count;
                if (begins[r] < begin && ends[r] > 0) begin = begins[r];
                if (ends[r] > end && begins[r] < count) end = ends[r];
            }
            if (begin < 0) begin = 0;
            if (begin >= end) continue;

            /* a. Maxima and sums of weights of this tile, and where its sums of values go. */
            float most[MAX_GROUP], total[MAX_GROUP];
            N(target) to = {.merges = !keeps};
            to.now = to.old + MAX_GROUP;
            memset(to.old, 0, sizeof to.old);
            if (!is_kept) {
                const int needed = (end + KEYS_MULTIPLE - 1) & ~(KEYS_MULTIPLE - 1);
                switch (taken) {
#define CASE(n) case n: N(dots)(n, query, start + base, s, needed, dim); break;
                    CASE(1) CASE(2) CASE(3) CASE(4)
#if GROUP > 4
                    CASE(5) CASE(6)
#endif
#if GROUP > 6
                    CASE(7) CASE(8)
#endif
#undef CASE
                }
                for (int r = 0; r < taken; r++)
                    N(weigh)(call, s->score + r * TILE, needed, begins[r], ends[r], most + r, total + r);
            }
            for (int r = 0; r < taken; r++) {
                const int i = base + r;
                float *kept = 0;
                if (keeps || is_kept) kept = result_of(call, index[i / share], first / TILE, head * share + i % share);
                if (keeps) {
                    to.sum[r] = kept;
                    kept[wide] = most[r];
                    kept[wide + 1] = total[r];
                    continue;
                }
                if (is_kept) {
                    most[r] = kept[wide];
                    total[r] = kept[wide + 1];
                }
                to.sum[r] = s->sum + (start + i) * wide;
                if (ends[r] <= 0 || begins[r] >= count) { /* sees nothing of this tile */
                    to.now[r] = -INFINITY;
                    continue;
                }
                float *before = s->most + start + i;
                const float larger = most[r] > *before ? most[r] : *before;
                to.old[r] = *before - larger;
                to.now[r] = most[r] - larger;
                *before = larger;
            }
            N(shrink)(to.old, 2 * MAX_GROUP);
            if (!keeps)
                for (int r = 0; r < taken; r++)
                    if (to.now[r] != 0.0f || to.old[r] != 1.0f) {
                        float *before = s->total + start + base + r;
                        *before = *before * to.old[r] + total[r] * to.now[r];
                    }

            /* b. Its sums of values. */
            if (is_kept) {
                for (int r = 0; r < taken; r++) {
                    if (ends[r] <= 0 || begins[r] >= count) continue;
                    const int i = base + r;
                    const float *kept = result_of(call, index[i / share], first / TILE, head * share + i % share);
                    for (int d = 0; d < wide; d += WIDTH) N(put)(&to, r, d, LOAD(kept + d));
                }
                continue;
            }
            switch (taken) {
#define CASE(n) case n: N(sums)(n, &to, s, dim, begin, end); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#if GROUP > 4
                CASE(5) CASE(6)
#endif
#if GROUP > 6
                CASE(7) CASE(8)
#endif
#undef CASE
            }
        }
    }

    /* 3. Averages. */
    if (keeps) return;
    for (int i = 0; i < all; i++) {
        const int head = (item->head + i / rows) * share + i % rows % share;
        float *out = call->out + ((int64_t)index[i % rows / share] * call->num_heads + head) * dim;
        for (int d = 0; d < dim; d++) out[d] = s->sum[i * wide + d] / s->total[i];
    }
}

#ifndef BF16_PRODUCTS
#include "forward.c"
#endif

#undef floats
#undef ints
#undef LOAD
#undef STORE
#undef ALL
#undef KEYS_MULTIPLE
#undef ISA
#undef WIDTH
#undef GROUP
#undef VECTORS
#undef TOGETHER
#undef BESIDE
#undef WIDE
#undef CASES
#undef TARGET
#undef FMA
#undef LARGER
#undef TRANSPOSE
#undef WIDEN
#undef BF16_PRODUCTS
#endif
