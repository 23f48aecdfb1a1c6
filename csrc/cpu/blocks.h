// Matrices in ggml's blocks of 4, 5, 6 and 8 bits (the types of GGUF files), in an order in which a vector's lanes are
// rows.
//
// 16 rows are a band. Of a band, 32 inputs are a tile, and 256 inputs of the types "K" a super-block of 8 tiles. Numbers
// stand for number * scale + offset; the scales of a band's rows lie side by side, and so do the numbers of an input:
//   types 0 and 1:  for each tile  16 f16 scales, 16 f16 offsets (type 1), its numbers
//   types K:        for each super-block  16 f16 d, 16 f16 dmin (4 and 5 bits), then for each run of inputs 16 bytes of
//                   scales, and for each 16 bytes of minima (4 and 5 bits), then the numbers of its tiles
// Numbers of a tile: byte [j][row], j < 16, has the lower 4 bits of inputs j and 16 + j. The fifth bits follow as 32
// words, one for each input with a bit for each row; bits 5 and 6 of inputs j, 8 + j, 16 + j, 24 + j as byte [j][row],
// j < 8. Numbers of 8 bits are byte [input][row], signed.
#ifndef VLLM_BLEND_BLOCKS_H
#define VLLM_BLEND_BLOCKS_H

#include "../vllm_blend_cpu.h"
#include "parallel.h"
#include "simd.h"

namespace VB_NAMESPACE {

constexpr int BAND = 16, TILE_INPUTS = 32, SUPER_TILES = 8;

// KIND is ggml's number of the type, BYTES what one of its blocks takes in a file. A number is stored as number + ZERO.
// RUNS is how many scales the 32 inputs of a row have.
template <int KIND_, int BITS_, int ZERO_, bool HAS_OFFSET_, bool IS_SUPER_, int RUNS_, int BYTES_>
struct BlockType {
  static constexpr int KIND = KIND_, BITS = BITS_, ZERO = ZERO_, RUNS = RUNS_, BYTES = BYTES_;
  static constexpr bool HAS_OFFSET = HAS_OFFSET_, IS_SUPER = IS_SUPER_;
  static constexpr int TILES = IS_SUPER ? SUPER_TILES : 1;  // of a block
  static constexpr int NUMBERS = BAND * TILE_INPUTS * BITS / 8;
  static constexpr int HALVES = 2 * BAND * (HAS_OFFSET ? 2 : 1);  // bytes of the f16 scales
  static constexpr int RUN_SCALES = IS_SUPER ? BAND * SUPER_TILES * RUNS : 0;
  static constexpr int HEAD = HALVES + RUN_SCALES * (HAS_OFFSET ? 2 : 1);
  static constexpr int PACKED = HEAD + TILES * NUMBERS;  // bytes of a band's blocks of the same inputs
};
using Q4_0 = BlockType<2, 4, 8, false, false, 1, 18>;
using Q4_1 = BlockType<3, 4, 0, true, false, 1, 20>;
using Q5_0 = BlockType<6, 5, 16, false, false, 1, 22>;
using Q5_1 = BlockType<7, 5, 0, true, false, 1, 24>;
using Q8_0 = BlockType<8, 8, 0, false, false, 1, 34>;
using Q4_K = BlockType<12, 4, 0, true, true, 1, 144>;
using Q5_K = BlockType<13, 5, 0, true, true, 1, 176>;
using Q6_K = BlockType<14, 6, 32, false, true, 2, 210>;

// Returns f(type) for the type that has this number.
template <typename F>
VB_INLINE int with_block_type(int32_t kind, F f) {
  switch (kind) {
    case Q4_0::KIND:
      return f(Q4_0{});
    case Q4_1::KIND:
      return f(Q4_1{});
    case Q5_0::KIND:
      return f(Q5_0{});
    case Q5_1::KIND:
      return f(Q5_1{});
    case Q8_0::KIND:
      return f(Q8_0{});
    case Q4_K::KIND:
      return f(Q4_K{});
    case Q5_K::KIND:
      return f(Q5_K{});
    case Q6_K::KIND:
      return f(Q6_K{});
  }
  return VB_BAD_DTYPE;
}

template <typename K>
VB_INLINE int64_t band_bytes(int64_t in) {
  return in / (TILE_INPUTS * K::TILES) * K::PACKED;
}

VB_INLINE vu bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return bit_cast<vu>(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return bit_cast<vu>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vb narrow;
  __builtin_memcpy(&narrow, p, sizeof(narrow));
  return __builtin_convertvector(narrow, vu);
#endif
}
VB_INLINE vf to_float(vu numbers) { return __builtin_convertvector(bit_cast<vi>(numbers), vf); }
VB_INLINE vf signed_bytes(const uint8_t* p) {
  return __builtin_convertvector((bit_cast<vi>(bytes(p)) ^ 128) - 128, vf);
}

// The lower 4 bits of each lane. With AVX-512 it is one look-up.
VB_INLINE vf nibbles(vu lanes) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return bit_cast<vf>(_mm512_permutexvar_ps(bit_cast<__m512i>(lanes), table));
#else
  return to_float(lanes & 15);
#endif
}
// v + 16 in the lanes of a part whose bit is set.
VB_INLINE vf add_sixteen(vf v, const uint16_t* bits, int part) {
#if defined(__AVX512F__)
  (void)part;
  const __m512 wide = bit_cast<__m512>(v);
  return bit_cast<vf>(_mm512_mask_add_ps(wide, __mmask16(*bits), wide, _mm512_set1_ps(16)));
#else
  vu own;
  for (int i = 0; i < VL; ++i) own[i] = 1u << (part * VL + i);
#if defined(__AVX2__)
  const vu all = bit_cast<vu>(_mm256_set1_epi16(short(*bits)));
#else
  const vu all = vu{} + *bits;
#endif
  const vi is_set = (all & own) == own;
  return v + bit_cast<vf>(is_set & bit_cast<vi>(splat(16)));
#endif
}

// Calls f(j, numbers of input j, numbers of input 16 + j) for all j < 16 of a tile: lanes are rows part * VL and on.
template <typename K, typename F>
VB_INLINE void each_pair(const uint8_t* numbers, int part, const F& f) {
  const uint8_t* lower = numbers + part * VL;
  const uint8_t* upper = lower + 256;
  if constexpr (K::BITS == 8) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) f(j, signed_bytes(lower + BAND * j), signed_bytes(lower + BAND * (16 + j)));
  } else if constexpr (K::BITS == 6) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const vu a = bytes(lower + BAND * j), b = bytes(lower + BAND * (8 + j)), high = bytes(upper + BAND * j);
      f(j, to_float((a & 15) | (high << 4 & 48)), to_float(a >> 4 | (high & 48)));
      f(8 + j, to_float((b & 15) | (high << 2 & 48)), to_float(b >> 4 | (high >> 2 & 48)));
    }
  } else {
    const uint16_t* fifth = (const uint16_t*)(numbers + 256);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const vu pair = bytes(lower + BAND * j);
      vf a = nibbles(pair), b = nibbles(pair >> 4);
      if constexpr (K::BITS == 5) {
        a = add_sixteen(a, fifth + j, part);
        b = add_sixteen(b, fifth + 16 + j, part);
      }
      f(j, a, b);
    }
  }
}

// What the numbers of VL rows are multiplied by, and what is added, in one run of a tile's inputs.
struct BlockScale {
  vf scale, offset;
};
template <typename K>
VB_INLINE BlockScale scale_of(const uint8_t* block, int tile, int run, int part) {
  vf scale = load((const f16*)block + part * VL), offset;
  if constexpr (K::IS_SUPER) {
    const uint8_t* own = block + K::HALVES + BAND * (tile * K::RUNS + run) + part * VL;
    scale *= K::HAS_OFFSET ? to_float(bytes(own)) : signed_bytes(own);
    if constexpr (K::HAS_OFFSET)
      offset = -(load((const f16*)block + BAND + part * VL) * to_float(bytes(own + K::RUN_SCALES)));
  } else if constexpr (K::HAS_OFFSET) {
    offset = load((const f16*)block + BAND + part * VL);
  }
  if constexpr (!K::HAS_OFFSET) offset = scale * float(-K::ZERO);
  return {scale, offset};
}

// What numbers stand for. Without an offset of the type's own this is exact: a number has few bits, and its scale 11, or
// 18 of which a byte is a factor.
VB_INLINE vf value_of(vf numbers, const BlockScale& by) { return numbers * by.scale + by.offset; }

// to[k * VL + lane] = what the inputs of a tile are, in the rows from part * VL on.
template <typename K>
static __attribute__((noinline)) void unpack_tile(float* to, const uint8_t* block, int tile, int part) {
  const BlockScale one = scale_of<K>(block, tile, 0, part), two = scale_of<K>(block, tile, K::RUNS - 1, part);
  each_pair<K>(block + K::HEAD + tile * K::NUMBERS, part, [&](int j, vf a, vf b) __attribute__((always_inline)) {
    store(to + j * VL, value_of(a, one));
    store(to + (16 + j) * VL, value_of(b, two));
  });
}

}  // namespace VB_NAMESPACE
#endif
