// int4.h by itself, and as the weights of linear.h.
#include "int4.h"

#include "linear.h"

namespace VB_NAMESPACE {

// The most rows of x for which `few_rows` is faster than `linear`.
static int64_t most_few_rows(int32_t dtype) {
#if defined(VB_AMX)
  if (dtype == VB_BF16) return 2;
#endif
  (void)dtype;
  return 4;
}

template <typename T>
static int unpack(T* out, const Int4& from, int64_t features, int32_t threads) {
  VB_PARALLEL_FOR(features * from.in)
  for (int64_t row = 0; row < features; ++row) unpack_row<T>(out + row * from.in, from, row);
  return VB_OK;
}

// Results n and n + 1 of M rows of x, [M, in] floats: the weights go from their bytes into the sums.
template <typename T, int M>
VB_INLINE void dots(const Linear& job, const float* x, int64_t n) {
  const Int4& from = *job.int4;
  vf sums[2][M][2] = {};
  for (int64_t g = 0, k = 0; k < from.in; ++g, k += from.group)
    for (int64_t row = 0; row < 2; ++row) {
      const uint8_t* bytes = from.values + (n + row) * (from.in / 2);
      const Group<T, float> group = group_at<T, float>(from, n + row, g);
      each_run(k, k + from.group, [&](int64_t run, bool upper) __attribute__((always_inline)) {
        for (int64_t i = 0; i < INT4_RUN; i += VL) {
          const vf weights = group.floats(bytes + byte_of(run, upper), upper, i);
          for (int m = 0; m < M; ++m) sums[row][m][upper] += weights * load(x + m * from.in + run + i);
        }
      });
    }
  for (int64_t row = 0; row < 2; ++row)
    for (int m = 0; m < M; ++m) {
      float total = sum_lanes(sums[row][m][0] + sums[row][m][1]);
      if (job.bias) total += load_n((const T*)job.bias + n + row, 1)[0];
      store_n((T*)job.out + m * job.features + n + row, splat(total), 1);
    }
}

// linear.h for 1 to 4 rows of x, for which unpacking into memory costs more than the product.
template <typename T>
static int few_rows(const Linear& job, int32_t threads) {
  float* x = (float*)vb_scratch(VB_SCRATCH_SHARED, size_t(job.rows * job.in) * sizeof(float));
  if (!x) return VB_NO_MEMORY;
  for (int64_t m = 0; m < job.rows; ++m)
    for (int64_t k = 0; k < job.in; k += VL) store(x + m * job.in + k, load((const T*)job.x + m * job.x_stride + k));
  VB_PARALLEL_FOR(job.in * job.features)
  for (int64_t n = 0; n < job.features; n += 2) switch (job.rows) {
      case 1:
        dots<T, 1>(job, x, n);
        break;
      case 2:
        dots<T, 2>(job, x, n);
        break;
      case 3:
        dots<T, 3>(job, x, n);
        break;
      default:
        dots<T, 4>(job, x, n);
    }
  return VB_OK;
}

static bool is_known(const Int4& weight) {
  return weight.in % (2 * INT4_RUN) == 0 && weight.group > 0 && weight.group % INT4_RUN == 0 &&
         weight.in % weight.group == 0 && weight.scale_dtype >= VB_F32 && weight.scale_dtype <= VB_F16;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(int4_linear)(void* out, const void* x, const void* weight, const void* scales, const void* zeros,
                       const void* bias, int64_t rows, int64_t in, int64_t features, int64_t group, int64_t x_stride,
                       int32_t scale_dtype, int32_t dtype, int32_t threads) {
  const Int4 int4 = {(const uint8_t*)weight, scales, (const uint8_t*)zeros, in, group, scale_dtype};
  if (!is_known(int4) || features % WEIGHT_ROWS) return VB_BAD_DTYPE;
  const Linear job = {out, x, nullptr, bias, rows, in, features, x_stride, &int4};
  if (rows > 0 && rows <= most_few_rows(dtype)) {
    if (dtype == VB_F32) return few_rows<float>(job, threads);
    if (dtype == VB_BF16) return few_rows<bf16>(job, threads);
    if (dtype == VB_F16) return few_rows<f16>(job, threads);
  }
  return linear(job, dtype, threads);
}

int VB_FN(int4_unpack)(void* out, const void* weight, const void* scales, const void* zeros, int64_t in,
                       int64_t features, int64_t group, int32_t scale_dtype, int32_t dtype, int32_t threads) {
  const Int4 from = {(const uint8_t*)weight, scales, (const uint8_t*)zeros, in, group, scale_dtype};
  if (!is_known(from)) return VB_BAD_DTYPE;
  if (dtype == VB_F32) return unpack((float*)out, from, features, threads);
  if (dtype == VB_BF16) return unpack((bf16*)out, from, features, threads);
  if (dtype == VB_F16) return unpack((f16*)out, from, features, threads);
  return VB_BAD_DTYPE;
}
