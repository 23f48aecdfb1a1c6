// The attention mass that the queries of one request give to its keys: what its two implementations (mma, wgmma) share.
#pragma once
#include "common.cuh"

namespace vb {

struct MassParams {
  const void* q;
  const float* lse;
  const void* key;
  const int64_t* positions;
  const int32_t* block_table;
  float* mass;
  int64_t q_token_stride, page_stride, slot_stride, head_stride;
  int log_block, num_blocks, rows, num_keys, kv_heads, group, window;
  float scale_log2;
};

int launch_mass_wgmma(const MassParams& p, int dtype, const VbCache& cache, cudaStream_t stream);

}  // namespace vb
