// RMSNorm with the residual addition fused, and the gated activation. They round where the plain torch versions round, so
// that both give the same bits but for the order of a sum.
#include "elementwise.cuh"
#include "launch.cuh"

namespace vb {
namespace {

constexpr int kMaxVecs = 4;  // 16-byte units a thread keeps in registers

// One block a row; every thread holds its part of the row, so that x is read once.
template <typename T>
__global__ void __launch_bounds__(512) rms_norm_kernel(const T* x, T* residual, const T* weight, T* out, int hidden, float eps) {
  wait_for_previous();
  const int64_t row = int64_t(blockIdx.x) * hidden;
  const int units = hidden / 8;
  Vec8 kept[kMaxVecs];
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    kept[i] = *reinterpret_cast<const Vec8*>(x + row + u * 8);
    float f[8];
    to_float<T>(kept[i], f);
    if (residual) {
      float r[8];
      to_float<T>(*reinterpret_cast<const Vec8*>(residual + row + u * 8), r);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] += r[j];
      kept[i] = from_float<T>(f);
      *reinterpret_cast<Vec8*>(residual + row + u * 8) = kept[i];
      to_float<T>(kept[i], f);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) total += f[j] * f[j];
  }
  __shared__ float sums[17];
  total = warp_sum(total);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = total;
  __syncthreads();
  if (threadIdx.x < 32) {
    total = warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.f);
    if (threadIdx.x == 0) sums[16] = rsqrtf(total / hidden + eps);
  }
  __syncthreads();
  const float inverse = sums[16];
#pragma unroll
  for (int i = 0; i < kMaxVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    float f[8], w[8];
    to_float<T>(kept[i], f);
    to_float<T>(*reinterpret_cast<const Vec8*>(weight + u * 8), w);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = round_to<T>(f[j] * inverse) * w[j];
    *reinterpret_cast<Vec8*>(out + row + u * 8) = from_float<T>(f);
  }
}

template <typename T>
__global__ void __launch_bounds__(256) silu_and_mul_kernel(const T* gate_up, T* out, int64_t total_units, int n) {
  wait_for_previous();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= total_units) return;
  const int units = n / 8, channel = i % units * 8;
  const int64_t row = i / units;
  const T* from = gate_up + row * 2 * n + channel;
  float g[8], u[8];
  to_float<T>(*reinterpret_cast<const Vec8*>(from), g);
  to_float<T>(*reinterpret_cast<const Vec8*>(from + n), u);
#pragma unroll
  for (int j = 0; j < 8; ++j) g[j] = round_to<T>(__fdividef(g[j], 1.f + __expf(-g[j]))) * u[j];
  *reinterpret_cast<Vec8*>(out + row * n + channel) = from_float<T>(g);
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t tokens, int hidden, float eps,
                           int dtype, void* stream) {
  if (tokens < 0 || tokens > INT32_MAX || hidden < 8 || hidden % 8 || hidden > 512 * 8 * kMaxVecs) return VB_ERROR_SHAPE;
  if (!aligned16(x) || !aligned16(residual) || !aligned16(weight) || !aligned16(out)) return VB_ERROR_ALIGNMENT;
  if (tokens == 0) return 0;
  int threads = 32;
  while (threads < 512 && threads * 8 * 2 < hidden) threads *= 2;
  return dispatch_dtype(dtype, [&](auto t) -> int {
    using T = decltype(t);
    return launch_early(rms_norm_kernel<T>, static_cast<unsigned>(tokens), threads, stream, static_cast<const T*>(x),
                        static_cast<T*>(residual), static_cast<const T*>(weight), static_cast<T*>(out), hidden, eps);
  });
}

extern "C" int vb_silu_and_mul(const void* gate_up, void* out, int64_t tokens, int n, int dtype, void* stream) {
  if (tokens < 0 || n < 8 || n % 8) return VB_ERROR_SHAPE;
  if (!aligned16(gate_up) || !aligned16(out)) return VB_ERROR_ALIGNMENT;
  const int64_t units = tokens * (n / 8);
  if (units == 0) return 0;
  return dispatch_dtype(dtype, [&](auto t) -> int {
    using T = decltype(t);
    return launch_early(silu_and_mul_kernel<T>, static_cast<unsigned>((units + 255) / 256), 256, stream,
                        static_cast<const T*>(gate_up), static_cast<T*>(out), units, n);
  });
}
