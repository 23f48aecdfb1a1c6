// The sum of small tensors over GPUs of one machine, in one kernel: each rank writes its part where the others can read it,
// and adds up all parts. This is for the sums of a decode step, where NCCL's time is latency: it hardly depends on the size.
#include <string.h>

#include "common.cuh"
#include "launch.cuh"

namespace vb {
namespace {

// The same for every call: a block waits for the blocks of its number on the other ranks alone.
constexpr int kBlocks = 32, kThreads = 512;
// Before the two halves of a rank's memory: flags [blocks, ranks], counts [blocks], and whether a call has seen
// that another rank has ended.
constexpr size_t kHeader = 4096, kAbandoned = kBlocks * (VB_MAX_RANKS + 1);

static_assert((kAbandoned + 1) * sizeof(uint32_t) <= kHeader, "the header holds all three");

struct Memories {
  char* of_rank[VB_MAX_RANKS];

  __device__ uint32_t* flag(int rank, int block, int from) const {
    return reinterpret_cast<uint32_t*>(of_rank[rank]) + block * VB_MAX_RANKS + from;
  }
  __device__ uint32_t* count(int rank, int block) const {
    return reinterpret_cast<uint32_t*>(of_rank[rank]) + kBlocks * VB_MAX_RANKS + block;
  }
  __device__ volatile uint32_t* abandoned(int rank) const {
    return reinterpret_cast<volatile uint32_t*>(of_rank[rank]) + kAbandoned;
  }
  __device__ uint4* half(int rank, uint32_t call) const {
    return reinterpret_cast<uint4*>(of_rank[rank] + kHeader + (call & 1) * size_t{VB_ALL_REDUCE_BYTES});
  }
};

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Not from the L1 cache, which may have what lay there two calls ago.
__device__ __forceinline__ uint4 load_shared(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

template <typename T>
struct Sum {  // of 16 bytes of each rank, in float32
  float2 lanes[4] = {};

  __device__ __forceinline__ void add(const uint4& v) {
    const uint32_t packed[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Type<T>::unpack(packed[i]);
      lanes[i].x += pair.x;
      lanes[i].y += pair.y;
    }
  }
  __device__ __forceinline__ uint4 result() const {
    return make_uint4(Type<T>::pack(lanes[0].x, lanes[0].y), Type<T>::pack(lanes[1].x, lanes[1].y),
                      Type<T>::pack(lanes[2].x, lanes[2].y), Type<T>::pack(lanes[3].x, lanes[3].y));
  }
};

template <>
struct Sum<float> {
  float4 lanes = {};

  __device__ __forceinline__ void add(const uint4& v) {
    lanes.x += __uint_as_float(v.x);
    lanes.y += __uint_as_float(v.y);
    lanes.z += __uint_as_float(v.z);
    lanes.w += __uint_as_float(v.w);
  }
  __device__ __forceinline__ uint4 result() const {
    return make_uint4(__float_as_uint(lanes.x), __float_as_uint(lanes.y), __float_as_uint(lanes.z), __float_as_uint(lanes.w));
  }
};

// Two halves are enough: a rank writes a half again two calls later, and by then it has seen every rank begin the call in
// between, so finish this one. A flag may be ahead by one call: that rank has seen this one, and has gone on.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    all_reduce_kernel(uint4* data, int count, const __grid_constant__ Memories memories, int rank, int ranks,
                      const volatile int32_t* has_ended) {
  wait_for_previous();
  start_next();
  const int block = blockIdx.x;
  const uint32_t call = *memories.count(rank, block) + 1;
  volatile uint32_t* abandoned = memories.abandoned(rank);
  bool has_left = *abandoned;
  uint4* own = memories.half(rank, call);
  if (!has_left)
    for (int i = block * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads) own[i] = data[i];
  // The memory of a rank that has ended is not touched. The threads may have looked at different moments: all of them decide
  // together, so that no other rank is told of a part that some threads have not written.
  if (__syncthreads_or(has_left)) return;
  const int other = threadIdx.x;
  if (other < ranks && other != rank) {
    __threadfence_system();
    store_release(memories.flag(other, block, rank), call);
    const uint32_t* theirs = memories.flag(rank, block, other);
    for (uint32_t looks = 1; static_cast<int32_t>(load_acquire(theirs) - call) < 0 && !has_left; ++looks) {
      // A look at the host's memory takes about a microsecond, and those of all warps follow one another. So a thread looks
      // there only when it has waited for long, and then tells the others and the calls behind this one.
      if (looks % 4096 == 0 && *has_ended) *abandoned = 1;
      if (looks % 64 == 0) has_left = *abandoned;
    }
  }
  if (__syncthreads_or(has_left)) return;
  for (int i = block * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads) {
    uint4 parts[VB_MAX_RANKS];  // all on their way before the first is added: a look at another GPU takes over a microsecond
#pragma unroll
    for (int from = 0; from < VB_MAX_RANKS; ++from)
      if (from < ranks) parts[from] = load_shared(memories.half(from, call) + i);
    Sum<T> sum;
#pragma unroll
    for (int from = 0; from < VB_MAX_RANKS; ++from)  // in one order on all ranks
      if (from < ranks) sum.add(parts[from]);
    data[i] = sum.result();
  }
  if (threadIdx.x == 0) *memories.count(rank, block) = call;
}

// Returns the error, which the launch of the next kernel would otherwise report as its own.
cudaError_t forget(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_share_memory(int64_t* address, uint8_t* handle) {
  void* memory = nullptr;
  const size_t bytes = kHeader + 2 * size_t{VB_ALL_REDUCE_BYTES};
  static_assert(sizeof(cudaIpcMemHandle_t) == VB_HANDLE_BYTES, "of the driver");
  cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) return forget(error);
  cudaIpcMemHandle_t shared;
  error = cudaMemset(memory, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&shared, memory);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return forget(error);
  }
  memcpy(handle, &shared, sizeof(shared));
  *address = reinterpret_cast<int64_t>(memory);
  return 0;
}

extern "C" int vb_open_memory(int64_t* address, const uint8_t* handle) {
  cudaIpcMemHandle_t shared;
  memcpy(&shared, handle, sizeof(shared));
  void* memory = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&memory, shared, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return forget(error);
  *address = reinterpret_cast<int64_t>(memory);
  return 0;
}

extern "C" int vb_close_memory(int64_t address, int is_own) {
  void* memory = reinterpret_cast<void*>(address);
  return forget(is_own ? cudaFree(memory) : cudaIpcCloseMemHandle(memory));
}

extern "C" int vb_all_reduce(void* data, int64_t bytes, const int64_t* memories, int rank, int ranks, const int32_t* has_ended,
                             int dtype, void* stream) {
  if (bytes < 0 || bytes > VB_ALL_REDUCE_BYTES || bytes % 16 || ranks < 1 || ranks > VB_MAX_RANKS || rank < 0 || rank >= ranks)
    return VB_ERROR_SHAPE;
  if (!aligned16(data)) return VB_ERROR_ALIGNMENT;
  Memories all = {};
  for (int i = 0; i < ranks; ++i) all.of_rank[i] = reinterpret_cast<char*>(memories[i]);
  void (*kernel)(uint4*, int, const Memories, int, int, const volatile int32_t*) = nullptr;
  if (dtype == VB_FP16) kernel = all_reduce_kernel<__half>;
  if (dtype == VB_BF16) kernel = all_reduce_kernel<__nv_bfloat16>;
  if (dtype == VB_FP32) kernel = all_reduce_kernel<float>;
  if (!kernel) return VB_ERROR_DTYPE;
  return launch_early(kernel, kBlocks, kThreads, stream, static_cast<uint4*>(data), static_cast<int>(bytes / 16), all, rank, ranks,
                      has_ended);
}
