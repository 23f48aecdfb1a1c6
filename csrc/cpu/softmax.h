// The running softmax of a tile of rows: one step per stretch of keys.
#ifndef VLLM_BLEND_SOFTMAX_H
#define VLLM_BLEND_SOFTMAX_H

#include "rows.h"

namespace VB_NAMESPACE {

struct Softmax {
  Rows rows;
  alignas(64) float maxima[TILE_ROWS], sums[TILE_ROWS];
  alignas(64) float shrink[TILE_ROWS + VL];  // what the last step multiplies earlier sums by

  void begin(const Paged& a, const Tile& tile, int64_t unit) {
    rows.begin(a, tile, unit);
    for (int64_t r = 0; r < TILE_ROWS; ++r) maxima[r] = -kInfinity;
    for (int64_t r = 0; r < TILE_ROWS; ++r) sums[r] = 0.0f;
    for (int64_t r = 0; r < TILE_ROWS + VL; ++r) shrink[r] = 0.0f;
    if (a.sinks)  // as if a key with this score and a value of zero had come first
      for (int64_t r = 0; r < rows.vectors * VL; ++r) {
        maxima[r] = a.sinks[rows.outputs[r] / a.head_dim % a.heads] * kLog2e;
        sums[r] = 1.0f;
      }
  }

  // Scores of `count` keys from `first` on, times `to_log2`, become weights; `done(v)` is called when those of vector v
  // are. Returns whether any `shrink` is other than 1.
  template <typename Done>
  static __attribute__((noinline)) bool step(Softmax& s, float* scores, float to_log2, int64_t first, int64_t count,
                                             int64_t window, Done done) {
    const bool masked = s.rows.needs_mask(first, count, window);
    vi changed = {};
    for (int64_t v = 0; v < s.rows.vectors; ++v) {
      float* column = scores + v * COLUMN;
      if (masked) Rows::mask(column, s.rows.positions + v * VL, first, count, window);
      const vf before = load(s.maxima + v * VL);
      vf best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity),
                    splat(-kInfinity)};  // four, to hide latency
      const int64_t fours = count / 4 * 4;
      for (int64_t k = 0; k < fours; k += 4)
        for (int i = 0; i < 4; ++i) best[i] = vmax(best[i], load(column + (k + i) * VL));
      for (int64_t k = fours; k < count; ++k) best[0] = vmax(best[0], load(column + k * VL));
      const vf highest = vmax(vmax(best[0], best[1]), vmax(best[2], best[3])) * to_log2;
      // A maximum is there to prevent overflow: unless it grows by more than 2^8, the old one will do, and saves
      // rescaling.
      const vf top = highest > before + 8.0f ? highest : before;
      const vf safe = top == splat(-kInfinity) ? vf{} : top;  // a row that has seen nothing yet keeps weights of 0
      const vf shrink = exp2_(before - safe);
      vf sum = load(s.sums + v * VL) * shrink;
      for (int64_t k = 0; k < count; ++k) {
        const vf weight = exp2_(load(column + k * VL) * to_log2 - safe);
        store(column + k * VL, weight);
        sum += weight;
      }
      store(s.maxima + v * VL, top);
      store(s.shrink + v * VL, shrink);
      store(s.sums + v * VL, sum);
      changed |= shrink != 1.0f;
      done(v);
    }
    int32_t any = 0;
    for (int i = 0; i < VL; ++i) any |= changed[i];
    return any != 0;
  }
};

}  // namespace VB_NAMESPACE
#endif
