/* Products of rows with quantised weights: engine/compute/quantize.py says what is computed, to the bit.
 *
 * Compiled and called by engine/compute/kernel.py, beside attention.c. A weight lies in blocks of 16 outputs, and a block
 * in quads: four inputs of each output, 64 bytes, or two quads in the halves of 64 bytes with 4 bits. So a decode reads
 * weights once and in order, a lane is an output, and nothing is added across lanes. A tile of rows shares what is
 * loaded of a block, and a block stays near while all tiles of a chunk of rows pass it.
 *
 * The second half is compiled once for each instruction set, as that of attention.c. They differ in how they add inner
 * products of four numbers in 8 bits, which is exact; all else is the same float32 arithmetic in the same order (nothing
 * is fused), so all give the same bits.
 */
#ifndef WIDTH

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if __GNUC__ >= 11 || __clang_major__ >= 12
#define HAS_AVX_VNNI 1 /* the compiler */
#else
#define HAS_AVX_VNNI 0
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define BLOCK 16           /* outputs that lie together */
#define CHUNK_BYTES 262144 /* of rounded rows that pass a block: they stay in a second-level cache */
#define SPAN_BYTES 32768   /* of weights that a thread takes at least */
#define AHEAD 16384        /* by bits of a number: bytes of a weight that are asked for before they are needed */

enum { PLAIN, NEON, NEON_DOT, AVX2, AVX2_VNNI, AVX512_VNNI };
enum { NOTHING, SWISH, MULTIPLY, ADD };

typedef struct {
    const uint8_t *values;        /* (blocks, runs * run / 4, 16, 4) int8; with 4 bits half of it */
    const float *scales, *minima; /* (blocks, groups, 16); minima may be null */
    const float *bias;            /* (outputs,) or null */
    int64_t inputs, outputs, run; /* run: inputs whose activations share a scale, 32 or 16 */
    int64_t group_runs;           /* runs that share a scale of the weight */
    int32_t bits, variant, rotated; /* rotated: runs of 32 are, of the weight, and of rows before they are rounded */
} weight_t;

typedef struct {
    const weight_t *weight;
    const float *rows, *other; /* (num_rows, inputs), (num_rows, outputs) */
    float *out;
    int64_t stride; /* between rows of out, and of other */
    int8_t *x;     /* (num_rows, runs * run) */
    float *scale;  /* (num_rows, runs) */
    float *moved;  /* (num_rows, runs) sums of x, times the scale: what minima are multiplied with */
    int32_t *less; /* (num_rows, runs) sums of x, times what the numbers of the weight are too large by, negated */
    int64_t num_rows, runs, finish;
    int64_t chunk, chunks, span, spans; /* rows and blocks of an item */
    int64_t next;
    int rounding;
} product_t;

#if defined(__x86_64__) && !defined(__clang__) /* gcc puts off additions until all registers are full of summands */
#define KEEP(sum) __asm__("" : "+x"(sum))
#else
#define KEEP(sum)
#endif

typedef int32_t fours_t __attribute__((may_alias));

#define INLINE static inline __attribute__((always_inline))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define N(name) JOIN(name, ISA)

typedef int32_t ints_t __attribute__((vector_size(16), may_alias));
typedef int8_t bytes_t __attribute__((vector_size(16), may_alias));

INLINE ints_t dot_plain(ints_t sum, bytes_t w, bytes_t x) {
    const int8_t *a = (const int8_t *)&w, *b = (const int8_t *)&x;
    for (int i = 0; i < 4; i++)
        sum[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] + a[4 * i + 3] * b[4 * i + 3];
    return sum;
}

#define ISA plain
#define WIDTH 4
#define ROWS 2
#define TARGET
#define DOT(sum, w, x) ((ints)dot_plain((ints_t)(sum), (bytes_t)(w), (bytes_t)(x)))
#include "products.c"

#if defined(__aarch64__)
INLINE int32x4_t dot_neon(int32x4_t sum, int8x16_t w, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#define ISA neon
#define WIDTH 4
#define ROWS 4
#define TARGET
#define DOT(sum, w, x) ((ints)dot_neon((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x)))
#include "products.c"

#define ISA neon_dot
#define WIDTH 4
#define ROWS 4
#ifdef __clang__
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define DOT(sum, w, x) ((ints)vdotq_s32((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x)))
#include "products.c"
#endif

#if defined(__x86_64__)
#define ISA avx2
#define WIDTH 8
#define ROWS 4
#define TARGET __attribute__((target("avx2")))
#define ONES _mm256_set1_epi16(1)
/* |w| * (x with the sign of w) in pairs: at most 2 * 128 * 127, which 16 bits hold. */
#define DOT(sum, w, x) \
    ((sum) + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)(w)), \
                                                          _mm256_sign_epi8((__m256i)(x), (__m256i)(w))), ONES))
/* Numbers below 16: 8 quads of 2 * 15 * 127 fit into 16 bits. */
#define DOT_SMALL(sum, w, x) ((ints)_mm256_add_epi16((__m256i)(sum), _mm256_maddubs_epi16((__m256i)(w), (__m256i)(x))))
#define WIDEN_SMALL(sum) ((ints)_mm256_madd_epi16((__m256i)(sum), ONES))
#include "products.c"
#undef ONES

#if HAS_AVX_VNNI
#define ISA avx2_vnni
#define WIDTH 8
#define ROWS 4
#define TARGET __attribute__((target("avx2,avxvnni")))
#define FLIPPED
#define DOT(sum, w, x) ((ints)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x)))
#include "products.c"
#endif

#define ISA avx512_vnni
#define WIDTH 16
#define ROWS 8
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define FLIPPED
#define DOT(sum, w, x) ((ints)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x)))
#include "products.c"
#endif

/* Whether this processor can run a variant: 1 or 0. */
int kvasir_has_products(int variant) {
    if (variant == PLAIN) return 1;
#if defined(__aarch64__)
    if (variant == NEON) return 1;
    if (variant == NEON_DOT) return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#elif defined(__x86_64__)
    __builtin_cpu_init();
    if (variant == AVX2) return __builtin_cpu_supports("avx2") != 0;
    if (variant == AVX2_VNNI) {
        unsigned a = 0, b, c, d;
        return HAS_AVX_VNNI && __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
    }
    if (variant == AVX512_VNNI)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}

static void work(void *given) {
    product_t *p = given;
    for (;;) {
        const int64_t number = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (number >= p->chunks * (p->rounding ? 1 : p->spans)) return;
        switch (p->weight->variant) {
#if defined(__aarch64__)
        case NEON: item_neon(p, number); break;
        case NEON_DOT: item_neon_dot(p, number); break;
#elif defined(__x86_64__)
        case AVX2: item_avx2(p, number); break;
#if HAS_AVX_VNNI
        case AVX2_VNNI: item_avx2_vnni(p, number); break;
#endif
        case AVX512_VNNI: item_avx512_vnni(p, number); break;
#endif
        default: item_plain(p, number);
        }
    }
}

INLINE int64_t up(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Fills out, (num_rows, outputs), rows `stride` apart: finish is one of the enum, what MULTIPLY and ADD take is `other`,
 * laid out as out, which it may be. parallel is GOMP_parallel, or null. Returns 0, or 1 without memory. */
int kvasir_products(const weight_t *weight, const float *rows, int64_t num_rows, float *out, int64_t stride,
                    const float *other, int64_t finish, int64_t threads,
                    void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    product_t p = {.weight = weight, .rows = rows, .num_rows = num_rows, .out = out, .stride = stride, .other = other, .finish = finish};
    if (!num_rows) return 0;
    p.runs = up(weight->inputs, weight->run);
    const int64_t padded = p.runs * weight->run, all = num_rows * p.runs, blocks = up(weight->outputs, BLOCK), bytes = blocks * padded * 2 * weight->bits;
    char *memory = aligned_alloc(64, (size_t)(up(num_rows * padded + 12 * all, 64) * 64));
    if (!memory) return 1;
    p.scale = (float *)memory;
    p.moved = p.scale + all;
    p.less = (int32_t *)(p.moved + all);
    p.x = (int8_t *)(p.less + all);
    p.chunk = CHUNK_BYTES / padded < 32 ? 32 : CHUNK_BYTES / padded & ~(int64_t)7;
    p.chunks = up(num_rows, p.chunk);
    if (!parallel || threads < 2 || bytes * num_rows < 4 * SPAN_BYTES) threads = 1;
    const int64_t most = bytes * p.chunks / SPAN_BYTES; /* spans of all chunks, four for each thread or fewer */
    p.spans = threads == 1 ? 1 : most < 4 * threads ? up(most, p.chunks) : up(4 * threads, p.chunks);
    p.span = up(blocks, p.spans < 1 ? 1 : p.spans);
    p.spans = up(blocks, p.span);
    for (p.rounding = 1; p.rounding >= 0; p.rounding--) {
        const int64_t items = p.chunks * (p.rounding ? 1 : p.spans), used = threads < items ? threads : items;
        p.next = 0;
        if (used > 1) parallel(work, &p, (unsigned)used, 0);
        else work(&p);
    }
    free(memory);
    return 0;
}

#else /* WIDTH: one instruction set */

typedef float N(floats) __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t N(ints) __attribute__((vector_size(4 * WIDTH), may_alias));
typedef uint8_t N(bytes) __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float N(loose) __attribute__((vector_size(4 * WIDTH), may_alias, aligned(4)));
#define floats N(floats)
#define ints N(ints)
#define bytes N(bytes)
#define LOAD(p) (*(const N(loose) *)(p))
#define ALL(x) ((x) - (floats){0})
#define VECTORS (BLOCK / WIDTH)
#ifndef DOT_SMALL
#define DOT_SMALL DOT
#define WIDEN_SMALL(sum) (sum)
#endif
#ifdef FLIPPED /* numbers of the weight are taken as 0 .. 255 */
#define FLIP 128
#else
#define FLIP 0
#endif

/* A run of a row in 8 bits: what is added makes the last bits of a float a whole number, rounded to even. Bits are
 * compared as whole numbers, because NaN is the largest then. */
TARGET INLINE void N(round_run)(const product_t *p, const float *row, const int run, int64_t at) {
    int8_t *x = p->x + at * run;
    int32_t bits[32], most = 0, total = 0;
    memcpy(bits, row, 4 * (size_t)run);
    for (int i = 0; i < run; i++) most = (bits[i] & 0x7fffffff) > most ? bits[i] & 0x7fffffff : most;
    float peak, moved[32];
    memcpy(&peak, &most, 4);
    const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    for (int i = 0; i < run; i++) moved[i] = row[i] * inverse + 12582912.0f;
    memcpy(bits, moved, 4 * (size_t)run);
    for (int i = 0; i < run; i++) x[i] = (int8_t)bits[i], total += (int8_t)bits[i];
    p->scale[at] = peak / 127.0f;
    p->moved[at] = (float)total * p->scale[at];
    p->less[at] = total * (p->weight->bits == 8 ? -FLIP : p->weight->minima ? 0 : -8);
}

/* Times the Hadamard matrix of 32: sums and differences of the halves, side by side, five times. */
TARGET INLINE void N(rotate)(float *run) {
    float next[32];
    for (int turn = 0; turn < 5; turn++) {
        for (int i = 0; i < 16; i++) next[2 * i] = run[i] + run[i + 16], next[2 * i + 1] = run[i] - run[i + 16];
        memcpy(run, next, sizeof next);
    }
}

TARGET static void N(round_rows)(const product_t *p, int64_t first, int64_t end) {
    const int64_t run = p->weight->run, inputs = p->weight->inputs;
    for (int64_t r = first; r < end; r++)
        for (int64_t g = 0; g < p->runs; g++) {
            const float *row = p->rows + r * inputs + g * run;
            const int64_t at = r * p->runs + g;
            float last[32] = {0};
            if (inputs - g * run < run) row = memcpy(last, row, 4 * (size_t)(inputs - g * run));
            if (p->weight->rotated) {
                row = memcpy(last, row, sizeof last);
                N(rotate)(last);
            }
            if (run == 32) N(round_run)(p, row, 32, at);
            else N(round_run)(p, row, 16, at);
        }
}

TARGET INLINE floats N(swish)(floats x) {
    floats y = x * ALL(-1.44269504f);
    y = (floats)(((ints)y & (y > ALL(-126.0f))) | ((ints)ALL(-126.0f) & (y <= ALL(-126.0f))));
    y = (floats)(((ints)y & (y < ALL(126.0f))) | ((ints)ALL(126.0f) & (y >= ALL(126.0f))));
    const floats whole = (y + ALL(12582912.0f)) - ALL(12582912.0f), part = y - whole;
    floats z = ALL(1.535336188319500e-4f);
    z = z * part + ALL(1.339887440266574e-3f);
    z = z * part + ALL(9.618437357674640e-3f);
    z = z * part + ALL(5.550332471162809e-2f);
    z = z * part + ALL(2.402264791363012e-1f);
    z = z * part + ALL(6.931472028550421e-1f);
    z = z * part + ALL(1.0f);
    z *= (floats)((__builtin_convertvector(whole, ints) + 127) << 23);
    return x / (ALL(1.0f) + z);
}

TARGET static void N(put)(const product_t *p, int64_t row, int64_t block, float *sums) {
    const weight_t *w = p->weight;
    const int64_t first = block * BLOCK, count = w->outputs - first < BLOCK ? w->outputs - first : BLOCK;
    const int64_t at = row * p->stride + first;
    float bias[BLOCK] = {0}, other[BLOCK] = {0};
    if (w->bias) memcpy(bias, w->bias + first, 4 * (size_t)count);
    if (p->finish >= MULTIPLY) memcpy(other, p->other + at, 4 * (size_t)count);
    for (int i = 0; i < BLOCK; i += WIDTH) {
        floats x = LOAD(sums + i);
        if (w->bias) x += LOAD(bias + i);
        if (p->finish == SWISH) x = N(swish)(x);
        if (p->finish == MULTIPLY) x *= LOAD(other + i);
        if (p->finish == ADD) x += LOAD(other + i);
        *(N(loose) *)(sums + i) = x;
    }
    memcpy(p->out + at, sums, 4 * (size_t)count);
}

/* `count` rows, from `row` on, with a block. */
TARGET INLINE void N(tile)(const product_t *p, const int bits, const int count, int64_t row, int64_t block) {
    const weight_t *w = p->weight;
    const int64_t runs = p->runs, run = w->run, groups = (runs + w->group_runs - 1) / w->group_runs;
    const uint8_t *values = w->values + block * runs * run * 2 * bits;
    const float *scales = w->scales + block * groups * BLOCK;
    const float *minima = w->minima ? w->minima + block * groups * BLOCK : 0;
    const int8_t *x = p->x + row * runs * run;
    const float *scale = p->scale + row * runs, *moved = p->moved + row * runs;
    const int32_t *less = p->less + row * runs;
    floats total[ROWS][VECTORS] = {{{0}}};
    int64_t left = w->group_runs;
    for (int64_t g = 0; g < runs; g++) {
        ints inner[ROWS][VECTORS] = {{{0}}};
        for (int64_t half = 0; half < run; half += 16, values += 32 * bits, x += 16)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                bytes quad[VECTORS];
                if (bits == 8 || k % 2) __builtin_prefetch(values + (bits == 8 ? k : k / 2) * 64 + AHEAD / bits, 0, 3);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    quad[v] = *(const bytes *)(values + (bits == 8 ? k : k / 2) * 64 + 4 * WIDTH * v);
                    if (bits == 8) quad[v] ^= FLIP;
                    else if (k % 2) quad[v] = quad[v] >> 4;
                    else quad[v] &= 15;
                }
#pragma GCC unroll 8
                for (int r = 0; r < count; r++) {
                    const bytes four = (bytes)(*(const fours_t *)(x + r * runs * run + 4 * k) - (ints){0});
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) {
                        if (bits == 8) inner[r][v] = DOT(inner[r][v], quad[v], four);
                        else inner[r][v] = DOT_SMALL(inner[r][v], quad[v], four);
                        KEEP(inner[r][v]);
                    }
                }
            }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int64_t at = r * runs + g;
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                ints exact = bits == 8 ? inner[r][v] : WIDEN_SMALL(inner[r][v]);
                if (bits == 4 || FLIP > 0) exact += less[at];
                total[r][v] += __builtin_convertvector(exact, floats) * (ALL(scale[at]) * LOAD(scales + v * WIDTH));
                if (minima) total[r][v] += ALL(moved[at]) * LOAD(minima + v * WIDTH);
            }
        }
        if (!--left) {
            left = w->group_runs;
            scales += BLOCK;
            if (minima) minima += BLOCK;
        }
    }
    for (int r = 0; r < count; r++) N(put)(p, row + r, block, (float *)total[r]);
}

TARGET static void N(tiles)(const product_t *p, const int bits, int64_t row, int64_t end, int64_t block) {
    for (; row + ROWS <= end; row += ROWS)
        if (bits == 8) N(tile)(p, 8, ROWS, row, block);
        else N(tile)(p, 4, ROWS, row, block);
    for (; row + 2 <= end; row += 2)
        if (bits == 8) N(tile)(p, 8, 2, row, block);
        else N(tile)(p, 4, 2, row, block);
    if (row < end) {
        if (bits == 8) N(tile)(p, 8, 1, row, block);
        else N(tile)(p, 4, 1, row, block);
    }
}

static void N(item)(const product_t *p, int64_t number) {
    const int64_t blocks = (p->weight->outputs + BLOCK - 1) / BLOCK;
    const int64_t chunk = p->rounding ? number : number / p->spans, row = chunk * p->chunk;
    const int64_t end = row + p->chunk < p->num_rows ? row + p->chunk : p->num_rows;
    if (p->rounding) {
        N(round_rows)(p, row, end);
        return;
    }
    const int64_t first = number % p->spans * p->span;
    const int64_t last = first + p->span < blocks ? first + p->span : blocks;
    for (int64_t block = first; block < last; block++) N(tiles)(p, p->weight->bits, row, end, block);
}

#undef floats
#undef ints
#undef bytes
#undef LOAD
#undef ALL
#undef VECTORS
#undef DOT_SMALL
#undef WIDEN_SMALL
#undef FLIP
#undef FLIPPED
#undef DOT
#undef ROWS
#undef TARGET
#undef WIDTH
#undef ISA
#endif
