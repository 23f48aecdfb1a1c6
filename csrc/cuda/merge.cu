// The attention over the union of two sets of keys, from the normalised output and log-sum-exp of each.
#include "elementwise.cuh"

namespace vb {
namespace {

template <typename T>
__global__ void __launch_bounds__(256) merge_states_kernel(const T* a, const float* lse_a, const T* b, const float* lse_b, T* out,
                                                           float* lse, int64_t total_units, int units) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= total_units) return;
  const int64_t row = i / units;
  const float la = lse_a[row], lb = lse_b[row], top = fmaxf(la, lb);
  const bool empty = top == -INFINITY;  // neither state saw a key
  const float ea = empty ? 0.f : exp2_fast((la - top) * kLog2e), eb = empty ? 0.f : exp2_fast((lb - top) * kLog2e);
  const float inverse = empty ? 0.f : 1.f / (ea + eb);
  float x[8], y[8];
  to_float<T>(reinterpret_cast<const Vec8*>(a)[i], x);
  to_float<T>(reinterpret_cast<const Vec8*>(b)[i], y);
  // An empty state's output may be anything: its weight is zero, its value must not count.
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = ((ea > 0.f ? ea * x[j] : 0.f) + (eb > 0.f ? eb * y[j] : 0.f)) * inverse;
  reinterpret_cast<Vec8*>(out)[i] = from_float<T>(x);
  if (lse && i % units == 0) lse[row] = empty ? -INFINITY : top + __logf(ea + eb);
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_merge_states(const void* out_a, const float* lse_a, const void* out_b, const float* lse_b, void* out, float* lse,
                               int64_t rows, int head_dim, int dtype, void* stream) {
  if (rows < 0) return VB_ERROR_SHAPE;
  if (head_dim < 8 || head_dim % 8) return VB_ERROR_HEAD_DIM;
  if (!aligned16(out_a) || !aligned16(out_b) || !aligned16(out)) return VB_ERROR_ALIGNMENT;
  const int units = head_dim / 8;
  const int64_t total = rows * units;
  if (total == 0) return 0;
  return dispatch_dtype(dtype, [&](auto t) -> int {
    using T = decltype(t);
    merge_states_kernel<T><<<static_cast<unsigned>((total + 255) / 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(out_a), lse_a, static_cast<const T*>(out_b), lse_b, static_cast<T*>(out), lse, total, units);
    return cudaGetLastError();
  });
}
