// What each key of a request receives from the prompt's last queries, head by head, without a matrix of probabilities.
//
// A block takes one KV head and 128 keys (64 of 256 channels), which stay in registers while the queries of one head after
// another pass through shared memory. A first kernel gives maximum and sum of each query head and stretch of keys, a second
// joins the stretches, a third adds powers of the probabilities over the queries. Each element is written by one thread.
#include "kv_sums.cuh"

namespace vb {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kRows = 64;

struct WindowParams {
  const void* q;
  const void* key;
  const int64_t* positions;
  const int32_t* block_table;
  float2* stats;   // [chunks, q_heads, rows]
  float* shifts;   // [q_heads, rows]
  float* sums;     // [q_heads, num_keys]
  int64_t q_token_stride, page_stride, slot_stride, head_stride, buffer;
  int log_block, rows, num_keys, q_heads, group, power;
  float scale_log2;
};

// Bytes of a row in shared memory: 16-byte reads of two neighbouring rows by eight lanes then hit all banks once.
constexpr int row_bytes(int head_dim) { return (head_dim * 2 - 64 + 127) / 128 * 128 + 64; }

template <typename T, typename C, int D, bool kStats>
__global__ void __launch_bounds__(kThreads) window_sums_kernel(WindowParams p) {
  using Span = KeySpan<T, C, D>;
  constexpr int kK = Span::kK, kTiles = Span::kTiles, kRow = row_bytes(D);
  __shared__ __align__(16) char rows_smem[kRows * kRow];
  __shared__ float shifts[kRows];
  __shared__ int positions[kRows];
  __shared__ float2 parts[kStats ? kWarps : 1][kRows];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  const int chunk = blockIdx.x, kv_head = blockIdx.y, block_first = chunk * kWarps * Span::kKeys;
  const int key0 = block_first + warp * Span::kKeys;
  int newest = -1;  // keys after every query get nothing
  for (int r = lane; r < p.rows; r += 32) newest = max(newest, static_cast<int>(p.positions[r]));
#pragma unroll
  for (int o = 16; o; o >>= 1) newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, o));
  if (block_first > newest) return;

  Span span;
  span.load(key0, p.num_keys, [&](int key) {
    return static_cast<const C*>(p.key) + int64_t(p.block_table[key >> p.log_block]) * p.page_stride +
           int64_t(key & ((1 << p.log_block) - 1)) * p.slot_stride + kv_head * p.head_stride;
  });
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
    float received[kTiles][2] = {};
    for (int base = 0; base < p.rows; base += kRows) {
      const int count = min(kRows, p.rows - base);
      __syncthreads();
      if (threadIdx.x < kRows) {
        const bool valid = threadIdx.x < count;
        positions[threadIdx.x] = valid ? static_cast<int>(p.positions[base + threadIdx.x]) : -1;
        shifts[threadIdx.x] = valid && !kStats ? p.shifts[int64_t(head) * p.rows + base + threadIdx.x] : INFINITY;
      }
      for (int i = threadIdx.x; i < kRows * kK * 4; i += kThreads) {
        const int r = i / (kK * 4), channel = i % (kK * 4) * 8;
        const bool valid = r < count && channel < D;
        cp_async16(smem_address(rows_smem + r * kRow + channel * 2),
                   static_cast<const T*>(p.q) + (valid ? (base + r) * p.q_token_stride + int64_t(head) * D + channel : 0), valid);
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      for (int row0 = 0; row0 < count; row0 += 16) {
        uint4 q[2][kK];
        float shift[2];
        int last[2];  // the last key that counts
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = row0 + g + 8 * i;
          shift[i] = shifts[r];
          last[i] = positions[r];
          if (!kStats && last[i] >= 0) last[i] = static_cast<int>(max(int64_t(last[i]) - p.buffer, int64_t(-1)));
#pragma unroll
          for (int s = 0; s < kK; ++s) q[i][s] = *reinterpret_cast<const uint4*>(rows_smem + r * kRow + (32 * s + 8 * q4) * 2);
        }
        float s[kTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          span.scores(s[i], q, i);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const bool counts = key0 + 8 * i + 2 * q4 + (e & 1) <= last[e >> 1];
            s[i][e] = counts ? s[i][e] * p.scale_log2 : -INFINITY;
            if constexpr (!kStats) {
              const float v = exp2_fast(s[i][e] - shift[e >> 1]);
              received[i][e & 1] += p.power == 2 ? v * v : v;
            }
          }
        }
        if constexpr (kStats) {
          float2 seen[2] = {make_float2(-INFINITY, 0.f), make_float2(-INFINITY, 0.f)};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            add_scores(seen[i], s, i);
            seen[i] = join_lanes(join_lanes(seen[i], 1), 2);
            if (q4 == 0) parts[warp][row0 + g + 8 * i] = seen[i];
          }
        }
      }
      if constexpr (kStats) {
        __syncthreads();
        if (threadIdx.x < count) {
          float2 all = parts[0][threadIdx.x];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) all = join(all, parts[w][threadIdx.x]);
          p.stats[(int64_t(chunk) * p.q_heads + head) * p.rows + base + threadIdx.x] = all;
        }
      }
    }
    if constexpr (!kStats) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float v = received[i][e];
#pragma unroll
          for (int o = 4; o < 32; o <<= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
          const int key = key0 + 8 * i + 2 * q4 + e;
          if (g == 0 && key < p.num_keys) p.sums[int64_t(head) * p.num_keys + key] = v;
        }
    }
  }
}

// A warp joins what the stretches of keys that a query sees have given.
__global__ void __launch_bounds__(kThreads) window_join_kernel(WindowParams p, int chunk_keys) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x & 31, all_rows = p.q_heads * p.rows;
  if (row >= all_rows) return;
  const int chunks = static_cast<int>(p.positions[row % p.rows]) / chunk_keys + 1;
  float2 all = make_float2(-INFINITY, 0.f);
  for (int i = lane; i < chunks; i += 32) all = join(all, p.stats[int64_t(i) * all_rows + row]);
#pragma unroll
  for (int o = 16; o; o >>= 1) all = join_lanes(all, o);
  if (lane == 0) p.shifts[row] = log2_sum(all);
}

constexpr int chunk_keys(int head_dim) { return kWarps * (head_dim == 256 ? 16 : 32); }

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" size_t vb_window_workspace_bytes(int rows, int num_keys, int q_heads, int head_dim) {
  const int64_t keys = chunk_keys(head_dim), chunks = (num_keys + keys - 1) / keys;
  return size_t(chunks + 1) * rows * q_heads * sizeof(float2);
}

extern "C" int vb_window_sums(const void* q, int64_t q_token_stride, const int64_t* positions, const int32_t* block_table, float* sums,
                              void* workspace, size_t workspace_bytes, int rows, int num_keys, int q_heads, int64_t buffer, float scale,
                              int power, int dtype, const VbCache* c, void* stream) {
  if (int e = check_cache(*c)) return e;
  if (q_heads < c->kv_heads || q_heads % c->kv_heads || c->kv_heads > 65535) return VB_ERROR_HEADS;
  if (rows < 0 || num_keys < 0 || buffer < 0 || (power != 1 && power != 2)) return VB_ERROR_SHAPE;
  if (!aligned16(q) || q_token_stride & 7) return VB_ERROR_ALIGNMENT;
  if (rows == 0 || num_keys == 0) return 0;
  if (workspace_bytes < vb_window_workspace_bytes(rows, num_keys, q_heads, c->head_dim)) return VB_ERROR_WORKSPACE;
  const int keys = chunk_keys(c->head_dim), chunks = (num_keys + keys - 1) / keys;
  float2* stats = static_cast<float2*>(workspace);
  const WindowParams p{q, c->key, positions, block_table, stats, reinterpret_cast<float*>(stats + int64_t(chunks) * q_heads * rows),
                       sums, q_token_stride, c->page_stride, c->slot_stride, c->head_stride, buffer, floor_log2(c->block_size), rows,
                       num_keys, q_heads, q_heads / c->kv_heads, power, scale * kLog2e};
  return dispatch(dtype, c->dtype, c->head_dim, [&](auto t, auto of_cache, auto d) -> int {
    using T = decltype(t);
    using C = decltype(of_cache);
    constexpr int D = decltype(d)::value;
    static_assert(kWarps * KeySpan<T, C, D>::kKeys == chunk_keys(D));
    const dim3 grid(chunks, c->kv_heads);
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    window_sums_kernel<T, C, D, true><<<grid, kThreads, 0, s>>>(p);
    if (const cudaError_t e = cudaGetLastError()) return e;
    window_join_kernel<<<(q_heads * rows + kWarps - 1) / kWarps, kThreads, 0, s>>>(p, keys);
    if (const cudaError_t e = cudaGetLastError()) return e;
    window_sums_kernel<T, C, D, false><<<grid, kThreads, 0, s>>>(p);
    return cudaGetLastError();
  });
}
