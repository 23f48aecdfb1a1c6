// Penalties on the logits of tokens that a sequence has had.
#include "common.cuh"

namespace vb {
namespace {

constexpr int kThreads = 256;

// A block a row. A table has an entry (token, how often it was generated; 0: it is in the prompt only) per token.
__global__ void __launch_bounds__(kThreads)
    penalize_kernel(float* logits, int64_t row_stride, int2* const* tables, const int32_t* sizes, const int4* changes,
                    int num_changes, const float* penalties) {
  const int row = blockIdx.x, size = sizes[row];
  int2* table = tables[row];
  for (int i = threadIdx.x; i < num_changes; i += kThreads) {
    const int4 change = changes[i];
    if (change.x == row) table[change.y] = make_int2(change.z, change.w);
  }
  __syncthreads();
  const float repetition = penalties[row], frequency = penalties[gridDim.x + row], presence = penalties[2 * gridDim.x + row];
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const int2 entry = table[i];
    float* at = logits + row * row_stride + entry.x;
    // Each operation rounds, as in the torch twin.
    const float v = *at, scaled = v > 0.f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
    *at = __fsub_rn(__fsub_rn(scaled, __fmul_rn(frequency, entry.y)), entry.y > 0 ? presence : 0.f);
  }
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_penalize(float* logits, int64_t row_stride, int32_t* const* tables, const int32_t* sizes, const int32_t* changes,
                           int num_changes, const float* penalties, int rows, void* stream) {
  if (rows < 0 || num_changes < 0) return VB_ERROR_SHAPE;
  if (!aligned16(changes)) return VB_ERROR_ALIGNMENT;
  if (rows == 0) return 0;
  penalize_kernel<<<rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      logits, row_stride, reinterpret_cast<int2* const*>(tables), sizes, reinterpret_cast<const int4*>(changes), num_changes,
      penalties);
  return cudaGetLastError();
}
