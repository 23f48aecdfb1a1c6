// Scores of cached keys against rows of queries by mma.sync, with the keys in registers: what the sums of KV-Compress share.
#pragma once
#include "e4m3.cuh"

namespace vb {

// A warp's span of keys, of C in the pages, as tensor-core fragments of T. Channels are contracted in the order that loads of
// eight give, of keys and queries alike: lane (g, q4) has channels 32 s + 8 q4 .. + 7 of key 8 i + g.
template <typename T, typename C, int D>
struct KeySpan {
  static constexpr int kK = (D + 31) / 32, kTiles = D == 256 ? 2 : 4, kKeys = 8 * kTiles;
  uint4 keys[kTiles][kK];

  // row_of(key): where the channels of a key begin; asked for keys below `end` only.
  template <typename F>
  __device__ __forceinline__ void load(int first, int end, F&& row_of) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q4 = lane & 3;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const C* from = row_of(min(first + 8 * i + g, end - 1)) + 8 * q4;
#pragma unroll
      for (int s = 0; s < kK; ++s)
        keys[i][s] = 32 * s + 8 * q4 < D ? load_eight<T>(from + 32 * s) : make_uint4(0, 0, 0, 0);
    }
  }

  // c[e]: of row g + 8 (e / 2) of 16 and key 8 i + 2 q4 + e % 2.
  __device__ __forceinline__ void scores(float (&c)[4], const uint4 (&q)[2][kK], int i) const {
#pragma unroll
    for (int s = 0; s < kK; ++s) {
      const uint32_t even[4] = {q[0][s].x, q[1][s].x, q[0][s].y, q[1][s].y};
      const uint32_t odd[4] = {q[0][s].z, q[1][s].z, q[0][s].w, q[1][s].w};
      mma16816<T>(c, even, keys[i][s].x, keys[i][s].y);
      mma16816<T>(c, odd, keys[i][s].z, keys[i][s].w);
    }
  }
};

// A maximum of scores in units of log2, and the sum of powers of 2 of the scores below it.
__device__ __forceinline__ float2 join(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  if (top == -INFINITY) return make_float2(top, 0.f);
  return make_float2(top, a.y * exp2_fast(a.x - top) + b.y * exp2_fast(b.x - top));
}
__device__ __forceinline__ float2 join_lanes(float2 v, int distance) {
  return join(v, make_float2(__shfl_xor_sync(0xffffffffu, v.x, distance), __shfl_xor_sync(0xffffffffu, v.y, distance)));
}
// One more stretch of scores: of row half (0 or 1) among the fragments that `scores` gives, -infinity where none is seen.
template <int kTiles>
__device__ __forceinline__ void add_scores(float2& seen, const float (&s)[kTiles][4], int half) {
  float top = seen.x;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) top = fmaxf(top, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
  if (top == -INFINITY) return;
  float sum = seen.y * exp2_fast(seen.x - top);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) sum += exp2_fast(s[i][2 * half] - top) + exp2_fast(s[i][2 * half + 1] - top);
  seen = make_float2(top, sum);
}
// Log2 of the sum of powers of 2: what to subtract from a score for the log2 of its probability. Infinite without scores.
__device__ __forceinline__ float log2_sum(float2 v) { return v.y > 0.f ? v.x + __log2f(v.y) : INFINITY; }

}  // namespace vb
