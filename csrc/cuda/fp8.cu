// FP8 (e4m3) with one scale a row: the row's largest magnitude becomes 448, the largest e4m3 value. Alone, and fused behind
// RMSNorm and the gated activation, which round to T first, so that fused and apart give the same bits.
#include "elementwise.cuh"

namespace vb {
namespace {

constexpr int kMaxVecs = 4;          // 16-byte units a thread keeps in registers, so that a row is read once: 1, 2 or 4
constexpr float kE4M3Max = 448.f;
constexpr float kSmallest = 1e-12f;  // stands in for the largest magnitude of a row of zeros

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// The row's scale from each thread's largest magnitude, to all threads.
__device__ __forceinline__ float row_scale(float largest) {
  __shared__ float shared[32];
  const int lane = threadIdx.x & 31;
  largest = warp_max(largest);
  if (lane == 0) shared[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = warp_max(lane < blockDim.x / 32 ? shared[lane] : 0.f);
  return fmaxf(largest, kSmallest) * (1.f / kE4M3Max);
}

__device__ __forceinline__ float largest_of(const float (&f)[8], float largest) {
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(f[j]));
  return largest;
}

// Scales and writes the row that the block's threads hold; `largest` is over each thread's part.
template <typename T, int kVecs>
__device__ __forceinline__ void write_row(const Vec8 (&kept)[kVecs], float largest, int units, uint8_t* out, float* scale_out) {
  const float scale = row_scale(largest), inverse = 1.f / scale;
  if (threadIdx.x == 0) *scale_out = scale;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    float f[8];
    to_float<T>(kept[i], f);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] *= inverse;
    *reinterpret_cast<uint2*>(out + u * 8) = make_uint2(e4m3x4(f[0], f[1], f[2], f[3]), e4m3x4(f[4], f[5], f[6], f[7]));
  }
}

template <typename T, int kVecs>
__global__ void __launch_bounds__(1024) quantize_kernel(const T* x, int64_t row_stride, uint8_t* out, float* scales, int n) {
  const T* row = x + blockIdx.x * row_stride;
  const int units = n / 8;
  Vec8 kept[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u < units) kept[i] = *reinterpret_cast<const Vec8*>(row + u * 8);
  }
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (threadIdx.x + i * blockDim.x >= units) break;
    float f[8];
    to_float<T>(kept[i], f);
    largest = largest_of(f, largest);
  }
  write_row<T, kVecs>(kept, largest, units, out + int64_t(blockIdx.x) * n, scales + blockIdx.x);
}

// The scales of a matrix product that were not applied to it: one a row, one a column. Null: it is as it should be.
struct ProductScales {
  const float* rows;
  const float* columns;

  __device__ __forceinline__ float row() const { return rows ? rows[blockIdx.x] : 1.f; }
  __device__ __forceinline__ void apply(float (&f)[8], float row, int column) const {
    if (!rows) return;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 c = *reinterpret_cast<const float4*>(columns + column + j);
      f[j] *= row * c.x;
      f[j + 1] *= row * c.y;
      f[j + 2] *= row * c.z;
      f[j + 3] *= row * c.w;
    }
  }
};

// The sum of squares is added up in the order of vb_rms_norm.
template <typename T, int kVecs>
__global__ void __launch_bounds__(512) rms_norm_quantize_kernel(const T* x, ProductScales x_scales, T* residual, const T* weight,
                                                                uint8_t* out, float* scales, int n, float eps) {
  const int64_t row = int64_t(blockIdx.x) * n;
  const int units = n / 8;
  const float x_row_scale = x_scales.row();
  Vec8 kept[kVecs], added[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u < units) {
      kept[i] = *reinterpret_cast<const Vec8*>(x + row + u * 8);
      if (residual) added[i] = *reinterpret_cast<const Vec8*>(residual + row + u * 8);
    }
  }
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    float f[8];
    to_float<T>(kept[i], f);
    x_scales.apply(f, x_row_scale, u * 8);
    if (residual) {
      float r[8];
      to_float<T>(added[i], r);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] += r[j];
      kept[i] = from_float<T>(f);
      *reinterpret_cast<Vec8*>(residual + row + u * 8) = kept[i];
      to_float<T>(kept[i], f);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) total += f[j] * f[j];
  }
  __shared__ float sums[32];
  total = warp_sum(total);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = total;
  __syncthreads();
  total = warp_sum((threadIdx.x & 31) < blockDim.x / 32 ? sums[threadIdx.x & 31] : 0.f);
  const float inverse = rsqrtf(total / n + eps);
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    float f[8], w[8];
    to_float<T>(kept[i], f);
    to_float<T>(*reinterpret_cast<const Vec8*>(weight + u * 8), w);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = round_to<T>(f[j] * inverse) * w[j];
    kept[i] = from_float<T>(f);
    to_float<T>(kept[i], f);
    largest = largest_of(f, largest);
  }
  write_row<T, kVecs>(kept, largest, units, out + row, scales + blockIdx.x);
}

template <typename T, int kVecs>
__global__ void __launch_bounds__(1024) silu_and_mul_quantize_kernel(const T* gate_up, ProductScales product, uint8_t* out,
                                                                     float* scales, int n) {
  const T* row = gate_up + int64_t(blockIdx.x) * 2 * n;
  const int units = n / 8;
  const float product_row_scale = product.row();
  Vec8 kept[kVecs], ups[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u < units) {
      kept[i] = *reinterpret_cast<const Vec8*>(row + u * 8);
      ups[i] = *reinterpret_cast<const Vec8*>(row + n + u * 8);
    }
  }
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int u = threadIdx.x + i * blockDim.x;
    if (u >= units) break;
    float g[8], up[8];
    to_float<T>(kept[i], g);
    to_float<T>(ups[i], up);
    product.apply(g, product_row_scale, u * 8);
    product.apply(up, product_row_scale, n + u * 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = round_to<T>(__fdividef(g[j], 1.f + __expf(-g[j]))) * up[j];
    kept[i] = from_float<T>(g);
    to_float<T>(kept[i], g);
    largest = largest_of(g, largest);
  }
  write_row<T, kVecs>(kept, largest, units, out + int64_t(blockIdx.x) * n, scales + blockIdx.x);
}

int check_rows(int64_t rows, int n, int max_threads) {
  return rows < 0 || rows > INT32_MAX || n < 8 || n % 8 || n > max_threads * 8 * kMaxVecs ? VB_ERROR_SHAPE : 0;
}

// One unit a thread while the block can grow.
int threads_for(int n) {
  int threads = 32;
  while (threads < 1024 && threads * 8 < n) threads *= 2;
  return threads;
}

template <typename F>
int dispatch_vecs(int dtype, int n, int threads, F&& f) {
  const int vecs = (n / 8 + threads - 1) / threads;
  return dispatch_dtype(dtype, [&](auto t) -> int {
    if (vecs <= 1) return f(t, Int<1>{});
    if (vecs <= 2) return f(t, Int<2>{});
    return f(t, Int<kMaxVecs>{});
  });
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_quantize_fp8(const void* x, int64_t row_stride, void* out, float* scales, int64_t rows, int n, int dtype,
                               void* stream) {
  if (int e = check_rows(rows, n, 1024)) return e;
  if (!aligned16(x) || !aligned16(out) || row_stride % 8) return VB_ERROR_ALIGNMENT;
  if (rows == 0) return 0;
  const int threads = threads_for(n);
  return dispatch_vecs(dtype, n, threads, [&](auto t, auto v) -> int {
    using T = decltype(t);
    quantize_kernel<T, decltype(v)::value><<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), row_stride, static_cast<uint8_t*>(out), scales, n);
    return cudaGetLastError();
  });
}

extern "C" int vb_rms_norm_quantize_fp8(const void* x, const float* x_row_scales, const float* x_column_scales, void* residual,
                                        const void* weight, void* out, float* scales, int64_t rows, int n, float eps, int dtype,
                                        void* stream) {
  if (int e = check_rows(rows, n, 512)) return e;
  if (!aligned16(x) || !aligned16(x_column_scales) || !aligned16(residual) || !aligned16(weight) || !aligned16(out))
    return VB_ERROR_ALIGNMENT;
  if (rows == 0) return 0;
  int threads = 32;  // as vb_rms_norm
  while (threads < 512 && threads * 8 * 2 < n) threads *= 2;
  return dispatch_vecs(dtype, n, threads, [&](auto t, auto v) -> int {
    using T = decltype(t);
    rms_norm_quantize_kernel<T, decltype(v)::value><<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), {x_row_scales, x_column_scales}, static_cast<T*>(residual), static_cast<const T*>(weight),
        static_cast<uint8_t*>(out), scales, n, eps);
    return cudaGetLastError();
  });
}

extern "C" int vb_silu_and_mul_quantize_fp8(const void* gate_up, const float* row_scales, const float* column_scales, void* out,
                                            float* scales, int64_t rows, int n, int dtype, void* stream) {
  if (int e = check_rows(rows, n, 1024)) return e;
  if (!aligned16(gate_up) || !aligned16(column_scales) || !aligned16(out)) return VB_ERROR_ALIGNMENT;
  if (rows == 0) return 0;
  const int threads = threads_for(n);
  return dispatch_vecs(dtype, n, threads, [&](auto t, auto v) -> int {
    using T = decltype(t);
    silu_and_mul_quantize_kernel<T, decltype(v)::value><<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(gate_up), {row_scales, column_scales}, static_cast<uint8_t*>(out), scales, n);
    return cudaGetLastError();
  });
}
