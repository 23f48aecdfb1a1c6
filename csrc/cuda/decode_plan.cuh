// The work of paged decode attention, and what the plan (made once a step) and the kernel (run once a layer) share.
//
// Keys are taken in tiles of 16. A unit is a KV head, with up to `rows` of its query rows (query heads, times queries where a
// request has several). The tiles of all requests, one after another, are cut into equal shares; a block takes one share of
// one unit, so that blocks of neighbouring units read neighbouring bytes at the same time. A request may be cut, so a share
// has at most two parts of cut requests: its first and its last.
#pragma once
#include "e4m3.cuh"

namespace vb {

constexpr int kDecodeKeys = 16;
constexpr int kMaxShares = 256;

struct alignas(16) DecodeShare {
  int first, last;               // its requests; last < first: none
  int tile_begin, tile_end;      // where it begins in the first and ends in the last, tiles from position 0 on
  int first_share, first_parts;  // of the first request: the share with its first part, and how many parts it has
  int last_parts, unused;        // of the last request when it is another: its first part is here
};

struct alignas(16) DecodeSpan {  // of a request
  int token, queries;  // its rows
  int low, high;       // positions of the first and last key that any of them sees

  __device__ __forceinline__ int tile_begin() const { return low / kDecodeKeys; }
  __device__ __forceinline__ int tile_end() const { return (high >> 4) + 1; }  // 0 without queries, where high is -1
};
static_assert(kDecodeKeys == 1 << 4, "tile_end shifts");

struct DecodeWorkspace {
  DecodeShare* shares;  // [num_shares]
  DecodeSpan* spans;    // [requests]
  int32_t* prefix;      // [requests] weights up to and with each, for the plan alone
  int32_t* counters;    // [num_shares, units]: parts of a cut request that are done, at the share of its first part
  float2* stats;        // [slots, units, rows] (max, sum)
  float* partial;       // [slots, units, rows, head_dim], not normalised
  int num_shares, units, rows;
  size_t bytes;

  // Slots of the parts of a request: a share's last part goes to its second slot, its first part to the first.
  __device__ __forceinline__ int slot(int first_share, int part) const { return 2 * (first_share + part) + (part == 0); }
};

// The most query rows that a unit's tile may have: accumulators of more do not fit the registers.
constexpr int decode_rows(int head_dim) { return head_dim == 256 ? 16 : 32; }

// How a kernel is cut to the shared memory of a chip: an H200's block may have 227 KB, the least of the others 99 KB.
constexpr int kLargeSmem = 232448, kSmallSmem = 101376;

template <int D, int kBytes, int kRows, bool kLarge>
struct DecodeShape {
  // Pages of e4m3 have more to compute for each byte: more warps hide it, as far as their registers are there.
  static constexpr int kWarps = (kLarge ? kBytes == 1 && kRows == 8 ? 12 : 8 : 4) / (D == 256 ? 2 : 1), kThreads = kWarps * 32;
  static constexpr int kTile = kDecodeKeys * D * kBytes;  // bytes of a tile's K or V; kBytes: of a number in the pages
  static constexpr int kQuery = kRows > 8 ? kRows * D * 2 : 0;  // up to eight rows are held in registers
  static constexpr int kOutRow = D + 8;                         // floats, padded against bank conflicts
  static constexpr int kWarpOut = kWarps * 8 * kOutRow * 4, kFinal = 8 * kMaxShares * 4 + kThreads * 16;
  static constexpr int kMerge = kWarpOut > kFinal ? kWarpOut : kFinal;
  static constexpr int kStats = kWarps * kRows * 8;
  static constexpr int kScales = kBytes == 1 && kRows > 8 ? kRows * 4 : 0;
  static constexpr int kFixed = kQuery + kMerge + kStats + 16 + kScales;
  static constexpr int kFit = ((kLarge ? kLargeSmem : kSmallSmem) - kFixed) / (kWarps * 2 * kTile);
  static constexpr int kStages = kFit > 6 ? 6 : kFit;  // tiles in flight a warp
  static constexpr int kSmem = kFixed + kStages * kWarps * 2 * kTile;
  static_assert(kStages >= 2);
};

struct DecodeParams {
  const void* q;
  void* out;
  float* lse;
  const void* key;
  const void* value;
  const int64_t* positions;
  const int32_t* block_tables;
  DecodeWorkspace work;
  int64_t q_token_stride, out_token_stride, page_stride, slot_stride, head_stride;
  int block_table_stride, log_block, kv_heads, group, head_blocks, window;
  float scale_log2;
};

int launch_decode(const DecodeParams& p, int dtype, const VbCache& cache, bool large, cudaStream_t stream);

}  // namespace vb
