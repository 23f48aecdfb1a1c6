// Products of few rows with a weight matrix as checkpoints store it, [features, in]. The weights are read once, as they
// lie, 16 rows at a time; the activations are packed as columns, and results come out transposed.
#ifndef VLLM_BLEND_LINEAR_H
#define VLLM_BLEND_LINEAR_H

#include "../vllm_blend_cpu.h"
#include "parallel.h"
#include "simd.h"

namespace VB_NAMESPACE {

constexpr int64_t WEIGHT_ROWS = 16;   // of a block
constexpr int64_t LINEAR_GROUPS = 4;  // groups of 16 or VL rows of x that share one pass over a block of weights
constexpr int64_t SERIAL_GROUPS = 4;  // up to so many are packed by one thread: a barrier costs more

struct Linear {
  void* out;
  const void *x, *weight, *bias;
  int64_t rows, in, features, x_stride;
};

// out[m][0:16] = block[0:16][m] + bias for `count` rows m; block is [16, VL].
template <typename T>
VB_INLINE void store_columns(T* out, int64_t stride, const float* block, const T* bias, int64_t count) {
  for (int64_t n = 0; n < WEIGHT_ROWS; n += VL) {
    vf rows[VL];
    for (int i = 0; i < VL; ++i) rows[i] = load(block + (n + i) * VL);
    transpose(rows);
    const vf shift = bias ? load(bias + n) : vf{};
    for (int64_t m = 0; m < count; ++m) store(out + m * stride + n, rows[m] + shift);
  }
}

int linear_amx(const Linear& job, int32_t threads);  // bf16; of the "amx" build

}  // namespace VB_NAMESPACE
#endif
