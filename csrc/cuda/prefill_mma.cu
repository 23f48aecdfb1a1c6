// Scattered-prefill attention with mma.sync, ldmatrix and cp.async: the path of every chip from sm_80 on without its own.
//
// A block computes its items of the plan in turn: 8 warps of 16 rows each. Key tiles are gathered row by row through the block
// table into padded shared memory (odd multiples of 16 bytes a row: ldmatrix without bank conflicts), two stages deep. Pages of
// e4m3 pass through registers and are widened there, so that only other warps hide how long they take to come.
#include "prefill_plan.cuh"

namespace vb {
namespace {

constexpr int kThreads = 256;

template <int D>
struct Shape {
  static constexpr int kKeys = D == 256 ? 32 : 64;
  static constexpr int kRow = D + 8;  // elements of a padded row
  static constexpr int kTile = kKeys * kRow;
  static constexpr int kSmem = 4 * kTile * 2 > kTileRows * kRow * 2 ? 4 * kTile * 2 : kTileRows * kRow * 2;
};

template <typename T, typename C, int D>
__global__ void __launch_bounds__(kThreads, 1) prefill_mma_kernel(PrefillParams p) {
  using S = Shape<D>;
  constexpr int kKeys = S::kKeys, kRow = S::kRow, kChunks = D / 8;
  extern __shared__ __align__(128) char smem_raw[];
  T* smem = reinterpret_cast<T*>(smem_raw);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int row0 = warp * 16 + lane / 4;
  const int block_mask = (1 << p.log_block) - 1;
  PrefillItem item;
  for (ItemCursor cursor(p); cursor.next(item);) {
    const int kv_head = item.kv_head;
    const int first_position = static_cast<int>(p.positions[item.token_start]);

    // Queries through shared memory into fragments.
    for (int i = tid; i < kTileRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, query = p.query_of(row);
      const bool valid = query < item.num_queries;
      const T* src = static_cast<const T*>(p.q) + int64_t(item.token_start + (valid ? query : 0)) * p.q_token_stride +
                     int64_t(kv_head * p.group + p.head_of(row)) * D + chunk * 8;
      cp_async16(smem_address(smem + row * kRow + chunk * 8), src, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t qf[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      ldmatrix_x4(qf[k], smem_address(smem + (warp * 16 + (lane & 15)) * kRow + k * 16 + (lane >> 4) * 8));
    __syncthreads();

    const int32_t* table = p.block_tables + int64_t(item.request) * p.block_table_stride;
    auto load = [&](int tile, int stage) {
      T* k_tile = smem + stage * 2 * S::kTile;
      T* v_tile = k_tile + S::kTile;
      for (int i = tid; i < kKeys * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks, key = tile * kKeys + row;
        const bool valid = key >= item.low && key < item.high;  // what no query sees may never have been written
        const int64_t page = valid ? table[key >> p.log_block] : 0;
        const int64_t offset = page * p.page_stride + int64_t(key & block_mask) * p.slot_stride + kv_head * p.head_stride + chunk * 8;
        const int at = row * kRow + chunk * 8;
        if constexpr (is_e4m3<C>) {
          uint4 k = make_uint4(0, 0, 0, 0), v = k;
          if (valid) {
            k = load_eight<T>(static_cast<const C*>(p.key) + offset);
            v = load_eight<T>(static_cast<const C*>(p.value) + offset);
          }
          *reinterpret_cast<uint4*>(k_tile + at) = k;
          *reinterpret_cast<uint4*>(v_tile + at) = v;
        } else {
          cp_async16(smem_address(k_tile + at), static_cast<const T*>(p.key) + (valid ? offset : 0), valid);
          cp_async16(smem_address(v_tile + at), static_cast<const T*>(p.value) + (valid ? offset : 0), valid);
        }
      }
      cp_async_commit();
    };

    const RowPair rows = own_rows(p, item, row0);
    float o[D / 2], m[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    fill(o, 0.f);
    load(item.tile_begin, 0);
    for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
      const int stage = (tile - item.tile_begin) & 1;
      if (tile + 1 < item.tile_end) {
        load(tile + 1, stage ^ 1);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncthreads();
      const T* k_tile = smem + stage * 2 * S::kTile;
      const T* v_tile = k_tile + S::kTile;

      float s[kKeys / 2];
      fill(s, 0.f);
#pragma unroll
      for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t b[4];
          ldmatrix_x4(b, smem_address(k_tile + (n * 16 + (lane & 7) + (lane >> 4) * 8) * kRow + k * 16 + ((lane >> 3) & 1) * 8));
          mma16816<T>(reinterpret_cast<float(&)[4]>(s[8 * n]), qf[k], b[0], b[1]);
          mma16816<T>(reinterpret_cast<float(&)[4]>(s[8 * n + 4]), qf[k], b[2], b[3]);
        }
      const int key0 = tile * kKeys;
      if (key0 + kKeys - 1 > first_position || (p.window && key0 < item.high - p.window)) mask_scores(s, rows, key0, p.window);
      float alpha[2];
      softmax_step<0>(s, m, sum, alpha, p.scale_log2);
      rescale(o, alpha);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        const uint32_t a[4] = {Type<T>::pack(s[8 * k], s[8 * k + 1]), Type<T>::pack(s[8 * k + 2], s[8 * k + 3]),
                               Type<T>::pack(s[8 * k + 4], s[8 * k + 5]), Type<T>::pack(s[8 * k + 6], s[8 * k + 7])};
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, smem_address(v_tile + (k * 16 + (lane & 15)) * kRow + n * 16 + (lane >> 4) * 8));
          mma16816<T>(reinterpret_cast<float(&)[4]>(o[8 * n]), a, b[0], b[1]);
          mma16816<T>(reinterpret_cast<float(&)[4]>(o[8 * n + 4]), a, b[2], b[3]);
        }
      }
      __syncthreads();
    }
    sum[0] = quad_sum(sum[0]);
    sum[1] = quad_sum(sum[1]);
    if (item.num_splits == 1 || combine_splits(p, item, tid, o, m, sum))
      write_rows<T>(p, rows, o, m, sum);
  }
  merge_shares<T, D / 2>(p, tid);
}

}  // namespace

int prefill_mma_key_tile(int head_dim) { return head_dim == 256 ? 32 : 64; }

int launch_prefill_mma(const PrefillParams& p, int dtype, const VbCache& cache, int blocks, cudaStream_t stream) {
  return dispatch(dtype, cache.dtype, cache.head_dim, [&](auto t, auto c, auto d) -> int {
    constexpr int D = decltype(d)::value;
    auto* kernel = prefill_mma_kernel<decltype(t), decltype(c), D>;
    if (int e = allow_smem(kernel, Shape<D>::kSmem)) return e;
    kernel<<<blocks, kThreads, Shape<D>::kSmem, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace vb
