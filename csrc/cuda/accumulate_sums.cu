// What the keys of compressed requests receive from the query of a decode step, added to their metric in place.
//
// A row is one KV head of one request. Its keys are dealt to `splits` blocks of four warps, so that few rows fill the chip too.
// One kernel finds maximum and sum of each block's share, a second joins them and adds powers of the probabilities: a slot is
// written by one thread, so nothing depends on an order. Where attention has found the log-sum-exp, the second is all there is.
// Which blocks have keys is decided on the device, by `lengths`: a launch depends on the widths of tensors alone, and can be
// captured.
#include "kv_sums.cuh"

namespace vb {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kMaxGroup = 64, kMaxSplits = 64;

struct SumsParams {
  float* metric;
  const void* q;
  const void* keys;
  const int32_t* tables;
  const int64_t* lengths;
  const int32_t* key_positions;
  const int64_t* query_positions;
  float2* stats;     // [rows, splits, group]
  const float* lse;  // [rows, group], natural log, or null: by stats
  int64_t q_row_stride, page_stride, slot_stride, table_stride, buffer;
  int log_block, group, splits, power;
  float scale_log2;
};

// The query heads row0 .. row0 + 15 of a row as fragments; zeros where there are none.
template <typename T, int D, int kK>
__device__ __forceinline__ void load_heads(uint4 (&q)[2][kK], const SumsParams& p, int row, int row0) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q4 = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int s = 0; s < kK; ++s) {
      const int head = row0 + g + 8 * i, channel = 32 * s + 8 * q4;
      q[i][s] = head < p.group && channel < D
                    ? *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + row * p.q_row_stride + int64_t(head) * D + channel)
                    : make_uint4(0, 0, 0, 0);
    }
}

template <typename T, typename C, int D, bool kStats>
__global__ void __launch_bounds__(kThreads) accumulate_sums_kernel(SumsParams p) {
  using Span = KeySpan<T, C, D>;
  __shared__ float2 parts[kWarps][16];
  __shared__ float shifts[kMaxGroup];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  const int row = blockIdx.y, split = blockIdx.x, length = static_cast<int>(p.lengths[row]);
  const int first = (split * kWarps + warp) * Span::kKeys, step = p.splits * kWarps * Span::kKeys;
  if (length <= 0) return;
  const int32_t* table = p.tables + row * p.table_stride;
  auto slot_of = [&](int key) { return (int64_t(table[key >> p.log_block]) << p.log_block) + (key & ((1 << p.log_block) - 1)); };
  auto row_of = [&](int key) {
    return static_cast<const C*>(p.keys) + int64_t(table[key >> p.log_block]) * p.page_stride +
           (key & ((1 << p.log_block) - 1)) * p.slot_stride;
  };
  float2* stats = p.stats + int64_t(row) * p.splits * p.group;
  if constexpr (kStats) {
    for (int row0 = 0; row0 < p.group; row0 += 16) {
      uint4 q[2][Span::kK];
      load_heads<T, D>(q, p, row, row0);
      float2 seen[2] = {make_float2(-INFINITY, 0.f), make_float2(-INFINITY, 0.f)};
      for (int key0 = first; key0 < length; key0 += step) {
        Span span;
        span.load(key0, length, row_of);
        float s[Span::kTiles][4] = {};
#pragma unroll
        for (int i = 0; i < Span::kTiles; ++i) {
          span.scores(s[i], q, i);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][e] = key0 + 8 * i + 2 * q4 + (e & 1) < length ? s[i][e] * p.scale_log2 : -INFINITY;
        }
        add_scores(seen[0], s, 0);
        add_scores(seen[1], s, 1);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        seen[i] = join_lanes(join_lanes(seen[i], 1), 2);
        if (q4 == 0) parts[warp][g + 8 * i] = seen[i];
      }
      __syncthreads();
      const int head = row0 + threadIdx.x;
      if (threadIdx.x < 16 && head < p.group) {
        float2 all = parts[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) all = join(all, parts[w][threadIdx.x]);
        stats[split * p.group + head] = all;
      }
      __syncthreads();
    }
  } else {
    if (split * kWarps * Span::kKeys >= length) return;
    if (p.lse) {
      if (threadIdx.x < p.group) shifts[threadIdx.x] = p.lse[int64_t(row) * p.group + threadIdx.x] * kLog2e;
    } else {
      for (int head = warp; head < p.group; head += kWarps) {
        float2 all = make_float2(-INFINITY, 0.f);
        for (int i = lane; i < p.splits; i += 32) all = join(all, stats[i * p.group + head]);
#pragma unroll
        for (int o = 16; o; o >>= 1) all = join_lanes(all, o);
        if (lane == 0) shifts[head] = log2_sum(all);
      }
    }
    __syncthreads();
    const int64_t last = p.query_positions[row] - p.buffer;
    uint4 q[2][Span::kK];
    load_heads<T, D>(q, p, row, 0);
    for (int key0 = first; key0 < length; key0 += step) {
      // What is added to is on its way while the keys are: a page holds an even number of keys, so two share their address.
      int64_t slots[Span::kTiles];
      int2 positions[Span::kTiles];
      float2 sums[Span::kTiles];
#pragma unroll
      for (int i = 0; i < Span::kTiles; ++i) {
        const int key = key0 + 8 * i + 2 * q4;
        if (g == 0 && key < length) {
          slots[i] = slot_of(key);
          positions[i] = *reinterpret_cast<const int2*>(p.key_positions + slots[i]);
          sums[i] = *reinterpret_cast<const float2*>(p.metric + slots[i]);
        }
      }
      Span span;
      span.load(key0, length, row_of);
      float received[Span::kTiles][2] = {};
      for (int row0 = 0; row0 < p.group; row0 += 16) {
        if (p.group > 16) load_heads<T, D>(q, p, row, row0);
        float shift[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) shift[i] = row0 + g + 8 * i < p.group ? shifts[row0 + g + 8 * i] : INFINITY;
#pragma unroll
        for (int i = 0; i < Span::kTiles; ++i) {
          float c[4] = {};
          span.scores(c, q, i);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float v = exp2_fast(c[e] * p.scale_log2 - shift[e >> 1]);
            received[i][e & 1] += p.power == 2 ? v * v : v;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Span::kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int o = 4; o < 32; o <<= 1) received[i][e] += __shfl_xor_sync(0xffffffffu, received[i][e], o);
        const int key = key0 + 8 * i + 2 * q4;
        if (g == 0 && key < length) {
          if (positions[i].x <= last) sums[i].x += received[i][0];
          if (key + 1 < length && positions[i].y <= last) sums[i].y += received[i][1];
          *reinterpret_cast<float2*>(p.metric + slots[i]) = sums[i];
        }
      }
    }
  }
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_accumulate_splits(int rows, int max_length) {
  DeviceInfo info;
  if (int e = device_info(&info)) return -100 - e;
  constexpr int kKeys = kWarps * 16;  // the fewest of a block
  const int wanted = rows > 0 ? (16 * info.sms + rows - 1) / rows : 1, most = (max_length + kKeys - 1) / kKeys;
  const int splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : splits < kMaxSplits ? splits : kMaxSplits;
}

extern "C" int vb_accumulate_sums(float* metric, const void* q, int64_t q_row_stride, const int32_t* tables, int64_t table_stride,
                                  const int64_t* lengths, const int32_t* key_positions, const int64_t* query_positions,
                                  float* stats, const float* lse, int rows, int splits, int group, int64_t buffer, float scale,
                                  int power, int dtype, const VbCache* c, void* stream) {
  if (int e = check_cache(*c)) return e;
  if (c->kv_heads != 1 || group < 1 || group > kMaxGroup) return VB_ERROR_HEADS;
  if (rows < 0 || rows > 65535 || splits < 1 || splits > kMaxSplits || buffer < 0 || (power != 1 && power != 2)) return VB_ERROR_SHAPE;
  if (!aligned16(q) || q_row_stride & 7) return VB_ERROR_ALIGNMENT;
  if (rows == 0) return 0;
  if (!stats && !lse) return VB_ERROR_WORKSPACE;
  const SumsParams p{metric, q, c->key, tables, lengths, key_positions, query_positions, reinterpret_cast<float2*>(stats), lse,
                     q_row_stride, c->page_stride, c->slot_stride, table_stride, buffer, floor_log2(c->block_size), group, splits,
                     power, scale * kLog2e};
  return dispatch(dtype, c->dtype, c->head_dim, [&](auto t, auto of_cache, auto d) -> int {
    using T = decltype(t);
    using C = decltype(of_cache);
    constexpr int D = decltype(d)::value;
    const dim3 grid(splits, rows);
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    if (!lse) {
      accumulate_sums_kernel<T, C, D, true><<<grid, kThreads, 0, s>>>(p);
      if (const cudaError_t e = cudaGetLastError()) return e;
    }
    accumulate_sums_kernel<T, C, D, false><<<grid, kThreads, 0, s>>>(p);
    return cudaGetLastError();
  });
}
