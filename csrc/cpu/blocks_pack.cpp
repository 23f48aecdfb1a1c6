// From ggml's blocks, as files have them, to the order of blocks.h.
#include "blocks.h"

namespace VB_NAMESPACE {

// One block of a row: 32 numbers of each tile, and what stands beside them.
template <typename K>
struct Row {
  uint8_t numbers[K::TILES * TILE_INPUTS];
  uint16_t scale, offset;                                // f16
  uint8_t scales[SUPER_TILES * 2], minima[SUPER_TILES];  // of the types K
};

VB_INLINE uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// 12 bytes hold 8 scales and 8 minima of 6 bits.
template <typename K>
VB_INLINE void read_six_bits(Row<K>& row, const uint8_t* p) {
  for (int i = 0; i < 4; ++i) {
    row.scales[i] = p[i] & 63;
    row.minima[i] = p[4 + i] & 63;
    row.scales[4 + i] = uint8_t((p[8 + i] & 15) | p[i] >> 6 << 4);
    row.minima[4 + i] = uint8_t(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
  }
}

template <typename K>
VB_INLINE void read_block(Row<K>& row, const uint8_t* p) {
  if constexpr (K::KIND == Q6_K::KIND) {
    const uint8_t *lower = p, *upper = p + 128;
    for (int half = 0; half < 2; ++half, lower += 64, upper += 32)
      for (int i = 0; i < 32; ++i)
        for (int quarter = 0; quarter < 4; ++quarter) {
          const int low = lower[i + 32 * (quarter % 2)] >> (4 * (quarter / 2)) & 15;
          row.numbers[128 * half + 32 * quarter + i] = uint8_t(low | (upper[i] >> (2 * quarter) & 3) << 4);
        }
    __builtin_memcpy(row.scales, p + 192, 16);
    row.scale = half_at(p + 208);
  } else if constexpr (K::IS_SUPER) {
    row.scale = half_at(p);
    row.offset = half_at(p + 2);
    read_six_bits(row, p + 4);
    const uint8_t *fifth = p + 16, *lower = p + 16 + (K::BITS == 5 ? 32 : 0);
    for (int tile = 0; tile < SUPER_TILES; ++tile)
      for (int i = 0; i < 32; ++i) {
        int number = lower[32 * (tile / 2) + i] >> (4 * (tile % 2)) & 15;
        if (K::BITS == 5) number |= (fifth[i] >> tile & 1) << 4;
        row.numbers[32 * tile + i] = uint8_t(number);
      }
  } else {
    row.scale = half_at(p);
    p += 2;
    if constexpr (K::HAS_OFFSET) {
      row.offset = half_at(p);
      p += 2;
    }
    if constexpr (K::BITS == 8) {
      __builtin_memcpy(row.numbers, p, 32);
      return;
    }
    uint32_t fifth = 0;
    if constexpr (K::BITS == 5) {
      __builtin_memcpy(&fifth, p, 4);
      p += 4;
    }
    for (int i = 0; i < 16; ++i) {
      row.numbers[i] = uint8_t((p[i] & 15) | (fifth >> i & 1) << 4);
      row.numbers[16 + i] = uint8_t(p[i] >> 4 | (fifth >> (16 + i) & 1) << 4);
    }
  }
}

// Puts a block of a row into its band, whose memory is zeros.
template <typename K>
VB_INLINE void put(uint8_t* to, const Row<K>& row, int lane) {
  ((uint16_t*)to)[lane] = row.scale;
  if constexpr (K::HAS_OFFSET) ((uint16_t*)to)[BAND + lane] = row.offset;
  if constexpr (K::IS_SUPER)
    for (int run = 0; run < SUPER_TILES * K::RUNS; ++run) {
      to[K::HALVES + BAND * run + lane] = row.scales[run];
      if constexpr (K::HAS_OFFSET) to[K::HALVES + K::RUN_SCALES + BAND * run + lane] = row.minima[run];
    }
  for (int tile = 0; tile < K::TILES; ++tile) {
    uint8_t *lower = to + K::HEAD + tile * K::NUMBERS + lane, *upper = lower + 256;
    const uint8_t* numbers = row.numbers + tile * TILE_INPUTS;
    if constexpr (K::BITS == 8) {
      for (int k = 0; k < TILE_INPUTS; ++k) lower[BAND * k] = numbers[k];
      continue;
    }
    for (int j = 0; j < 16; ++j) lower[BAND * j] = uint8_t((numbers[j] & 15) | numbers[16 + j] << 4);
    if constexpr (K::BITS == 5)
      for (int k = 0; k < TILE_INPUTS; ++k)
        ((uint16_t*)(upper - lane))[k] |= uint16_t((numbers[k] >> 4 & 1) << lane);
    if constexpr (K::BITS == 6)
      for (int k = 0; k < TILE_INPUTS; ++k)
        upper[BAND * (k % 8)] |= uint8_t((numbers[k] >> 4 & 3) << (2 * (k / 8)));
  }
}

template <typename K>
static int pack(uint8_t* out, const uint8_t* from, const int64_t* rows, int64_t count, int64_t in, int32_t threads) {
  const int64_t blocks = in / (TILE_INPUTS * K::TILES);
  VB_PARALLEL_FOR(count * in)
  for (int64_t band = 0; band < (count + BAND - 1) / BAND; ++band) {
    uint8_t* to = out + band * band_bytes<K>(in);
    __builtin_memset(to, 0, size_t(band_bytes<K>(in)));
    for (int64_t lane = 0; lane < min64(BAND, count - band * BAND); ++lane)
      for (int64_t block = 0; block < blocks; ++block) {
        Row<K> row;
        read_block(row, from + (rows[band * BAND + lane] * blocks + block) * K::BYTES);
        put(to + block * K::PACKED, row, int(lane));
      }
  }
  return VB_OK;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(blocks_pack)(void* out, const void* from, const int64_t* rows, int64_t count, int64_t in, int32_t kind,
                       int32_t threads) {
  return with_block_type(kind, [&](auto type) -> int {
    using K = decltype(type);
    if (in % (TILE_INPUTS * K::TILES)) return VB_BAD_DTYPE;
    return pack<K>((uint8_t*)out, (const uint8_t*)from, rows, count, in, threads);
  });
}
