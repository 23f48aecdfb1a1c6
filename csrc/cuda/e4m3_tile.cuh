// Keys or values of e4m3 pages as a tile of wgmma operands. The copy engine moves bytes and converts nothing, so the warps that
// would have asked it for pages read them, widen them and lay them out as it would have.
#pragma once
#include "e4m3.cuh"
#include "hopper.cuh"

namespace vb {

constexpr int kTileLoaders = 128;  // threads, of one warpgroup; each arrives at the barrier of a tile that it has helped to fill

struct E4m3Pages {  // of one head and one request
  const e4m3* pages;
  const int32_t* table;
  int64_t page_stride, slot_stride;
  int log_block;
};

__device__ __forceinline__ void store_shared16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Rows of 64 channels, 128 bytes with 128-byte swizzle, one after another; a column of these after the other. Keys outside
// [low, high) are zeros, since what no query sees may never have been written.
template <typename T, int D, int kKeys>
__device__ __forceinline__ void load_tile(uint32_t tile, const E4m3Pages& from, int key0, int low, int high) {
  constexpr int kChunks = D / 8, kAll = kKeys * kChunks, kEach = (kAll + kTileLoaders - 1) / kTileLoaders, kAhead = 8;
  const int thread = threadIdx.x % kTileLoaders, block_mask = (1 << from.log_block) - 1;
#pragma unroll 1
  for (int i0 = thread; i0 < kAll; i0 += kAhead * kTileLoaders) {
    int pages[kAhead];  // negative: zeros
    uint2 v[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead && j < kEach; ++j) {
      const int i = i0 + j * kTileLoaders, key = key0 + i / kChunks;
      pages[j] = i < kAll && key >= low && key < high ? from.table[key >> from.log_block] : -1;
    }
#pragma unroll
    for (int j = 0; j < kAhead && j < kEach; ++j) {
      const int i = i0 + j * kTileLoaders, key = key0 + i / kChunks;
      v[j] = make_uint2(0, 0);
      if (pages[j] >= 0)
        v[j] = *reinterpret_cast<const uint2*>(from.pages + pages[j] * from.page_stride + (key & block_mask) * from.slot_stride +
                                               i % kChunks * 8);
    }
#pragma unroll
    for (int j = 0; j < kAhead && j < kEach; ++j) {
      const int i = i0 + j * kTileLoaders, row = i / kChunks, chunk = i % kChunks;
      const uint32_t at = tile + chunk / 8 * (kKeys * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
      if (i < kAll) store_shared16(at, eight_of_e4m3<T>(v[j]));
    }
  }
  fence_async_proxy();
}

}  // namespace vb
