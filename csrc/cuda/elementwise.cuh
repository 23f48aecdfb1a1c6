// Eight values in a register unit (fp16 and bf16 take 16 bytes, e4m3 takes 8), and rotation of a half-split pair of them: what the memory-bound kernels are made of.
#pragma once
#include "e4m3.cuh"

namespace vb {

struct alignas(16) Vec8 {
  uint32_t w[4];
};

struct alignas(8) Bytes8 {
  uint32_t w[2];
};
template <typename C>
using Eight = std::conditional_t<is_e4m3<C>, Bytes8, Vec8>;

template <typename C>
__device__ __forceinline__ void to_float(const Eight<C>& v, float (&f)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 x;
    if constexpr (is_e4m3<C>) x = Type<__half>::unpack(half2_of_e4m3(v.w[i / 2] >> (16 * (i % 2))));
    else x = Type<C>::unpack(v.w[i]);
    f[2 * i] = x.x;
    f[2 * i + 1] = x.y;
  }
}

template <typename C>
__device__ __forceinline__ Eight<C> from_float(const float (&f)[8]) {
  if constexpr (is_e4m3<C>) {
    return Bytes8{{e4m3x4(f[0], f[1], f[2], f[3]), e4m3x4(f[4], f[5], f[6], f[7])}};
  } else {
    Vec8 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = Type<C>::pack(f[2 * i], f[2 * i + 1]);
    return v;
  }
}

// Eight values of T in the dtype of a cache.
template <typename C, typename T>
__device__ __forceinline__ Eight<C> stored_as(const Vec8& v) {
  if constexpr (std::is_same_v<C, T>) {
    return v;
  } else {
    float f[8];
    to_float<T>(v, f);
    return from_float<C>(f);
  }
}

// Read once: it need not stay in a cache of the chip.
template <typename C>
__device__ __forceinline__ Eight<C> load_once(const C* from) {
  if constexpr (is_e4m3<C>) {
    const uint2 w = __ldcs(reinterpret_cast<const uint2*>(from));
    return Bytes8{{w.x, w.y}};
  } else {
    const uint4 w = __ldcs(reinterpret_cast<const uint4*>(from));
    return Vec8{{w.x, w.y, w.z, w.w}};
  }
}

// Whether eight values of this dtype may be read at p at once.
inline bool aligned_eight(const void* p, int dtype) { return (reinterpret_cast<uintptr_t>(p) & (dtype == VB_E4M3 ? 7 : 15)) == 0; }

template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// a, b: channels d..d+7 and half + d..; cos, sin at d.
__device__ __forceinline__ void rotate(float (&a)[8], float (&b)[8], const float* cos, const float* sin) {
  float c[8], s[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(c + i) = *reinterpret_cast<const float4*>(cos + i);
    *reinterpret_cast<float4*>(s + i) = *reinterpret_cast<const float4*>(sin + i);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = a[i], y = b[i];
    a[i] = x * c[i] - y * s[i];
    b[i] = y * c[i] + x * s[i];
  }
}

// The same for packed values of T, written as C. Float32 throughout, cast once.
template <typename T, typename C>
__device__ __forceinline__ void rotate_to(C* first_to, C* second_to, const Eight<T>& first, const Eight<T>& second, const float* cos,
                                          const float* sin) {
  float a[8], b[8];
  to_float<T>(first, a);
  to_float<T>(second, b);
  rotate(a, b, cos, sin);
  *reinterpret_cast<Eight<C>*>(first_to) = from_float<C>(a);
  *reinterpret_cast<Eight<C>*>(second_to) = from_float<C>(b);
}

// Channels of a thread's unit in a head: a rotated head has rotary_half / 8 units that hold a pair (channels d.. and half + d..),
// and units beyond 2 * rotary_half that pass through, whose `second` is negative.
struct Unit {
  int first, second;
};

__device__ __forceinline__ Unit unit_of(int u, int rotary_half) {
  const int pairs = rotary_half / 8;
  return u < pairs ? Unit{u * 8, u * 8 + rotary_half} : Unit{2 * rotary_half + (u - pairs) * 8, -1};
}

inline unsigned units_of(int head_dim, int rotary_half) { return head_dim / 8 - rotary_half / 8; }

struct Pages {
  int64_t page_stride, slot_stride, head_stride;
  int log_block;

  __device__ __forceinline__ int64_t offset(int64_t slot, int head) const {
    return (slot >> log_block) * page_stride + (slot & ((1 << log_block) - 1)) * slot_stride + head * head_stride;
  }
};

inline int make_pages(Pages* pages, int64_t page_stride, int64_t slot_stride, int64_t head_stride, int block_size) {
  if (block_size < 1 || (block_size & (block_size - 1))) return VB_ERROR_BLOCK_SIZE;
  if ((page_stride | slot_stride | head_stride) & 7) return VB_ERROR_ALIGNMENT;
  *pages = {page_stride, slot_stride, head_stride, floor_log2(block_size)};
  return 0;
}

}  // namespace vb
