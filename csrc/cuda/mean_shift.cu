// The mean shift of reused tokens: a plan for each step, and for each layer the mean change of every segment's computed rows,
// then one pass that reads stored K and V, adds it, rotates K and writes pages.
//
// The pass may start while the changes are still being added up: what it reads first was there before them.
#include "elementwise.cuh"
#include "launch.cuh"

namespace vb {
namespace {

static_assert(sizeof(VbShiftSegment) == 64, "the caller passes rows of 64 bytes");

constexpr int kPlanThreads = 512;

// A block a segment.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const VbShiftSegment* segments, const int64_t* positions, const int32_t* block_tables, int64_t table_stride,
                int64_t* slots, int32_t* rows, int log_block) {
  __shared__ int bounds[2];
  const VbShiftSegment s = segments[blockIdx.x];
  if (threadIdx.x < 2) {  // the first row at or behind the segment's start, and its stop
    const int64_t wanted = int64_t(s.position) + (threadIdx.x ? s.tokens : 0);
    int low = s.row_start, high = s.row_stop;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (positions[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    bounds[threadIdx.x] = low;
    rows[2 * blockIdx.x + threadIdx.x] = low;
  }
  __syncthreads();
  const int first = bounds[0], last = bounds[1];
  const int32_t* table = block_tables + s.request * table_stride;
  int64_t* own = slots + s.first_token;
  for (int token = threadIdx.x; token < s.tokens; token += kPlanThreads) {
    const int position = s.position + token;
    const int64_t slot = (int64_t(table[position >> log_block]) << log_block) + (position & ((1 << log_block) - 1));
    own[token] = first < last ? slot : ~slot;
  }
  __syncthreads();
  for (int row = first + threadIdx.x; row < last; row += kPlanThreads) {  // positions ascend: each token once
    int64_t* slot = own + (positions[row] - s.position);
    *slot = ~*slot;
  }
}

struct ShiftParams {
  const VbShiftSegment* segments;
  const int32_t* tiles;
  const int64_t* positions;
  const int32_t* rows;
  const int64_t* slots;
  const void* k;
  const void* v;
  const float* cos;
  const float* sin;
  float* shift;
  void* key;
  void* value;
  int64_t k_stride, v_stride;
  Pages pages;
  int layer, kv_heads, head_dim, rotary_half;
  unsigned num_tiles, units, lines, slices;  // units of a head, of all heads; slices of all heads' channels
};

constexpr int kSumThreads = 512, kSumWarps = kSumThreads / 32;
constexpr int kSliceUnits = 16;                           // of 8 channels, side by side in half a warp
constexpr int kSumGroups = kSumThreads / kSliceUnits;     // rows at a time
constexpr int kSliceChannels = kSliceUnits * 8;

// A block takes a slice of the channels of K or of V of a segment. What is stored is of C, as the pages are.
template <typename T, typename C>
__global__ void __launch_bounds__(kSumThreads) sum_changes_kernel(ShiftParams p) {
  wait_for_previous();
  start_next();
  __shared__ alignas(16) float parts[kSumWarps][kSliceChannels];
  const unsigned slice = blockIdx.x % p.slices, rest = blockIdx.x / p.slices, segment = rest / 2;
  const bool is_v = rest % 2;
  const VbShiftSegment s = p.segments[segment];
  const int first = p.rows[2 * segment], last = p.rows[2 * segment + 1];
  const int channels = p.kv_heads * p.head_dim, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int channel = slice * kSliceChannels + threadIdx.x % kSliceUnits * 8;
  float sum[8] = {};
  if (channel < channels) {
    const int64_t stride = is_v ? p.v_stride : p.k_stride;
    const T* computed = static_cast<const T*>(is_v ? p.v : p.k) + channel;
    const C* stored = reinterpret_cast<const C*>(is_v ? s.v : s.k) + p.layer * s.layer_stride + channel;
#pragma unroll 4
    for (int row = first + int(threadIdx.x) / kSliceUnits; row < last; row += kSumGroups) {
      float now[8], then[8];
      to_float<T>(*reinterpret_cast<const Vec8*>(computed + row * stride), now);
      to_float<C>(load_once(stored + (p.positions[row] - s.position) * s.token_stride), then);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += now[i] - then[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += __shfl_down_sync(0xffffffffu, sum[i], kSliceUnits);
  if (lane < kSliceUnits) {
    float4* part = reinterpret_cast<float4*>(&parts[warp][lane * 8]);
    part[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    part[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  __syncthreads();
  const int own = slice * kSliceChannels + threadIdx.x;
  if (threadIdx.x >= kSliceChannels || own >= channels) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kSumWarps; ++i) total += parts[i][threadIdx.x];
  const float scale = first < last ? s.strength / static_cast<float>(last - first) : 0.f;
  p.shift[int64_t(rest) * channels + own] = total * scale;
}

constexpr int kMoveThreads = 128, kMoveBlocks = 5;  // of a multiprocessor: six would spill registers
constexpr int kTokens = 4;                           // of a thread, which keeps its shift in registers
constexpr int kTogether = VB_SHIFT_TILE / kTokens;   // threads that share a unit of a tile

__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
}

// A thread takes one unit of one head, of K or of V, of every fourth token of a tile.
template <typename C>
__global__ void __launch_bounds__(kMoveThreads, kMoveBlocks) move_kernel(ShiftParams p) {
  const unsigned i = blockIdx.x * kMoveThreads + threadIdx.x;  // the host checks that 32 bits are enough
  const unsigned line = i % p.lines, part = i / p.lines;
  const unsigned tile = part / (2 * kTogether);
  const int together = part % kTogether;
  const bool is_v = part / kTogether % 2;
  if (tile >= p.num_tiles) return wait_for_previous();
  const int segment = p.tiles[tile];
  const VbShiftSegment& s = p.segments[segment];
  const int head = line / p.units, tokens = s.tokens, position = s.position;
  const Unit u = unit_of(line % p.units, p.rotary_half);
  const int first = (int(tile) - s.first_tile) * VB_SHIFT_TILE + together;
  const int64_t* slots = p.slots + s.first_token;
  const int64_t stride = s.token_stride;
  const C* stored = reinterpret_cast<const C*>(is_v ? s.v : s.k) + p.layer * s.layer_stride + head * p.head_dim;
  int64_t slot[kTokens];
  Eight<C> a[kTokens], b[kTokens];
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    const int token = first + j * kTogether;
    slot[j] = token < tokens ? slots[token] : -1;
  }
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (slot[j] < 0) continue;
    const C* from = stored + (first + j * kTogether) * stride;
    a[j] = load_once(from + u.first);
    if (u.second >= 0) b[j] = load_once(from + u.second);
  }

  wait_for_previous();
  const int64_t channels = int64_t(p.kv_heads) * p.head_dim;
  const float* shift = p.shift + (2 * segment + is_v) * channels + head * p.head_dim;
  C* pages = static_cast<C*>(is_v ? p.value : p.key);
  float by_first[8], by_second[8];
  load8(by_first, shift + u.first);
  if (u.second >= 0) load8(by_second, shift + u.second);
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (slot[j] < 0) continue;
    C* to = pages + p.pages.offset(slot[j], head);
    float x[8], y[8];
    to_float<C>(a[j], x);
#pragma unroll
    for (int d = 0; d < 8; ++d) x[d] += by_first[d];
    if (u.second >= 0) {
      to_float<C>(b[j], y);
#pragma unroll
      for (int d = 0; d < 8; ++d) y[d] += by_second[d];
      if (!is_v) {
        const int64_t at = int64_t(position + first + j * kTogether) * p.rotary_half + u.first;
        rotate(x, y, p.cos + at, p.sin + at);
      }
      *reinterpret_cast<Eight<C>*>(to + u.second) = from_float<C>(y);
    }
    *reinterpret_cast<Eight<C>*>(to + u.first) = from_float<C>(x);
  }
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_mean_shift_plan(const void* segments, const int64_t* positions, const int32_t* block_tables, int64_t* slots,
                                  int32_t* rows, int64_t table_stride, int count, int block_size, void* stream) {
  if (count < 0) return VB_ERROR_SHAPE;
  if (block_size < 1 || (block_size & (block_size - 1))) return VB_ERROR_BLOCK_SIZE;
  if (!aligned16(segments)) return VB_ERROR_ALIGNMENT;
  if (count == 0) return 0;
  plan_kernel<<<count, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const VbShiftSegment*>(segments), positions, block_tables, table_stride, slots, rows, floor_log2(block_size));
  return cudaGetLastError();
}

extern "C" int vb_mean_shift(const void* segments, const int32_t* tiles, const int64_t* positions, const int32_t* rows,
                             const int64_t* slots, const void* k, const void* v, const float* cos, const float* sin, float* shift,
                             void* key_cache, void* value_cache, int64_t k_token_stride, int64_t v_token_stride,
                             int64_t page_stride, int64_t slot_stride, int64_t head_stride, int layer, int count, int num_tiles,
                             int kv_heads, int head_dim, int rotary_half, int block_size, int dtype, int cache_dtype,
                             void* stream) {
  if (head_dim < 8 || head_dim % 8 || rotary_half % 8 || rotary_half < 0 || 2 * rotary_half > head_dim) return VB_ERROR_HEAD_DIM;
  if (layer < 0 || count < 0 || num_tiles < count || kv_heads < 1) return VB_ERROR_SHAPE;
  const unsigned units = units_of(head_dim, rotary_half), lines = kv_heads * units;
  const int channels = kv_heads * head_dim, slices = (channels + kSliceChannels - 1) / kSliceChannels;
  const int64_t moving = int64_t(num_tiles) * 2 * kTogether * lines, summing = int64_t(count) * 2 * slices;
  if (moving > INT32_MAX || summing > INT32_MAX) return VB_ERROR_SHAPE;
  ShiftParams p{static_cast<const VbShiftSegment*>(segments), tiles, positions, rows, slots, k, v, cos, sin, shift, key_cache,
                value_cache, k_token_stride, v_token_stride, {}, layer, kv_heads, head_dim, rotary_half, unsigned(num_tiles), units,
                lines, unsigned(slices)};
  if (int e = make_pages(&p.pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (!aligned16(segments) || !aligned16(k) || !aligned16(v) || !aligned16(shift) || !aligned16(key_cache) || !aligned16(value_cache))
    return VB_ERROR_ALIGNMENT;
  if (!aligned16(cos) || !aligned16(sin) || (k_token_stride | v_token_stride) & 7) return VB_ERROR_ALIGNMENT;
  if (count == 0) return 0;
  const unsigned move_blocks = static_cast<unsigned>((moving + kMoveThreads - 1) / kMoveThreads);
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    using C = decltype(c);
    if (int e = launch_early(sum_changes_kernel<decltype(t), C>, unsigned(summing), kSumThreads, stream, p)) return e;
    return launch_early(move_kernel<C>, move_blocks, kMoveThreads, stream, p);
  });
}
