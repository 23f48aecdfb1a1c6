// Paged decode attention: one query a request, or a few, bound by reading K and V once.
//
// A block computes its share of the plan for one unit. Its warps take 16-key tiles in turn, each through a ring of its own in
// shared memory that is filled ahead, into the next requests too: nothing but the end of a request joins the warps. What the
// warps found is merged through shared memory; parts of a cut request are merged by the block that finishes last.
//
// Pages of e4m3 lie in the ring as they are and become float16 in registers: one instruction for two numbers. Queries and
// probabilities then are of float16 too, and queries of bfloat16 are brought into its range row by row.
#include "decode_plan.cuh"

namespace vb {
namespace {

template <typename T, typename C, int D, int kRows, bool kLarge>
__global__ void __launch_bounds__(DecodeShape<D, sizeof(C), kRows, kLarge>::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using S = DecodeShape<D, sizeof(C), kRows, kLarge>;
  using P = std::conditional_t<is_e4m3<C>, __half, T>;  // of products
  constexpr bool kScaled = !std::is_same_v<P, T>;
  constexpr int kWarps = S::kWarps, kThreads = S::kThreads, kStages = S::kStages;
  constexpr int kRowTiles = (kRows + 15) / 16, kHalves = kRows > 8 ? 2 : 1;  // halves: eight rows of a 16-row product
  constexpr int kChunks = D / 8, kSteps = (D + 31) / 32;  // chunks of eight channels
  constexpr int kRow = D * sizeof(C), kUnits = kRow / 16, kCopies = (kDecodeKeys * kUnits + 31) / 32;  // units of 16 bytes
  // Units of a row trade places so that reads of a warp hit all banks: K is read in pieces of eight channels, 16 bytes by eight
  // lanes as rows 2 i and 2 i + 1 times four pieces, or 8 bytes of e4m3 by 16 lanes as rows 4 i .. 4 i + 3 times four; V is read
  // as one unit of eight rows.
  constexpr int kSpread = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : kUnits % 2 == 0 ? 2 : 1;
  auto query_place = [](int row, int chunk) { return row * (D * 2) + (chunk ^ (kChunks % 8 ? 0 : (row & 1) << 2)) * 16; };
  auto k_place = [](int row, int unit) {
    if constexpr (!is_e4m3<C>) return row * kRow + (unit ^ (kUnits % 8 ? 0 : (row & 1) << 2)) * 16;
    else if constexpr (kUnits % 8 == 0) return row * kRow + (unit ^ (row & 3) << 1) * 16;
    else if constexpr (kUnits % 4 == 0) return row * kRow + (unit ^ (row & 2)) * 16;
    else return row * kRow + unit * 16;
  };
  auto v_place = [](int row, int unit) { return row * kRow + (unit ^ (row / (8 / kSpread) & (kSpread - 1))) * 16; };
  extern __shared__ __align__(128) char smem[];
  char* query_smem = smem + kStages * kWarps * 2 * S::kTile;
  float* merge = reinterpret_cast<float*>(query_smem + S::kQuery);
  float2* warp_stats = reinterpret_cast<float2*>(query_smem + S::kQuery + S::kMerge);  // [kWarps][kRows]
  int* arrived = reinterpret_cast<int*>(warp_stats + kWarps * kRows);
  float* query_scales = reinterpret_cast<float*>(arrived + 4);  // [kRows], where rows are more than eight

  const int units = p.work.units, share_index = blockIdx.x / units, unit = blockIdx.x % units;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, q4 = lane & 3;
  const int kv_head = unit / p.head_blocks, head0 = (unit % p.head_blocks) * kRows;
  const int heads = min(p.head_blocks == 1 ? p.group : kRows, p.group - head0);
  const DecodeShare share = p.work.shares[share_index];
  if (share.last < share.first) return;
  auto span_of = [&](int request) {
    const int4 v = reinterpret_cast<const int4*>(p.work.spans)[request];
    return DecodeSpan{v.x, v.y, v.z, v.w};
  };
  auto begin_of = [&](int request, const DecodeSpan& s) { return request == share.first ? share.tile_begin : s.tile_begin(); };
  auto end_of = [&](int request, const DecodeSpan& s) { return request == share.last ? share.tile_end : s.tile_end(); };

  // Loads, kStages tiles ahead of the products. The page of the next tile is looked up one load early.
  const uint32_t ring = smem_address(smem) + warp * kStages * 2 * S::kTile;
  const int block_mask = (1 << p.log_block) - 1;
  DecodeSpan load_span = span_of(share.first);
  int load_request = share.first, load_tile = begin_of(share.first, load_span) + warp, load_end = end_of(share.first, load_span);
  int load_page = 0;
  auto find_page = [&] {
    while (load_tile >= load_end) {
      if (++load_request > share.last) return;
      load_span = span_of(load_request);
      load_tile = begin_of(load_request, load_span) + warp;
      load_end = end_of(load_request, load_span);
    }
    load_page = p.block_tables[int64_t(load_request) * p.block_table_stride + ((load_tile * kDecodeKeys) >> p.log_block)];
  };
  auto load = [&](int stage) {
    if (load_request <= share.last) {
      const int key0 = load_tile * kDecodeKeys;
      const int64_t offset =
          int64_t(load_page) * p.page_stride + int64_t(key0 & block_mask) * p.slot_stride + kv_head * p.head_stride;
      const uint32_t to = ring + stage * 2 * S::kTile;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int at = i * 32 + lane, row = at / kUnits, unit_of_row = at % kUnits;
        if (kDecodeKeys * kUnits % 32 && row >= kDecodeKeys) break;
        // What no query sees may never have been written: zeros take its place, since 0 * NaN is NaN.
        const bool seen = key0 + row >= load_span.low && key0 + row <= load_span.high;
        const int64_t from = offset + row * p.slot_stride + unit_of_row * (16 / int(sizeof(C)));
        cp_async16(to + k_place(row, unit_of_row), static_cast<const C*>(p.key) + from, seen);
        cp_async16(to + S::kTile + v_place(row, unit_of_row), static_cast<const C*>(p.value) + from, seen);
      }
      load_tile += kWarps;
      find_page();
    }
    cp_async_commit();
  };
  find_page();
#pragma unroll
  for (int i = 0; i < kStages; ++i) load(i);

  auto query_of = [&](const DecodeSpan& span, int row, int chunk) {
    const T* q = static_cast<const T*>(p.q) + (span.token + row / heads) * p.q_token_stride;
    return *reinterpret_cast<const uint4*>(q + int64_t(kv_head * p.group + head0 + row % heads) * D + chunk * 8);
  };
  uint4 held[kRows > 8 ? 1 : kSteps];
  auto fetch_query = [&](const DecodeSpan& span) {
    const int rows = span.queries * heads;
    if constexpr (kRows > 8 && kScaled) {  // a warp takes a row
      for (int row = warp; row < kRows; row += kWarps) {
        const uint4 v = row < rows && lane < kChunks ? query_of(span, row, lane) : make_uint4(0, 0, 0, 0);
        float largest = largest_magnitude<T>(v);
#pragma unroll
        for (int w = 16; w; w >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, w));
        const RowScale scale = row_scale(largest);
        if (lane < kChunks) *reinterpret_cast<uint4*>(query_smem + query_place(row, lane)) = scaled_to_half<T>(v, scale.up);
        if (lane == 0) query_scales[row] = scale.down;
      }
    } else if constexpr (kRows > 8) {
      for (int i = tid; i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const uint4 v = row < rows ? query_of(span, row, chunk) : make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(query_smem + query_place(row, chunk)) = v;
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        held[s] = g < rows && 4 * s + q4 < kChunks ? query_of(span, g, 4 * s + q4) : make_uint4(0, 0, 0, 0);
    }
  };
  DecodeSpan span = span_of(share.first);
  fetch_query(span);
  if constexpr (kRows > 8) __syncthreads();

  auto key_of = [&](const char* k_tile, int row, int chunk) {  // eight channels
    const int at = is_e4m3<C> ? k_place(row, chunk / 2) + chunk % 2 * 8 : k_place(row, chunk);
    return load_eight<P>(reinterpret_cast<const C*>(k_tile + at));
  };
  int stage = 0;
  for (int request = share.first; request <= share.last; ++request) {
    const int rows = span.queries * heads;
    int position[kRowTiles][kHalves];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int row = 16 * t + 8 * h + g;
        position[t][h] = row >= rows          ? -1
                         : span.queries == 1 ? span.high
                                             : static_cast<int>(p.positions[span.token + row / heads]);
      }
    float unscaled[kRowTiles][kHalves];  // what the scores of a row are multiplied by
    if constexpr (kScaled && kRows > 8) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) unscaled[t][h] = query_scales[16 * t + 8 * h + g];
    } else if constexpr (kScaled) {
      float largest = 0.f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) largest = fmaxf(largest, largest_magnitude<T>(held[s]));
      const RowScale scale = row_scale(quad_max(largest));
      unscaled[0][0] = scale.down;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) held[s] = scaled_to_half<T>(held[s], scale.up);
    }
    float o[kRowTiles][D / 8][4], m[kRowTiles][kHalves], sum[kRowTiles][kHalves];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int j = 0; j < D / 8; ++j) o[t][j][0] = o[t][j][1] = o[t][j][2] = o[t][j][3] = 0.f;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) m[t][h] = -INFINITY, sum[t][h] = 0.f;
    }
    const int tile_end = end_of(request, span);
    for (int tile = begin_of(request, span) + warp; tile < tile_end; tile += kWarps) {
      cp_async_wait<kStages - 1>();
      __syncwarp();
      const char* k_tile = smem + (warp * kStages + stage) * 2 * S::kTile;
      const uint32_t v_tile = ring + stage * 2 * S::kTile + S::kTile;
      float s[kRowTiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        // The contraction runs over channels in the order that 16-byte reads give, of K and of the query alike.
        const bool inside = kChunks % 4 == 0 || 4 * k + q4 < kChunks;
        uint4 kf[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          kf[i] = inside ? key_of(k_tile, 8 * i + g, 4 * k + q4) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          uint4 a = make_uint4(0, 0, 0, 0), b = a;
          if constexpr (kRows <= 8) {
            a = held[k];
          } else if (inside) {
            a = *reinterpret_cast<const uint4*>(query_smem + query_place(16 * t + g, 4 * k + q4));
            b = *reinterpret_cast<const uint4*>(query_smem + query_place(16 * t + 8 + g, 4 * k + q4));
          }
          const uint32_t even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma16816<P>(s[t][i], even, kf[i].x, kf[i].y);
            mma16816<P>(s[t][i], odd, kf[i].z, kf[i].w);
          }
        }
      }
      uint32_t prob[kRowTiles][4] = {};
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int last = position[t][h] - tile * kDecodeKeys - 2 * q4, before = p.window ? last - p.window : INT32_MIN;
          float top = m[t][h];
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& v = s[t][i][2 * h + e];
              if constexpr (kScaled) v *= unscaled[t][h];
              if (8 * i + e > last || 8 * i + e <= before) v = -INFINITY;
              top = fmaxf(top, v);
            }
          top = quad_max(top);
          const float shift = top == -INFINITY ? 0.f : top * p.scale_log2;
          const float alpha = exp2_fast(m[t][h] * p.scale_log2 - shift);
          m[t][h] = top;
          sum[t][h] *= alpha;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float a = exp2_fast(s[t][i][2 * h] * p.scale_log2 - shift), b = exp2_fast(s[t][i][2 * h + 1] * p.scale_log2 - shift);
            sum[t][h] += a + b;
            prob[t][2 * i + h] = Type<P>::pack(a, b);
          }
#pragma unroll
          for (int j = 0; j < D / 8; ++j) o[t][j][2 * h] *= alpha, o[t][j][2 * h + 1] *= alpha;
        }
#pragma unroll
      for (int n = 0; n < (kUnits + 1) / 2; ++n) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, v_tile + v_place(lane & 15, min(2 * n + (lane >> 4), kUnits - 1)));
        if constexpr (is_e4m3<C>) {
          // A register has channels 2 g and 2 g + 1 of a unit, of keys 2 q4 and 2 q4 + 1: even and odd channels are two products.
#pragma unroll
          for (int i = 0; i < 2 && 2 * n + i < kUnits; ++i) {
            const uint32_t low = __byte_perm(b[2 * i], 0, 0x3120), high = __byte_perm(b[2 * i + 1], 0, 0x3120);
            const uint32_t even[2] = {half2_of_e4m3(low), half2_of_e4m3(high)};
            const uint32_t odd[2] = {half2_of_e4m3(low >> 16), half2_of_e4m3(high >> 16)};
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
              mma16816<P>(o[t][4 * n + 2 * i], prob[t], even[0], even[1]);
              mma16816<P>(o[t][4 * n + 2 * i + 1], prob[t], odd[0], odd[1]);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) {
            mma16816<P>(o[t][2 * n], prob[t], b[0], b[1]);
            mma16816<P>(o[t][2 * n + 1], prob[t], b[2], b[3]);
          }
        }
      }
      __syncwarp();
      load(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    const DecodeSpan done = span;
    if (request < share.last) {  // on its way while the warps merge
      span = span_of(request + 1);
      if constexpr (kRows <= 8) fetch_query(span);
    }
    const bool at_first = request == share.first;
    const int first_share = at_first ? share.first_share : share_index, part = share_index - first_share;
    const int parts = at_first ? share.first_parts : share.last_parts;
    const bool whole = parts == 1 || (!at_first && request != share.last);
    auto cell = [&](int i) { return int64_t(p.work.slot(first_share, i)) * units + unit; };
    auto weight_of = [&](float m_part, float top) { return m_part == -INFINITY ? 0.f : exp2_fast((m_part - top) * p.scale_log2); };
    auto add = [](float4& acc, float weight, float4 v) {
      acc.x += weight * v.x, acc.y += weight * v.y, acc.z += weight * v.z, acc.w += weight * v.w;
    };
    auto write = [&](int row, int dim, float4 v, float2 total) {
      const float inverse = total.y > 0.f ? 1.f / total.y : 0.f;
      const int64_t token = done.token + row / heads;
      const int head = kv_head * p.group + head0 + row % heads;
      *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + token * p.out_token_stride + int64_t(head) * D + dim) =
          make_uint2(Type<T>::pack(v.x * inverse, v.y * inverse), Type<T>::pack(v.z * inverse, v.w * inverse));
      if (p.lse && dim == 0)
        p.lse[token * (p.kv_heads * p.group) + head] = total.y > 0.f ? (total.x * p.scale_log2 + __log2f(total.y)) * kLn2 : -INFINITY;
    };

#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int row0 = 16 * t + 8 * h, count = min(8, rows - row0);
        if (count <= 0) continue;
        sum[t][h] = quad_sum(sum[t][h]);
        if (q4 == 0) warp_stats[warp * kRows + row0 + g] = make_float2(m[t][h], sum[t][h]);
        float* mine = merge + (warp * 8 + g) * S::kOutRow;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          const float x = o[t][j][2 * h], y = o[t][j][2 * h + 1];
          if constexpr (!is_e4m3<C>) {
            *reinterpret_cast<float2*>(mine + 8 * j + 2 * q4) = make_float2(x, y);
          } else if (j % 2 == 0) {  // even channels: x and y are the first and the third of four
            *reinterpret_cast<float4*>(mine + 8 * j + 4 * q4) = make_float4(x, o[t][j + 1][2 * h], y, o[t][j + 1][2 * h + 1]);
          }
        }
        __syncthreads();
        for (int i = tid; i < count * (D / 4); i += kThreads) {
          const int row = i / (D / 4), dim = i % (D / 4) * 4;
          float2 total = make_float2(-INFINITY, 0.f);
#pragma unroll
          for (int w = 0; w < kWarps; ++w) total.x = fmaxf(total.x, warp_stats[w * kRows + row0 + row].x);
          float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float2 one = warp_stats[w * kRows + row0 + row];
            const float weight = weight_of(one.x, total.x);
            total.y += weight * one.y;
            add(v, weight, *reinterpret_cast<const float4*>(merge + (w * 8 + row) * S::kOutRow + dim));
          }
          if (whole) {
            write(row0 + row, dim, v, total);
          } else {
            const int64_t at = cell(part) * kRows + row0 + row;
            __stcg(reinterpret_cast<float4*>(p.work.partial + at * D + dim), v);
            if (dim == 0) __stcg(p.work.stats + at, total);
          }
        }
        __syncthreads();
      }
    if constexpr (kRows > 8) {
      if (request < share.last) {
        if (rows == 0) __syncthreads();  // nothing above joined the warps
        fetch_query(span);
        __syncthreads();
      }
    }
    if (whole) continue;

    __threadfence();
    __syncthreads();
    if (tid == 0) {
      int32_t* counter = p.work.counters + first_share * units + unit;
      *arrived = atomicAdd(counter, 1);
      if (*arrived == parts - 1) *counter = 0;  // ready for the next layer
    }
    __syncthreads();
    if (*arrived != parts - 1) continue;
    __threadfence();
    // Eight rows at a time: the weights of all parts first, a warp a row and a lane a part, then the parts, eight in flight.
    float* weights = merge;  // [8][kMaxShares]
    float4* sums = reinterpret_cast<float4*>(merge + 8 * kMaxShares);
    for (int row0 = 0; row0 < rows; row0 += 8) {
      const int count = min(8, rows - row0);
      for (int row = warp; row < count; row += kWarps) {
        float top = -INFINITY, all = 0.f;
        for (int i = lane; i < parts; i += 32) top = fmaxf(top, __ldcg(p.work.stats + cell(i) * kRows + row0 + row).x);
#pragma unroll
        for (int w = 16; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, w));
        for (int i = lane; i < parts; i += 32) {
          const float2 one = __ldcg(p.work.stats + cell(i) * kRows + row0 + row);
          const float weight = weight_of(one.x, top);
          all += weight * one.y;
          weights[row * kMaxShares + i] = weight;
        }
        all = warp_sum(all);
        if (lane == 0) warp_stats[row] = make_float2(top, all);
      }
      __syncthreads();
      const int cells = count * (D / 4), team = max(1, kThreads / cells);  // threads to a cell, each with its parts
      for (int base = 0; base < cells; base += kThreads) {
        const int at = base + tid % cells, first = tid / cells, row = at / (D / 4), dim = at % (D / 4) * 4;
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first < team && at < cells)
          for (int i0 = first; i0 < parts; i0 += 8 * team) {
            float4 v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const int i = i0 + j * team;
              v[j] = i < parts ? __ldcg(reinterpret_cast<const float4*>(p.work.partial + (cell(i) * kRows + row0 + row) * D + dim))
                               : make_float4(0.f, 0.f, 0.f, 0.f);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const int i = i0 + j * team;
              add(acc, i < parts ? weights[row * kMaxShares + i] : 0.f, v[j]);
            }
          }
        if (team > 1) {
          sums[tid] = acc;
          __syncthreads();
          if (first == 0)
            for (int i = 1; i < team; ++i) add(acc, 1.f, sums[i * cells + tid]);
        }
        if (first == 0 && at < cells) write(row0 + row, dim, acc, warp_stats[row]);
      }
      __syncthreads();
    }
  }
}

template <typename T, typename C, int D, int kRows, bool kLarge>
int launch(const DecodeParams& p, cudaStream_t stream) {
  using S = DecodeShape<D, sizeof(C), kRows, kLarge>;
  auto* kernel = decode_kernel<T, C, D, kRows, kLarge>;
  if (int e = allow_smem(kernel, S::kSmem)) return e;
  kernel<<<p.work.num_shares * p.work.units, S::kThreads, S::kSmem, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int launch_decode(const DecodeParams& p, int dtype, const VbCache& cache, bool large, cudaStream_t stream) {
  return dispatch(dtype, cache.dtype, cache.head_dim, [&](auto t, auto c, auto d) -> int {
    using T = decltype(t);
    using C = decltype(c);
    constexpr int D = decltype(d)::value, kMany = decode_rows(D);
    if (p.work.rows == 8) return large ? launch<T, C, D, 8, true>(p, stream) : launch<T, C, D, 8, false>(p, stream);
    return large ? launch<T, C, D, kMany, true>(p, stream) : launch<T, C, D, kMany, false>(p, stream);
  });
}

}  // namespace vb
