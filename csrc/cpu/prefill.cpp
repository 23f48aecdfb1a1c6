// Attention of a tile of query rows over its keys, flash style: one pass with a running maximum and sum.
#include "prefill.h"

namespace VB_NAMESPACE {

constexpr int64_t PADDED_ROWS = TILE_ROWS + ROWS;

struct Scratch {
  Queries q;
  alignas(64) float scores[(TILE_KEYS + ROWS) * TILE_ROWS + VL];  // [keys, rows]
  alignas(64) float out[PADDED_ROWS * MAX_HEAD_DIM];              // [rows, head_dim]
  alignas(64) float keys[TILE_KEYS * MAX_HEAD_DIM];               // of 16-bit caches, as float32
  alignas(64) float values[TILE_KEYS * MAX_HEAD_DIM];
  alignas(64) float maxima[TILE_ROWS], sums[TILE_ROWS], shrink[PADDED_ROWS];
  const float *key[TILE_KEYS + ROWS], *value[TILE_KEYS];
  int64_t offsets[TILE_KEYS];
};

// out[0:ROWS][0:C*VL] = out * shrink + weights . values
template <int C>
VB_INLINE void value_block(float* out, int64_t head_dim, const float* shrink, const float* weights, const float* const* value,
                           int64_t column, int64_t count) {
  vf sums[ROWS][C];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * head_dim + c * VL) * shrink[r];
  for (int64_t k = 0; k < count; ++k) {
    vf row[C];
    for (int c = 0; c < C; ++c) row[c] = load(value[k] + column + c * VL);
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] += row[c] * weights[k * TILE_ROWS + r];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < C; ++c) store(out + r * head_dim + c * VL, sums[r][c]);
}

VB_INLINE void value_tile(Scratch& s, int64_t rows, int64_t count, int64_t head_dim) {
  for (int64_t r = 0; r < rows; r += ROWS) {
    float* out = s.out + r * head_dim;
    int64_t d = 0;
    for (; d + VECTORS * VL <= head_dim; d += VECTORS * VL)
      value_block<VECTORS>(out + d, head_dim, s.shrink + r, s.scores + r, s.value, d, count);
    for (; d < head_dim; d += VL) value_block<1>(out + d, head_dim, s.shrink + r, s.scores + r, s.value, d, count);
  }
}

// One online-softmax step: scores become weights.
VB_INLINE void weigh_tile(Scratch& s, int64_t first, int64_t count, int64_t window) {
  const bool masked = needs_mask(s.q, first, count, window);
  for (int64_t v = 0; v < s.q.vectors; ++v) {
    float* column = s.scores + v * VL;
    if (masked) mask_scores(column, s.q.positions + v * VL, first, count, window);
    const vf before = load(s.maxima + v * VL);
    vf top = before;
    for (int64_t k = 0; k < count; ++k) top = vmax(top, load(column + k * TILE_ROWS));
    const vf safe = top == splat(-kInfinity) ? vf{} : top;  // a row that has seen nothing yet keeps weights of 0
    const vf shrink = exp2_(before - safe);
    vf sum = load(s.sums + v * VL) * shrink;
    for (int64_t k = 0; k < count; ++k) {
      const vf weight = exp2_(load(column + k * TILE_ROWS) - safe);
      store(column + k * TILE_ROWS, weight);
      sum += weight;
    }
    store(s.maxima + v * VL, top);
    store(s.shrink + v * VL, shrink);
    store(s.sums + v * VL, sum);
  }
}

template <typename T>
size_t prefill_scratch_bytes() {
  return sizeof(Scratch);
}

template <typename T>
void prefill_tile(const Paged& a, const Tile& tile, void* scratch) {
  Scratch& s = *(Scratch*)scratch;
  const int64_t head_dim = a.head_dim;
  Queries::pack<T>(s.q, a, tile);
  for (int64_t r = 0; r < TILE_ROWS; ++r) s.maxima[r] = -kInfinity;
  for (int64_t r = 0; r < TILE_ROWS; ++r) s.sums[r] = 0.0f;
  for (int64_t r = 0; r < PADDED_ROWS; ++r) s.shrink[r] = 0.0f;
  for (int64_t i = 0; i < (tile.rows + ROWS) * head_dim; ++i) s.out[i] = 0.0f;

  const int64_t end = s.q.highest + 1;
  for (int64_t first = a.first_key(s.q.lowest); first < end; first += TILE_KEYS) {
    const int64_t count = min64(TILE_KEYS, end - first);
    a.offsets(s.offsets, tile.request, first, count);
    rows_of(s.key, s.keys, (const T*)a.keys + tile.kv_head * head_dim, s.offsets, count, head_dim);
    rows_of(s.value, s.values, (const T*)a.values + tile.kv_head * head_dim, s.offsets, count, head_dim);
    score_tile(s.scores, s.key, s.q, count, head_dim);
    weigh_tile(s, first, count, a.window);
    value_tile(s, tile.rows, count, head_dim);
  }

  for (int64_t r = 0; r < tile.rows; ++r) {
    T* out = (T*)a.out + (Queries::token(a, tile, r) * a.heads + Queries::head(a, tile, r)) * head_dim;
    const float inverse = 1.0f / s.sums[r];
    for (int64_t d = 0; d < head_dim; d += VL) store(out + d, load(s.out + r * head_dim + d) * inverse);
  }
}

template size_t prefill_scratch_bytes<float>();
template size_t prefill_scratch_bytes<bf16>();
template size_t prefill_scratch_bytes<f16>();
template void prefill_tile<float>(const Paged&, const Tile&, void*);
template void prefill_tile<bf16>(const Paged&, const Tile&, void*);
template void prefill_tile<f16>(const Paged&, const Tile&, void*);

}  // namespace VB_NAMESPACE
