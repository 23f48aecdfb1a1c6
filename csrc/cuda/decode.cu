// Paged decode attention: one query a request, bound by reading K and V once.
//
// A block of four warps takes one request, one KV head (its query heads packed, up to eight) and one span of keys. Warps take
// 16-key tiles in turn and read K and V straight from the pages into tensor-core fragments, 16 bytes a lane: the contraction
// runs over channels in whatever order those loads deliver, since the query is read in the same order, and pairs of V rows are
// interleaved in registers. The last block of a request and head to finish merges the spans.
#include "common.cuh"

namespace vb {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32, kHeads = 8, kKeys = 16;
constexpr int kMaxSplits = 128;
constexpr int kMaxCells = 65536;  // (request, heads) pairs that may be split

struct DecodeParams {
  const void* q;
  void* out;
  float* lse;
  const void* key;
  const void* value;
  const int64_t* positions;
  const int32_t* block_tables;
  int32_t* counters;  // [batch, units]
  float2* stats;      // [batch, units, splits, kHeads]
  float* partial;     // [batch, units, splits, kHeads, head_dim]
  int64_t q_token_stride, out_token_stride, page_stride, slot_stride, head_stride;
  int block_table_stride, log_block, kv_heads, group, head_blocks, window;
  float scale_log2;
};

__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The product of m16n8k16 whose rows 8-15 are unused.
template <typename T>
__device__ __forceinline__ void mma_upper(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float full[4] = {c[0], c[1], 0.f, 0.f};
  const uint32_t a[4] = {a0, 0u, a2, 0u};
  mma16816<T>(full, a, b0, b1);
  c[0] = full[0];
  c[1] = full[1];
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, D == 256 ? 2 : 3) decode_kernel(DecodeParams p) {
  constexpr int kK = (D + 31) / 32;  // 32-channel loads of a key
  constexpr int kV = (D + 63) / 64;  // 64-channel loads of a value
  __shared__ float warp_out[kWarps][kHeads][D];
  __shared__ float2 warp_stats[kWarps][kHeads];
  __shared__ int arrived;

  const int split = blockIdx.x, unit = blockIdx.y, request = blockIdx.z;
  const int kv_head = unit / p.head_blocks, head0 = (unit % p.head_blocks) * kHeads;
  const int heads = min(kHeads, p.group - head0);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, q4 = lane & 3;

  // The span of this block, in 16-key tiles; blocks past the end of a short context have nothing to do.
  const int position = static_cast<int>(p.positions[request]);
  const int low = p.window ? max(0, position - p.window + 1) : 0;
  const int first_tile = low / kKeys, tiles = position / kKeys + 1 - first_tile;
  const int per_split = (tiles + gridDim.x * kWarps - 1) / (gridDim.x * kWarps) * kWarps;
  const int splits = max(1, (tiles + per_split - 1) / per_split);
  if (split >= splits) return;
  const int tile_end = first_tile + min(tiles, (split + 1) * per_split);

  const T* query = static_cast<const T*>(p.q) + request * p.q_token_stride + int64_t(kv_head * p.group + head0 + g) * D;
  uint4 qf[kK];
#pragma unroll
  for (int s = 0; s < kK; ++s) {
    const int dim = 32 * s + 8 * q4;
    qf[s] = g < heads && dim < D ? *reinterpret_cast<const uint4*>(query + dim) : make_uint4(0, 0, 0, 0);
  }

  const int32_t* table = p.block_tables + int64_t(request) * p.block_table_stride;
  const int block_mask = (1 << p.log_block) - 1;
  auto page_offset = [&](int page, int tile) {
    return int64_t(page) * p.page_stride + int64_t((tile * kKeys) & block_mask) * p.slot_stride + kv_head * p.head_stride;
  };
  auto page_of = [&](int tile) { return tile < tile_end ? table[(tile * kKeys) >> p.log_block] : 0; };
  uint4 kf[2][kK], vf[4][kV];
  auto load_keys = [&](int64_t offset) {
    const T* base = static_cast<const T*>(p.key) + offset + 8 * q4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int s = 0; s < kK; ++s)
        kf[i][s] = 32 * s + 8 * q4 < D ? load_stream(base + (8 * i + g) * p.slot_stride + 32 * s) : make_uint4(0, 0, 0, 0);
  };
  auto load_values = [&](int64_t offset, int tile) {
    const T* base = static_cast<const T*>(p.value) + offset + 8 * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * q4 + (i & 1) + 8 * (i >> 1), key = tile * kKeys + row;
      const bool seen = key >= low && key <= position;  // unseen slots may never have been written
#pragma unroll
      for (int c = 0; c < kV; ++c)
        vf[i][c] = seen && 64 * c + 8 * g < D ? load_stream(base + row * p.slot_stride + 64 * c) : make_uint4(0, 0, 0, 0);
    }
  };

  float o[kV * 8][2], m = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < kV * 8; ++i) o[i][0] = o[i][1] = 0.f;
  int tile = first_tile + split * per_split + warp;
  int64_t offset = page_offset(page_of(tile), tile);
  int next_page = page_of(tile + kWarps);
  if (tile < tile_end) load_keys(offset);
  while (tile < tile_end) {
    load_values(offset, tile);
    float s[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        mma_upper<T>(s[i], qf[k].x, qf[k].y, kf[i][k].x, kf[i][k].y);
        mma_upper<T>(s[i], qf[k].z, qf[k].w, kf[i][k].z, kf[i][k].w);
      }
    const int next = tile + kWarps;
    offset = page_offset(next_page, next);
    next_page = page_of(next + kWarps);
    if (next < tile_end) load_keys(offset);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = tile * kKeys + 8 * i + 2 * q4 + e;
        if (key > position || key < low) s[i][e] = -INFINITY;
      }
    const float top = fmaxf(m, quad_max(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]))));
    const float shift = top == -INFINITY ? 0.f : top * p.scale_log2;
    const float alpha = exp2_fast(m * p.scale_log2 - shift);
    m = top;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) s[i][e] = exp2_fast(s[i][e] * p.scale_log2 - shift);
    sum = sum * alpha + (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]);
#pragma unroll
    for (int i = 0; i < kV * 8; ++i) o[i][0] *= alpha, o[i][1] *= alpha;
    const uint32_t a0 = Type<T>::pack(s[0][0], s[0][1]), a2 = Type<T>::pack(s[1][0], s[1][1]);
#pragma unroll
    for (int c = 0; c < kV; ++c)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        auto word = [&](int i) { return w == 0 ? vf[i][c].x : w == 1 ? vf[i][c].y : w == 2 ? vf[i][c].z : vf[i][c].w; };
        const uint32_t r0 = word(0), r1 = word(1), r2 = word(2), r3 = word(3);
        mma_upper<T>(o[c * 8 + 2 * w], a0, a2, __byte_perm(r0, r1, 0x5410), __byte_perm(r2, r3, 0x5410));
        mma_upper<T>(o[c * 8 + 2 * w + 1], a0, a2, __byte_perm(r0, r1, 0x7632), __byte_perm(r2, r3, 0x7632));
      }
    tile = next;
  }

  // Column 2 q4 + e of product t holds channel 64 c + 8 (2 q4 + e) + t.
  sum = quad_sum(sum);
  if (q4 == 0) warp_stats[warp][g] = make_float2(m, sum);
#pragma unroll
  for (int c = 0; c < kV; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int dim = 64 * c + 8 * (2 * q4 + e);
      if (dim < D) {
        float4* to = reinterpret_cast<float4*>(&warp_out[warp][g][dim]);
        to[0] = make_float4(o[c * 8][e], o[c * 8 + 1][e], o[c * 8 + 2][e], o[c * 8 + 3][e]);
        to[1] = make_float4(o[c * 8 + 4][e], o[c * 8 + 5][e], o[c * 8 + 6][e], o[c * 8 + 7][e]);
      }
    }
  __syncthreads();

  auto write = [&](int head, int dim, float4 v, float2 total) {
    const float inverse = total.y > 0.f ? 1.f / total.y : 0.f;
    const int64_t h = kv_head * p.group + head0 + head;
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + request * p.out_token_stride + h * D + dim) =
        make_uint2(Type<T>::pack(v.x * inverse, v.y * inverse), Type<T>::pack(v.z * inverse, v.w * inverse));
    if (p.lse && dim == 0)
      p.lse[int64_t(request) * (p.kv_heads * p.group) + h] =
          total.y > 0.f ? (total.x * p.scale_log2 + __log2f(total.y)) * kLn2 : -INFINITY;
  };
  auto weight_of = [&](float part, float top) { return part == -INFINITY ? 0.f : exp2_fast((part - top) * p.scale_log2); };
  auto add = [](float4& acc, float weight, float4 v) {
    acc.x += weight * v.x, acc.y += weight * v.y, acc.z += weight * v.z, acc.w += weight * v.w;
  };
  const int64_t cell = int64_t(request) * gridDim.y + unit;
  float2* stats = p.stats + cell * gridDim.x * kHeads;
  float* partial = p.partial + cell * gridDim.x * kHeads * D;
  for (int i = tid; i < heads * (D / 4); i += kThreads) {
    const int head = i / (D / 4), dim = i % (D / 4) * 4;
    float2 total = make_float2(-INFINITY, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total.x = fmaxf(total.x, warp_stats[w][head].x);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = weight_of(warp_stats[w][head].x, total.x);
      total.y += weight * warp_stats[w][head].y;
      add(v, weight, *reinterpret_cast<const float4*>(&warp_out[w][head][dim]));
    }
    if (splits == 1) {
      write(head, dim, v, total);
    } else {
      __stcg(reinterpret_cast<float4*>(partial + (int64_t(split) * kHeads + head) * D + dim), v);
      if (dim == 0) __stcg(stats + split * kHeads + head, total);
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    arrived = atomicAdd(p.counters + cell, 1);
    if (arrived == splits - 1) p.counters[cell] = 0;
  }
  __syncthreads();
  if (arrived != splits - 1) return;
  __threadfence();
  // The last block: weights of all parts first (a warp a head, a lane a part), then parts eight at a time.
  float(*weights)[kMaxSplits] = reinterpret_cast<float(*)[kMaxSplits]>(&warp_out[0][0][0]);
  static_assert(kMaxSplits <= kWarps * D, "weights reuse the space of the warps' outputs");
  __shared__ float2 totals[kHeads];
  for (int head = warp; head < heads; head += kWarps) {
    float2 mine[kMaxSplits / 32];
    float top = -INFINITY, all = 0.f;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const int s = lane + 32 * j;
      mine[j] = s < splits ? __ldcg(stats + s * kHeads + head) : make_float2(-INFINITY, 0.f);
      top = fmaxf(top, mine[j].x);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const float weight = weight_of(mine[j].x, top);
      all += weight * mine[j].y;
      weights[head][lane + 32 * j] = weight;
    }
    all = warp_sum(all);
    if (lane == 0) totals[head] = make_float2(top, all);
  }
  __syncthreads();
  for (int i = tid; i < heads * (D / 4); i += kThreads) {
    const int head = i / (D / 4), dim = i % (D / 4) * 4;
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s0 = 0; s0 < splits; s0 += 8) {
      float4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        v[j] = s0 + j < splits ? __ldcg(reinterpret_cast<const float4*>(partial + (int64_t(s0 + j) * kHeads + head) * D + dim))
                               : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 8; ++j) add(acc, s0 + j < splits ? weights[head][s0 + j] : 0.f, v[j]);
    }
    write(head, dim, acc, totals[head]);
  }
}

int units_of(int q_heads, int kv_heads) { return kv_heads * ((q_heads / kv_heads + kHeads - 1) / kHeads); }

// Two blocks a multiprocessor where the batch alone gives fewer, but no span below 128 keys.
int choose_splits(int cells, int sms, int max_seq_len) {
  const int wanted = sms * 2 / cells, most = (max_seq_len + 127) / 128;
  const int splits = wanted < most ? wanted : most;
  return splits < 1 ? 1 : splits > kMaxSplits ? kMaxSplits : splits;
}

struct DecodeWorkspace {
  int32_t* counters;
  float2* stats;
  float* partial;
  size_t bytes;
};

// Counters have a place of their own that no batch size shifts: they must stay zero between calls.
DecodeWorkspace carve(void* base, size_t parts, int head_dim) {
  DecodeWorkspace w;
  char* p = static_cast<char*>(base);
  size_t at = kMaxCells * sizeof(int32_t);
  w.counters = reinterpret_cast<int32_t*>(p);
  w.stats = reinterpret_cast<float2*>(p + at);
  at += (parts * kHeads * sizeof(float2) + 255) / 256 * 256;
  w.partial = reinterpret_cast<float*>(p + at);
  w.bytes = at + parts * kHeads * head_dim * sizeof(float);
  return w;
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" size_t vb_decode_workspace_bytes(int batch, int q_heads, int kv_heads, int head_dim, int num_splits) {
  DeviceInfo info;
  if (kv_heads < 1 || q_heads < kv_heads || batch < 1 || device_info(&info)) return 0;
  const size_t cells = size_t(batch) * units_of(q_heads, kv_heads), chosen = size_t(info.sms) * 2;
  const size_t parts = cells * num_splits;
  return carve(nullptr, parts > chosen ? parts : chosen, head_dim).bytes;
}

extern "C" int vb_decode_attention(const VbDecode* a, const VbCache* c, void* stream) {
  if (int e = check_cache(*c)) return e;
  if (a->q_heads < c->kv_heads || a->q_heads % c->kv_heads) return VB_ERROR_HEADS;
  if (a->batch < 0 || a->batch > 65535 || a->window < 0 || a->num_splits < 0 || a->num_splits > kMaxSplits) return VB_ERROR_SHAPE;
  if (!aligned16(a->q) || !aligned16(a->out) || a->q_token_stride & 7 || a->out_token_stride & 3) return VB_ERROR_ALIGNMENT;
  if (a->batch == 0) return 0;
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  const int units = units_of(a->q_heads, c->kv_heads);
  const int splits = a->num_splits ? a->num_splits : choose_splits(a->batch * units, info.sms, a->max_seq_len);
  if (splits > 1 && int64_t(a->batch) * units > kMaxCells) return VB_ERROR_SHAPE;
  const DecodeWorkspace w = carve(a->workspace, splits > 1 ? size_t(a->batch) * units * splits : 0, c->head_dim);
  if (w.bytes > a->workspace_bytes) return VB_ERROR_WORKSPACE;
  DecodeParams p{};
  p.q = a->q;
  p.out = a->out;
  p.lse = a->lse;
  p.key = c->key;
  p.value = c->value;
  p.positions = a->positions;
  p.block_tables = a->block_tables;
  p.counters = w.counters;
  p.stats = w.stats;
  p.partial = w.partial;
  p.q_token_stride = a->q_token_stride;
  p.out_token_stride = a->out_token_stride;
  p.page_stride = c->page_stride;
  p.slot_stride = c->slot_stride;
  p.head_stride = c->head_stride;
  p.block_table_stride = a->block_table_stride;
  p.log_block = floor_log2(c->block_size);
  p.kv_heads = c->kv_heads;
  p.group = a->q_heads / c->kv_heads;
  p.head_blocks = units / c->kv_heads;
  p.window = a->window;
  p.scale_log2 = a->scale * kLog2e;
  return dispatch(c->dtype, c->head_dim, [&](auto t, auto d) -> int {
    decode_kernel<decltype(t), decltype(d)::value><<<dim3(splits, units, a->batch), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
  });
}
