// Writing K and V into pages: chunk placement with rotation, plain writes, and RoPE fused with the write.
//
// Threads move eight channels at a time (`Unit`), so rotary_half must be a multiple of 8 (as must head_dim). Pages are of C, which
// is T, the dtype of what is computed, or e4m3. Whatever is computed in float32 is rounded to C at once.
#include "elementwise.cuh"
#include "launch.cuh"

namespace vb {
namespace {

constexpr int kThreads = 256;

struct PlaceParams {
  const void* k;
  const void* v;
  const float* cos;
  const float* sin;
  void* const* key_caches;
  void* const* value_caches;
  const int64_t* slots;
  int64_t layer_stride, token_stride;
  Pages pages;
  int tokens;
  unsigned kv_heads;
  int head_dim, rotary_half;
  unsigned units;
};

// Stored chunks have the dtype of the pages.
template <typename C>
__global__ void __launch_bounds__(kThreads) place_chunk_kernel(PlaceParams p) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;  // the host checks that 32 bits are enough
  const unsigned row = i / p.units;
  const int unit = i % p.units, head = row % p.kv_heads;
  const int64_t token = row / p.kv_heads;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int layer = blockIdx.y;
  const Unit u = unit_of(unit, p.rotary_half);
  const int64_t from = layer * p.layer_stride + token * p.token_stride + head * p.head_dim;
  const C* k = static_cast<const C*>(p.k) + from;
  const C* v = static_cast<const C*>(p.v) + from;
  const int64_t to = p.pages.offset(slot, head);
  C* key = static_cast<C*>(p.key_caches[layer]) + to;
  C* value = static_cast<C*>(p.value_caches[layer]) + to;
  auto put = [](C* x, const Eight<C>& w) { *reinterpret_cast<Eight<C>*>(x) = w; };
  const Eight<C> k0 = load_once(k + u.first), v0 = load_once(v + u.first);
  if (u.second < 0) {
    put(key + u.first, k0);
    put(value + u.first, v0);
    return;
  }
  const Eight<C> k1 = load_once(k + u.second), v1 = load_once(v + u.second);
  const int64_t at = token * p.rotary_half + u.first;
  rotate_to<C>(key + u.first, key + u.second, k0, k1, p.cos + at, p.sin + at);
  put(value + u.first, v0);
  put(value + u.second, v1);
}

struct WriteParams {
  const void* k;
  const void* v;
  int64_t k_stride, v_stride;
  void* key;
  void* value;
  const int64_t* slots;
  Pages pages;
  int tokens;
  unsigned kv_heads;
  int head_dim;
};

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) reshape_and_cache_kernel(WriteParams p) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;  // the host checks that 32 bits are enough
  const unsigned units = p.head_dim / 8, row = i / units;
  const int channel = i % units * 8, head = row % p.kv_heads;
  const int64_t token = row / p.kv_heads;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t to = p.pages.offset(slot, head) + channel;
  const int from = head * p.head_dim + channel;
  const Vec8 k = *reinterpret_cast<const Vec8*>(static_cast<const T*>(p.k) + token * p.k_stride + from);
  const Vec8 v = *reinterpret_cast<const Vec8*>(static_cast<const T*>(p.v) + token * p.v_stride + from);
  *reinterpret_cast<Eight<C>*>(static_cast<C*>(p.key) + to) = stored_as<C, T>(k);
  *reinterpret_cast<Eight<C>*>(static_cast<C*>(p.value) + to) = stored_as<C, T>(v);
}

struct RopeParams {
  void* qkv;
  int64_t token_stride;
  const float* cos;
  const float* sin;
  const int64_t* positions;
  const int64_t* slots;
  void* key;
  void* value;
  Pages pages;
  int tokens, q_heads, kv_heads, head_dim, rotary_half;
  unsigned units;
  const void* q_weight;  // with kNorm, as k_weight: [head_dim], of the RMSNorm over each head before the rotation
  const void* k_weight;
  float eps;
};

// Eight channels of a head of V, from `channel` on, to their slot.
template <typename T, typename C>
__device__ __forceinline__ void put_value(C* value, const T* v, int channel) {
  *reinterpret_cast<Eight<C>*>(value + channel) = stored_as<C, T>(*reinterpret_cast<const Vec8*>(v + channel));
}

// RMSNorm of a head that `units` adjacent lanes hold, rounded where a norm of its own would round.
template <typename T>
__device__ __forceinline__ void normalize(Vec8& first, Vec8& second, const T* weight, const Unit& u, const RopeParams& p) {
  float a[8], b[8], w[8], total = 0.f;
  to_float<T>(first, a);
  to_float<T>(second, b);
#pragma unroll
  for (int j = 0; j < 8; ++j) total += a[j] * a[j] + b[j] * b[j];
  for (unsigned lane = 1; lane < p.units; lane <<= 1) total += __shfl_xor_sync(0xffffffffu, total, lane);
  const float inverse = rsqrtf(total / p.head_dim + p.eps);
  to_float<T>(*reinterpret_cast<const Vec8*>(weight + u.first), w);
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = round_to<T>(a[j] * inverse) * w[j];
  to_float<T>(*reinterpret_cast<const Vec8*>(weight + u.second), w);
#pragma unroll
  for (int j = 0; j < 8; ++j) b[j] = round_to<T>(b[j] * inverse) * w[j];
  first = from_float<T>(a);
  second = from_float<T>(b);
}

// The same with the norm: only for heads that are rotated whole, by a power of two of lanes.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) norm_rope_and_cache_kernel(RopeParams p) {
  wait_for_previous();
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  const unsigned heads = p.q_heads + p.kv_heads, line = i / p.units;
  const int head = line % heads;
  // Lanes after the last token do its work again and write nothing: the others need them to add up.
  const bool extra = line / heads >= static_cast<unsigned>(p.tokens);
  const int64_t token = extra ? p.tokens - 1 : line / heads;
  const Unit u = unit_of(i % p.units, p.rotary_half);
  auto vec = [](T* x) -> Vec8& { return *reinterpret_cast<Vec8*>(x); };
  T* from = static_cast<T*>(p.qkv) + token * p.token_stride + head * p.head_dim;
  const int64_t at = p.positions[token] * p.rotary_half + u.first;
  const bool is_query = head < p.q_heads;
  Vec8 a = vec(from + u.first), b = vec(from + u.second);
  normalize<T>(a, b, static_cast<const T*>(is_query ? p.q_weight : p.k_weight), u, p);
  if (extra) return;
  if (is_query) return rotate_to<T>(from + u.first, from + u.second, a, b, p.cos + at, p.sin + at);
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t to = p.pages.offset(slot, head - p.q_heads);
  C* key = static_cast<C*>(p.key) + to;
  C* value = static_cast<C*>(p.value) + to;
  const T* v = from + p.kv_heads * p.head_dim;
  rotate_to<T>(key + u.first, key + u.second, a, b, p.cos + at, p.sin + at);
  put_value<T>(value, v, u.first);
  put_value<T>(value, v, u.second);
}

// A thread takes one unit of one query head or of one KV head (K and V).
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) rope_and_cache_kernel(RopeParams p) {
  wait_for_previous();
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;  // the host checks that 32 bits are enough
  const unsigned heads = p.q_heads + p.kv_heads, line = i / p.units;
  const int unit = i % p.units, head = line % heads;
  const int64_t token = line / heads;
  if (token >= p.tokens) return;
  const Unit u = unit_of(unit, p.rotary_half);
  T* row = static_cast<T*>(p.qkv) + token * p.token_stride;
  const int64_t at = p.positions[token] * p.rotary_half + u.first;
  auto vec = [](T* x) -> Vec8& { return *reinterpret_cast<Vec8*>(x); };
  T* from = row + head * p.head_dim;
  if (head < p.q_heads) {
    if (u.second < 0) return;
    const Vec8 a = vec(from + u.first), b = vec(from + u.second);
    return rotate_to<T>(from + u.first, from + u.second, a, b, p.cos + at, p.sin + at);
  }
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t to = p.pages.offset(slot, head - p.q_heads);
  C* key = static_cast<C*>(p.key) + to;
  C* value = static_cast<C*>(p.value) + to;
  const T* v = from + p.kv_heads * p.head_dim;
  const Vec8 a = vec(from + u.first);
  put_value<T>(value, v, u.first);
  if (u.second >= 0) {
    const Vec8 b = vec(from + u.second);
    put_value<T>(value, v, u.second);
    rotate_to<T>(key + u.first, key + u.second, a, b, p.cos + at, p.sin + at);
  } else {
    *reinterpret_cast<Eight<C>*>(key + u.first) = stored_as<C, T>(a);
  }
}

int check(int tokens, int heads, int head_dim, int rotary_half) {
  if (tokens < 0 || heads < 1 || int64_t(tokens) * heads * (head_dim / 8) > INT32_MAX) return VB_ERROR_SHAPE;
  if (head_dim < 8 || head_dim % 8 || rotary_half % 8 || rotary_half < 0 || 2 * rotary_half > head_dim) return VB_ERROR_HEAD_DIM;
  return 0;
}

unsigned blocks_of(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" int vb_place_chunk(const void* k, const void* v, int64_t layer_stride, int64_t token_stride, const float* cos,
                              const float* sin, void* const* key_caches, void* const* value_caches, const int64_t* slots,
                              int64_t page_stride, int64_t slot_stride, int64_t head_stride, int layers, int tokens, int kv_heads,
                              int head_dim, int rotary_half, int block_size, int dtype, void* stream) {
  PlaceParams p{k, v, cos, sin, key_caches, value_caches, slots, layer_stride, token_stride, {}, tokens, unsigned(kv_heads), head_dim,
                rotary_half, units_of(head_dim, rotary_half)};
  if (int e = check(tokens, kv_heads, head_dim, rotary_half)) return e;
  if (int e = make_pages(&p.pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (!aligned_eight(k, dtype) || !aligned_eight(v, dtype) || (layer_stride | token_stride) & 7) return VB_ERROR_ALIGNMENT;
  if (!aligned16(cos) || !aligned16(sin)) return VB_ERROR_ALIGNMENT;
  if (tokens == 0 || layers == 0) return 0;
  const dim3 grid(blocks_of(int64_t(tokens) * kv_heads * p.units), layers);
  return dispatch_cache(dtype, [&](auto c) -> int {
    place_chunk_kernel<decltype(c)><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
  });
}

extern "C" int vb_reshape_and_cache(const void* k, const void* v, int64_t k_token_stride, int64_t v_token_stride, void* key_cache,
                                    void* value_cache, const int64_t* slots, int64_t page_stride, int64_t slot_stride,
                                    int64_t head_stride, int tokens, int kv_heads, int head_dim, int block_size, int dtype,
                                    int cache_dtype, void* stream) {
  WriteParams p{k, v, k_token_stride, v_token_stride, key_cache, value_cache, slots, {}, tokens, unsigned(kv_heads), head_dim};
  if (int e = check(tokens, kv_heads, head_dim, 0)) return e;
  if (int e = make_pages(&p.pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (!aligned16(k) || !aligned16(v) || (k_token_stride | v_token_stride) & 7) return VB_ERROR_ALIGNMENT;
  if (tokens == 0) return 0;
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    reshape_and_cache_kernel<decltype(t), decltype(c)>
        <<<blocks_of(int64_t(tokens) * kv_heads * (head_dim / 8)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
  });
}

extern "C" int vb_rope_and_cache(void* qkv, int64_t token_stride, const float* cos, const float* sin, const int64_t* positions,
                                 const int64_t* slots, void* key_cache, void* value_cache, int64_t page_stride,
                                 int64_t slot_stride, int64_t head_stride, int tokens, int q_heads, int kv_heads, int head_dim,
                                 int rotary_half, int block_size, int dtype, int cache_dtype, void* stream) {
  RopeParams p{qkv, token_stride, cos, sin, positions, slots, key_cache, value_cache, {}, tokens, q_heads, kv_heads, head_dim,
               rotary_half, units_of(head_dim, rotary_half), nullptr, nullptr, 0.f};
  if (int e = check(tokens, q_heads + kv_heads, head_dim, rotary_half)) return e;
  if (int e = make_pages(&p.pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (!aligned16(qkv) || !aligned16(cos) || !aligned16(sin) || token_stride & 7) return VB_ERROR_ALIGNMENT;
  if (tokens == 0) return 0;
  const unsigned blocks = blocks_of(int64_t(tokens) * (q_heads + kv_heads) * p.units);
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    return launch_early(rope_and_cache_kernel<decltype(t), decltype(c)>, blocks, kThreads, stream, p);
  });
}

extern "C" int vb_norm_rope_and_cache(void* qkv, int64_t token_stride, const void* q_weight, const void* k_weight, float eps,
                                      const float* cos, const float* sin, const int64_t* positions, const int64_t* slots,
                                      void* key_cache, void* value_cache, int64_t page_stride, int64_t slot_stride,
                                      int64_t head_stride, int tokens, int q_heads, int kv_heads, int head_dim,
                                      int rotary_half, int block_size, int dtype, int cache_dtype, void* stream) {
  RopeParams p{qkv, token_stride, cos, sin, positions, slots, key_cache, value_cache, {}, tokens, q_heads, kv_heads, head_dim,
               rotary_half, units_of(head_dim, rotary_half), q_weight, k_weight, eps};
  if (int e = check(tokens, q_heads + kv_heads, head_dim, rotary_half)) return e;
  if (2 * rotary_half != head_dim || p.units > 32 || (p.units & (p.units - 1))) return VB_ERROR_HEAD_DIM;
  if (int e = make_pages(&p.pages, page_stride, slot_stride, head_stride, block_size)) return e;
  if (!aligned16(qkv) || !aligned16(cos) || !aligned16(sin) || token_stride & 7) return VB_ERROR_ALIGNMENT;
  if (!aligned16(q_weight) || !aligned16(k_weight)) return VB_ERROR_ALIGNMENT;
  if (tokens == 0) return 0;
  const unsigned blocks = blocks_of(int64_t(tokens) * (q_heads + kv_heads) * p.units);
  return dispatch_pair(dtype, cache_dtype, [&](auto t, auto c) -> int {
    return launch_early(norm_rope_and_cache_kernel<decltype(t), decltype(c)>, blocks, kThreads, stream, p);
  });
}
