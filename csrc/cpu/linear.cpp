// linear.h in float32, and the choice between the kernels.
#include "linear.h"

namespace VB_NAMESPACE {

// While a block is multiplied, the one after it is on its way: each line of it is asked for once.
// R weight rows against C groups of packed x [in, VL] (a group is `in` * VL floats): block[c][r] are VL results.
template <int R, int C>
VB_INLINE void multiply(float* block, const float* weight, const float* x, int64_t in) {
  vf sums[R][C] = {};
  for (int64_t line = 0; line < in; line += 16) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(weight + (WEIGHT_ROWS + r) * in + line, 0, 2);
    for (int64_t k = line; k < line + 16; ++k) {
      vf column[C];
      for (int c = 0; c < C; ++c) column[c] = load(x + (c * in + k) * VL);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] += column[c] * weight[r * in + k];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(block + (c * WEIGHT_ROWS + r) * VL, sums[r][c]);
}
template <int C>
VB_INLINE void multiply_block(float* block, const float* weight, const float* x, int64_t in) {
  constexpr int R = (VL == 16 ? 16 : 8) / C;  // accumulators that fit the registers
  for (int64_t r = 0; r < WEIGHT_ROWS; r += R) multiply<R, C>(block + r * VL, weight + r * in, x, in);
}

template <typename T>
static void pack_group(float* to, const Linear& job, int64_t group) {
  const int64_t count = min64(VL, job.rows - group * VL);
  const T* x = (const T*)job.x + group * VL * job.x_stride;
  for (int64_t k = 0; k < job.in; k += VL, to += VL * VL) {
    vf block[VL];
    for (int64_t i = 0; i < VL; ++i) block[i] = i < count ? load(x + i * job.x_stride + k) : vf{};
    transpose(block);
    for (int i = 0; i < VL; ++i) store(to + i * VL, block[i]);
  }
}

template <typename T>
static void multiply_rows(const Linear& job, const float* packed, int64_t groups, int64_t n, float* scratch) {
  alignas(64) float block[LINEAR_GROUPS * WEIGHT_ROWS * VL];
  const float* weight = weight_rows<T>(job, n, scratch);
  const T* bias = job.bias ? (const T*)job.bias + n : nullptr;
  const int64_t size = job.in * VL;
  for (int64_t g = 0; g < groups; g += LINEAR_GROUPS) {
    const int64_t count = min64(LINEAR_GROUPS, groups - g);
    switch (count) {
      case 1:
        multiply_block<1>(block, weight, packed + g * size, job.in);
        break;
      case 2:
        multiply_block<2>(block, weight, packed + g * size, job.in);
        break;
      case 3:  // three do not divide a block's rows evenly
        multiply_block<2>(block, weight, packed + g * size, job.in);
        multiply_block<1>(block + 2 * WEIGHT_ROWS * VL, weight, packed + (g + 2) * size, job.in);
        break;
      default:
        multiply_block<4>(block, weight, packed + g * size, job.in);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t m = (g + i) * VL;
      store_columns((T*)job.out + m * job.features + n, job.features, block + i * WEIGHT_ROWS * VL, bias,
                    min64(VL, job.rows - m));
    }
  }
}

template <typename T>
static int linear_f32(const Linear& job, int32_t threads) {
  const int64_t groups = (job.rows + VL - 1) / VL, size = job.in * VL;
  float* packed = (float*)vb_scratch(VB_SCRATCH_SHARED, size_t(groups * size) * sizeof(float));
  if (!packed) return VB_NO_MEMORY;
  for (int64_t g = 0; g < groups; ++g) pack_group<T>(packed + g * size, job, g);
  const int team = job.in * job.features > VB_SERIAL_ELEMENTS ? threads : 1;
  int status = VB_OK;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    float* scratch = nullptr;
    const bool ready = scratch_rows(job, &scratch);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < job.features; n += WEIGHT_ROWS)
      if (ready) multiply_rows<T>(job, packed, groups, n, scratch);
    if (!ready) {
#pragma omp atomic write
      status = VB_NO_MEMORY;
    }
  }
  return status;
}

#if defined(__AVX512BF16__) && !defined(VB_AMX)
// Results n to n + R of M rows of x: pairs of bf16 are multiplied as both lie.
template <int M, int R>
VB_INLINE void dots(const Linear& job, const bf16* x, bf16* out, int64_t n) {
  const bf16* weight = (const bf16*)job.weight + n * job.in;
  __m512 sums[R][M] = {};
  for (int64_t k = 0; k < job.in; k += 32) {
    __m512bh rows[M];
    for (int m = 0; m < M; ++m) rows[m] = bit_cast<__m512bh>(_mm512_loadu_si512(x + m * job.x_stride + k));
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(weight + (R + r) * job.in + k, 0, 2);
      const __m512bh own = bit_cast<__m512bh>(_mm512_loadu_si512(weight + r * job.in + k));
      for (int m = 0; m < M; ++m) sums[r][m] = _mm512_dpbf16_ps(sums[r][m], own, rows[m]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float shift = job.bias ? load_n((const bf16*)job.bias + n + r, 1)[0] : 0;
    for (int m = 0; m < M; ++m)
      store_n(out + m * job.features + n + r, splat(_mm512_reduce_add_ps(sums[r][m]) + shift), 1);
  }
}

template <int M>
static void few_rows(const Linear& job, int64_t first, int32_t threads) {
  constexpr int R = M == 1 ? 8 : M <= 4 ? 4 : 2;  // sums that fit the registers
  const bf16* x = (const bf16*)job.x + first * job.x_stride;
  bf16* out = (bf16*)job.out + first * job.features;
  VB_PARALLEL_FOR(job.in * job.features)
  for (int64_t n = 0; n < job.features; n += R) dots<M, R>(job, x, out, n);
}

static int linear_pairs(const Linear& job, int32_t threads) {
  void (*const passes[])(const Linear&, int64_t, int32_t) = {few_rows<1>, few_rows<2>, few_rows<3>, few_rows<4>,
                                                             few_rows<5>, few_rows<6>, few_rows<7>, few_rows<8>};
  for (int64_t m = 0; m < job.rows; m += 8) passes[min64(8, job.rows - m) - 1](job, m, threads);  // over all weights
  return VB_OK;
}
#endif

int linear(const Linear& job, int32_t dtype, int32_t threads) {
  if (job.in % 32 || job.features % WEIGHT_ROWS) return VB_BAD_DTYPE;
  if (dtype == VB_F32) return linear_f32<float>(job, threads);
#if defined(VB_AMX)
  if (dtype == VB_BF16) return linear_amx(job, threads);
#elif defined(__AVX512BF16__)
  if (dtype == VB_BF16 && !job.int4) return linear_pairs(job, threads);
#endif
  if (!job.int4) return VB_BAD_DTYPE;  // of matrices as they lie, torch has the better product
  if (dtype == VB_BF16) return linear_f32<bf16>(job, threads);
  if (dtype == VB_F16) return linear_f32<f16>(job, threads);
  return VB_BAD_DTYPE;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(linear)(void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t in,
                  int64_t features, int64_t x_stride, int32_t dtype, int32_t threads) {
  return linear({out, x, weight, bias, rows, in, features, x_stride}, dtype, threads);
}
