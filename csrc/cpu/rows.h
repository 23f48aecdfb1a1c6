// The query rows that are computed together, and which keys they see. A row is one (query, head) pair; the query heads
// of a KV head lie side by side. Scores of a tile are kept by vectors of rows, and in each transposed, [keys, VL]:
// maxima, weights and sums then run down the keys, with no reduction across a vector.
#ifndef VLLM_BLEND_ROWS_H
#define VLLM_BLEND_ROWS_H

#include "attention.h"

namespace VB_NAMESPACE {

constexpr int64_t SPARE_KEYS = 6;  // a register block may write this many scores past the last key
constexpr int64_t COLUMN = (TILE_KEYS + SPARE_KEYS) * VL;  // floats between the scores of two vectors of rows
constexpr int64_t SCORES = TILE_ROWS / VL * COLUMN;

// `rows` consecutive (query, head) pairs of one KV head, counted from row `start` of q and the KV head's first query
// head.
struct Tile {
  int64_t request, kv_head, start, first_row, rows;
};

// What is known of each row; what pads the last vectors repeats the last row.
struct Rows {
  alignas(64) int32_t positions[TILE_ROWS];
  int64_t queries[TILE_ROWS], outputs[TILE_ROWS];  // element offsets in q and out
  int64_t vectors, lowest, highest;                // of the positions

  // Pads the rows of the tile to a multiple of `unit`, itself a multiple of VL.
  void begin(const Paged& a, const Tile& tile, int64_t unit) {
    const int64_t padded = (tile.rows + unit - 1) / unit * unit, group = a.group();
    int64_t token = tile.start + tile.first_row / group, member = tile.first_row % group;
    vectors = padded / VL;
    lowest = highest = a.positions[token];
    for (int64_t r = 0; r < padded; ++r) {
      const int64_t position = a.positions[token], head = tile.kv_head * group + member;
      positions[r] = int32_t(position);
      queries[r] = token * a.q_stride + head * a.head_dim;
      outputs[r] = (token * a.heads + head) * a.head_dim;
      lowest = min64(lowest, position);
      highest = max64(highest, position);
      if (r + 1 < tile.rows && ++member == group) {
        member = 0;
        ++token;
      }
    }
  }

  // Whether any row fails to see any of the keys first:first + count.
  bool needs_mask(int64_t first, int64_t count, int64_t window) const {
    return first + count - 1 > lowest || (window && first <= highest - window);
  }

  // Scores of keys that a row does not see become -infinity, for one vector of rows.
  VB_INLINE void mask(float* column, const int32_t* positions, int64_t first, int64_t count, int64_t window) {
    vi position;
    __builtin_memcpy(&position, positions, sizeof(position));
    const int32_t reach = int32_t(min64(window ? window : INT32_MAX, INT32_MAX));
    for (int64_t k = 0; k < count; ++k) {
      const vi behind = position - int32_t(first + k);
      const vf score = load(column + k * VL);
      store(column + k * VL, (behind >= 0) & (behind < reach) ? score : splat(-kInfinity));
    }
  }
};

}  // namespace VB_NAMESPACE
#endif
