// Attention mass for Hopper: scores of 64 keys x up to 128 query rows a product, keys in the rows of the accumulators, so that
// a key's mass is a sum inside one thread and its three neighbours.
//
// A block takes one KV head and a run of 128-key tiles, which four producer warps gather into a ring of stages (of e4m3 pages they
// read and widen them); each of two consumer warpgroups takes 64 keys of a tile, and one exponentiates while the other multiplies.
// Queries beyond 128 rows are further passes over the keys, by the same threads: no order of addition varies.
#include "e4m3_tile.cuh"
#include "hopper.cuh"
#include "mass.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace vb {
namespace {

constexpr int kThreads = 384, kConsumers = 256, kKeys = 128;
constexpr int kBarConsumers = 1;

template <int D, int kRows>
struct Shape {
  static constexpr int kChunks = (D + 63) / 64;  // columns of 64 channels, 128 bytes a row
  static constexpr int kQuery = kRows * 128 * kChunks, kTile = kKeys * 128 * kChunks;
  static constexpr int kFit = (220 * 1024 - kQuery) / kTile, kStages = kFit > 6 ? 6 : kFit;
  static constexpr int kSmem = kQuery + kStages * kTile + 1024;
  static_assert(kStages >= 2);
};

template <typename T, typename C, int D, int kRows>
__global__ void __launch_bounds__(kThreads, 1) mass_wgmma_kernel(const MassParams all, const __grid_constant__ CUtensorMap k_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const MassParams p = of_request<T>(all, blockIdx.z);
  if (p.rows == 0) return;
  using S = Shape<D, kRows>;
  constexpr int kStages = S::kStages, kChunks = S::kChunks;
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  __shared__ float shifts[kRows];  // log-sum-exp of a row in units of log2; infinite where it does not count
  __shared__ int positions[kRows];

  char* smem = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(smem_raw) + 1023) & ~uintptr_t(1023));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + S::kQuery, bars = smem_address(barriers);
  auto full = [&](int s) { return bars + s * 8; };
  auto empty = [&](int s) { return bars + (kStages + s) * 8; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full(s), is_e4m3<C> ? kTileLoaders : 4);
      mbarrier_init(empty(s), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();

  const int head = blockIdx.y, rows = p.rows * p.group, lane = threadIdx.x & 31;
  // Keys after every query get nothing: a graph is captured for the longest context there may be.
  int newest = -1;
  for (int r = lane; r < p.rows; r += 32) newest = max(newest, static_cast<int>(p.positions[r]));
  for (int o = 16; o; o >>= 1) newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, o));
  const int tiles = (min(p.num_keys, newest + 1) + kKeys - 1) / kKeys;
  const int begin = int64_t(tiles) * blockIdx.x / gridDim.x, end = int64_t(tiles) * (blockIdx.x + 1) / gridDim.x;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    registers_down<is_e4m3<C> ? 72 : 40>();
    // The boxes of a tile are dealt to the lanes of four warps, as in prefill.
    const int warp = threadIdx.x >> 5;
    constexpr int kBoxes = kKeys / kBoxRows, kAll = kBoxes * kChunks;
    static_assert(kAll <= 128);
    const int mine = lane * 4 + warp, box = mine % kBoxes, chunk = mine / kBoxes;
    const int bytes = (kAll / 4 + (warp < kAll % 4)) * kBoxRows * 128;
    const uint32_t at = chunk * kKeys * 128 + box * kBoxRows * 128;
    int count = 0;
    for (int row0 = 0; row0 < rows; row0 += kRows) {
      auto page_of = [&](int tile) {
        const int key = tile * kKeys + box * kBoxRows;
        return key < p.num_keys && tile < end ? p.block_table[key >> p.log_block] : p.num_blocks;  // past the last: zeros
      };
      int next_page = page_of(begin);
      for (int tile = begin; tile < end; ++tile, ++count) {
        const int stage = count % kStages;
        if constexpr (is_e4m3<C>) {
          const E4m3Pages from{static_cast<const e4m3*>(p.key) + head * p.head_stride, p.block_table, p.page_stride, p.slot_stride,
                               p.log_block};
          mbarrier_wait(empty(stage), (count / kStages & 1) ^ 1);
          load_tile<T, D, kKeys>(k_smem + stage * S::kTile, from, tile * kKeys, 0, p.num_keys);
          mbarrier_arrive(full(stage));
        } else {
          const int page = next_page, token = (tile * kKeys + box * kBoxRows) & ((1 << p.log_block) - 1);
          next_page = page_of(tile + 1);
          mbarrier_wait(empty(stage), (count / kStages & 1) ^ 1);
          if (lane == 0) mbarrier_expect(full(stage), bytes);
          __syncwarp();
          if (mine < kAll) tma_load_4d(k_smem + stage * S::kTile + at, &k_map, full(stage), chunk * 64, head, token, page);
        }
      }
    }
  } else {
    registers_up<is_e4m3<C> ? 216 : 232>();
    const int group = warpgroup - 1, thread = threadIdx.x - 128, lane4 = lane & 3;
    const uint64_t q_desc = smem_descriptor(q_smem, 0), k_desc = smem_descriptor(k_smem + group * 64 * 128, 0);
    const int q_heads = p.kv_heads * p.group, row_in_tile = group * 64 + (thread % 128) / 32 * 16 + lane / 4;
    const int window = p.window ? p.window : INT32_MAX;
    int count = 0;
    for (int row0 = 0; row0 < rows; row0 += kRows) {
      named_sync(kBarConsumers, kConsumers);  // the pass before has read its queries
      for (int i = thread; i < kRows * (D / 8); i += kConsumers) {
        const int r = i / (D / 8), c16 = i % (D / 8), row = row0 + r;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < rows)
          v = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + row / p.group * p.q_token_stride +
                                              int64_t(head * p.group + row % p.group) * D + c16 * 8);
        *reinterpret_cast<uint4*>(smem + (c16 / 8) * kRows * 128 + r * 128 + (((c16 & 7) ^ (r & 7)) << 4)) = v;
      }
      if (thread < kRows) {
        const int row = row0 + thread, query = min(row, rows - 1) / p.group;
        positions[thread] = static_cast<int>(p.positions[query]);
        shifts[thread] = row < rows ? p.lse[int64_t(query) * q_heads + head * p.group + row % p.group] * kLog2e : INFINITY;
      }
      fence_async_proxy();
      named_sync(kBarConsumers, kConsumers);
      int first = INT32_MAX, last = -1;  // of the rows that count
      for (int r = lane; r < kRows; r += 32) {
        const int at = positions[r];
        first = shifts[r] < INFINITY ? min(first, at) : first;
        last = shifts[r] < INFINITY ? max(last, at) : last;
      }
      for (int o = 16; o; o >>= 1) {
        first = min(first, __shfl_xor_sync(0xffffffffu, first, o));
        last = max(last, __shfl_xor_sync(0xffffffffu, last, o));
      }
      if (last < 0) first = -1;  // none does: what others see may never have been written
      float shift[kRows / 4];  // of this thread's columns
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        shift[2 * j] = shifts[8 * j + 2 * lane4];
        shift[2 * j + 1] = shifts[8 * j + 2 * lane4 + 1];
      }
      float s[kRows / 2];
      for (int tile = begin; tile < end; ++tile, ++count) {
        const int stage = count % kStages, key0 = tile * kKeys + group * 64;
        mbarrier_wait(full(stage), count / kStages & 1);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
          Wgmma<kRows>::template ss<T>(s, k_desc + (stage * S::kTile + (k / 4) * kKeys * 128 + (k % 4) * 32) / 16,
                                       q_desc + ((k / 4) * kRows * 128 + (k % 4) * 32) / 16, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        if (lane == 0) mbarrier_arrive(empty(stage));
        float total[2] = {0.f, 0.f};
        if (key0 + 63 <= first && last - key0 < window) {  // every row that counts sees every key
#pragma unroll
          for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e >> 1] += exp2_fast(s[4 * j + e] * p.scale_log2 - shift[2 * j + (e & 1)]);
        } else {
          const int key = tile * kKeys + row_in_tile;
#pragma unroll
          for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int at = positions[8 * j + 2 * lane4 + (e & 1)], of = key + 8 * (e >> 1);
              const float mass = exp2_fast(s[4 * j + e] * p.scale_log2 - shift[2 * j + (e & 1)]);
              total[e >> 1] += of <= at && at - of < window ? mass : 0.f;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          total[i] = quad_sum(total[i]);
          const int key = tile * kKeys + row_in_tile + 8 * i;
          if (lane4 == 0 && key < p.num_keys) p.mass[int64_t(head) * p.num_keys + key] += total[i] / q_heads;
        }
      }
    }
  }
#endif
}

}  // namespace

int launch_mass_wgmma(const MassParams& p, int count, int dtype, const VbCache& cache, cudaStream_t stream) {
  CUtensorMap k_map{};
  if (cache.dtype != VB_E4M3) {
    if (int e = encode_map(&k_map, cache.key, cache)) return e;
  }
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  const int tiles = (p.num_keys + kKeys - 1) / kKeys, share = info.sms / (p.kv_heads * count);
  const dim3 grid(share < 1 ? 1 : share < tiles ? share : tiles, p.kv_heads, count);
  return dispatch(dtype, cache.dtype, cache.head_dim, [&](auto t, auto c, auto d) -> int {
    auto launch = [&](auto width) -> int {
      constexpr int kRows = decltype(width)::value, D = decltype(d)::value;
      auto* kernel = mass_wgmma_kernel<decltype(t), decltype(c), D, kRows>;
      if (int e = allow_smem(kernel, Shape<D, kRows>::kSmem)) return e;
      kernel<<<grid, kThreads, Shape<D, kRows>::kSmem, stream>>>(p, k_map);
      return cudaGetLastError();
    };
    return p.rows * p.group <= 64 ? launch(Int<64>{}) : launch(Int<128>{});
  });
}

}  // namespace vb
