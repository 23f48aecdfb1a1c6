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
  // GCC 12 may drop the stores to `config`: it does not know that the instruction reads memory.
  __asm__ __volatile__("" : : "r"(&config) : "memory");
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

// n numbers of e4m3 as bf16, which holds them all; n is a multiple of TILE_PAIRS.
VB_INLINE void widen_row(bf16* to, const f8* from, int64_t n) {
  // What shifting exponent and mantissa into place does not give: numbers below 2^-6, and NaN, at its last five bits.
  alignas(64) static const uint16_t rare[32] = {0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60,
                                                0,      0,      0,      0,      0,      0,      0,      0,
                                                0,      0,      0,      0,      0,      0,      0,      0,
                                                0,      0,      0,      0,      0,      0,      0,      0x7fc0};
  const __m512i table = _mm512_load_si512(rare), low = _mm512_set1_epi16(0x7f);
  for (int64_t i = 0; i < n; i += TILE_PAIRS) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + i)));
    const __m512i size = _mm512_and_si512(wide, low), sign = _mm512_slli_epi16(_mm512_andnot_si512(low, wide), 8);
    const __m512i next = _mm512_and_si512(_mm512_add_epi16(size, _mm512_set1_epi16(1)), low);
    const __mmask32 is_rare = _mm512_cmplt_epu16_mask(next, _mm512_set1_epi16(9));
    const __m512i usual = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __m512i found = _mm512_mask_permutexvar_epi16(usual, is_rare, size, table);
    _mm512_storeu_si512(to + i, _mm512_or_si512(found, sign));
  }
}

}  // namespace VB_NAMESPACE
#else
namespace VB_NAMESPACE {
VB_INLINE void tiles_begin() {}
VB_INLINE void tiles_end() {}
}  // namespace VB_NAMESPACE
#endif
#endif
