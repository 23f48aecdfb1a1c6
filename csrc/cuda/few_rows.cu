// Products of a few rows with a weight matrix, as steps of a few requests have them: all of the time goes into reading the weights,
// and a tensor core would mostly multiply padding. Weights change in no step, so a block asks for its first ones before the kernel
// ahead has ended: the memory never rests between two kernels.
#include "elementwise.cuh"
#include "launch.cuh"

namespace vb {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kOuts = VB_FEW_ROWS_OUTS;  // of a block, whose threads share out the inputs
constexpr int kUnits = 2;                // of eight inputs, that a thread asks for at once

// Weights are read once: they need no place in the L1 cache.
__device__ __forceinline__ Vec8 load_once(const void* from) {
  Vec8 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(from));
  return v;
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const T* x, const T* weight, const T* bias, T* out, int in, int outs) {
  const int first = blockIdx.x * kOuts, units = in / 8;
  Vec8 weights[kUnits][kOuts];
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = from + i * kThreads;
      if (unit < units)
#pragma unroll
        for (int o = 0; o < kOuts; ++o) weights[i][o] = load_once(weight + int64_t(first + o) * in + unit * 8);
    }
  };
  load(threadIdx.x);
  wait_for_previous();
  start_next();
  float sums[kOuts][kRows] = {};
  for (int from = threadIdx.x; from < units; from += kUnits * kThreads) {
    if (from >= kThreads) load(from);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = from + i * kThreads;
      if (unit >= units) break;
      float inputs[kRows][8];
#pragma unroll
      for (int r = 0; r < kRows; ++r) to_float<T>(*reinterpret_cast<const Vec8*>(x + int64_t(r) * in + unit * 8), inputs[r]);
#pragma unroll
      for (int o = 0; o < kOuts; ++o) {
        float w[8];
        to_float<T>(weights[i][o], w);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[o][r] += w[j] * inputs[r][j];
      }
    }
  }
  __shared__ float parts[kWarps][kOuts * kRows];
#pragma unroll
  for (int o = 0; o < kOuts; ++o)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_sum(sums[o][r]);
      if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5][o * kRows + r] = sum;
    }
  __syncthreads();
  if (threadIdx.x >= kOuts * kRows) return;
  const int column = first + threadIdx.x / kRows, row = threadIdx.x % kRows;
  float total = bias ? static_cast<float>(bias[column]) : 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += parts[w][threadIdx.x];
  out[int64_t(row) * outs + column] = T(total);
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_few_rows(const void* x, const void* weight, const void* bias, void* out, int rows, int in, int outs, int dtype,
                           void* stream) {
  static_assert(VB_FEW_ROWS == 4, "a case for each number of rows");
  if (rows < 0 || rows > VB_FEW_ROWS || in < 8 || in % 8 || outs < 0 || outs % kOuts) return VB_ERROR_SHAPE;
  if (!aligned16(x) || !aligned16(weight)) return VB_ERROR_ALIGNMENT;
  if (rows == 0 || outs == 0) return 0;
  return dispatch_dtype(dtype, [&](auto t) -> int {
    using T = decltype(t);
    auto launch = [&](auto count) {
      return launch_early(few_rows_kernel<T, decltype(count)::value>, unsigned(outs / kOuts), kThreads, stream,
                          static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out),
                          in, outs);
    };
    switch (rows) {
      case 1: return launch(Int<1>{});
      case 2: return launch(Int<2>{});
      case 3: return launch(Int<3>{});
      default: return launch(Int<4>{});
    }
  });
}
