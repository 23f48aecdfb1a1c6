// RMSNorm with an optional residual, and the gated SiLU.
#include "../vllm_blend_cpu.h"
#include "parallel.h"
#include "simd.h"

namespace VB_NAMESPACE {

template <typename T>
VB_INLINE void norm_row(T* out, T* sum, const T* x, const T* residual, const T* weight, int64_t n, float eps) {
  vf squares = {};
  if (residual) {
    for (int64_t i = 0; i < n; i += VL) {
      // The residual stream is what the next layer reads: square what was stored, not what was computed.
      const vf total = round_to(load_n(x + i, n - i) + load_n(residual + i, n - i), x);
      store_n(sum + i, total, n - i);
      squares += total * total;
    }
    x = sum;
  } else {
    for (int64_t i = 0; i < n; i += VL) {
      const vf value = load_n(x + i, n - i);
      squares += value * value;
    }
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(squares) / float(n) + eps);
  for (int64_t i = 0; i < n; i += VL) {
    // Rounded before the product with the weight, as Hugging Face's Llama does it.
    const vf normed = round_to(load_n(x + i, n - i) * inverse, x);
    store_n(out + i, normed * load_n(weight + i, n - i), n - i);
  }
}

template <typename T>
static int rms_norm(void* out, void* sum, const void* x, const void* residual, const void* weight, int64_t rows,
                    int64_t n, int64_t x_stride, float eps, int32_t threads) {
  VB_PARALLEL_FOR(rows * n)
  for (int64_t r = 0; r < rows; ++r)
    norm_row<T>((T*)out + r * n, residual ? (T*)sum + r * n : nullptr, (const T*)x + r * x_stride,
                residual ? (const T*)residual + r * n : nullptr, (const T*)weight, n, eps);
  return VB_OK;
}

template <typename T>
VB_INLINE vf divide(vf a, vf b, const T*) {
  return a / b;
}
#if defined(__AVX512F__)
// Division is what limits silu_and_mul, and 14 bits of the reciprocal are more than bf16 keeps. (1 / infinity is 0.)
VB_INLINE vf divide(vf a, vf b, const bf16*) { return a * bit_cast<vf>(_mm512_rcp14_ps(bit_cast<__m512>(b))); }
#endif

template <typename T>
static int silu_and_mul(void* out, const void* gate_up, int64_t rows, int64_t n, int64_t stride, int32_t threads) {
  VB_PARALLEL_FOR(rows * n)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = (const T*)gate_up + r * stride;
    const T* up = gate + n;
    T* to = (T*)out + r * n;
    for (int64_t i = 0; i < n; i += VL) {
      const vf g = load_n(gate + i, n - i);
      const vf raised = g * -kLog2e;  // 2^128 is an infinity, and the quotient then 0
      const vf denominator = exp2_(raised > splat(128.0f) ? splat(128.0f) : raised) + 1.0f;
      store_n(to + i, divide(g, denominator, gate) * load_n(up + i, n - i), n - i);
    }
  }
  return VB_OK;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(rms_norm)(void* out, void* sum, const void* x, const void* residual, const void* weight, int64_t rows,
                    int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t threads) {
  switch (dtype) {
    case VB_F32:
      return rms_norm<float>(out, sum, x, residual, weight, rows, n, x_stride, eps, threads);
    case VB_BF16:
      return rms_norm<bf16>(out, sum, x, residual, weight, rows, n, x_stride, eps, threads);
    case VB_F16:
      return rms_norm<f16>(out, sum, x, residual, weight, rows, n, x_stride, eps, threads);
  }
  return VB_BAD_DTYPE;
}

int VB_FN(silu_and_mul)(void* out, const void* gate_up, int64_t rows, int64_t n, int64_t stride, int32_t dtype,
                        int32_t threads) {
  switch (dtype) {
    case VB_F32:
      return silu_and_mul<float>(out, gate_up, rows, n, stride, threads);
    case VB_BF16:
      return silu_and_mul<bf16>(out, gate_up, rows, n, stride, threads);
    case VB_F16:
      return silu_and_mul<f16>(out, gate_up, rows, n, stride, threads);
  }
  return VB_BAD_DTYPE;
}
