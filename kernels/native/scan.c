/* How much of each query's attention falls on each stored block? `packed_lookup.py` and
   `exact_lookup.py` are the twins, for one token's queries. */

#define SCORES_AT_ONCE 512  /* keys of a block at a time: their scores stay in the first cache */

/* lse and peak of one block for some rows [rows <= MOST_ROWS]; results are `step` apart. */
static void reduce_block(const part_t *part, const void *keys, const layer_t *l,
                         const folded_t *folded, const float *widened, int rows, float *lse,
                         float *peak, int64_t step) {
    float scores[MOST_ROWS * SCORES_AT_ONCE];
    float most[MOST_ROWS] = {0}, sum[MOST_ROWS] = {0};
    for (int64_t at = 0; at < l->block_tokens; at += SCORES_AT_ONCE) {
        int64_t n = smaller(SCORES_AT_ONCE, l->block_tokens - at);
        if (part->packed)
            codes_scores((const int8_t *)keys + at * l->dim, n, l->dim, folded, rows, scores,
                         SCORES_AT_ONCE);
        else
            numbers_scores((const bf16 *)keys + at * l->dim, n, l->dim, widened, rows, scores,
                           SCORES_AT_ONCE);
        for (int r = 0; r < rows; r++) {
            float *s = scores + r * SCORES_AT_ONCE;
            if (!part->packed && l->rounds)
                for (int64_t t = 0; t < n; t++) s[t] = widen(narrow(s[t]));
            float here = most_of(s, n);
            if (at == 0) {
                most[r] = here;
                sum[r] = exp_and_sum(s, n, here);
                continue;
            }
            float old = most[r];
            most[r] = here > old ? here : old;
            sum[r] = sum[r] * exp_of(old - most[r]) + exp_and_sum(s, n, most[r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float shift = part->packed ? folded[r].shift : 0;
        peak[r * step] = most[r] + shift;
        lse[r * step] = logf(sum[r]) + most[r] + shift;
    }
}

/* Blocks [first, last) of a head of a part, `column` the first one's place among all. */
static void scan_blocks(const layer_t *l, const part_t *part, int64_t head, int64_t first,
                        int64_t last, int64_t column, int64_t columns, const bf16 *q,
                        int64_t all_rows, float *lse, float *peak) {
    folded_t folded[MOST_ROWS];
    float widened[MOST_ROWS * MOST_DIM];
    int64_t size = l->block_tokens * l->dim;
    for (int64_t row = 0; row < all_rows; row += MOST_ROWS) {
        int rows = (int)smaller(MOST_ROWS, all_rows - row);
        for (int r = 0; r < rows; r++) {
            const bf16 *own = q + (head * all_rows + row + r) * l->dim;
            if (part->packed)
                fold_query(own, part->scale + head * l->dim, part->low + head * l->dim, l->dim,
                           folded + r);
            else
                for (int64_t j = 0; j < l->dim; j++) widened[r * MOST_DIM + j] = widen(own[j]);
        }
        for (int64_t b = first; b < last; b++) {
            int64_t at = head * part->key_stride + b * size;
            const void *keys = part->packed ? (const void *)((const int8_t *)part->keys + at)
                                            : (const void *)((const bf16 *)part->keys + at);
            int64_t to = (head * all_rows + row) * columns + column + b - first;
            reduce_block(part, keys, l, folded, widened, rows, lse + to, peak + to, columns);
        }
    }
}

/* Queries q [H_kv, rows, d], scaled, against the blocks of parts, which begin at `column` of all
   `columns` -> lse and peak [H_kv, rows, columns]. A block is computed by one thread alone, so
   nothing depends on their number. */
EXPORT void infllm_scan(const layer_t *l, const part_t *parts, int64_t n_parts, const bf16 *q,
                        int64_t rows, int64_t column, int64_t columns, float *lse, float *peak) {
    int64_t all = 0;
    for (int64_t p = 0; p < n_parts; p++) all += parts[p].blocks * l->kv_heads;
    int threads = (int)smaller(l->threads, all);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t thread = 0, of = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(), of = omp_get_num_threads();
#endif
        int64_t begin = all * thread / of, end = all * (thread + 1) / of, at = 0, place = column;
        for (int64_t p = 0; p < n_parts; place += parts[p].blocks, p++)
            for (int64_t h = 0; h < l->kv_heads; at += parts[p].blocks, h++) {
                int64_t first = begin > at ? begin - at : 0;
                int64_t last = smaller(end - at, parts[p].blocks);
                if (first < last)
                    scan_blocks(l, parts + p, h, first, last, place + first, columns, q, rows,
                                lse, peak);
            }
    }
}

/* The same of listed blocks [H_kv, n] alone -> lse and peak [H_kv, rows, n]. */
EXPORT void infllm_scan_listed(const layer_t *l, const part_t *parts, int64_t n_parts,
                               const int64_t *blocks, int64_t n, const bf16 *q, int64_t rows,
                               float *lse, float *peak) {
    int64_t all = l->kv_heads * n;
#pragma omp parallel for schedule(static) num_threads((int)smaller(l->threads, all)) \
    if (l->threads > 1 && all > 1)
    for (int64_t i = 0; i < all; i++) {
        int64_t index = blocks[i], p = 0;
        while (p + 1 < n_parts && index >= parts[p].blocks) index -= parts[p++].blocks;
        scan_blocks(l, parts + p, i / n, index, index + 1, i % n, n, q, rows, lse, peak);
    }
}

/* lse [H_kv, rows, n], which is used up -> mass [H_kv, n] as `block_mass.py` has it, and the
   `wanted` blocks of the greatest [H_kv, wanted], in document order. */
EXPORT void infllm_choose(const layer_t *l, float *lse, int64_t rows, int64_t n, int64_t wanted,
                          float *mass, int64_t *blocks) {
    for (int64_t h = 0; h < l->kv_heads; h++) {
        float *m = mass + h * n;
        int64_t *chosen = blocks + h * wanted;
        memset(m, 0, n * sizeof *m);
        for (int64_t r = 0; r < rows; r++) {
            float *x = lse + (h * rows + r) * n;
            float sum = exp_and_sum(x, n, most_of(x, n));
            for (int64_t b = 0; b < n; b++) m[b] += x[b] / sum;
        }
        int64_t least = 0;  /* the place of the smallest of those chosen */
        for (int64_t i = 0; i < wanted; i++) {
            chosen[i] = i;
            if (m[i] <= m[chosen[least]]) least = i;
        }
        for (int64_t b = wanted; b < n; b++) {
            if (!(m[b] > m[chosen[least]])) continue;
            for (int64_t i = least; i + 1 < wanted; i++) chosen[i] = chosen[i + 1];
            chosen[wanted - 1] = b;  /* they stay in order */
            least = 0;
            for (int64_t i = 1; i < wanted; i++)
                if (m[chosen[i]] <= m[chosen[least]]) least = i;
        }
    }
}
