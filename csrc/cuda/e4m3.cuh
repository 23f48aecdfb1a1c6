// Numbers of an FP8 KV cache (e4m3: no infinities, 448 is the largest) in and out of registers, eight at a time.
//
// Kernels compute in T (float16 or bfloat16, which hold every e4m3 number) and read and write pages of C, which is T or e4m3.
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "common.cuh"

namespace vb {

struct e4m3 {
  uint8_t bits;
};

template <typename C>
constexpr bool is_e4m3 = std::is_same_v<C, e4m3>;

// The two numbers in the lower 16 bits of v as float16.
__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t v) {
#if __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(v)));
  return r;
#else
  // Exponent and mantissa in the place of float16's, whose exponent is larger by 8. All ones are NaN in both.
  const uint32_t bytes = __byte_perm(v, 0, 0x1404), magnitude = (bytes & 0x7f007f00) >> 1;
  const uint32_t nan = (magnitude + 0x00800080) & 0x40004000, bits = (bytes & 0x80008000) | magnitude | nan;
  const __half2 r = __hmul2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(256.f));
  return reinterpret_cast<const uint32_t&>(r);
#endif
}

// The same as T. What bfloat16 cannot hold of a float32 is zero here.
template <typename T>
__device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t v) {
  const uint32_t half2 = half2_of_e4m3(v);
  if constexpr (std::is_same_v<T, __half>) {
    return half2;
  } else {
    const float2 f = __half22float2(reinterpret_cast<const __half2&>(half2));
    return __byte_perm(__float_as_uint(f.x), __float_as_uint(f.y), 0x7632);
  }
}

template <typename T>
__device__ __forceinline__ uint4 eight_of_e4m3(uint2 v) {
  return make_uint4(pair_of_e4m3<T>(v.x), pair_of_e4m3<T>(v.x >> 16), pair_of_e4m3<T>(v.y), pair_of_e4m3<T>(v.y >> 16));
}

// Eight numbers of C, one after another, as T.
template <typename T, typename C>
__device__ __forceinline__ uint4 load_eight(const C* from) {
  if constexpr (is_e4m3<C>) {
    return eight_of_e4m3<T>(*reinterpret_cast<const uint2*>(from));
  } else {
    static_assert(std::is_same_v<T, C>);
    return *reinterpret_cast<const uint4*>(from);
  }
}

// Queries of T that meet e4m3 in float16: a row is multiplied by the power of two that brings its largest number to between 2^14
// and 2^15, which float16 holds, and its scores by the inverse.
struct RowScale {
  float up, down;
};

// By the largest magnitude in the row.
__device__ __forceinline__ RowScale row_scale(float largest) {
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
  return {__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23)};
}

template <typename T>
__device__ __forceinline__ float largest_magnitude(const uint4& v) {
  const float2 a = Type<T>::unpack(v.x), b = Type<T>::unpack(v.y), c = Type<T>::unpack(v.z), d = Type<T>::unpack(v.w);
  return fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))),
               fmaxf(fmaxf(fabsf(c.x), fabsf(c.y)), fmaxf(fabsf(d.x), fabsf(d.y))));
}

template <typename T>
__device__ __forceinline__ uint4 scaled_to_half(const uint4& v, float scale) {
  auto pair = [&](uint32_t w) {
    const float2 f = Type<T>::unpack(w);
    return Type<__half>::pack(f.x * scale, f.y * scale);
  };
  return make_uint4(pair(v.x), pair(v.y), pair(v.z), pair(v.w));
}

// Rounded to nearest even; what is larger than 448 becomes 448.
__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Calls f(C{}) for the element type of a cache.
template <typename F>
int dispatch_cache(int dtype, F&& f) {
  return dtype == VB_E4M3 ? f(e4m3{}) : dispatch_dtype(dtype, f);
}

// Calls f(T{}, C{}) for activations and a cache of these dtypes.
template <typename F>
int dispatch_pair(int dtype, int cache_dtype, F&& f) {
  return dispatch_dtype(dtype, [&](auto t) -> int {
    if (cache_dtype == VB_E4M3) return f(t, e4m3{});
    return cache_dtype == dtype ? f(t, t) : static_cast<int>(VB_ERROR_DTYPE);
  });
}

// Calls f(T{}, C{}, Int<head_dim>{}).
template <typename F>
int dispatch(int dtype, int cache_dtype, int head_dim, F&& f) {
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    switch (head_dim) {
      case 64: return f(t, c, Int<64>{});
      case 80: return f(t, c, Int<80>{});
      case 96: return f(t, c, Int<96>{});
      case 128: return f(t, c, Int<128>{});
      case 256: return f(t, c, Int<256>{});
    }
    return VB_ERROR_HEAD_DIM;
  });
}

}  // namespace vb
