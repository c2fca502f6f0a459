/* One token's attention over a run of slots, and what each key drew. The twin is `attend_weights`
   of infllm_cli/memory/softmax.py with `note_tiers` of attended.py.

   Keys are divided into pieces of one size whatever the number of threads, and what the pieces
   give is added in one order: the result does not depend on it. */

#define PIECE 256  /* keys */

/* sum[r] += weights[r, t] * values[t] over n keys, [rows, dv]. */
INLINE void add_values(const bf16 *values, int64_t n, int64_t dv, const float *weights,
                       int64_t stride, const int rows, float *sum) {
    int64_t j = 0;
#ifdef __AVX512F__
    for (; j + 64 <= dv; j += 64) {
        __m512 acc[MOST_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++) acc[r][i] = _mm512_setzero_ps();
        for (int64_t t = 0; t < n; t++)
            for (int i = 0; i < 4; i++) {
                __m256i x = _mm256_loadu_si256((const __m256i *)(values + t * dv + j + 16 * i));
                __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
                for (int r = 0; r < rows; r++)
                    acc[r][i] = _mm512_fmadd_ps(v, _mm512_set1_ps(weights[r * stride + t]),
                                                acc[r][i]);
            }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(sum + r * dv + j + 16 * i, acc[r][i]);
    }
#endif
    for (; j < dv; j += 16) {
        int64_t wide = smaller(16, dv - j);
        for (int r = 0; r < rows; r++) {
            float lanes[16] = {0};
            for (int64_t t = 0; t < n; t++)
                for (int64_t i = 0; i < wide; i++)
                    lanes[i] = madd(widen(values[t * dv + j + i]), weights[r * stride + t],
                                    lanes[i]);
            memcpy(sum + r * dv + j, lanes, wide * sizeof *lanes);
        }
    }
}

static void values_sum(const bf16 *values, int64_t n, int64_t dv, const float *weights,
                       int64_t stride, int rows, float *sum) {
#define CALL(R) add_values(values, n, dv, weights, stride, R, sum)
    WITH_ROWS(rows, CALL)
#undef CALL
}

/* Scores [H, keys] of one piece of one KV head's keys; the greatest of each head to `most`. */
static void piece_scores(const layer_t *l, const bf16 *q, int64_t first, int64_t keys, int64_t h,
                         int64_t p, int64_t pieces, float *scores, float *most) {
    int64_t d = l->dim, group = l->heads / l->kv_heads;
    int64_t begin = p * PIECE, n = smaller(PIECE, keys - begin);
    const bf16 *k = l->rotated + (h * l->capacity + first + begin) * d;
    float widened[MOST_ROWS * MOST_DIM];
    for (int64_t row = 0; row < group; row += MOST_ROWS) {
        int rows = (int)smaller(MOST_ROWS, group - row);
        int64_t head = h * group + row;
        for (int r = 0; r < rows; r++)
            for (int64_t j = 0; j < d; j++)
                widened[r * MOST_DIM + j] = widen(q[(head + r) * d + j]);
        numbers_scores(k, n, d, widened, rows, scores + head * keys + begin, keys);
        for (int r = 0; r < rows; r++) {
            float *s = scores + (head + r) * keys + begin;
            for (int64_t t = 0; t < n; t++)
                s[t] = (l->rounds ? widen(narrow(s[t])) : s[t]) * l->scaling;
            most[(head + r) * pieces + p] = most_of(s, n);
        }
    }
}

/* Weights of a piece in place, their sum over heads to `per_key`, and the weighted values. */
static void piece_values(const layer_t *l, int64_t first, int64_t keys, int64_t h, int64_t p,
                         int64_t pieces, float *scores, const float *sums, float *per_key,
                         float *partial) {
    int64_t dv = l->value_dim, group = l->heads / l->kv_heads;
    int64_t begin = p * PIECE, n = smaller(PIECE, keys - begin);
    const bf16 *v = l->values + (h * l->capacity + first + begin) * dv;
    float *drawn = per_key + h * keys + begin;
    memset(drawn, 0, n * sizeof *drawn);
    for (int64_t row = 0; row < group; row += MOST_ROWS) {
        int rows = (int)smaller(MOST_ROWS, group - row);
        int64_t head = h * group + row;
        for (int r = 0; r < rows; r++) {
            float *w = scores + (head + r) * keys + begin;
            float total = 0;
            for (int64_t i = 0; i < pieces; i++) total += sums[(head + r) * pieces + i];
            for (int64_t t = 0; t < n; t++) {
                w[t] /= total;
                drawn[t] += w[t];
                w[t] = widen(narrow(w[t]));
            }
        }
        values_sum(v, n, dv, scores + head * keys + begin, keys, rows,
                   partial + (p * l->heads + head) * dv);
    }
}

/* Rotated q [H, d] over slots [first, first + keys) -> out [H, d_v], per_key [H_kv, keys].
   `work`: H * (keys + pieces * (2 + d_v)) floats, pieces = ceil(keys / PIECE). */
EXPORT void infllm_attend(const layer_t *l, const bf16 *q, int64_t first, int64_t keys, bf16 *out,
                          float *per_key, float *work) {
    int64_t pieces = (keys + PIECE - 1) / PIECE, dv = l->value_dim, all = pieces * l->kv_heads;
    int64_t group = l->heads / l->kv_heads;
    float *scores = work, *most = scores + l->heads * keys, *sums = most + l->heads * pieces;
    float *partial = sums + l->heads * pieces;
#pragma omp parallel num_threads((int)smaller(l->threads, all)) if (l->threads > 1 && all > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++)
            piece_scores(l, q, first, keys, i / pieces, i % pieces, pieces, scores, most);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++)
            for (int64_t g = 0; g < group; g++) {
                int64_t head = i / pieces * group + g, p = i % pieces;
                float *s = scores + head * keys + p * PIECE;
                sums[head * pieces + p] = exp_and_sum(s, smaller(PIECE, keys - p * PIECE),
                                                      most_of(most + head * pieces, pieces));
            }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all; i++)
            piece_values(l, first, keys, i / pieces, i % pieces, pieces, scores, sums, per_key,
                         partial);
    }
    for (int64_t i = 0; i < l->heads * dv; i++) {
        float sum = 0;
        for (int64_t p = 0; p < pieces; p++) sum += partial[p * l->heads * dv + i];
        out[i] = narrow(sum);
    }
}

/* Add per_key [H_kv, keys] of sinks, blocks [H_kv, n] and window to mass by absolute position;
   `start`: of the window's first token. */
EXPORT void infllm_note(const layer_t *l, const float *per_key, int64_t keys,
                        const int64_t *blocks, int64_t n, int64_t sinks, int64_t start,
                        float *mass) {
    int64_t size = l->block_tokens, lead = sinks + n * size;
    for (int64_t h = 0; h < l->kv_heads; h++, per_key += keys) {
        for (int64_t t = 0; t < sinks; t++) mass[t] += per_key[t];
        for (int64_t b = 0; b < n; b++) {
            float *to = mass + sinks + blocks[h * n + b] * size;
            for (int64_t t = 0; t < size; t++) to[t] += per_key[sinks + b * size + t];
        }
        for (int64_t t = lead; t < keys; t++) mass[start + t - lead] += per_key[t];
    }
}
