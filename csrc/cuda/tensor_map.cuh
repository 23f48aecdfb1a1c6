// Tensor maps of a paged cache, by which the copy engine of Hopper gathers pages.
#pragma once
#include <cuda.h>

#include "common.cuh"

namespace vb {

constexpr int kBoxRows = 16;  // tokens a copy brings: the smallest page

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encoder() {  // through the runtime, so that the library needs no link to the driver's
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess) return nullptr;
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(f) : nullptr;
}

// The cache as [num_blocks, block_size, kv_heads, head_dim], read in boxes of one page's tokens, one head, 64 channels.
inline int encode_map(CUtensorMap* map, const void* base, const VbCache& c) {
  static const EncodeTiled encode = find_encoder();
  if (!encode) return VB_ERROR_TENSOR_MAP;
  const cuuint64_t dims[4] = {cuuint64_t(c.head_dim), cuuint64_t(c.kv_heads), cuuint64_t(c.block_size), cuuint64_t(c.num_blocks)};
  const cuuint64_t strides[3] = {cuuint64_t(c.head_stride) * 2, cuuint64_t(c.slot_stride) * 2, cuuint64_t(c.page_stride) * 2};
  const cuuint32_t box[4] = {64, 1, kBoxRows, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult r = encode(map, c.dtype ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                            const_cast<void*>(base), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? 0 : static_cast<int>(VB_ERROR_TENSOR_MAP);
}

}  // namespace vb
