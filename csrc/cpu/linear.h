// Products of few rows with a weight matrix as checkpoints store it, [features, in]. The weights are read once, as they
// lie or unpacked from 4 bits, 16 rows at a time; the activations are packed as columns, and results come out
// transposed.
#ifndef VLLM_BLEND_LINEAR_H
#define VLLM_BLEND_LINEAR_H

#include "../vllm_blend_cpu.h"
#include "int4.h"
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
  const Int4* int4 = nullptr;  // the weights, if they are in 4 bits
};

// Weight rows n to n + 15 as numbers of type T, rounded to Stored. `scratch` [16, in] holds them if they are unpacked.
template <typename Stored, typename T>
VB_INLINE const T* weight_rows(const Linear& job, int64_t n, T* scratch) {
  if (!job.int4) return (const T*)job.weight + n * job.in;
  for (int64_t row = 0; row < WEIGHT_ROWS; ++row) unpack_row<Stored>(scratch + row * job.in, *job.int4, n + row);
  return scratch;
}

// Whether the calling thread has memory for `weight_rows`, where that needs some.
template <typename T>
VB_INLINE bool scratch_rows(const Linear& job, T** scratch) {
  if (!job.int4) return true;
  *scratch = (T*)vb_scratch(VB_SCRATCH_PRIVATE, size_t(WEIGHT_ROWS * job.in) * sizeof(T));
  return *scratch != nullptr;
}

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
int linear(const Linear& job, int32_t dtype, int32_t threads);

}  // namespace VB_NAMESPACE
#endif
