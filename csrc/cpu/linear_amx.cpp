// linear.h on the tile registers: the weights are the left operand, the activations the right one.
#include "amx.h"
#include "linear.h"

#if defined(VB_AMX)

namespace VB_NAMESPACE {

// One block of 16 weight rows against G groups of packed x.
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

static void pack_group(uint32_t* to, const Linear& job, int64_t group) {
  const int64_t count = min64(TILE, job.rows - group * TILE);
  const bf16* row[TILE];
  for (int i = 0; i < TILE; ++i) row[i] = (const bf16*)job.x + (group * TILE + min64(i, count - 1)) * job.x_stride;
  for (int64_t k = 0; k < job.in; k += TILE_PAIRS, to += TILE * TILE) {
    pack_columns(to, row, count);
    for (int i = 0; i < TILE; ++i) row[i] += TILE_PAIRS;
  }
}

static void multiply_rows(const Linear& job, const uint32_t* packed, int64_t groups, int64_t n, bf16* scratch) {
  alignas(64) float block[LINEAR_GROUPS * TILE * TILE];
  const bf16* weight = weight_rows<bf16>(job, n, scratch);
  const bf16* bias = job.bias ? (const bf16*)job.bias + n : nullptr;
  for (int64_t g = 0; g < groups; g += LINEAR_GROUPS) {
    const int64_t count = min64(LINEAR_GROUPS, groups - g);
    const uint32_t* x = packed + g * job.in / 2 * TILE;
    switch (count) {
      case 1:
        multiply<1>(block, weight, x, job.in);
        break;
      case 2:
        multiply<2>(block, weight, x, job.in);
        break;
      case 3:
        multiply<3>(block, weight, x, job.in);
        break;
      default:
        multiply<4>(block, weight, x, job.in);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t m = (g + i) * TILE;
      store_columns((bf16*)job.out + m * job.features + n, job.features, block + i * TILE * TILE, bias,
                    min64(TILE, job.rows - m));
    }
  }
}

int linear_amx(const Linear& job, int32_t threads) {
  const int64_t groups = (job.rows + TILE - 1) / TILE, size = job.in / 2 * TILE;
  uint32_t* packed = (uint32_t*)vb_scratch(VB_SCRATCH_SHARED, size_t(groups * size) * sizeof(uint32_t));
  if (!packed) return VB_NO_MEMORY;
  const bool alone = groups <= SERIAL_GROUPS;
  if (alone)
    for (int64_t g = 0; g < groups; ++g) pack_group(packed + g * size, job, g);
  const int team = job.in * job.features > VB_SERIAL_ELEMENTS ? threads : 1;
  int status = VB_OK;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t g = 0; g < groups; ++g) pack_group(packed + g * size, job, g);
    }
    bf16* scratch = nullptr;
    const bool ready = scratch_rows(job, &scratch);
    tiles_begin();
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < job.features; n += TILE)
      if (ready) multiply_rows(job, packed, groups, n, scratch);
    tiles_end();
    if (!ready) {
#pragma omp atomic write
      status = VB_NO_MEMORY;
    }
  }
  return status;
}

}  // namespace VB_NAMESPACE

#endif
