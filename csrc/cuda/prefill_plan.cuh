// The work of scattered-prefill attention and what its two implementations (mma, wgmma) share.
//
// A tile is up to kTileRows rows of one request and KV head: consecutive queries times the query heads of that KV head.
// Its keys are [low, high): from the window of its first query to the position of its last. Blocks are persistent, one a
// multiprocessor, and a plan made once a step says what each computes:
//   - whole tiles, longest first, dealt to the blocks back and forth, when there is plenty of work: blocks that run together
//     then walk the same keys, which stay in the L2 cache;
//   - else equal shares of all key tiles (as Stream-K does for matrix products; Osama et al., 2023): a tile may be split
//     over its keys between blocks.
#pragma once
#include "e4m3.cuh"

namespace vb {

constexpr int kTileRows = 128;

struct alignas(16) PrefillItem {
  int token_start, num_queries, request, kv_head;
  int low, high;             // keys that some query of the tile sees
  int tile_begin, tile_end;  // of these, this item's, in key tiles
  int split, num_splits;
  int slot;   // first partial slot of the tile when num_splits > 1
  int block;  // who computes it, when shares are equal
};

enum PlanMode : int { kWholeTiles = 0, kEqualShares = 1 };

struct PrefillWorkspace {
  int4* ranges;          // each block's items: (first, end, mode); whole tiles stand for every KV head
  int32_t* tile_prefix;  // [num_requests + 1]
  PrefillItem* items;
  int32_t* flags;     // [max_slots, warps]: this warp's part is there
  float2* stats;      // (max, sum) of each row of each partial, in the order of the threads that own them
  float* partial;     // unnormalised outputs of split tiles, in fragment order
  int max_slots;
  size_t bytes;
};

inline int queries_per_tile(int q_heads, int kv_heads) { return kTileRows / (q_heads / kv_heads); }

// A block has at most two parts of split tiles, its first and its last item.
inline PrefillWorkspace carve_workspace(void* base, int num_tokens, int num_requests, int q_heads, int kv_heads, int head_dim,
                                        int sms) {
  PrefillWorkspace w;
  const size_t tiles = num_tokens / queries_per_tile(q_heads, kv_heads) + num_requests;
  w.max_slots = 2 * sms;
  char* p = static_cast<char*>(base);
  size_t at = 0;
  auto take = [&](size_t bytes) {
    char* r = p + at;
    at += (bytes + 255) / 256 * 256;
    return r;
  };
  w.ranges = reinterpret_cast<int4*>(take(sms * sizeof(int4)));
  w.tile_prefix = reinterpret_cast<int32_t*>(take((num_requests + 1) * sizeof(int32_t)));
  w.items = reinterpret_cast<PrefillItem*>(take((tiles * kv_heads + sms) * sizeof(PrefillItem)));
  w.flags = reinterpret_cast<int32_t*>(take(w.max_slots * kTileRows / 16 * sizeof(int32_t)));
  w.stats = reinterpret_cast<float2*>(take(size_t(w.max_slots) * kTileRows * 4 * sizeof(float2)));
  w.partial = reinterpret_cast<float*>(take(size_t(w.max_slots) * kTileRows * head_dim * sizeof(float)));
  w.bytes = at;
  return w;
}

// Kernel parameters common to both implementations.
struct PrefillParams {
  const void* q;
  void* out;
  float* lse;
  const void* key;
  const void* value;
  const int64_t* positions;
  const int32_t* block_tables;
  PrefillWorkspace work;
  int64_t q_token_stride, out_token_stride, page_stride, slot_stride, head_stride;
  int block_table_stride, num_blocks, log_block, kv_heads, group, window;
  int group_magic;  // ceil(2^16 / group): rows of a tile are divided by the group often
  float scale_log2;

  __device__ __forceinline__ int query_of(int row) const { return row * group_magic >> 16; }
  __device__ __forceinline__ int head_of(int row) const { return row - query_of(row) * group; }  // inside the group
};

// This block's items in order.
struct ItemCursor {
  const PrefillWorkspace* work;
  int kv_heads, at, end, round;
  bool whole;

  __device__ __forceinline__ ItemCursor(const PrefillParams& p) : work(&p.work), kv_heads(p.kv_heads), round(0) {
    const int4 range = work->ranges[blockIdx.x];
    at = range.x;
    end = range.y;
    whole = range.z == kWholeTiles;
  }
  __device__ __forceinline__ bool next(PrefillItem& item) {
    if (at >= end) return false;
    const int4* from = reinterpret_cast<const int4*>(work->items + (whole ? at / kv_heads : at));
    int4* to = reinterpret_cast<int4*>(&item);
    to[0] = from[0];
    to[1] = from[1];
    to[2] = from[2];
    if (whole) {
      item.kv_head = at % kv_heads;
      ++round;
      at = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    } else {
      ++at;
    }
    return true;
  }
};

// Which rows of its tile a thread owns in the accumulator layout (row, row + 8), and where they go.
struct RowPair {
  int position[2];  // of the query; rows past the end repeat the last query, so that they mask alike
  int64_t token[2];
  int head[2];
  bool valid[2];
};

__device__ __forceinline__ RowPair own_rows(const PrefillParams& p, const PrefillItem& item, int row) {
  RowPair r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = p.query_of(row + 8 * i);
    r.valid[i] = query < item.num_queries;
    r.token[i] = item.token_start + min(query, item.num_queries - 1);
    r.head[i] = item.kv_head * p.group + p.head_of(row + 8 * i);
    r.position[i] = static_cast<int>(p.positions[r.token[i]]);
  }
  return r;
}

// Scores s (accumulator layout: s[4 j + {0,1}] row 0, s[4 j + {2,3}] row 1, columns 8 j + 2 (lane % 4) + {0,1}) of keys from
// key0 on: those a row does not see become -inf.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const RowPair& rows, int key0, int window) {
  const int column0 = key0 + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int last = rows.position[i] - column0;
    const int before = window ? last - window : INT32_MIN;
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + e;
        if (column > last || column <= before) s[4 * j + 2 * i + e] = -INFINITY;
      }
  }
}

// One step of the online softmax over a tile's scores. m is what is subtracted from a row's scores, unscaled: their running
// maximum, which may lie up to kGrowth powers of two above m before m follows (as in FlashAttention-4). sum is this thread's
// share of the running sum; on return s holds the probabilities, below 2^kGrowth, and alpha what earlier sums and outputs must
// be multiplied by.
template <int kGrowth, int N>
__device__ __forceinline__ void softmax_step(float (&s)[N], float (&m)[2], float (&sum)[2], float (&alpha)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int j = 1; j < N / 4; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    top = quad_max(top);
    if (kGrowth == 0) top = fmaxf(m[i], top);
    const bool follows = kGrowth == 0 || (top - m[i]) * scale_log2 > kGrowth;
    const float shift = top == -INFINITY ? 0.f : (follows ? top : m[i]) * scale_log2;  // a row may see nothing of this item
    alpha[i] = follows ? exp2_fast(m[i] * scale_log2 - shift) : 1.f;
    if (follows) m[i] = top;
    float part = 0.f;
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& v = s[4 * j + 2 * i + e];
        v = exp2_fast(v * scale_log2 - shift);
        part += v;
      }
    sum[i] = sum[i] * alpha[i] + part;
  }
}

template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], const float (&alpha)[2]) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    o[4 * j] *= alpha[0];
    o[4 * j + 1] *= alpha[0];
    o[4 * j + 2] *= alpha[1];
    o[4 * j + 3] *= alpha[1];
  }
}

// Parts of a split tile, exchanged between the same warps of the blocks through counters of their own: no barrier.
//
// Two or three parts: the block with the first (its last item) adds the others, each the first item of a later block, so that
// they are nearly always there already. More would be read one after another by one block while the others idle: then every
// block leaves its part, and once it is through with its items merges some columns of all parts (merge_shares).
// Waiting is safe: first items wait for nobody, merging comes after all items, and blocks start in order.
constexpr int kDirectParts = 3;

struct SplitTile {
  static constexpr int kThreads = 2 * kTileRows;
  const PrefillWorkspace& work;
  int slot, warp, thread;

  __device__ __forceinline__ SplitTile(const PrefillParams& p, const PrefillItem& item, int thread)
      : work(p.work), slot(item.slot), warp(thread / 32), thread(thread) {}
  __device__ __forceinline__ int32_t* flag(int part) const { return work.flags + (slot + part) * (kThreads / 32) + warp; }
  __device__ __forceinline__ int32_t* arrived() const { return flag(0); }
  __device__ __forceinline__ int32_t* merged() const { return flag(1); }
  __device__ __forceinline__ float2* stats(int part, int i) const {
    return work.stats + (int64_t(slot + part) * 2 + i) * kThreads + thread;
  }
  template <int N>
  __device__ __forceinline__ float* outputs(int part) const {
    return work.partial + int64_t(slot + part) * (N * kThreads) + thread;
  }
  template <int N>
  __device__ __forceinline__ void store(int part, const float (&o)[N], const float (&m)[2], const float (&sum)[2]) const {
    float* mine = outputs<N>(part);
#pragma unroll
    for (int i = 0; i < N; ++i) __stcg(mine + i * kThreads, o[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) __stcg(stats(part, i), make_float2(m[i], sum[i]));
    __threadfence();
    __syncwarp();
  }
};

__device__ __forceinline__ void wait_for(const int32_t* counter, int value) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  while (seen != value);
  __syncwarp();
}

// Returns whether this block writes the output of the item now.
template <int N>
__device__ __forceinline__ bool combine_splits(const PrefillParams& p, const PrefillItem& item, int thread, float (&o)[N],
                                               float (&m)[2], float (&sum)[2]) {
  const SplitTile tile(p, item, thread);
  const bool leader = thread % 32 == 0;
  if (item.num_splits > kDirectParts) {
    tile.store(item.split, o, m, sum);
    if (leader) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(tile.arrived()) : "memory");
    return false;
  }
  if (item.split > 0) {
    tile.store(item.split, o, m, sum);
    if (leader) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(tile.flag(item.split)) : "memory");
    return false;
  }
  for (int split = 1; split < item.num_splits; ++split) {
    wait_for(tile.flag(split), 1);
    float mine[2], theirs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 other = __ldcg(tile.stats(split, i));
      const float top = fmaxf(m[i], other.x);
      mine[i] = m[i] == -INFINITY ? 0.f : exp2_fast((m[i] - top) * p.scale_log2);
      theirs[i] = other.x == -INFINITY ? 0.f : exp2_fast((other.x - top) * p.scale_log2);
      sum[i] = sum[i] * mine[i] + other.y * theirs[i];
      m[i] = top;
    }
    const float* other = tile.outputs<N>(split);
#pragma unroll
    for (int i = 0; i < N; ++i)
      o[i] = o[i] * mine[(i >> 1) & 1] + __ldcg(other + i * SplitTile::kThreads) * theirs[(i >> 1) & 1];
    if (leader) *tile.flag(split) = 0;  // ready for the next layer
  }
  return true;
}

// Normalises and writes a thread's two rows: N / 4 groups of eight columns, two columns a thread.
template <typename T, int N>
__device__ __forceinline__ void write_rows(const PrefillParams& p, const RowPair& rows, const float (&o)[N], const float (&m)[2],
                                           const float (&sum)[2]) {
  const int lane4 = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.valid[i]) continue;
    const float inverse = sum[i] > 0.f ? 1.f / sum[i] : 0.f;
    T* out = static_cast<T*>(p.out) + rows.token[i] * p.out_token_stride + int64_t(rows.head[i]) * (N * 2) + 2 * lane4;
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
      *reinterpret_cast<uint32_t*>(out + 8 * j) = Type<T>::pack(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse);
    if (p.lse && lane4 == 0)
      p.lse[rows.token[i] * (p.kv_heads * p.group) + rows.head[i]] =
          sum[i] > 0.f ? (m[i] * p.scale_log2 + __log2f(sum[i])) * kLn2 : -INFINITY;
  }
}

// Merges this block's share of the columns (in groups of eight) of the tiles that it left parts of, at most two: its first item
// and its last. N: accumulators of a thread, head_dim / 2. Called by the threads that computed the items.
template <typename T, int N>
__device__ __forceinline__ void merge_shares(const PrefillParams& p, int thread) {
  constexpr int kGroups = N / 4, kAhead = 8;
  const int4 range = p.work.ranges[blockIdx.x];
  if (range.z != kEqualShares || range.x >= range.y) return;
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  for (int at = range.x;; at = range.y - 1) {
    const PrefillItem item = p.work.items[at];
    const int parts = item.num_splits;
    if (parts > kDirectParts) {
      const SplitTile tile(p, item, thread);
      const int begin = item.split * kGroups / parts, end = (item.split + 1) * kGroups / parts;
      if (begin < end) {
        const RowPair rows = own_rows(p, item, row);
        wait_for(tile.arrived(), parts);
        float m[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll kAhead
          for (int part = 0; part < parts; ++part) m[i] = fmaxf(m[i], __ldcg(tile.stats(part, i)).x);
          m[i] = m[i] == -INFINITY ? 0.f : m[i];  // no part saw a key: every weight below is 0
        }
        for (int group = begin; group < end; ++group) {
          float o[4] = {0.f, 0.f, 0.f, 0.f};
          sum[0] = sum[1] = 0.f;
          for (int part0 = 0; part0 < parts; part0 += kAhead) {
            float v[kAhead][4];
            float2 one[kAhead][2];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
              const int part = min(part0 + k, parts - 1);
#pragma unroll
              for (int i = 0; i < 2; ++i) one[k][i] = __ldcg(tile.stats(part, i));
              const float* from = tile.outputs<N>(part) + group * (4 * SplitTile::kThreads);
#pragma unroll
              for (int i = 0; i < 4; ++i) v[k][i] = __ldcg(from + i * SplitTile::kThreads);
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
              if (part0 + k >= parts) break;
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const float weight = exp2_fast((one[k][i].x - m[i]) * p.scale_log2);
                sum[i] += weight * one[k][i].y;
                o[2 * i] += weight * v[k][2 * i];
                o[2 * i + 1] += weight * v[k][2 * i + 1];
              }
            }
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (!rows.valid[i]) continue;
            const float inverse = sum[i] > 0.f ? 1.f / sum[i] : 0.f;
            const int64_t head = rows.head[i];
            T* out = static_cast<T*>(p.out) + rows.token[i] * p.out_token_stride + head * (N * 2) + 8 * group + 2 * (lane & 3);
            *reinterpret_cast<uint32_t*>(out) = Type<T>::pack(o[2 * i] * inverse, o[2 * i + 1] * inverse);
            if (p.lse && group == 0 && (lane & 3) == 0)
              p.lse[rows.token[i] * (p.kv_heads * p.group) + head] =
                  sum[i] > 0.f ? (m[i] * p.scale_log2 + __log2f(sum[i])) * kLn2 : -INFINITY;
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        if (atomicAdd(tile.merged(), 1) == parts - 1) *tile.arrived() = *tile.merged() = 0;  // ready for the next layer
      }
    }
    if (at == range.y - 1) return;
  }
}

template <int N>
__device__ __forceinline__ void fill(float (&a)[N], float v) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = v;
}

int launch_prefill_mma(const PrefillParams& p, int dtype, const VbCache& cache, int blocks, cudaStream_t stream);
int launch_prefill_wgmma(const PrefillParams& p, int dtype, const VbCache& cache, int key_tile, int blocks, cudaStream_t stream);
int prefill_mma_key_tile(int head_dim);
int prefill_wgmma_key_tile(int head_dim, bool plenty);

}  // namespace vb
