// Register-blocked products of query rows with cached keys in float32, in the layout of rows.h. Keys enter as scalars
// straight from the cache: a float32 cache is read in place, others are converted a stretch of keys at a time.
#ifndef VLLM_BLEND_PRODUCTS_H
#define VLLM_BLEND_PRODUCTS_H

#include "rows.h"

namespace VB_NAMESPACE {

constexpr int BLOCK_ROWS = SPARE_KEYS;           // of a register block
constexpr int BLOCK_VECTORS = VL == 16 ? 4 : 2;  // of a register block

// The queries of a tile as columns [head_dim, TILE_ROWS], times `scale`; padded by repeating the last row.
template <typename T>
VB_INLINE void pack_queries(float* to, const Paged& a, const Rows& rows, float scale) {
  for (int64_t v = 0; v < rows.vectors; ++v) {
    const T* q[VL];
    for (int i = 0; i < VL; ++i) q[i] = (const T*)a.q + rows.queries[v * VL + i];
    for (int64_t d = 0; d < a.head_dim; d += VL) {
      vf block[VL];
      for (int i = 0; i < VL; ++i) block[i] = load(q[i] + d) * scale;
      transpose(block);
      for (int i = 0; i < VL; ++i) store(to + (d + i) * TILE_ROWS + v * VL, block[i]);
    }
  }
}

// Scores of BLOCK_ROWS keys for C vectors of rows.
template <int C>
VB_INLINE void score_block(float* scores, const float* const* key, const float* q, int64_t head_dim) {
  vf sums[BLOCK_ROWS][C] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    vf column[C];
    for (int c = 0; c < C; ++c) column[c] = load(q + d * TILE_ROWS + c * VL);
    for (int r = 0; r < BLOCK_ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] += column[c] * key[r][d];
  }
  for (int r = 0; r < BLOCK_ROWS; ++r)
    for (int c = 0; c < C; ++c) store(scores + c * COLUMN + r * VL, sums[r][c]);
}

// Scores of `count` keys. `key` and `scores` have room for a last block of BLOCK_ROWS keys.
VB_INLINE void score_tile(float* scores, const float** key, const float* q, int64_t vectors, int64_t count,
                          int64_t head_dim) {
  for (int64_t k = count; k < count + BLOCK_ROWS; ++k) key[k] = key[count - 1];
  for (int64_t k = 0; k < count; k += BLOCK_ROWS) {
    float* block = scores + k * VL;
    int64_t v = 0;
    for (; v + BLOCK_VECTORS <= vectors; v += BLOCK_VECTORS)
      score_block<BLOCK_VECTORS>(block + v * COLUMN, key + k, q + v * VL, head_dim);
    for (; v < vectors; ++v) score_block<1>(block + v * COLUMN, key + k, q + v * VL, head_dim);
  }
}

// Pointers to `count` rows of one KV head: into a float32 cache itself, or to a float32 copy of another one.
VB_INLINE void rows_of(const float** rows, float*, const float* cache, const int64_t* offsets, int64_t count, int64_t) {
  for (int64_t k = 0; k < count; ++k) rows[k] = cache + offsets[k];
}
template <typename T>
VB_INLINE void rows_of(const float** rows, float* copy, const T* cache, const int64_t* offsets, int64_t count,
                       int64_t n) {
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t d = 0; d < n; d += VL) store(copy + k * n + d, load(cache + offsets[k] + d));
    rows[k] = copy + k * n;
  }
}

}  // namespace VB_NAMESPACE
#endif
