// Plans the work of scattered-prefill attention on the device (positions never come to the host) and dispatches it.
#include "prefill_plan.cuh"
#include "scan.cuh"

namespace vb {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = kThreads;
constexpr int kMinShare = 4;  // key tiles: below, merging parts costs more than it saves
constexpr int kSliver = 2;

struct PlanParams {
  const int64_t* positions;
  const int32_t* query_start_loc;
  PrefillWorkspace work;
  int num_requests, kv_heads, queries, key_tile, window, sms;
  int whole_percent;  // whole tiles when an even share is at least this part of the longest tile
};

// Tile number `tile` of a KV head, as one item.
__device__ PrefillItem find_tile(const PlanParams& p, int tile) {
  int low = 0, high = p.num_requests - 1;
  while (low < high) {  // the last request whose first tile is <= tile
    const int mid = (low + high + 1) / 2;
    if (p.work.tile_prefix[mid] <= tile) low = mid;
    else high = mid - 1;
  }
  PrefillItem t{};
  t.request = low;
  t.token_start = p.query_start_loc[low] + (tile - p.work.tile_prefix[low]) * p.queries;
  t.num_queries = min(p.queries, p.query_start_loc[low + 1] - t.token_start);
  const int first = static_cast<int>(p.positions[t.token_start]);
  t.high = static_cast<int>(p.positions[t.token_start + t.num_queries - 1]) + 1;
  t.low = p.window ? max(0, first - p.window + 1) : 0;
  t.tile_begin = t.low / p.key_tile;
  t.tile_end = (t.high - 1) / p.key_tile + 1;
  t.num_splits = 1;
  return t;
}

__device__ __forceinline__ int length(const PrefillItem& t) { return t.tile_end - t.tile_begin; }

// Items by length, longest first (a counting sort; lengths above kBins share bins).
__device__ void plan_whole_tiles(const PlanParams& p, int tiles, int longest, int* warps, int* bins) {
  const int tid = threadIdx.x;
  const int shift = max(0, 32 - __clz(longest / kBins));
  auto bin = [&](const PrefillItem& t) { return kBins - 1 - min(kBins - 1, length(t) >> shift); };
  bins[tid] = 0;
  __syncthreads();
  for (int i = tid; i < tiles; i += kThreads) atomicAdd(&bins[bin(find_tile(p, i))], 1);
  __syncthreads();
  const int count = bins[tid];
  const int inclusive = block_prefix(count, warps);
  bins[tid] = inclusive - count;
  __syncthreads();
  for (int i = tid; i < tiles; i += kThreads) {
    const PrefillItem t = find_tile(p, i);
    p.work.items[atomicAdd(&bins[bin(t)], 1)] = t;
  }
  for (int c = tid; c < p.sms; c += kThreads) p.work.ranges[c] = make_int4(c, tiles * p.kv_heads, kWholeTiles, 0);
}

// Tiles of all KV heads in a row, each weighing its key tiles and one more; block c takes weights from c / blocks of the
// total to (c + 1) / blocks. Cuts that would leave a sliver of a tile move to its edge.
__device__ void plan_equal_shares(const PlanParams& p, int tiles, int64_t total, int* warps, int* shared) {
  const int tid = threadIdx.x;
  const int64_t blocks = max(int64_t(1), min(int64_t(p.sms), total / kMinShare));
  int* weight_before = shared;
  int* items_before = shared + 1;
  int* next_slot = shared + 2;
  if (tid < 3) shared[tid] = 0;
  for (int c = tid; c < p.sms; c += kThreads) p.work.ranges[c] = make_int4(0, 0, kEqualShares, 0);
  __syncthreads();
  const int pairs = tiles * p.kv_heads;
  for (int base = 0; base < pairs; base += kThreads) {
    const int pair = base + tid;
    const bool valid = pair < pairs;
    PrefillItem t{};
    if (valid) t = find_tile(p, pair % tiles);
    const int n = length(t), weight = valid ? n + 1 : 0;
    const int weight_end = *weight_before + block_prefix(weight, warps);
    const int64_t start = weight_end - weight;
    const int first = static_cast<int>(start * blocks / total), last = static_cast<int>((start + weight - 1) * blocks / total);
    auto cut = [&](int c) {  // the key tile at which block c takes over
      if (c <= first) return 0;
      if (c > last) return n;
      const int at = min(n, static_cast<int>((c * total + blocks - 1) / blocks - start));
      if (n < 2 * kSliver) return 2 * at < n ? 0 : n;
      return at < kSliver ? 0 : at > n - kSliver ? n : at;
    };
    int parts = 0;
    if (valid)
      for (int c = first; c <= last; ++c) parts += cut(c + 1) > cut(c);
    __syncthreads();
    const int items_end = *items_before + block_prefix(parts, warps);
    if (valid) {
      const int begin = t.tile_begin;
      int index = items_end - parts;
      t.kv_head = pair / tiles;
      t.num_splits = parts;
      t.slot = parts > 1 ? atomicAdd(next_slot, parts) : 0;
      t.split = 0;
      for (int c = first; c <= last; ++c) {
        if (cut(c + 1) <= cut(c)) continue;
        t.tile_begin = begin + cut(c);
        t.tile_end = begin + cut(c + 1);
        t.block = c;
        p.work.items[index++] = t;
        ++t.split;
      }
    }
    __syncthreads();
    if (tid == kThreads - 1) *weight_before = weight_end, *items_before = items_end;
    __syncthreads();
  }
  const int items = *items_before;
  for (int i = tid; i < items; i += kThreads) {
    const int block = p.work.items[i].block;
    if (i == 0 || p.work.items[i - 1].block != block) p.work.ranges[block].x = i;
    if (i == items - 1 || p.work.items[i + 1].block != block) p.work.ranges[block].y = i + 1;
  }
}

__global__ void __launch_bounds__(kThreads) plan_kernel(PlanParams p) {
  __shared__ int warps[32], bins[kBins], total_tiles, longest;
  __shared__ unsigned long long work;
  const int tid = threadIdx.x;
  if (tid == 0) total_tiles = longest = 0, work = 0;
  for (int i = tid; i < p.work.max_slots * (kTileRows / 16); i += kThreads) p.work.flags[i] = 0;
  __syncthreads();

  for (int base = 0; base < p.num_requests; base += kThreads) {
    const int r = base + tid;
    const int n = r < p.num_requests ? p.query_start_loc[r + 1] - p.query_start_loc[r] : 0;
    const int tiles = (n + p.queries - 1) / p.queries;
    const int before = total_tiles;
    const int inclusive = block_prefix(tiles, warps);
    if (r < p.num_requests) p.work.tile_prefix[r] = before + inclusive - tiles;
    __syncthreads();
    if (tid == kThreads - 1) total_tiles = before + inclusive;
    __syncthreads();
  }
  const int tiles = total_tiles;
  unsigned long long my_work = 0;
  int my_longest = 0;
  for (int i = tid; i < tiles; i += kThreads) {
    const int n = length(find_tile(p, i));
    my_work += n + 1;
    my_longest = max(my_longest, n);
  }
  if (my_longest) {
    atomicAdd(&work, my_work);
    atomicMax(&longest, my_longest);
  }
  __syncthreads();
  const int64_t total = static_cast<int64_t>(work) * p.kv_heads;
  // Dealt whole, the longest tile bounds the time; shares cost their merging and walk the keys out of step.
  if (100 * total >= int64_t(p.whole_percent) * p.sms * longest) plan_whole_tiles(p, tiles, longest, warps, bins);
  else plan_equal_shares(p, tiles, total, warps, bins);
}

// Keys in a key tile. The plan and every layer must agree, so it follows from the arguments they share.
int key_tile_of(const VbPrefill& a, const VbCache& c, int variant, int sms) {
  if (variant == VB_PREFILL_MMA) return prefill_mma_key_tile(c.head_dim);
  const int64_t tiles = int64_t(a.num_tokens / queries_per_tile(a.q_heads, c.kv_heads)) * c.kv_heads;
  return prefill_wgmma_key_tile(c.head_dim, tiles >= 2 * sms && c.dtype != VB_E4M3);
}

int check_prefill(const VbPrefill& a, const VbCache& c, int* variant) {
  if (int e = check_cache(c)) return e;
  if (a.q_heads < c.kv_heads || a.q_heads % c.kv_heads || a.q_heads / c.kv_heads > kTileRows) return VB_ERROR_HEADS;
  if (!aligned16(a.q) || !aligned16(a.out) || a.q_token_stride & 7 || a.out_token_stride & 1) return VB_ERROR_ALIGNMENT;
  if (a.num_tokens < 0 || a.num_requests < 0 || a.window < 0) return VB_ERROR_SHAPE;
  *variant = vb_prefill_variant(c.head_dim, a.variant);
  return *variant < 0 ? *variant : 0;
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" size_t vb_prefill_workspace_bytes(int num_tokens, int num_requests, int q_heads, int kv_heads, int head_dim) {
  DeviceInfo info;
  if (kv_heads < 1 || q_heads < kv_heads || device_info(&info)) return 0;
  return carve_workspace(nullptr, num_tokens, num_requests, q_heads, kv_heads, head_dim, info.sms).bytes;
}

extern "C" int vb_prefill_variant(int head_dim, int variant) {
  DeviceInfo info;
  if (int e = device_info(&info)) return e > 0 ? -100 - e : e;
  if (head_dim != 64 && head_dim != 80 && head_dim != 96 && head_dim != 128 && head_dim != 256) return VB_ERROR_HEAD_DIM;
  if (variant == VB_PREFILL_WGMMA || variant == VB_PREFILL_MMA) {
    return variant == VB_PREFILL_WGMMA && info.major != 9 ? VB_ERROR_VARIANT : variant;
  }
  return info.major == 9 ? VB_PREFILL_WGMMA : VB_PREFILL_MMA;
}

extern "C" int vb_prefill_plan(const VbPrefill* a, const VbCache* c, void* stream) {
  int variant;
  if (int e = check_prefill(*a, *c, &variant)) return e;
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  PlanParams p{};
  p.positions = a->positions;
  p.query_start_loc = a->query_start_loc;
  p.work = carve_workspace(a->workspace, a->num_tokens, a->num_requests, a->q_heads, c->kv_heads, c->head_dim, info.sms);
  if (p.work.bytes > a->workspace_bytes) return VB_ERROR_WORKSPACE;
  p.num_requests = a->num_requests;
  p.kv_heads = c->kv_heads;
  p.queries = queries_per_tile(a->q_heads, c->kv_heads);
  p.key_tile = key_tile_of(*a, *c, variant, info.sms);
  p.window = a->window;
  p.whole_percent = variant == VB_PREFILL_WGMMA ? 67 : 100;  // measured on an H200
  p.sms = info.sms;
  plan_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

extern "C" int vb_prefill_attention(const VbPrefill* a, const VbCache* c, void* stream) {
  int variant;
  if (int e = check_prefill(*a, *c, &variant)) return e;
  if (a->num_tokens == 0) return 0;
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  PrefillParams p{};
  p.work = carve_workspace(a->workspace, a->num_tokens, a->num_requests, a->q_heads, c->kv_heads, c->head_dim, info.sms);
  if (p.work.bytes > a->workspace_bytes) return VB_ERROR_WORKSPACE;
  p.q = a->q;
  p.out = a->out;
  p.lse = a->lse;
  p.key = c->key;
  p.value = c->value;
  p.positions = a->positions;
  p.block_tables = a->block_tables;
  p.q_token_stride = a->q_token_stride;
  p.out_token_stride = a->out_token_stride;
  p.page_stride = c->page_stride;
  p.slot_stride = c->slot_stride;
  p.head_stride = c->head_stride;
  p.block_table_stride = a->block_table_stride;
  p.num_blocks = c->num_blocks;
  p.log_block = floor_log2(c->block_size);
  p.kv_heads = c->kv_heads;
  p.group = a->q_heads / c->kv_heads;
  p.group_magic = (65536 + p.group - 1) / p.group;
  p.window = a->window;
  p.scale_log2 = a->scale * kLog2e;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (variant == VB_PREFILL_MMA) return launch_prefill_mma(p, a->dtype, *c, info.sms, s);
  return launch_prefill_wgmma(p, a->dtype, *c, key_tile_of(*a, *c, variant, info.sms), info.sms, s);
}
