// Matrices in PyTorch's layout of 4 bits written out in bf16, for products that cuBLAS is faster at. A number q stands for
// (q - 8) * scale + zero, in the arithmetic of PyTorch's own product (one fused multiply-add of bf16), to the bit.
#include "common.cuh"
#include "int4_tiles.cuh"

namespace vb {
namespace {

constexpr uint32_t kNumbers = 0x000f000f;
constexpr uint32_t k128 = 0x43004300;  // two numbers in bf16 whose last four bits are worth 1: 128 + q is 128 | q
constexpr int kColumns = 32, kRows = 8;  // threads of a block: 256 inputs of the 8 rows that lie together

__device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t bits) { return reinterpret_cast<__nv_bfloat162&>(bits); }
__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 pair) { return reinterpret_cast<uint32_t&>(pair); }

// A thread writes eight numbers of a row. scales_and_zeros [groups, features]: a scale in the lower half, a zero in the upper one.
__global__ void __launch_bounds__(kColumns* kRows)
    unpack_kernel(const uint32_t* tiles, const uint32_t* scales_and_zeros, uint4* out, Int4Tiles layout, int features, int log_group) {
  const int row = blockIdx.x * kRows + threadIdx.y, unit = blockIdx.y * kColumns + threadIdx.x, units = layout.size / 8;
  if (unit >= units) return;
  const __nv_bfloat162 both = as_pair(scales_and_zeros[int64_t(unit * 8 >> log_group) * features + row]);
  const __nv_bfloat162 scale = __low2bfloat162(both), zero = __high2bfloat162(both), middle = __float2bfloat162_rn(136.f);
  const uint32_t* words = tiles + layout.word(row, unit);
  uint32_t eight[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t numbers = words[c * layout.stride()] >> layout.bit(unit) & kNumbers;
    eight[c] = as_bits(__hfma2(__hsub2(as_pair(numbers | k128), middle), scale, zero));
  }
  out[int64_t(row) * units + unit] = make_uint4(eight[0], eight[1], eight[2], eight[3]);
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_int4_tiles_unpack(const void* tiles, const void* scales_and_zeros, void* out, int features, int size, int group,
                                    int words, void* stream) {
  if (words != 1 && words != 2 && words != 4) return VB_ERROR_SHAPE;
  if (features < 8 || features % kRows || size < 32 || size % (32 * words)) return VB_ERROR_SHAPE;
  if (group < 32 || (group & (group - 1)) || size % group) return VB_ERROR_SHAPE;
  if (!aligned16(out)) return VB_ERROR_ALIGNMENT;
  const dim3 blocks(features / kRows, (size / 8 + kColumns - 1) / kColumns), threads(kColumns, kRows);
  unpack_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint32_t*>(tiles), static_cast<const uint32_t*>(scales_and_zeros), static_cast<uint4*>(out),
      {size, floor_log2(words)}, features, floor_log2(group));
  return cudaGetLastError();
}
