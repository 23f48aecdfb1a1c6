// Prefix sums over a block of 1024 threads, which the plans of both attention kernels are made with.
#pragma once
#include <cuda_runtime.h>

namespace vb {

// Inclusive prefix sum over the block; `warps` is 32 ints of shared memory.
__device__ inline int block_prefix(int v, int* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int o = 1; o < 32; o <<= 1) {
    const int u = __shfl_up_sync(0xffffffffu, v, o);
    if (lane >= o) v += u;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int w = warps[lane];
    for (int o = 1; o < 32; o <<= 1) {
      const int u = __shfl_up_sync(0xffffffffu, w, o);
      if (lane >= o) w += u;
    }
    warps[lane] = w;
  }
  __syncthreads();
  return v + (warp ? warps[warp - 1] : 0);
}

}  // namespace vb
