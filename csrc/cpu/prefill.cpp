// Attention of a tile of query rows over its keys, flash style: one pass with a running softmax.
#include "prefill.h"

#include "products.h"
#include "softmax.h"

namespace VB_NAMESPACE {

constexpr int64_t PADDED_ROWS = TILE_ROWS + BLOCK_ROWS;

struct PrefillScratch {
  Softmax softmax;
  alignas(64) float q[MAX_HEAD_DIM * TILE_ROWS];  // [head_dim, rows], in log2 units
  alignas(64) float scores[SCORES + COLUMN];
  alignas(64) float out[PADDED_ROWS * MAX_HEAD_DIM];  // [rows, head_dim]
  alignas(64) float keys[TILE_KEYS * MAX_HEAD_DIM];   // of caches of fewer bits, as float32
  alignas(64) float values[TILE_KEYS * MAX_HEAD_DIM];
  const float *key[TILE_KEYS + BLOCK_ROWS], *value[TILE_KEYS];
  int64_t offsets[TILE_KEYS];
};

// out[0:BLOCK_ROWS][0:C*VL] = out * shrink + weights . values
template <int C>
VB_INLINE void value_block(float* out, int64_t head_dim, const float* shrink, const float* const* weights,
                           const float* const* value, int64_t column, int64_t count) {
  vf sums[BLOCK_ROWS][C];
  for (int r = 0; r < BLOCK_ROWS; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * head_dim + c * VL) * shrink[r];
  for (int64_t k = 0; k < count; ++k) {
    vf row[C];
    for (int c = 0; c < C; ++c) row[c] = load(value[k] + column + c * VL);
    for (int r = 0; r < BLOCK_ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] += row[c] * weights[r][k * VL];
  }
  for (int r = 0; r < BLOCK_ROWS; ++r)
    for (int c = 0; c < C; ++c) store(out + r * head_dim + c * VL, sums[r][c]);
}

VB_INLINE void value_tile(PrefillScratch& s, int64_t rows, int64_t count, int64_t head_dim) {
  for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
    float* out = s.out + r * head_dim;
    const float* shrink = s.softmax.shrink + r;
    const float* weights[BLOCK_ROWS];
    for (int i = 0; i < BLOCK_ROWS; ++i) weights[i] = s.scores + (r + i) / VL * COLUMN + (r + i) % VL;
    int64_t d = 0;
    for (; d + BLOCK_VECTORS * VL <= head_dim; d += BLOCK_VECTORS * VL)
      value_block<BLOCK_VECTORS>(out + d, head_dim, shrink, weights, s.value, d, count);
    for (; d < head_dim; d += VL) value_block<1>(out + d, head_dim, shrink, weights, s.value, d, count);
  }
}

size_t prefill_scratch_bytes() { return sizeof(PrefillScratch); }

template <typename T, typename C>
void prefill_tile(const Paged& a, const Tile& tile, void* scratch) {
  PrefillScratch& s = *(PrefillScratch*)scratch;
  const int64_t head_dim = a.head_dim;
  s.softmax.begin(a, tile, VL);
  const Rows& rows = s.softmax.rows;
  pack_queries<T>(s.q, a, rows, a.scale * kLog2e);
  for (int64_t i = 0; i < (tile.rows + BLOCK_ROWS) * head_dim; ++i) s.out[i] = 0.0f;

  const int64_t end = rows.highest + 1;
  for (int64_t first = a.first_key(rows.lowest); first < end; first += TILE_KEYS) {
    const int64_t count = min64(TILE_KEYS, end - first);
    a.offsets(s.offsets, tile.request, first, count);
    rows_of(s.key, s.keys, (const C*)a.keys + tile.kv_head * head_dim, s.offsets, count, head_dim);
    rows_of(s.value, s.values, (const C*)a.values + tile.kv_head * head_dim, s.offsets, count, head_dim);
    score_tile(s.scores, s.key, s.q, rows.vectors, count, head_dim);
    Softmax::step(s.softmax, s.scores, 1.0f, first, count, a.window, [](int64_t) {});
    value_tile(s, tile.rows, count, head_dim);
  }

  for (int64_t r = 0; r < tile.rows; ++r) {
    T* out = (T*)a.out + rows.outputs[r];
    const float inverse = 1.0f / s.softmax.sums[r];
    for (int64_t d = 0; d < head_dim; d += VL) store(out + d, load(s.out + r * head_dim + d) * inverse);
  }
}

template void prefill_tile<float, float>(const Paged&, const Tile&, void*);
template void prefill_tile<bf16, bf16>(const Paged&, const Tile&, void*);
template void prefill_tile<f16, f16>(const Paged&, const Tile&, void*);
template void prefill_tile<float, f8>(const Paged&, const Tile&, void*);
template void prefill_tile<bf16, f8>(const Paged&, const Tile&, void*);
template void prefill_tile<f16, f8>(const Paged&, const Tile&, void*);

}  // namespace VB_NAMESPACE
