// Register-blocked products of query rows with cached keys, shared by prefill and attention mass. A row is one (query, head)
// pair; the query heads of a KV head lie side by side. Scores are kept transposed, [keys, rows]: keys then enter as scalars
// straight from the cache (float32 caches are read in place), and maxima, weights and sums run down the keys with no
// reduction across a vector.
#ifndef VLLM_BLEND_TILE_H
#define VLLM_BLEND_TILE_H

#include "attention.h"

namespace VB_NAMESPACE {

constexpr int ROWS = 6;                    // of a register block
constexpr int VECTORS = VL == 16 ? 4 : 2;  // of a register block

// `rows` consecutive (query, head) pairs of one KV head, counted from row `start` of q and the KV head's first query head.
struct Tile {
  int64_t request, kv_head, start, first_row, rows;
};

// The queries of a tile, [head_dim, rows] and scaled to log2 units, padded by repeating the last row.
struct Queries {
  alignas(64) float columns[MAX_HEAD_DIM * TILE_ROWS];
  alignas(64) int32_t positions[TILE_ROWS];
  int64_t vectors, lowest, highest;  // vectors of rows; lowest and highest position

  static int64_t token(const Paged& a, const Tile& tile, int64_t row) { return tile.start + (tile.first_row + row) / a.group(); }
  static int64_t head(const Paged& a, const Tile& tile, int64_t row) {
    return tile.kv_head * a.group() + (tile.first_row + row) % a.group();
  }

  template <typename T>
  VB_INLINE void pack(Queries& to, const Paged& a, const Tile& tile) {
    const float to_log2 = a.scale * kLog2e;
    to.vectors = (tile.rows + VL - 1) / VL;
    to.lowest = to.highest = a.positions[token(a, tile, 0)];
    for (int64_t r = 0; r < to.vectors * VL; r += VL) {
      const T* q[VL];
      for (int i = 0; i < VL; ++i) {
        const int64_t row = min64(r + i, tile.rows - 1), position = a.positions[token(a, tile, row)];
        q[i] = (const T*)a.q + token(a, tile, row) * a.q_stride + head(a, tile, row) * a.head_dim;
        to.positions[r + i] = int32_t(position);
        to.lowest = min64(to.lowest, position);
        to.highest = max64(to.highest, position);
      }
      for (int64_t d = 0; d < a.head_dim; d += VL) {
        vf block[VL];
        for (int i = 0; i < VL; ++i) block[i] = load(q[i] + d) * to_log2;
        transpose(block);
        for (int i = 0; i < VL; ++i) store(to.columns + (d + i) * TILE_ROWS + r, block[i]);
      }
    }
  }
};

// scores[0:ROWS][0:C*VL] = key . q
template <int C>
VB_INLINE void score_block(float* scores, const float* const* key, const float* q, int64_t head_dim) {
  vf sums[ROWS][C] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    vf column[C];
    for (int c = 0; c < C; ++c) column[c] = load(q + d * TILE_ROWS + c * VL);
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] += column[c] * key[r][d];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * TILE_ROWS + c * VL, sums[r][c]);
}

// scores [count, TILE_ROWS] of the keys against all vectors of q. Both have room for a last block of ROWS keys.
VB_INLINE void score_tile(float* scores, const float** key, const Queries& q, int64_t count, int64_t head_dim) {
  for (int64_t k = count; k < count + ROWS; ++k) key[k] = key[count - 1];
  for (int64_t k = 0; k < count; k += ROWS) {
    float* block = scores + k * TILE_ROWS;
    int64_t v = 0;
    for (; v + VECTORS <= q.vectors; v += VECTORS) score_block<VECTORS>(block + v * VL, key + k, q.columns + v * VL, head_dim);
    for (; v < q.vectors; ++v) score_block<1>(block + v * VL, key + k, q.columns + v * VL, head_dim);
  }
}

// Scores of keys that a row does not see become -infinity, for one vector of rows.
VB_INLINE void mask_scores(float* column, const int32_t* positions, int64_t first, int64_t count, int64_t window) {
  vi position;
  __builtin_memcpy(&position, positions, sizeof(position));
  for (int64_t k = 0; k < count; ++k) {
    const vi behind = position - int32_t(first + k);
    vf score = load(column + k * TILE_ROWS);
    score = behind >= 0 ? score : splat(-kInfinity);
    if (window) score = behind < int32_t(min64(window, INT32_MAX)) ? score : splat(-kInfinity);
    store(column + k * TILE_ROWS, score);
  }
}
// Whether any row of q fails to see any of the keys first:first + count.
VB_INLINE bool needs_mask(const Queries& q, int64_t first, int64_t count, int64_t window) {
  return first + count - 1 > q.lowest || (window && first <= q.highest - window);
}

// Pointers to `count` rows of one KV head: into a float32 cache itself, or to a float32 copy of a 16-bit one.
VB_INLINE void rows_of(const float** rows, float*, const float* cache, const int64_t* offsets, int64_t count, int64_t) {
  for (int64_t k = 0; k < count; ++k) rows[k] = cache + offsets[k];
}
template <typename T>
VB_INLINE void rows_of(const float** rows, float* copy, const T* cache, const int64_t* offsets, int64_t count, int64_t n) {
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t d = 0; d < n; d += VL) store(copy + k * n + d, load(cache + offsets[k] + d));
    rows[k] = copy + k * n;
  }
}

}  // namespace VB_NAMESPACE
#endif
