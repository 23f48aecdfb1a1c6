// Eight fp16/bf16 values in 16 bytes, and rotation of a half-split pair of them: what the memory-bound kernels are made of.
#pragma once
#include "common.cuh"

namespace vb {

struct alignas(16) Vec8 {
  uint32_t w[4];
};

template <typename T>
__device__ __forceinline__ void to_float(const Vec8& v, float (&f)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = Type<T>::unpack(v.w[i]);
    f[2 * i] = x.x;
    f[2 * i + 1] = x.y;
  }
}

template <typename T>
__device__ __forceinline__ Vec8 from_float(const float (&f)[8]) {
  Vec8 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.w[i] = Type<T>::pack(f[2 * i], f[2 * i + 1]);
  return v;
}

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

// The same for packed values. Float32 throughout, cast once.
template <typename T>
__device__ __forceinline__ void rotate(Vec8& first, Vec8& second, const float* cos, const float* sin) {
  float a[8], b[8];
  to_float<T>(first, a);
  to_float<T>(second, b);
  rotate(a, b, cos, sin);
  first = from_float<T>(a);
  second = from_float<T>(b);
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
