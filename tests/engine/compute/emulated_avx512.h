/* The AVX-512 instructions of attention.c, in terms of others: include it first, with -mavx2 -mfma. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define target(instructions) unused

#define MAKE(name, type, count, expression) \
    static inline __m512i name(__m512i a, __m512i b) { \
        type x[count], y[count], out[count]; \
        memcpy(x, &a, 64), memcpy(y, &b, 64); \
        for (int i = 0; i < count; i++) out[i] = expression; \
        memcpy(&a, out, 64); \
        return a; \
    }
#define EACH(i, n, lanes) ((i) / (lanes) * (lanes) + (n))
MAKE(e_unpacklo_epi32, int32_t, 16, (i % 2 ? y : x)[EACH(i, i % 4 / 2, 4)])
MAKE(e_unpackhi_epi32, int32_t, 16, (i % 2 ? y : x)[EACH(i, 2 + i % 4 / 2, 4)])
MAKE(e_unpacklo_epi64, int64_t, 8, (i % 2 ? y : x)[EACH(i, 0, 2)])
MAKE(e_unpackhi_epi64, int64_t, 8, (i % 2 ? y : x)[EACH(i, 1, 2)])
MAKE(e_shuffle_0x88, int32_t, 16, (i < 8 ? x : y)[(i / 4 % 2 ? 8 : 0) + i % 4])
MAKE(e_shuffle_0xdd, int32_t, 16, (i < 8 ? x : y)[(i / 4 % 2 ? 12 : 4) + i % 4])
MAKE(e_add_epi16, int16_t, 32, (int16_t)(x[i] + y[i]))

static inline __m512 e_fmadd(__m512 a, __m512 b, __m512 c) {
    float x[16], y[16], z[16];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    for (int i = 0; i < 16; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    memcpy(&c, z, 64);
    return c;
}
static inline __m512 e_max(__m512 a, __m512 b) {
    float x[16], y[16];
    memcpy(x, &a, 64), memcpy(y, &b, 64);
    for (int i = 0; i < 16; i++) y[i] = x[i] > y[i] ? x[i] : y[i];
    memcpy(&b, y, 64);
    return b;
}
static inline __m512i e_permutex2var(__m512i a, __m512i index, __m512i b) {
    uint16_t from[64], at[32], out[32];
    memcpy(from, &a, 64), memcpy(from + 32, &b, 64), memcpy(at, &index, 64);
    for (int i = 0; i < 32; i++) out[i] = from[at[i] % 64];
    memcpy(&a, out, 64);
    return a;
}
static inline __m512i e_set1_epi16(short x) {
    short all[32];
    __m512i out;
    for (int i = 0; i < 32; i++) all[i] = x;
    memcpy(&out, all, 64);
    return out;
}
static inline __m512i e_set1_epi32(int x) {
    int all[16];
    __m512i out;
    for (int i = 0; i < 16; i++) all[i] = x;
    memcpy(&out, all, 64);
    return out;
}
#define e_set_epi16(...) e_set_epi16_((short[]){__VA_ARGS__})
static inline __m512i e_set_epi16_(const short *last_first) {
    short all[32];
    __m512i out;
    for (int i = 0; i < 32; i++) all[i] = last_first[31 - i];
    memcpy(&out, all, 64);
    return out;
}
static inline __m512i e_load(const void *from) {
    __m512i out;
    memcpy(&out, from, 64);
    return out;
}
static inline void e_store(void *to, __m512i x) { memcpy(to, &x, 64); }
static inline uint16_t e_rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline float e_widened(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline __m512i e_cvtne2ps(__m512 high, __m512 low) {
    float x[32];
    uint16_t out[32];
    __m512i packed;
    memcpy(x, &low, 64), memcpy(x + 16, &high, 64);
    for (int i = 0; i < 32; i++) out[i] = e_rounded(x[i]);
    memcpy(&packed, out, 64);
    return packed;
}
static inline __m256i e_cvtneps(__m512 from) {
    float x[16];
    uint16_t out[16];
    __m256i packed;
    memcpy(x, &from, 64);
    for (int i = 0; i < 16; i++) out[i] = e_rounded(x[i]);
    memcpy(&packed, out, 32);
    return packed;
}
static inline __m512 e_dpbf16(__m512 sum, __m512i a, __m512i b) {
    float out[16];
    uint16_t x[32], y[32];
    memcpy(out, &sum, 64), memcpy(x, &a, 64), memcpy(y, &b, 64);
    for (int i = 0; i < 16; i++)
        out[i] += e_widened(x[2 * i + 1]) * e_widened(y[2 * i + 1]) + e_widened(x[2 * i]) * e_widened(y[2 * i]);
    memcpy(&sum, out, 64);
    return sum;
}

#define __m512bh __m512i
#define _mm512_unpacklo_epi32 e_unpacklo_epi32
#define _mm512_unpackhi_epi32 e_unpackhi_epi32
#define _mm512_unpacklo_epi64 e_unpacklo_epi64
#define _mm512_unpackhi_epi64 e_unpackhi_epi64


#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, order) e_shuffle_##order(a, b)
#define _mm512_add_epi16 e_add_epi16
#define _mm512_fmadd_ps e_fmadd
#define _mm512_max_ps e_max
#define _mm512_permutex2var_epi16 e_permutex2var
#define _mm512_set1_epi16 e_set1_epi16
#define _mm512_set1_epi32 e_set1_epi32
#define _mm512_set_epi16 e_set_epi16
#define _mm512_loadu_si512 e_load
#define _mm512_storeu_si512 e_store
#define _mm512_cvtne2ps_pbh e_cvtne2ps
#define _mm512_cvtneps_pbh e_cvtneps
#define _mm512_dpbf16_ps e_dpbf16
