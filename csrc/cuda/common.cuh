// What all kernels share: element types, packing, tensor-core wrappers of sm_80, and host-side dispatch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels.h"

namespace vb {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
struct Type;

template <>
struct Type<__half> {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __half2 v = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) { return __half22float2(reinterpret_cast<__half2&>(v)); }
};

template <>
struct Type<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// c += a b, m16n8k16, row-major a, column-major b, float32 accumulators.
template <typename T>
__device__ __forceinline__ void mma16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma16816<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// 16 bytes to shared memory; zeros when the source is not valid.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

inline int floor_log2(int v) {
  int r = 0;
  while (v > 1) v >>= 1, ++r;
  return r;
}

inline bool aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Properties of the current device, read once per device: cudaDeviceGetAttribute is cheap but not free.
struct DeviceInfo {
  int sms, major;
  int smem;  // bytes of shared memory a block may ask for
};
inline int device_info(DeviceInfo* info) {
  constexpr int kMax = 64;
  static DeviceInfo known[kMax];
  int device;
  cudaError_t e = cudaGetDevice(&device);
  if (e != cudaSuccess) return e;
  if (device < kMax && known[device].sms) {
    *info = known[device];
    return 0;
  }
  if ((e = cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, device)) != cudaSuccess) return e;
  if ((e = cudaDeviceGetAttribute(&info->smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) != cudaSuccess) return e;
  if ((e = cudaDeviceGetAttribute(&info->sms, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) return e;
  if (device < kMax) known[device] = *info;
  return 0;
}

inline int check_cache(const VbCache& c) {
  if (c.block_size < 16 || (c.block_size & (c.block_size - 1))) return VB_ERROR_BLOCK_SIZE;
  if (c.dtype != VB_FP16 && c.dtype != VB_BF16 && c.dtype != VB_E4M3) return VB_ERROR_DTYPE;
  if (c.kv_heads < 1) return VB_ERROR_HEADS;
  const int unit = c.dtype == VB_E4M3 ? 16 : 8;  // elements of 16 bytes
  if (!aligned16(c.key) || !aligned16(c.value)) return VB_ERROR_ALIGNMENT;
  if ((c.page_stride | c.slot_stride | c.head_stride) & (unit - 1)) return VB_ERROR_ALIGNMENT;
  return 0;
}

template <int D>
struct Int {
  static constexpr int value = D;
};

// Calls f(T{}) for the element type of activations.
template <typename F>
int dispatch_dtype(int dtype, F&& f) {
  switch (dtype) {
    case VB_FP16: return f(__half{});
    case VB_BF16: return f(__nv_bfloat16{});
  }
  return VB_ERROR_DTYPE;
}

// Shared memory above 48 KB must be asked for once per kernel and device; asking again is cheap and changes nothing.
template <typename K>
int allow_smem(K* kernel, int bytes) {
  return bytes <= 48 * 1024 ? 0 : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace vb
