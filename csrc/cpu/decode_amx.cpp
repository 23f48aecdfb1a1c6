// decode.cpp's chunk on the tile registers: 16 keys of a block are a left operand just as they lie in the cache, the
// query heads the right one. The weights then meet the values, whose rows are paired up on the way.
#include "amx.h"
#include "attention.h"

#if defined(VB_AMX)

namespace VB_NAMESPACE {

constexpr int64_t KEYS = DECODE_CHUNK + TILE;  // a chunk that starts inside a block is widened to the block's start
constexpr int64_t WORDS = TILE * TILE;         // 32-bit words of a tile

// Heads of as many KV heads as fit share the columns of one score tile.
struct Layout {
  int64_t per_tile, tiles, steps;  // KV heads of a tile, score tiles, products of 32 channels

  explicit Layout(const Paged& a)
      : per_tile(min64(a.kv_heads, TILE / a.group())),
        tiles((a.kv_heads + per_tile - 1) / per_tile),
        steps(a.head_dim / TILE_PAIRS) {}
};

struct DecodeTiles {
  alignas(64) float tile[4 * WORDS];
  alignas(64) uint32_t values[2][4 * WORDS];  // two, so that packing one never waits for the products of the other
  uint32_t* q;                                // [kv_heads, steps, 16 pairs, 16 columns]
  float* scores;                              // [heads, KEYS]
  bf16* weights;                              // [heads + 16, KEYS]: a left operand may reach past the last head
  bf16* rows;                                 // [KEYS, kv_heads * head_dim]: keys, then values, of an e4m3 cache
};

static DecodeTiles& carve(const Paged& a, const Layout& layout, void* memory) {
  DecodeTiles& s = *(DecodeTiles*)memory;
  s.q = (uint32_t*)(&s + 1);
  s.scores = (float*)(s.q + a.kv_heads * layout.steps * WORDS);
  s.weights = (bf16*)(s.scores + a.heads * KEYS);
  s.rows = s.weights + (a.heads + TILE) * KEYS;
  return s;
}

size_t decode_amx_scratch_bytes(const Paged& a) {
  const Layout layout(a);
  return sizeof(DecodeTiles) + size_t(a.kv_heads * layout.steps * WORDS) * sizeof(uint32_t) +
         size_t(a.heads * KEYS) * sizeof(float) + size_t((a.heads + TILE + a.row()) * KEYS) * sizeof(bf16);
}

// The query heads of every KV head as right operands; the columns of the other KV heads of the tile are zero.
static void pack_queries(const Paged& a, const Layout& layout, const bf16* q, uint32_t* to) {
  const int64_t group = a.group();
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
    const int64_t column = kv_head % layout.per_tile * group;
    for (int64_t step = 0; step < layout.steps; ++step, to += WORDS) {
      const bf16* row[TILE];
      static const bf16 zeros[TILE_PAIRS] = {};
      for (int64_t i = 0; i < TILE; ++i) {
        const bool mine = i >= column && i < column + group;
        row[i] = mine ? q + (kv_head * group + i - column) * a.head_dim + step * TILE_PAIRS : zeros;
      }
      pack_columns(to, row, TILE);
    }
  }
}

// Scores of 4 x 16 keys from key i on, for the heads of one tile. `block` are the offsets of the 4 groups' first keys.
VB_INLINE void score_groups(const Paged& a, const Layout& layout, DecodeTiles& s, const int64_t* block, int64_t tile,
                            int64_t i, int64_t groups, Ahead& ahead, int64_t lines) {
  const int64_t first = tile * layout.per_tile, last = min64(first + layout.per_tile, a.kv_heads);
  const int64_t row_bytes = a.row() * 2, group = a.group();
  const bf16* keys = (const bf16*)a.keys;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t kv_head = first; kv_head < last; ++kv_head)
    for (int64_t step = 0; step < layout.steps; ++step) {
      const int64_t channel = kv_head * a.head_dim + step * TILE_PAIRS;
      _tile_loadd(4, s.q + (kv_head * layout.steps + step) * WORDS, 64);
      _tile_loadd(5, keys + block[0] + channel, row_bytes);
      _tile_dpbf16ps(0, 5, 4);
      Ahead::touch(ahead, lines);
      _tile_loadd(6, keys + block[1] + channel, row_bytes);
      _tile_dpbf16ps(1, 6, 4);
      Ahead::touch(ahead, lines);
      _tile_loadd(7, keys + block[2] + channel, row_bytes);
      _tile_dpbf16ps(2, 7, 4);
      Ahead::touch(ahead, lines);
      _tile_loadd(5, keys + block[3] + channel, row_bytes);
      _tile_dpbf16ps(3, 5, 4);
      Ahead::touch(ahead, lines);
    }
  _tile_stored(0, s.tile, 64);
  _tile_stored(1, s.tile + WORDS, 64);
  _tile_stored(2, s.tile + 2 * WORDS, 64);
  _tile_stored(3, s.tile + 3 * WORDS, 64);
  const int64_t heads = (last - first) * group;
  for (int64_t g = 0; g < groups; ++g) {
    vf column[VL];
    for (int k = 0; k < TILE; ++k) column[k] = load(s.tile + g * WORDS + k * TILE);
    transpose(column);
    for (int64_t h = 0; h < heads; ++h) store(s.scores + (first * group + h) * KEYS + i + g * TILE, column[h]);
  }
}

// Scores [0, padded) -> bf16 weights, zero outside [begin, end); their maximum (log2) and sum.
VB_INLINE void weigh(const float* scores, bf16* weights, float to_log2, int64_t begin, int64_t end, int64_t padded,
                     float* maximum, float* sum) {
  vi lane;
  for (int i = 0; i < VL; ++i) lane[i] = i;
  auto masked = [&](int64_t i) {
    const vi key = lane + int32_t(i);
    const vf score = load(scores + i) * to_log2;
    return (key >= int32_t(begin)) & (key < int32_t(end)) ? score : splat(-kInfinity);
  };
  vf top = splat(-kInfinity);
  for (int64_t i = 0; i < padded; i += VL) top = vmax(top, masked(i));
  *maximum = max_lanes(top);
  vf total = {};
  for (int64_t i = 0; i < padded; i += VL) {
    const vf weight = exp2_(masked(i) - *maximum);
    store(weights + i, weight);
    total += weight;
  }
  *sum = sum_lanes(total);
}

// Right operands of 32 keys x `tiles` * 16 channels, whose rows pair up; that leaves the channels as `store_channels`
// undoes it.
VB_INLINE void pack_pair(uint32_t* to, __m512i even, __m512i odd) {
  _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
  _mm512_store_si512(to + WORDS, _mm512_unpackhi_epi16(even, odd));
}
VB_INLINE void pack_values(uint32_t* to, const bf16* values, const int64_t* offsets, int64_t tiles, Ahead& ahead,
                           int64_t lines) {
  for (int64_t pair = 0; pair < TILE; ++pair, to += TILE) {
    Ahead::touch(ahead, lines);
    for (int64_t t = 0; t < tiles; t += 2)
      pack_pair(to + t * WORDS, _mm512_loadu_si512(values + offsets[2 * pair] + t * TILE),
                _mm512_loadu_si512(values + offsets[2 * pair + 1] + t * TILE));
  }
}
// The same, with zeros for keys outside [begin, end): what their slots hold may be NaN, and 0 times NaN is NaN.
VB_INLINE void pack_some_values(uint32_t* to, const bf16* values, const int64_t* offsets, int64_t begin, int64_t end,
                                int64_t tiles) {
  for (int64_t pair = 0; pair < TILE; ++pair, to += TILE)
    for (int64_t t = 0; t < tiles; t += 2) {
      __m512i row[2];
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t key = 2 * pair + i;
        row[i] =
            key >= begin && key < end ? _mm512_loadu_si512(values + offsets[key] + t * TILE) : _mm512_setzero_si512();
      }
      pack_pair(to + t * WORDS, row[0], row[1]);
    }
}
// Two tiles of 16 paired columns -> 32 channels in order: quarters alternate between the tiles.
VB_INLINE void store_channels(float* to, const float* low, const float* high) {
  for (int q = 0; q < 4; ++q) {
    __builtin_memcpy(to + q * 8, low + q * 4, 16);
    __builtin_memcpy(to + q * 8 + 4, high + q * 4, 16);
  }
}

// out [group, head_dim] of one KV head.
VB_INLINE void weighted_values(const Paged& a, DecodeTiles& s, const int64_t* offsets, int64_t kv_head, int64_t begin,
                               int64_t end, float* out, Ahead& ahead, int64_t lines) {
  const int64_t group = a.group(), head_dim = a.head_dim;
  const bf16* weights = s.weights + kv_head * group * KEYS;
  for (int64_t d = 0; d < head_dim; d += 4 * TILE) {
    const int64_t tiles = min64(4, (head_dim - d) / TILE);  // 2 or 4
    const bf16* values = (const bf16*)a.values + kv_head * head_dim + d;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < end; i += TILE_PAIRS) {
      uint32_t* packed = s.values[i / TILE_PAIRS % 2];
      if (i >= begin && i + TILE_PAIRS <= end)
        pack_values(packed, values, offsets + i, tiles, ahead, lines);
      else
        pack_some_values(packed, values, offsets + i, begin - i, end - i, tiles);
      _tile_loadd(4, weights + i, KEYS * 2);
      _tile_loadd(5, packed, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, packed + WORDS, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (tiles == 4) {
        _tile_loadd(7, packed + 2 * WORDS, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, packed + 3 * WORDS, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, s.tile, 64);
    _tile_stored(1, s.tile + WORDS, 64);
    _tile_stored(2, s.tile + 2 * WORDS, 64);
    _tile_stored(3, s.tile + 3 * WORDS, 64);
    for (int64_t h = 0; h < group; ++h)
      for (int64_t t = 0; t < tiles; t += 2)
        store_channels(out + h * head_dim + d + t * TILE, s.tile + t * WORDS + h * TILE,
                       s.tile + (t + 1) * WORDS + h * TILE);
  }
}

// Rows of an e4m3 cache as bf16, one after another; these are then the cache.
static void widen_rows(const Paged& a, bf16* to, const void* cache, const int64_t* offsets, int64_t count) {
  for (int64_t i = 0; i < count; ++i) widen_row(to + i * a.row(), (const f8*)cache + offsets[i], a.row());
}

template <typename C>
void decode_chunk_amx(const Paged& given, const Chunk& chunk, float* partial, void* memory, Ahead& ahead) {
  Paged a = given;
  const Layout layout(a);
  DecodeTiles& s = carve(a, layout, memory);
  // Widened to whole groups of 16 keys, each within one block; [begin, end) are the keys that count.
  const int64_t base = chunk.first / TILE * TILE, begin = chunk.first - base, end = begin + chunk.count;
  const int64_t padded = (end + TILE_PAIRS - 1) / TILE_PAIRS * TILE_PAIRS;
  int64_t offsets[KEYS + 4 * TILE], own[KEYS + 4 * TILE];
  a.offsets(offsets, chunk.request, base, end);
  if constexpr (sizeof(C) == 1) {
    widen_rows(a, s.rows, given.keys, offsets, end);
    a.keys = a.values = s.rows;
    for (int64_t i = 0; i < end; ++i) own[i] = i * a.row();
  }
  const int64_t* rows = sizeof(C) == 1 ? own : offsets;
  pack_queries(a, layout, (const bf16*)a.q + a.starts[chunk.request] * a.q_stride, s.q);

  // The next chunk is fetched in small helpings, half of it with the products of the keys, half while the values are
  // packed.
  const int64_t products = (end + 4 * TILE - 1) / (4 * TILE) * 4 * a.kv_heads * layout.steps;
  const int64_t pairs = max64(1, end / TILE_PAIRS) * TILE * a.kv_heads * ((a.head_dim + 4 * TILE - 1) / (4 * TILE));
  const int64_t key_lines = ahead.share(2 * products), value_lines = ahead.share(2 * pairs);
  for (int64_t i = 0; i < end; i += 4 * TILE) {
    const int64_t groups = min64(4, (end - i + TILE - 1) / TILE);
    int64_t block[4];
    for (int64_t g = 0; g < 4; ++g) block[g] = rows[i + min64(g, groups - 1) * TILE];
    for (int64_t tile = 0; tile < layout.tiles; ++tile)
      score_groups(a, layout, s, block, tile, i, groups, ahead, key_lines);
  }
  float* maxima = partial + a.heads * a.head_dim;
  for (int64_t head = 0; head < a.heads; ++head)
    weigh(s.scores + head * KEYS, s.weights + head * KEYS, a.scale * kLog2e, begin, end, padded, maxima + head,
          maxima + a.heads + head);
  if constexpr (sizeof(C) == 1) widen_rows(a, s.rows, given.values, offsets, end);
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
    weighted_values(a, s, rows, kv_head, begin, end, partial + kv_head * a.group() * a.head_dim, ahead, value_lines);
}

template void decode_chunk_amx<bf16>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk_amx<f8>(const Paged&, const Chunk&, float*, void*, Ahead&);

}  // namespace VB_NAMESPACE

#endif
