// The AMX tile registers, bf16 in and float32 out: one instruction multiplies 16 x 32 by 32 x 16. Only for the "amx"
// build.
//
// A left operand is 16 rows of 32 numbers, as they lie in memory. A right operand holds pairs: row p, column c is the
// pair of numbers 2p and 2p + 1 of column c, so a matrix stored by columns (keys, queries) enters through a transpose
// of 32-bit pairs.
#ifndef VLLM_BLEND_AMX_H
#define VLLM_BLEND_AMX_H

#include "simd.h"

#if defined(VB_AMX)
#include <immintrin.h>

namespace VB_NAMESPACE {

constexpr int TILE = 16;        // rows of a tile register; 32-bit columns too
constexpr int TILE_PAIRS = 32;  // bf16 columns

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The calling thread may use all eight tiles, each 16 x 64 bytes, until tiles_end().
VB_INLINE void tiles_begin() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = TILE;
  }
  _tile_loadconfig(&config);
}
VB_INLINE void tiles_end() { _tile_release(); }

// 16 rows of bf16 pairs -> the right operand whose columns they are: to[p * TILE + c] = pair p of row c.
// Rows from `count` on are zero.
VB_INLINE void pack_columns(uint32_t* to, const bf16* const* row, int64_t count) {
  vf block[VL];
  for (int i = 0; i < TILE; ++i) {
    block[i] = vf{};
    if (i < count) __builtin_memcpy(&block[i], row[i], sizeof(vf));
  }
  transpose(block);
  for (int i = 0; i < TILE; ++i) __builtin_memcpy(to + i * TILE, &block[i], sizeof(vf));
}

}  // namespace VB_NAMESPACE
#else
namespace VB_NAMESPACE {
VB_INLINE void tiles_begin() {}
VB_INLINE void tiles_end() {}
}  // namespace VB_NAMESPACE
#endif
#endif
