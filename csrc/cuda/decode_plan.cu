// Plans paged decode attention on the device, where the lengths of the contexts are, and dispatches it.
//
// The plan is a kernel like any other: captured into a CUDA graph with the layers that use it, it follows the positions of
// each replay, so that no graph is tied to the lengths it was captured with.
#include "decode_plan.cuh"
#include "scan.cuh"

namespace vb {
namespace {

constexpr int kThreads = 1024;
constexpr int kItemWeight = 2;  // beginning and ending a request costs about as much as so many tiles

struct PlanParams {
  const int64_t* positions;
  const int32_t* query_start_loc;
  DecodeWorkspace work;
  int requests, warps, window;
};

__global__ void __launch_bounds__(kThreads) decode_plan_kernel(PlanParams p) {
  __shared__ int warps[32], total;
  __shared__ int2 cuts[kMaxShares + 1];  // where a share begins: request, and tile of its keys
  const int tid = threadIdx.x;
  if (tid == 0) total = 0;
  for (int i = tid; i < p.work.num_shares * p.work.units; i += kThreads) p.work.counters[i] = 0;
  __syncthreads();
  auto tiles_of = [&](int request) { return p.work.spans[request].tile_end() - p.work.spans[request].tile_begin(); };
  for (int base = 0; base < p.requests; base += kThreads) {
    const int r = base + tid;
    int weight = 0;
    if (r < p.requests) {
      DecodeSpan s{r, 1, 0, -1};
      if (p.query_start_loc) {
        s.token = p.query_start_loc[r];
        s.queries = p.query_start_loc[r + 1] - s.token;
      }
      if (s.queries > 0) {
        s.high = static_cast<int>(p.positions[s.token + s.queries - 1]);
        if (p.window) s.low = max(0, static_cast<int>(p.positions[s.token]) - p.window + 1);
        weight = s.tile_end() - s.tile_begin() + kItemWeight;
      }
      p.work.spans[r] = s;
    }
    const int before = total, upto = before + block_prefix(weight, warps);
    if (r < p.requests) p.work.prefix[r] = upto;
    __syncthreads();
    if (tid == kThreads - 1) total = upto;
    __syncthreads();
  }

  // A share is no smaller than a tile for every warp; cuts inside a request are at multiples of that, so two never meet.
  const int step = p.warps, shares = max(1, min(p.work.num_shares, total / step));
  for (int c = tid; c <= shares; c += kThreads) {
    int2 cut = make_int2(c == 0 ? 0 : p.requests, 0);
    if (c > 0 && c < shares) {
      const int target = static_cast<int>(int64_t(total) * c / shares);
      int low = 0, high = p.requests - 1;
      while (low < high) {  // the first request that ends after the target
        const int mid = (low + high) / 2;
        if (p.work.prefix[mid] > target) high = mid;
        else low = mid + 1;
      }
      const int tiles = tiles_of(low), offset = target - (p.work.prefix[low] - tiles - kItemWeight);
      const int at = (min(offset, tiles) + step / 2) / step * step;
      cut = 2 * (tiles - at) < step ? make_int2(low + 1, 0) : make_int2(low, at);
    }
    cuts[c] = cut;
  }
  __syncthreads();
  for (int s = tid; s < p.work.num_shares; s += kThreads) {
    DecodeShare share{0, -1, 0, 0, 0, 1, 1, 0};
    const int2 from = s < shares ? cuts[s] : make_int2(0, 0), to = s < shares ? cuts[s + 1] : from;
    if (from.x < to.x || from.y < to.y) {
      auto end_of = [&](int request, int at) {  // the share after the last with a part of the request
        while (at < shares && cuts[at].x == request) ++at;
        return at;
      };
      share.first = from.x;
      share.last = to.y > 0 ? to.x : to.x - 1;
      share.tile_begin = p.work.spans[share.first].tile_begin() + from.y;
      share.tile_end = to.y > 0 ? p.work.spans[share.last].tile_begin() + to.y : p.work.spans[share.last].tile_end();
      share.first_share = s;
      while (cuts[share.first_share].x == share.first && cuts[share.first_share].y > 0) --share.first_share;
      share.first_parts = end_of(share.first, s + 1) - share.first_share;
      share.last_parts = share.last == share.first ? share.first_parts : end_of(share.last, s + 1) - s;
    }
    p.work.shares[s] = share;
  }
}

// Rows of a unit's tile: eight are held in registers and cost the least.
int rows_of(const VbDecode& a, const VbCache& c) {
  return a.max_queries * (a.q_heads / c.kv_heads) <= 8 ? 8 : decode_rows(c.head_dim);
}

bool is_large(const DeviceInfo& info) { return info.smem >= kLargeSmem; }

DecodeWorkspace carve(void* base, const VbDecode& a, const VbCache& c, const DeviceInfo& info) {
  DecodeWorkspace w{};
  const int group = a.q_heads / c.kv_heads, resident = is_large(info) ? info.sms : 2 * info.sms;
  w.rows = rows_of(a, c);
  w.units = c.kv_heads * ((group + w.rows - 1) / w.rows);
  w.num_shares = resident / w.units < 1 ? 1 : resident / w.units > kMaxShares ? kMaxShares : resident / w.units;
  char* p = static_cast<char*>(base);
  size_t at = 0;
  auto take = [&](size_t bytes) {
    char* r = p + at;
    at += (bytes + 255) / 256 * 256;
    return r;
  };
  const size_t cells = size_t(2) * w.num_shares * w.units * w.rows;
  w.shares = reinterpret_cast<DecodeShare*>(take(w.num_shares * sizeof(DecodeShare)));
  w.spans = reinterpret_cast<DecodeSpan*>(take(a.num_requests * sizeof(DecodeSpan)));
  w.prefix = reinterpret_cast<int32_t*>(take(a.num_requests * sizeof(int32_t)));
  w.counters = reinterpret_cast<int32_t*>(take(size_t(w.num_shares) * w.units * sizeof(int32_t)));
  w.stats = reinterpret_cast<float2*>(take(cells * sizeof(float2)));
  w.partial = reinterpret_cast<float*>(take(cells * c.head_dim * sizeof(float)));
  w.bytes = at;
  return w;
}

int check_decode(const VbDecode& a, const VbCache& c) {
  if (int e = check_cache(c)) return e;
  if (a.q_heads < c.kv_heads || a.q_heads % c.kv_heads) return VB_ERROR_HEADS;
  if (a.num_requests < 0 || a.window < 0 || a.max_queries < 1) return VB_ERROR_SHAPE;
  if (a.max_queries > vb_decode_max_queries(a.q_heads, c.kv_heads, c.head_dim)) return VB_ERROR_SHAPE;
  if (a.max_queries > 1 && !a.query_start_loc) return VB_ERROR_SHAPE;
  return 0;
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_decode_max_queries(int q_heads, int kv_heads, int head_dim) {
  if (kv_heads < 1 || q_heads < kv_heads) return 1;
  const int queries = decode_rows(head_dim) / (q_heads / kv_heads);
  return queries < 1 ? 1 : queries;
}

extern "C" size_t vb_decode_workspace_bytes(const VbDecode* a, const VbCache* c) {
  DeviceInfo info;
  if (check_decode(*a, *c) || device_info(&info)) return 0;
  return carve(nullptr, *a, *c, info).bytes;
}

extern "C" int vb_decode_plan(const VbDecode* a, const VbCache* c, void* stream) {
  if (int e = check_decode(*a, *c)) return e;
  if (a->num_requests == 0) return 0;
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  PlanParams p{};
  p.work = carve(a->workspace, *a, *c, info);
  if (p.work.bytes > a->workspace_bytes) return VB_ERROR_WORKSPACE;
  p.positions = a->positions;
  p.query_start_loc = a->query_start_loc;
  p.requests = a->num_requests;
  p.warps = (is_large(info) ? 8 : 4) / (c->head_dim == 256 ? 2 : 1);
  p.window = a->window;
  decode_plan_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

extern "C" int vb_decode_attention(const VbDecode* a, const VbCache* c, void* stream) {
  if (int e = check_decode(*a, *c)) return e;
  if (!aligned16(a->q) || !aligned16(a->out) || a->q_token_stride & 7 || a->out_token_stride & 3) return VB_ERROR_ALIGNMENT;
  if (a->num_requests == 0) return 0;
  DeviceInfo info;
  if (int e = device_info(&info)) return e;
  DecodeParams p{};
  p.work = carve(a->workspace, *a, *c, info);
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
  p.log_block = floor_log2(c->block_size);
  p.kv_heads = c->kv_heads;
  p.group = a->q_heads / c->kv_heads;
  p.head_blocks = p.work.units / c->kv_heads;
  p.window = a->window;
  p.scale_log2 = a->scale * kLog2e;
  return launch_decode(p, a->dtype, *c, is_large(info), static_cast<cudaStream_t>(stream));
}
