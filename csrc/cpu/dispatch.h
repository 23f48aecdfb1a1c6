// From dtype codes to types.
#ifndef VLLM_BLEND_DISPATCH_H
#define VLLM_BLEND_DISPATCH_H

#include "../vllm_blend_cpu.h"
#include "simd.h"

namespace VB_NAMESPACE {

// Returns f(T{}, C{}) for activations of T and a cache of C, which is T or e4m3.
template <typename F>
VB_INLINE int with_types(int32_t dtype, int32_t cache_dtype, F f) {
  if (cache_dtype != dtype && cache_dtype != VB_F8) return VB_BAD_DTYPE;
  const bool is_f8 = cache_dtype == VB_F8;
  switch (dtype) {
    case VB_F32:
      return is_f8 ? f(float{}, f8{}) : f(float{}, float{});
    case VB_BF16:
      return is_f8 ? f(bf16{}, f8{}) : f(bf16{}, bf16{});
    case VB_F16:
      return is_f8 ? f(f16{}, f8{}) : f(f16{}, f16{});
  }
  return VB_BAD_DTYPE;
}

}  // namespace VB_NAMESPACE
#endif
