// Scores of single queries: products of one query with a vector's worth of keys, and a softmax over a stretch of them.
#ifndef VLLM_BLEND_DOTS_H
#define VLLM_BLEND_DOTS_H

#include "attention.h"

namespace VB_NAMESPACE {

constexpr int64_t KEY_STRIDE = MAX_HEAD_DIM + 16;  // not a power of two: rows must not share cache sets

// Scores of VL keys for one head: lane i = q . k[i].
template <typename T>
VB_INLINE vf dot_keys(const float* q, const T* const* k, int64_t head_dim) {
  vf sums[VL] = {};
  for (int64_t d = 0; d < head_dim; d += VL) {
    const vf x = load(q + d);
    for (int i = 0; i < VL; ++i) sums[i] += x * load(k[i] + d);
  }
  return sum_each(sums);
}
VB_INLINE vf dot_keys(const float* q, const float (*k)[KEY_STRIDE], int64_t head_dim) {
  vf sums[VL] = {};
  for (int64_t d = 0; d < head_dim; d += VL) {
    const vf x = load(q + d);
    for (int i = 0; i < VL; ++i) sums[i] += x * load(&k[i][d]);
  }
  return sum_each(sums);
}

// Scores of VL keys k for `heads` heads with q [heads, head_dim]: scores[head * stride + i]. `copy` holds the keys of a
// cache of fewer bits as float32.
template <typename T>
VB_INLINE void score_heads(float* scores, int64_t stride, const float* q, const T* const* k, float (*copy)[KEY_STRIDE],
                           int64_t heads, int64_t head_dim) {
  const bool convert = sizeof(T) < sizeof(float) && heads > 1;  // once per key, not once per head
  if (convert)
    for (int j = 0; j < VL; ++j)
      for (int64_t d = 0; d < head_dim; d += VL) store(&copy[j][d], load(k[j] + d));
  for (int64_t head = 0; head < heads; ++head, q += head_dim, scores += stride)
    store(scores, convert ? dot_keys(q, copy, head_dim) : dot_keys<T>(q, k, head_dim));
}

// Scores -> weights in place; returns their maximum and sum. There is room for a last whole vector.
VB_INLINE void weigh(float* scores, int64_t count, float* maximum, float* sum) {
  for (int64_t i = count; i % VL; ++i) scores[i] = -kInfinity;
  vf top = splat(-kInfinity);
  for (int64_t i = 0; i < count; i += VL) top = vmax(top, load(scores + i));
  *maximum = max_lanes(top);
  vf total = {};
  for (int64_t i = 0; i < count; i += VL) {
    const vf weight = exp2_(load(scores + i) - *maximum);
    store(scores + i, weight);
    total += weight;
  }
  *sum = sum_lanes(total);
}

}  // namespace VB_NAMESPACE
#endif
