/* What the files of this folder share: numbers, layouts, and how work is divided over threads.

   Compiled as one file (native.c). Products and sums are joined where `madd` says so and nowhere
   else (-ffp-contract=off), so that what torch rounds comes out as torch has it. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define MOST_ROWS 4      /* rows of a tile: their accumulators fit the registers */
#define MOST_DIM 1024    /* sums of a digit times a code stay within 32 bits */
#define DIGIT 128        /* a query is rounded to two digits to this base */
#define MOST_DIGIT 127

typedef uint16_t bf16;

/* Keys and values of some blocks, as they are stored. Strides count elements from head to head. */
typedef struct {
    const void *keys;      /* [H, n, B, d] int8 or bf16 */
    const float *scale;    /* [H, d] of int8 keys */
    const float *low;      /* [H, d] of int8 keys */
    const void *values;    /* [H, n, B, d_v] int8 or bf16 */
    const bf16 *by_token;  /* [H, n, B] scales of int8 values */
    int64_t key_stride, value_stride, token_stride;
    int64_t blocks;        /* n */
    int64_t packed;        /* 1: int8; 0: bf16 */
} part_t;

/* One layer: its geometry, and its window's slots. */
typedef struct {
    int64_t heads, kv_heads, dim, value_dim;
    int64_t half;          /* dimensions that turn, divided by two */
    int64_t interleaved;   /* pairs are neighbours, not halves apart */
    int64_t block_tokens;
    int64_t rounds;        /* scores of bf16 keys are rounded to bf16, as torch's products are */
    int64_t threads;
    float scaling;
    int64_t capacity;      /* slots of the buffers below */
    bf16 *rotated, *values, *raw;  /* [H_kv, capacity, d] */
    float *query_sums;     /* [H_kv, capacity, d], or NULL */
} layer_t;

INLINE float widen(bf16 x) {
    union { uint32_t bits; float number; } u = {(uint32_t)x << 16};
    return u.number;
}

INLINE bf16 narrow(float x) { /* to nearest, ties to even; NaN stays NaN */
    union { float number; uint32_t bits; } u = {x};
    uint32_t rounded = (u.bits + 0x7FFF + ((u.bits >> 16) & 1)) >> 16;
    return (u.bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (bf16)rounded;
}

INLINE float madd(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp of x <= 0, to 2 units in the last place; below -87 it is all but nothing. */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = madd(n, -0.693359375f, x);
    r = madd(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = madd(p, r, 1.3981999507e-3f);
    p = madd(p, r, 8.3334519073e-3f);
    p = madd(p, r, 4.1665795894e-2f);
    p = madd(p, r, 1.6666665459e-1f);
    p = madd(p, r, 5.0000001201e-1f);
    p = madd(p, r * r, r) + 1.0f;
    union { int32_t bits; float number; } u = {((int32_t)n + 127) << 23};
    return p * u.number;
}

#ifdef __AVX512F__
/* 16 at once: left to itself the compiler prefers vectors of half the width. */
INLINE __m512 exp_of_16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* of NaN and a number the second is taken */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
#endif

INLINE float most_of(const float *x, int64_t n) {
    float most = x[0];
    int64_t i = 0;
#ifdef __AVX512F__
    __m512 lanes = _mm512_set1_ps(most);
    for (; i + 16 <= n; i += 16) lanes = _mm512_max_ps(lanes, _mm512_loadu_ps(x + i));
    most = _mm512_reduce_max_ps(lanes);
#endif
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* exp(x - most) in place, and their sum. The order of additions is always the same. */
INLINE float exp_and_sum(float *x, int64_t n, float most) {
    float lanes[16] = {0};
    int64_t i = 0;
#ifdef __AVX512F__
    __m512 sums = _mm512_setzero_ps();
    for (; i + 16 <= n; i += 16) {
        __m512 e = exp_of_16(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(most)));
        _mm512_storeu_ps(x + i, e);
        sums = _mm512_add_ps(sums, e);
    }
    _mm512_storeu_ps(lanes, sums);
#else
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) {
            x[i + l] = exp_of(x[i + l] - most);
            lanes[l] += x[i + l];
        }
#endif
    float sum = 0;
    for (int l = 0; l < 16; l++) sum += lanes[l];
    for (; i < n; i++) sum += x[i] = exp_of(x[i] - most);
    return sum;
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef __AVX512F__
/* 16 rows of 16 words -> words by rows: lane i of out[j] is word j of row i. */
INLINE void transpose(__m512i *x) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#endif
