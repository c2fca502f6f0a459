/* A token's own key into the window, and stored blocks into the slots before it.

   Everything is rounded where torch rounds it: `Rotary.rotate`, `store_codec.unpack`. */

/* x [dim] turned by the angles of one position; torch.addcmul joins its product and sum, too. */
INLINE void rotate(const layer_t *l, const bf16 *x, const float *cos, const float *sin, bf16 *out) {
    int64_t half = l->half;
    if (l->interleaved) {
        for (int64_t j = 0; j < half; j++) {
            float a = widen(x[2 * j]), b = widen(x[2 * j + 1]);
            out[2 * j] = narrow(madd(-b, sin[j], a * cos[j]));
            out[2 * j + 1] = narrow(madd(a, sin[j], b * cos[j]));
        }
    } else {
        for (int64_t j = 0; j < half; j++) {
            float a = widen(x[j]), b = widen(x[half + j]);
            out[j] = narrow(madd(-b, sin[j], a * cos[j]));
            out[half + j] = narrow(madd(a, sin[j], b * cos[j]));
        }
    }
    for (int64_t j = 2 * half; j < l->dim; j++) out[j] = x[j];
}

/* One token: q [H, d], k [H_kv, d], v [H_kv, d_v] with heads `stride` apart, un-rotated.

   Writes the token to slot `slot` of the window; q rotated to its own position (`table`: cosines,
   then sines), and rotated to the window's distance (`far`) and scaled, for the lookup. */
EXPORT void infllm_begin(const layer_t *l, int64_t slot, int64_t first, const bf16 *q,
                         int64_t q_stride, const bf16 *k, int64_t k_stride, const bf16 *v,
                         int64_t v_stride, const float *cos, const float *sin,
                         const float *far_cos, const float *far_sin, bf16 *rotated, bf16 *folded) {
    int64_t d = l->dim, group = l->heads / l->kv_heads;
    for (int64_t h = 0; h < l->heads; h++) {
        rotate(l, q + h * q_stride, cos, sin, rotated + h * d);
        rotate(l, q + h * q_stride, far_cos, far_sin, folded + h * d);
        for (int64_t j = 0; j < d; j++)
            folded[h * d + j] = narrow(widen(folded[h * d + j]) * l->scaling);
    }
    for (int64_t h = 0; h < l->kv_heads; h++) {
        int64_t at = h * l->capacity + slot;
        rotate(l, k + h * k_stride, cos, sin, l->rotated + at * d);
        memcpy(l->raw + at * d, k + h * k_stride, d * sizeof *k);
        memcpy(l->values + at * l->value_dim, v + h * v_stride, l->value_dim * sizeof *v);
        if (!l->query_sums) continue;
        float *sums = l->query_sums + at * d;
        for (int64_t j = 0; j < d; j++) {
            float sum = 0;
            for (int64_t g = 0; g < group; g++) sum += widen(rotated[(h * group + g) * d + j]);
            sums[j] = slot > first ? sum + sums[j - d] : sum;
        }
    }
}

static void load_block(const layer_t *l, const part_t *part, int64_t head, int64_t index,
                       const float *cos, const float *sin, bf16 *keys, bf16 *values) {
    int64_t d = l->dim, dv = l->value_dim, first = index * l->block_tokens;
    const float *scale = part->scale + head * d, *low = part->low + head * d;
    for (int64_t t = 0; t < l->block_tokens; t++, cos += l->half, sin += l->half) {
        int64_t k = head * part->key_stride + (first + t) * d;
        int64_t v = head * part->value_stride + (first + t) * dv;
        if (!part->packed) {
            rotate(l, (const bf16 *)part->keys + k, cos, sin, keys + t * d);
            memcpy(values + t * dv, (const bf16 *)part->values + v, dv * sizeof *values);
            continue;
        }
        const int8_t *codes = (const int8_t *)part->keys + k;
        bf16 key[MOST_DIM];
        for (int64_t j = 0; j < d; j++) key[j] = narrow((float)codes[j] * scale[j] + low[j]);
        rotate(l, key, cos, sin, keys + t * d);
        codes = (const int8_t *)part->values + v;
        float unit = widen(part->by_token[head * part->token_stride + first + t]);
        for (int64_t j = 0; j < dv; j++) values[t * dv + j] = narrow((float)codes[j] * unit);
    }
}

/* Write blocks [H_kv, n] into the slots that end at `first`, each rotated to its place there by
   cosines and sines [n * B, half]; but those that are `there` [H_kv, n] already (NULL: none). */
EXPORT void infllm_load(const layer_t *l, const part_t *parts, int64_t n_parts,
                        const int64_t *blocks, const int64_t *there, int64_t n, int64_t first,
                        const float *cos, const float *sin) {
    int64_t size = l->block_tokens, all = l->kv_heads * n;
#pragma omp parallel for schedule(dynamic) num_threads((int)smaller(l->threads, all)) \
    if (l->threads > 1 && all > 1)
    for (int64_t i = 0; i < all; i++) {
        if (there && there[i] == blocks[i]) continue;
        int64_t head = i / n, place = i % n, index = blocks[i], p = 0;
        while (p + 1 < n_parts && index >= parts[p].blocks) index -= parts[p++].blocks;
        int64_t slot = head * l->capacity + first - (n - place) * size;
        load_block(l, parts + p, head, index, cos + place * size * l->half,
                   sin + place * size * l->half, l->rotated + slot * l->dim,
                   l->values + slot * l->value_dim);
    }
}
