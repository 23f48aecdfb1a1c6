// What token selection measures: deviation of fresh K or V from the cached, and the attention mass a question gives to keys.
#include "elementwise.cuh"
#include "mass.cuh"

namespace vb {
namespace {

template <typename T, typename C>
__global__ void __launch_bounds__(256)
    kv_deviation_kernel(const T* fresh, int64_t token_stride, const C* cache, const int64_t* slots, const int64_t* rows, Pages pages,
                        float* deviation, int count, int kv_heads, int head_dim) {
  const int index = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  if (index >= count) return;
  const int64_t token = rows ? rows[index] : index, slot = slots[token];
  const int units = head_dim / 8;
  float total = 0.f;
  for (int i = lane; i < kv_heads * units; i += 32) {
    const int head = i / units, channel = i % units * 8;
    float a[8], b[8];
    to_float<T>(*reinterpret_cast<const Vec8*>(fresh + token * token_stride + head * head_dim + channel), a);
    to_float<C>(*reinterpret_cast<const Eight<C>*>(cache + pages.offset(slot, head) + channel), b);
#pragma unroll
    for (int j = 0; j < 8; ++j) total += (a[j] - b[j]) * (a[j] - b[j]);
  }
  total = warp_sum(total);
  if (lane == 0) deviation[index] = total;
}

constexpr int kMassWarps = 4, kMassThreads = kMassWarps * 32, kMassRows = 64;

// Bytes of a row in shared memory: 16-byte reads of two neighbouring rows by eight lanes then hit all banks once.
constexpr int mass_row_bytes(int head_dim) { return (head_dim * 2 - 64 + 127) / 128 * 128 + 64; }

// A block takes one KV head and a span of keys, each warp kKeys of them: they stay in registers as tensor-core fragments while
// the rows (queries x query heads) pass through shared memory. Channels are contracted in the order that 16-byte loads give.
template <typename T, typename C, int D, int kKeys>
__global__ void __launch_bounds__(kMassThreads) attention_mass_kernel(const MassParams all) {
  const MassParams p = of_request<T>(all, blockIdx.z);
  constexpr int kK = (D + 31) / 32, kTiles = kKeys / 8, kRow = mass_row_bytes(D);
  __shared__ __align__(16) char rows_smem[kMassRows * kRow];
  __shared__ float shifts[kMassRows];
  __shared__ int positions[kMassRows];
  __shared__ int64_t offsets[kMassRows];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q4 = lane & 3;
  const int key0 = (blockIdx.x * kMassWarps + warp) * kKeys, head = blockIdx.y, block_mask = (1 << p.log_block) - 1;
  const int q_heads = p.kv_heads * p.group, rows = p.rows * p.group;
  // Keys after every query get nothing: a graph is captured for the longest context there may be.
  int last = -1;
  for (int r = lane; r < p.rows; r += 32) last = max(last, static_cast<int>(p.positions[r]));
  for (int o = 16; o; o >>= 1) last = max(last, __shfl_xor_sync(0xffffffffu, last, o));
  if (static_cast<int>(blockIdx.x) * kMassWarps * kKeys > last) return;
  uint4 kf[kTiles][kK];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int key = min(key0 + 8 * i + g, p.num_keys - 1);
    const C* from = static_cast<const C*>(p.key) + int64_t(p.block_table[key >> p.log_block]) * p.page_stride +
                    int64_t(key & block_mask) * p.slot_stride + head * p.head_stride + 8 * q4;
#pragma unroll
    for (int s = 0; s < kK; ++s)
      kf[i][s] = 32 * s + 8 * q4 < D ? load_eight<T>(from + 32 * s) : make_uint4(0, 0, 0, 0);
  }
  const int window = p.window ? p.window : INT32_MAX;
  const float scale_log2 = p.scale_log2;
  float acc[kTiles][2] = {};
  for (int base = 0; base < rows; base += kMassRows) {
    __syncthreads();
    if (threadIdx.x < kMassRows) {
      const int row = base + threadIdx.x;
      const bool valid = row < rows;
      const int query = valid ? row / p.group : 0, h = head * p.group + (valid ? row % p.group : 0);
      positions[threadIdx.x] = valid ? static_cast<int>(p.positions[query]) : -1;
      shifts[threadIdx.x] = valid ? p.lse[int64_t(query) * q_heads + h] * kLog2e : 0.f;
      offsets[threadIdx.x] = valid ? query * p.q_token_stride + int64_t(h) * D : -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kMassRows * kK * 4; i += kMassThreads) {
      const int r = i / (kK * 4), channel = i % (kK * 4) * 8;
      const bool valid = offsets[r] >= 0 && channel < D;
      cp_async16(smem_address(rows_smem + r * kRow + channel * 2), static_cast<const T*>(p.q) + (valid ? offsets[r] + channel : 0),
                 valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const int count = min(kMassRows, rows - base);
    for (int row0 = 0; row0 < count; row0 += 16) {
      uint4 qf[2][kK];
      float shift[2];
      int position[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row0 + g + 8 * i;
        position[i] = positions[r];
        shift[i] = shifts[r];
#pragma unroll
        for (int s = 0; s < kK; ++s) qf[i][s] = *reinterpret_cast<const uint4*>(rows_smem + r * kRow + (32 * s + 8 * q4) * 2);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        float c[4] = {};
#pragma unroll
        for (int s = 0; s < kK; ++s) {
          const uint32_t even[4] = {qf[0][s].x, qf[1][s].x, qf[0][s].y, qf[1][s].y};
          const uint32_t odd[4] = {qf[0][s].z, qf[1][s].z, qf[0][s].w, qf[1][s].w};
          mma16816<T>(c, even, kf[i][s].x, kf[i][s].y);
          mma16816<T>(c, odd, kf[i][s].z, kf[i][s].w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = key0 + 8 * i + 2 * q4 + (e & 1), at = position[e >> 1];
          const float mass = exp2_fast(c[e] * scale_log2 - shift[e >> 1]);
          acc[i][e & 1] += key <= at && at - key < window ? mass : 0.f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float v = acc[i][e];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
      const int key = key0 + 8 * i + 2 * q4 + e;
      if (g == 0 && key < p.num_keys) p.mass[int64_t(head) * p.num_keys + key] += v / q_heads;
    }
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_kv_deviation(const void* fresh, int64_t token_stride, const void* cache, const int64_t* slots,
                               const int64_t* rows, int64_t page_stride, int64_t slot_stride, int64_t head_stride, float* deviation,
                               int count, int kv_heads, int head_dim, int block_size, int dtype, int cache_dtype,
                               void* stream) {
  Pages pages;
  if (int e = make_pages(&pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (head_dim < 8 || head_dim % 8) return VB_ERROR_HEAD_DIM;
  if (count < 0 || kv_heads < 1) return VB_ERROR_SHAPE;
  if (!aligned16(fresh) || !aligned_eight(cache, cache_dtype) || token_stride & 7) return VB_ERROR_ALIGNMENT;
  if (count == 0) return 0;
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    using T = decltype(t);
    using C = decltype(c);
    kv_deviation_kernel<T, C><<<(count + 7) / 8, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(fresh), token_stride, static_cast<const C*>(cache), slots, rows, pages, deviation, count, kv_heads,
        head_dim);
    return cudaGetLastError();
  });
}

extern "C" int vb_attention_mass(const void* q, int64_t q_token_stride, const float* lse, const int64_t* positions,
                                 const int32_t* block_tables, int64_t table_stride, const int64_t* requests, int count, float* mass,
                                 int rows, int num_keys, int q_heads, int window, float scale, int variant, int dtype,
                                 const VbCache* c, void* stream) {
  if (int e = check_cache(*c)) return e;
  if (q_heads < c->kv_heads || q_heads % c->kv_heads) return VB_ERROR_HEADS;
  if (rows < 0 || num_keys < 0 || window < 0 || count < 1 || count > 65535 || (count > 1 && !requests)) return VB_ERROR_SHAPE;
  if (!aligned16(q) || q_token_stride & 7) return VB_ERROR_ALIGNMENT;
  const int chosen = vb_prefill_variant(c->head_dim, variant);
  if (chosen < 0) return chosen;
  if (rows == 0 || num_keys == 0) return 0;
  const MassParams p{q, lse, c->key, positions, block_tables, mass, q_token_stride, c->page_stride, c->slot_stride, c->head_stride,
                     floor_log2(c->block_size), c->num_blocks, rows, num_keys, c->kv_heads, q_heads / c->kv_heads, window,
                     scale * kLog2e, requests, table_stride};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (chosen == VB_PREFILL_WGMMA) return launch_mass_wgmma(p, count, dtype, *c, s);
  return dispatch(dtype, c->dtype, c->head_dim, [&](auto t, auto of_cache, auto d) -> int {
    constexpr int D = decltype(d)::value, kKeys = D == 256 ? 16 : 32;
    const dim3 grid((num_keys + kKeys * kMassWarps - 1) / (kKeys * kMassWarps), c->kv_heads, count);
    attention_mass_kernel<decltype(t), decltype(of_cache), D, kKeys><<<grid, kMassThreads, 0, s>>>(p);
    return cudaGetLastError();
  });
}
