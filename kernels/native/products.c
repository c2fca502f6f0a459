/* Scores of keys against a few queries: the keys are long, the queries few.

   16 keys are put across the lanes once for all queries, so that no sum runs over lanes. Where the
   processor has no vectors of that width the compiler makes what it can of plain loops. */

#ifndef AHEAD
#define AHEAD 2048  /* bytes: the processor's own guess ends with the page */
#endif

/* A query for int8 keys: its digits, high and low, and what stands for the codes' constants. */
typedef struct {
    int8_t digits[2][MOST_DIM];
    int16_t whole[MOST_DIM];  /* 128 * high + low */
    int32_t sums[2];          /* of the digits */
    float unit, shift;
} folded_t;

/* The same roundings as `_scan_integers` in packed_lookup.py. */
static void fold_query(const bf16 *q, const float *scale, const float *low, int64_t dim,
                       folded_t *out) {
    float folded[MOST_DIM], most = 0, shift = 0;
    for (int64_t j = 0; j < dim; j++) {
        folded[j] = widen(q[j]) * scale[j];
        shift += widen(q[j]) * low[j];
        most = fabsf(folded[j]) > most ? fabsf(folded[j]) : most;
    }
    float unit = most / (MOST_DIGIT * DIGIT);
    unit = unit < 1e-37f ? 1e-37f : unit;
    memset(out->digits, 0, sizeof out->digits);
    out->sums[0] = out->sums[1] = 0;
    for (int64_t j = 0; j < dim; j++) {
        float whole = rintf(folded[j] / unit);
        float high = floorf((whole + DIGIT / 2) / DIGIT);
        out->whole[j] = (int16_t)whole;
        out->digits[0][j] = (int8_t)high;
        out->digits[1][j] = (int8_t)(whole - DIGIT * high);
        for (int i = 0; i < 2; i++) out->sums[i] += out->digits[i][j];
    }
    out->unit = unit;
    out->shift = shift;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
INLINE void score_16_codes(const int8_t *keys, int64_t dim, const folded_t *q, const int rows,
                           float *scores, int64_t stride) {
    __m512i sums[MOST_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) sums[r][i] = _mm512_setzero_si512();
    for (int64_t at = 0; at < dim; at += 64) {
        __m512i x[16];
        __mmask64 held = dim - at >= 64 ? ~0ull : (1ull << (dim - at)) - 1;
        for (int i = 0; i < 16; i++)
            _mm_prefetch((const char *)(keys + i * dim + at) + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < 16; i++)
            /* Unsigned: 128 too large, which the digits' sums take back. */
            x[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(held, keys + i * dim + at),
                                    _mm512_set1_epi8(-128));
        transpose(x);
        for (int j = 0; j < 16; j++)
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++) {
                    int32_t four;
                    memcpy(&four, q[r].digits[i] + at + 4 * j, 4);
                    sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], x[j], _mm512_set1_epi32(four));
                }
    }
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < 2; i++)
            sums[r][i] = _mm512_sub_epi32(sums[r][i], _mm512_set1_epi32(128 * q[r].sums[i]));
        __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0], 7), sums[r][1]);
        _mm512_storeu_ps(scores + r * stride,
                         _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(q[r].unit)));
    }
}
#define HAS_16_CODES
#endif

/* Scores [rows, n] of codes [n, dim], row r at scores + r * stride. */
INLINE void score_codes(const int8_t *keys, int64_t n, int64_t dim, const folded_t *q,
                        const int rows, float *scores, int64_t stride) {
    int64_t t = 0;
#ifdef HAS_16_CODES
    for (; t + 16 <= n; t += 16)
        score_16_codes(keys + t * dim, dim, q, rows, scores + t, stride);
#endif
    for (; t < n; t++)
        for (int r = 0; r < rows; r++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < dim; j++) sum += (int32_t)keys[t * dim + j] * q[r].whole[j];
            scores[r * stride + t] = (float)sum * q[r].unit;
        }
}

#ifdef __AVX512F__
INLINE void score_16_numbers(const bf16 *keys, int64_t dim, const float *q, const int rows,
                             float *scores, int64_t stride) {
    __m512 sums[MOST_ROWS];
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    for (int r = 0; r < rows; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t at = 0; at < dim; at += 32) {
        __m512i x[16];
        for (int i = 0; i < 16; i++)
            _mm_prefetch((const char *)(keys + i * dim + at) + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(keys + i * dim + at);
        transpose(x);
        for (int j = 0; j < 16; j++) {
            __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x[j], 16));
            __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(x[j], upper));
            for (int r = 0; r < rows; r++) {
                const float *pair = q + r * MOST_DIM + at + 2 * j;
                sums[r] = _mm512_fmadd_ps(even, _mm512_set1_ps(pair[0]), sums[r]);
                sums[r] = _mm512_fmadd_ps(odd, _mm512_set1_ps(pair[1]), sums[r]);
            }
        }
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(scores + r * stride, sums[r]);
}
#endif

/* The same of keys as the model made them; queries [rows, MOST_DIM] widened. */
INLINE void score_numbers(const bf16 *keys, int64_t n, int64_t dim, const float *q,
                          const int rows, float *scores, int64_t stride) {
    int64_t t = 0;
#ifdef __AVX512F__
    if (dim % 32 == 0)
        for (; t + 16 <= n; t += 16)
            score_16_numbers(keys + t * dim, dim, q, rows, scores + t, stride);
#endif
    for (; t < n; t++)
        for (int r = 0; r < rows; r++) {
            float lanes[16] = {0}, sum = 0;
            int64_t j = 0;
            for (; j + 16 <= dim; j += 16)
                for (int l = 0; l < 16; l++)
                    lanes[l] = madd(widen(keys[t * dim + j + l]), q[r * MOST_DIM + j + l], lanes[l]);
            for (; j < dim; j++) sum = madd(widen(keys[t * dim + j]), q[r * MOST_DIM + j], sum);
            for (int l = 0; l < 16; l++) sum += lanes[l];
            scores[r * stride + t] = sum;
        }
}

/* A constant number of rows lets the compiler keep their sums in registers. */
#define WITH_ROWS(rows, call) \
    switch (rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    default: call(4); break; \
    }

static void codes_scores(const int8_t *keys, int64_t n, int64_t dim, const folded_t *q, int rows,
                         float *scores, int64_t stride) {
#define CALL(R) score_codes(keys, n, dim, q, R, scores, stride)
    WITH_ROWS(rows, CALL)
#undef CALL
}

static void numbers_scores(const bf16 *keys, int64_t n, int64_t dim, const float *q, int rows,
                           float *scores, int64_t stride) {
#define CALL(R) score_numbers(keys, n, dim, q, R, scores, stride)
    WITH_ROWS(rows, CALL)
#undef CALL
}
