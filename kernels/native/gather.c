/* Pieces that lie all over host memory into one, for a single copy over the bus. */

/* from [kinds, n]: addresses of pieces, `sizes` [kinds] bytes each; those of a kind are written
   behind each other from `offsets` [kinds] of `to` on. */
EXPORT void infllm_gather(const int64_t *from, int64_t kinds, int64_t n, const int64_t *sizes,
                          const int64_t *offsets, char *to, int64_t threads) {
    int64_t all = kinds * n;
#pragma omp parallel for schedule(dynamic) num_threads((int)smaller(threads, all)) \
    if (threads > 1 && all > 1)
    for (int64_t i = 0; i < all; i++) {
        int64_t kind = i / n, size = sizes[kind];
        memcpy(to + offsets[kind] + i % n * size, (const void *)(intptr_t)from[i], (size_t)size);
    }
}
