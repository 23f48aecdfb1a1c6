// Scattered-prefill attention for Hopper: wgmma on tiles that the bulk tensor copy engine gathers page by page.
//
// Blocks compute their items of the plan in turn: four producer warps issue the copies (a box of one page and KV head, 64
// channels wide), or fill a tile themselves where pages are of e4m3, into a ring of stages, ahead into the next item; two consumer
// warpgroups hold 64 rows each. As in FlashAttention-3 (Shah et al., 2024, section 3), each overlaps the softmax of a key tile with
// the product of the tile before, and the two take turns on the tensor cores.
#include "e4m3_tile.cuh"
#include "hopper.cuh"
#include "prefill_plan.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace vb {
namespace {

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kGrowth = 8;  // half precision holds probabilities below 2^8, and most steps leave the output as it is
enum { kBarTurn = 1, kBarConsumers = 3, kBarGroup = 4 };  // kBarTurn and kBarGroup: one for each consumer warpgroup

template <int D, int kKeyTile>
struct Shape {
  static constexpr int kKeys = kKeyTile;
  static constexpr int kStages = 2;
  static constexpr int kChunks = (D + 63) / 64;  // columns of 64 channels, 128 bytes a row
  static constexpr int kQuery = kTileRows * 128 * kChunks;
  static constexpr int kTile = kKeys * 128 * kChunks;
  static constexpr int kSmem = kQuery + 2 * kStages * kTile + 1024;
  // Where producers load tiles themselves; 504 in all, two for the consumers.
  static constexpr int kLoaderRegisters = 72, kConsumerRegisters = (504 - kLoaderRegisters) / 2;
};

template <typename T, typename C, int D, int kKeyTile>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_wgmma_kernel(PrefillParams p, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<D, kKeyTile>;
  constexpr int kKeys = S::kKeys, kStages = S::kStages, kChunks = S::kChunks;
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t barriers[4 * kStages];

  char* smem = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(smem_raw) + 1023) & ~uintptr_t(1023));
  const uint32_t q_smem = smem_address(smem), k_smem = q_smem + S::kQuery, v_smem = k_smem + kStages * S::kTile;
  const uint32_t bars = smem_address(barriers);
  auto full_k = [&](int s) { return bars + s * 8; };
  auto full_v = [&](int s) { return bars + (kStages + s) * 8; };
  auto empty_k = [&](int s) { return bars + (2 * kStages + s) * 8; };
  auto empty_v = [&](int s) { return bars + (3 * kStages + s) * 8; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full_k(s), is_e4m3<C> ? kTileLoaders : 4);
      mbarrier_init(full_v(s), is_e4m3<C> ? kTileLoaders : 4);
      mbarrier_init(empty_k(s), kConsumers / 32);
      mbarrier_init(empty_v(s), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  PrefillItem item;
  int count = 0;  // key tiles before the current item: stage and parity of tile t follow from count + t
  auto stage_of = [&](int t) { return (count + t) % kStages; };
  auto parity_of = [&](int t) { return ((count + t) / kStages) & 1; };

  if (warpgroup == 0) {
    if constexpr (is_e4m3<C>) {
      registers_down<S::kLoaderRegisters>();
      for (ItemCursor cursor(p); cursor.next(item);) {
        const int tiles = item.tile_end - item.tile_begin;
        const int64_t head = item.kv_head * p.head_stride;
        const int32_t* table = p.block_tables + int64_t(item.request) * p.block_table_stride;
        auto fill_tile = [&](const void* cache, uint32_t tile, int t) {
          const E4m3Pages from{static_cast<const e4m3*>(cache) + head, table, p.page_stride, p.slot_stride, p.log_block};
          load_tile<T, D, kKeys>(tile, from, (item.tile_begin + t) * kKeys, item.low, item.high);
        };
        for (int t = 0; t < tiles; ++t) {
          const int stage = stage_of(t), parity = parity_of(t);
          mbarrier_wait(empty_k(stage), parity ^ 1);
          fill_tile(p.key, k_smem + stage * S::kTile, t);
          mbarrier_arrive(full_k(stage));
          mbarrier_wait(empty_v(stage), parity ^ 1);
          fill_tile(p.value, v_smem + stage * S::kTile, t);
          mbarrier_arrive(full_v(stage));
        }
        count += tiles;
      }
    } else {
      registers_down<24>();
      // The boxes of a tile are dealt to the lanes of four warps: copies of one warp are issued one after another, and one warp
      // alone would be slower than the products.
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      constexpr int kBoxes = kKeys / kBoxRows, kAll = kBoxes * kChunks;
      const int mine = lane * 4 + warp, box = mine % kBoxes, chunk = mine / kBoxes;
      const int bytes = (kAll / 4 + (warp < kAll % 4)) * kBoxRows * 128;
      const uint32_t at = chunk * kKeys * 128 + box * kBoxRows * 128;
      for (ItemCursor cursor(p); cursor.next(item);) {
        const int tiles = item.tile_end - item.tile_begin;
        const int32_t* table = p.block_tables + int64_t(item.request) * p.block_table_stride;
        auto page_of = [&](int t) {
          const int key = (item.tile_begin + t) * kKeys + box * kBoxRows;
          return key < item.high && key + kBoxRows > item.low && t < tiles ? table[key >> p.log_block] : p.num_blocks;
        };
        int next_page = page_of(0);
        for (int t = 0; t < tiles; ++t) {
          const int stage = stage_of(t), parity = parity_of(t);
          const int page = next_page;
          const int token = ((item.tile_begin + t) * kKeys + box * kBoxRows) & ((1 << p.log_block) - 1);
          next_page = page_of(t + 1);
          mbarrier_wait(empty_k(stage), parity ^ 1);
          if (lane == 0) mbarrier_expect(full_k(stage), bytes);
          __syncwarp();
          if (mine < kAll)
            tma_load_4d(k_smem + stage * S::kTile + at, &k_map, full_k(stage), chunk * 64, item.kv_head, token, page);
          mbarrier_wait(empty_v(stage), parity ^ 1);
          if (lane == 0) mbarrier_expect(full_v(stage), bytes);
          __syncwarp();
          if (mine < kAll)
            tma_load_4d(v_smem + stage * S::kTile + at, &v_map, full_v(stage), chunk * 64, item.kv_head, token, page);
        }
        count += tiles;
      }
    }
  } else {
    registers_up<is_e4m3<C> ? S::kConsumerRegisters : 240>();
    const int group = warpgroup - 1, thread = threadIdx.x - 128, lane = threadIdx.x & 31;
    const uint64_t q_desc = smem_descriptor(q_smem + group * 64 * 128, 0);
    const uint64_t k_desc = smem_descriptor(k_smem, 0);
    const uint64_t v_desc = smem_descriptor(v_smem, kKeys * 128);
    float o[D / 2], s[kKeys / 2], m[2], sum[2], alpha[2];
    uint32_t prob[kKeys / 16][4];

    auto scores = [&](int stage) {  // s = q k^T, asynchronous
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
        Wgmma<kKeys>::template ss<T>(s, q_desc + ((k / 4) * kTileRows * 128 + (k % 4) * 32) / 16,
                                     k_desc + (stage * S::kTile + (k / 4) * kKeys * 128 + (k % 4) * 32) / 16, k > 0);
      wgmma_commit();
    };
    auto accumulate = [&](int stage) {  // o += prob v, asynchronous
      pin(o);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) Wgmma<D>::template rs<T, 1>(o, prob[k], v_desc + (stage * S::kTile + k * 2048) / 16, 1);
      wgmma_commit();
    };
    auto pack = [&] {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) prob[k][i] = Type<T>::pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    };
    auto release = [&](uint32_t bar) {
      if (lane == 0) mbarrier_arrive(bar);
    };

    for (ItemCursor cursor(p); cursor.next(item);) {
      const int tiles = item.tile_end - item.tile_begin;
      const RowPair rows = own_rows(p, item, thread / 32 * 16 + lane / 4);
      const int group_first = static_cast<int>(p.positions[item.token_start + min(p.query_of(group * 64), item.num_queries - 1)]);
      named_sync(kBarGroup + group, 128);  // the item before has read its queries
      // Queries of this warpgroup's 64 rows, swizzled as the copy engine would.
      for (int i = threadIdx.x % 128; i < 64 * (D / 8); i += 128) {
        const int row = group * 64 + i / (D / 8), c16 = i % (D / 8), query = p.query_of(row);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (query < item.num_queries)
          v = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + int64_t(item.token_start + query) * p.q_token_stride +
                                              int64_t(item.kv_head * p.group + p.head_of(row)) * D + c16 * 8);
        *reinterpret_cast<uint4*>(smem + (c16 / 8) * kTileRows * 128 + row * 128 + (((c16 & 7) ^ (row & 7)) << 4)) = v;
      }
      fence_async_proxy();
      named_sync(kBarGroup + group, 128);
      // Tiles [edge, unmasked) are those of which all rows of this warpgroup see every key; the others are masked.
      const int unmasked = min(tiles, (group_first + 1) / kKeys - item.tile_begin);
      const int edge = p.window ? max(0, item.high - p.window + kKeys - 1) / kKeys - item.tile_begin : 0;
      auto mask = [&](int t) { mask_scores(s, rows, (item.tile_begin + t) * kKeys, p.window); };
      // Values that no query of the tile sees may never have been written: 0 * NaN must not reach the output.
      auto clear_unseen = [&](int t) {
        if constexpr (is_e4m3<C>) return;  // they are zeros already
        const int key0 = (item.tile_begin + t) * kKeys;
        if (key0 >= item.low && key0 + kKeys <= item.high) return;
        char* tile = smem + S::kQuery + kStages * S::kTile + stage_of(t) * S::kTile;
        for (int i = thread; i < kKeys * kChunks * 8; i += kConsumers) {
          const int key = key0 + i / 8 % kKeys;
          if (key < item.low || key >= item.high) *reinterpret_cast<uint4*>(tile + i * 16) = make_uint4(0, 0, 0, 0);
        }
        fence_async_proxy();
        named_sync(kBarConsumers, kConsumers);
      };

      fill(o, 0.f);
      m[0] = m[1] = -INFINITY;
      sum[0] = sum[1] = 0.f;
      if (group == 1 && tiles > 1) named_arrive(kBarTurn, kConsumers);  // warpgroup 0 goes first
      mbarrier_wait(full_k(stage_of(0)), parity_of(0));
      scores(stage_of(0));
      wgmma_wait<0>();
      pin(s);
      release(empty_k(stage_of(0)));
      if (edge > 0 || unmasked <= 0) mask(0);
      softmax_step<kGrowth>(s, m, sum, alpha, p.scale_log2);
      pack();
      mbarrier_wait(full_v(stage_of(0)), parity_of(0));
      clear_unseen(0);
      auto step = [&](int t, auto masked) {
        mbarrier_wait(full_k(stage_of(t)), parity_of(t));
        mbarrier_wait(full_v(stage_of(t - 1)), parity_of(t - 1));
        named_sync(kBarTurn + group, kConsumers);
        scores(stage_of(t));
        accumulate(stage_of(t - 1));
        if (group == 0 || t + 1 < tiles) named_arrive(kBarTurn + (group ^ 1), kConsumers);
        wgmma_wait<1>();
        pin(s);
        release(empty_k(stage_of(t)));
        if constexpr (decltype(masked)::value) mask(t);
        softmax_step<kGrowth>(s, m, sum, alpha, p.scale_log2);
        wgmma_wait<0>();
        pin(o);
        release(empty_v(stage_of(t - 1)));
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) rescale(o, alpha);
        pack();
      };
      for (int t = 1; t < tiles; ++t) {
        if (t >= edge && t < unmasked) step(t, Int<0>{});
        else step(t, Int<1>{});
      }
      if (tiles > 1) {
        mbarrier_wait(full_v(stage_of(tiles - 1)), parity_of(tiles - 1));
        clear_unseen(tiles - 1);
      }
      accumulate(stage_of(tiles - 1));
      sum[0] = quad_sum(sum[0]);
      sum[1] = quad_sum(sum[1]);
      wgmma_wait<0>();
      pin(o);
      release(empty_v(stage_of(tiles - 1)));
      count += tiles;
      if (item.num_splits == 1 || combine_splits(p, item, thread, o, m, sum))
        write_rows<T>(p, rows, o, m, sum);
    }
    merge_shares<T, D / 2>(p, thread);
  }
#endif
}

}  // namespace

// Longer key tiles spend less on synchronisation; shorter ones divide little work more evenly, and leave registers to producers
// that load pages of e4m3 themselves.
int prefill_wgmma_key_tile(int head_dim, bool plenty) { return head_dim == 256 ? 64 : plenty ? 160 : 128; }

int launch_prefill_wgmma(const PrefillParams& p, int dtype, const VbCache& cache, int key_tile, int blocks, cudaStream_t stream) {
  CUtensorMap k_map{}, v_map{};
  if (cache.dtype != VB_E4M3) {
    if (int e = encode_map(&k_map, cache.key, cache)) return e;
    if (int e = encode_map(&v_map, cache.value, cache)) return e;
  }
  return dispatch(dtype, cache.dtype, cache.head_dim, [&](auto t, auto c, auto d) -> int {
    constexpr int D = decltype(d)::value;
    auto launch = [&](auto keys) -> int {
      constexpr int kKeys = decltype(keys)::value, kSmem = Shape<D, kKeys>::kSmem;
      auto* kernel = prefill_wgmma_kernel<decltype(t), decltype(c), D, kKeys>;
      if (int e = allow_smem(kernel, kSmem)) return e;
      kernel<<<blocks, kThreads, kSmem, stream>>>(p, k_map, v_map);
      return cudaGetLastError();
    };
    if constexpr (D == 256) return launch(Int<64>{});
    else if constexpr (is_e4m3<decltype(c)>) return launch(Int<128>{});
    else return key_tile == 160 ? launch(Int<160>{}) : launch(Int<128>{});
  });
}

}  // namespace vb
