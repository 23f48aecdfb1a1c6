// The attention mass that the queries of requests give to their keys: what its two implementations (mma, wgmma) share.
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
  // Of several requests: VB_MASS_FIELDS of each, and `rows` and `num_keys` are the most that any has. Null: of one.
  const int64_t* requests;
  int64_t table_stride;
};

// What concerns a block of request `index`.
template <typename T>
__device__ __forceinline__ MassParams of_request(MassParams p, int index) {
  if (!p.requests) return p;
  const int64_t* own = p.requests + index * VB_MASS_FIELDS;
  const int64_t first = own[0];
  p.q = static_cast<const T*>(p.q) + first * p.q_token_stride;
  p.lse += first * p.kv_heads * p.group;
  p.positions += first;
  p.block_table += index * p.table_stride;
  p.rows = static_cast<int>(own[1]);
  p.num_keys = static_cast<int>(own[2]);
  p.mass += own[3];
  return p;
}

int launch_mass_wgmma(const MassParams& p, int count, int dtype, const VbCache& cache, cudaStream_t stream);

}  // namespace vb
