// Launches that overlap with the end of the kernel before them (programmatic dependent launch, Hopper and later). For the
// small kernels between the matrix products of a decode step, whose launches would otherwise be a good part of their time.
#pragma once
#include <cuda_runtime.h>

namespace vb {

// To be called by every thread of a kernel that `launch_early` starts, before it touches memory.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one start before this one's end, if `launch_early` starts it. It may then read what was there
// before this kernel; for everything else, and before it writes, it calls `wait_for_previous`. To be called after this
// kernel's own `wait_for_previous`: what is done before this kernel is then done for the next one as well.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline bool has_early_launch() {
  static thread_local int known_device = -1;
  static thread_local bool known = false;
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device != known_device) {
    known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
    known_device = device;
  }
  return known;
}

template <typename... P, typename... A>
int launch_early(void (*kernel)(P...), unsigned blocks, unsigned threads, void* stream, A... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = has_early_launch() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

}  // namespace vb
