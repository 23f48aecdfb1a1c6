// bf16 matrix products of few or many rows with a weight matrix as checkpoints store it, without repacking the weights:
// they are the left operand, the activations the right one, and the result comes out transposed.
#include "../vllm_blend_cpu.h"
#include "amx.h"
#include "parallel.h"

#if defined(VB_AMX)

namespace VB_NAMESPACE {

constexpr int64_t GROUPS = 4;  // of 16 rows of x that share one pass over 16 rows of the weights

// out[m][n : n + 16] = tile[0:16][m] + bias, for `count` rows m.
VB_INLINE void store_columns(bf16* out, int64_t stride, const float* tile, const bf16* bias, int64_t count) {
  vf block[VL];
  for (int i = 0; i < TILE; ++i) block[i] = load(tile + i * TILE);
  transpose(block);
  const vf shift = bias ? load(bias) : vf{};
  for (int64_t m = 0; m < count; ++m) store(out + m * stride, block[m] + shift);
}

// One block of 16 weight rows against up to GROUPS groups of packed x.
template <int G>
VB_INLINE void multiply(float* to, const bf16* weight, const uint32_t* x, int64_t in) {
  const int64_t group = in / 2 * TILE;  // 32-bit words of one packed group
  _tile_zero(0);
  if (G > 1) _tile_zero(1);
  if (G > 2) _tile_zero(2);
  if (G > 3) _tile_zero(3);
  for (int64_t k = 0; k < in; k += TILE_PAIRS) {
    const uint32_t* column = x + k / 2 * TILE;
    _tile_loadd(4, weight + k, in * 2);
    _tile_loadd(5, column, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (G > 1) {
      _tile_loadd(6, column + group, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (G > 2) {
      _tile_loadd(7, column + 2 * group, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (G > 3) {
      _tile_loadd(5, column + 3 * group, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, to, 64);
  if (G > 1) _tile_stored(1, to + TILE * TILE, 64);
  if (G > 2) _tile_stored(2, to + 2 * TILE * TILE, 64);
  if (G > 3) _tile_stored(3, to + 3 * TILE * TILE, 64);
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(linear)(void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t in,
                  int64_t features, int64_t x_stride, int32_t dtype, int32_t threads) {
  if (dtype != VB_BF16 || in % TILE_PAIRS || features % TILE) return VB_BAD_DTYPE;
  const int64_t groups = (rows + TILE - 1) / TILE, group = in / 2 * TILE;
  uint32_t* packed = (uint32_t*)vb_scratch(VB_SCRATCH_SHARED, size_t(groups * group) * sizeof(uint32_t));
  if (!packed) return VB_NO_MEMORY;
  const int team = in * features > VB_SERIAL_ELEMENTS ? threads : 1;
#pragma omp parallel num_threads(team) if (team > 1)
  {
#pragma omp for schedule(static)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t count = rows - g * TILE < TILE ? rows - g * TILE : TILE;
      for (int64_t k = 0; k < in; k += TILE_PAIRS) {
        const bf16* row[TILE];
        for (int i = 0; i < TILE; ++i) row[i] = (const bf16*)x + (g * TILE + i) * x_stride + k;
        pack_columns(packed + g * group + k / 2 * TILE, row, count);
      }
    }
    tiles_begin();
    alignas(64) float tile[GROUPS * TILE * TILE];
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < features; n += TILE) {
      const bf16* w = (const bf16*)weight + n * in;
      for (int64_t g = 0; g < groups; g += GROUPS) {
        const int64_t count = min64(GROUPS, groups - g);
        switch (count) {
          case 1:
            multiply<1>(tile, w, packed + g * group, in);
            break;
          case 2:
            multiply<2>(tile, w, packed + g * group, in);
            break;
          case 3:
            multiply<3>(tile, w, packed + g * group, in);
            break;
          default:
            multiply<4>(tile, w, packed + g * group, in);
        }
        for (int64_t i = 0; i < count; ++i) {
          const int64_t m = (g + i) * TILE;
          store_columns((bf16*)out + m * features + n, features, tile + i * TILE * TILE,
                        bias ? (const bf16*)bias + n : nullptr, min64(TILE, rows - m));
        }
      }
    }
    tiles_end();
  }
  return VB_OK;
}

#endif
