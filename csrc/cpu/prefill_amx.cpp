// prefill.cpp's tile on the tile registers: the same transposed scores and the same softmax, with both products in bf16
// pairs. Keys are a left operand just as they lie in the cache; values become one by a transpose that all rows of the
// tile share.
#include "amx.h"
#include "prefill.h"
#include "softmax.h"

#if defined(VB_AMX)

namespace VB_NAMESPACE {

constexpr int64_t WORDS = TILE * TILE;  // 32-bit words of a tile register
constexpr int64_t ROW_TILES = TILE_ROWS / TILE;

constexpr int64_t STEPS = TILE_KEYS / TILE_PAIRS;  // products of 32 keys

struct PrefillTiles {
  Softmax softmax;
  alignas(64) uint32_t q[MAX_HEAD_DIM / TILE_PAIRS * ROW_TILES * WORDS];  // right operands, [channel steps, row tiles]
  alignas(64) float scores[SCORES];
  alignas(64) uint32_t weights[ROW_TILES * STEPS * WORDS];           // right operands, [row tiles, steps]
  alignas(64) uint32_t values[MAX_HEAD_DIM / TILE * STEPS * WORDS];  // left operands, [channel tiles, steps]
  alignas(64) float out[MAX_HEAD_DIM / TILE * ROW_TILES * WORDS];    // [channel tiles, row tiles, 16 channels, 16 rows]
  alignas(64) bf16 keys[TILE_KEYS * MAX_HEAD_DIM], value_rows[TILE_KEYS * MAX_HEAD_DIM];  // of an e4m3 cache
  int64_t offsets[TILE_KEYS], own[TILE_KEYS];
  int64_t channel_tiles;
};

size_t prefill_amx_scratch_bytes() { return sizeof(PrefillTiles); }

static void pack_queries(const Paged& a, PrefillTiles& s) {
  for (int64_t t = 0; t < s.softmax.rows.vectors; ++t) {
    const bf16* row[TILE];
    for (int64_t i = 0; i < TILE; ++i) row[i] = (const bf16*)a.q + s.softmax.rows.queries[t * TILE + i];
    for (int64_t step = 0; step * TILE_PAIRS < a.head_dim; ++step) {
      pack_columns(s.q + (step * ROW_TILES + t) * WORDS, row, TILE);
      for (int64_t i = 0; i < TILE; ++i) row[i] += TILE_PAIRS;
    }
  }
}

// Two groups of 16 keys against two tiles of rows.
static __attribute__((noinline)) void score_square(float* scores, const bf16* low, const bf16* high, int64_t row_bytes,
                                                   const uint32_t* q, int64_t head_dim) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < head_dim; d += TILE_PAIRS, q += ROW_TILES * WORDS) {
    _tile_loadd(4, low + d, row_bytes);
    _tile_loadd(6, q, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, q + WORDS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, high + d, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + COLUMN, 64);
  _tile_stored(2, scores + WORDS, 64);
  _tile_stored(3, scores + COLUMN + WORDS, 64);
}

// The weights of one vector of rows -> right operands: row p of a step pairs the keys 2p and 2p + 1.
static __attribute__((noinline)) void pack_weights(PrefillTiles& s, int64_t v) {
  const vu half = vu{} + 0x8000u;  // rounds to nearest; weights are finite and not negative
  const float* column = s.scores + v * COLUMN;
  uint32_t* to = s.weights + v * STEPS * WORDS;
  for (int64_t k = 0; k < TILE_KEYS; k += 2, to += TILE) {
    const vu even = bit_cast<vu>(load(column + k * VL)) + half, odd = bit_cast<vu>(load(column + (k + 1) * VL)) + half;
    const vu pairs = (even >> 16) | (odd & 0xffff0000u);
    __builtin_memcpy(to, &pairs, sizeof(pairs));
  }
}

// Values of `count` keys -> left operands, channels down and keys across; zeros stand for the keys from `count` on,
// whose slots may hold NaN.
static __attribute__((noinline)) void pack_values(PrefillTiles& s, const bf16* values, const int64_t* offsets,
                                                  int64_t count) {
  for (int64_t step = 0; step < STEPS; ++step)
    for (int64_t t = 0; t < s.channel_tiles; t += 2) {
      vf low[VL], high[VL];
      for (int64_t pair = 0; pair < TILE; ++pair) {
        __m512i row[2];
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t key = step * TILE_PAIRS + 2 * pair + i;
          row[i] = key < count ? _mm512_loadu_si512(values + offsets[key] + t * TILE) : _mm512_setzero_si512();
        }
        low[pair] = bit_cast<vf>(_mm512_unpacklo_epi16(row[0], row[1]));
        high[pair] = bit_cast<vf>(_mm512_unpackhi_epi16(row[0], row[1]));
      }
      transpose(low);
      transpose(high);
      // Interleaving works on quarters: lane 4q + i of `low` is channel 8q + i, of `high` channel 8q + 4 + i.
      for (int q = 0; q < 4; ++q)
        for (int i = 0; i < 4; ++i) {
          const int64_t channel = t * TILE + 8 * q + i;
          auto place = [&](int64_t c) { return s.values + (c / TILE * STEPS + step) * WORDS + c % TILE * TILE; };
          __builtin_memcpy(place(channel), &low[4 * q + i], 64);
          __builtin_memcpy(place(channel + 4), &high[4 * q + i], 64);
        }
    }
}

// out += values . weights, for two tiles of channels and two of rows.
static __attribute__((noinline)) void value_square(PrefillTiles& s, int64_t channel_tile, int64_t row_tile) {
  float* out = s.out + (channel_tile * ROW_TILES + row_tile) * WORDS;
  const uint32_t *values = s.values + channel_tile * STEPS * WORDS, *weights = s.weights + row_tile * STEPS * WORDS;
  _tile_loadd(0, out, 64);
  _tile_loadd(1, out + WORDS, 64);
  _tile_loadd(2, out + ROW_TILES * WORDS, 64);
  _tile_loadd(3, out + (ROW_TILES + 1) * WORDS, 64);
  for (int64_t step = 0; step < STEPS; ++step, values += WORDS, weights += WORDS) {
    _tile_loadd(4, values, 64);
    _tile_loadd(6, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + STEPS * WORDS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, values + STEPS * WORDS, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + WORDS, 64);
  _tile_stored(2, out + ROW_TILES * WORDS, 64);
  _tile_stored(3, out + (ROW_TILES + 1) * WORDS, 64);
}

// Multiply the rows of every tile of out by factors [rows].
static __attribute__((noinline)) void scale_rows(PrefillTiles& s, const float* factors) {
  for (int64_t c = 0; c < s.channel_tiles; ++c)
    for (int64_t v = 0; v < s.softmax.rows.vectors; ++v) {
      const vf factor = load(factors + v * VL);
      float* out = s.out + (c * ROW_TILES + v) * WORDS;
      for (int i = 0; i < TILE; ++i) store(out + i * TILE, load(out + i * TILE) * factor);
    }
}

static void write_out(const Paged& a, const Tile& tile, PrefillTiles& s) {
  for (int64_t v = 0; v < s.softmax.rows.vectors; ++v)
    store(s.softmax.sums + v * VL, 1.0f / load(s.softmax.sums + v * VL));
  scale_rows(s, s.softmax.sums);
  for (int64_t c = 0; c < s.channel_tiles; ++c)
    for (int64_t r = 0; r < tile.rows; r += TILE) {
      vf block[VL];
      for (int i = 0; i < TILE; ++i) block[i] = load(s.out + (c * ROW_TILES + r / TILE) * WORDS + i * TILE);
      transpose(block);
      for (int64_t i = 0; i < min64(TILE, tile.rows - r); ++i)
        store((bf16*)a.out + s.softmax.rows.outputs[r + i] + c * TILE, block[i]);
    }
}

// Rows of one head of an e4m3 cache as bf16, one after another.
static __attribute__((noinline)) void widen_rows(bf16* to, const f8* cache, const int64_t* offsets, int64_t count,
                                                 int64_t head_dim) {
  for (int64_t k = 0; k < count; ++k) widen_row(to + k * head_dim, cache + offsets[k], head_dim);
}

template <typename C>
void prefill_tile_amx(const Paged& a, const Tile& tile, void* scratch) {
  PrefillTiles& s = *(PrefillTiles*)scratch;
  s.softmax.begin(a, tile, 2 * TILE);  // tiles of rows are taken in twos
  const Rows& rows = s.softmax.rows;
  s.channel_tiles = a.head_dim / TILE;
  pack_queries(a, s);
  for (int64_t i = 0; i < s.channel_tiles * ROW_TILES * WORDS; ++i) s.out[i] = 0.0f;

  const C* cached_keys = (const C*)a.keys + tile.kv_head * a.head_dim;
  const C* cached_values = (const C*)a.values + tile.kv_head * a.head_dim;
  constexpr bool widens = sizeof(C) == 1;
  const bf16* keys = widens ? s.keys : (const bf16*)cached_keys;
  const bf16* values = widens ? s.value_rows : (const bf16*)cached_values;
  const int64_t* offsets = widens ? s.own : s.offsets;
  const int64_t row_bytes = (widens ? a.head_dim : a.row()) * 2;
  for (int64_t k = 0; k < TILE_KEYS; ++k) s.own[k] = k * a.head_dim;
  const int64_t end = rows.highest + 1;
  bool fresh = true;  // out is zero and needs no scaling
  for (int64_t first = a.first_key(rows.lowest) / TILE * TILE; first < end; first += TILE_KEYS, fresh = false) {
    const int64_t count = min64(TILE_KEYS, end - first);
    a.offsets(s.offsets, tile.request, first, count);
    if constexpr (widens) {
      widen_rows(s.keys, cached_keys, s.offsets, count, a.head_dim);
      widen_rows(s.value_rows, cached_values, s.offsets, count, a.head_dim);
    }
    // Keys from `end` on lie behind every row, so the mask gives them weights of 0, whatever their scores.
    for (int64_t k = 0; k < TILE_KEYS; k += 2 * TILE) {
      const bf16* low = keys + offsets[k < count ? k : 0];
      const bf16* high = keys + offsets[k + TILE < count ? k + TILE : 0];
      for (int64_t v = 0; v < rows.vectors; v += 2)
        score_square(s.scores + v * COLUMN + k * VL, low, high, row_bytes, s.q + v * WORDS, a.head_dim);
    }
    const bool shrunk = Softmax::step(s.softmax, s.scores, a.scale * kLog2e, first, TILE_KEYS, a.window,
                                      [&s](int64_t v) { pack_weights(s, v); });
    if (shrunk && !fresh) scale_rows(s, s.softmax.shrink);
    pack_values(s, values, offsets, count);
    for (int64_t c = 0; c < s.channel_tiles; c += 2)
      for (int64_t v = 0; v < rows.vectors; v += 2) value_square(s, c, v);
  }
  write_out(a, tile, s);
}

template void prefill_tile_amx<bf16>(const Paged&, const Tile&, void*);
template void prefill_tile_amx<f8>(const Paged&, const Tile&, void*);

}  // namespace VB_NAMESPACE

#endif
