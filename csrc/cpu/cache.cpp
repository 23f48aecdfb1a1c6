// Rotary embedding, and every way K and V get into the paged cache.
#include "dispatch.h"
#include "parallel.h"

namespace VB_NAMESPACE {

static bool slots_ok(const int64_t* slots, int64_t tokens, int64_t num_slots) {
  bool ok = true;
  for (int64_t t = 0; t < tokens; ++t) ok &= slots[t] >= 0 && slots[t] < num_slots;
  return ok;
}

// One head: channels i and half + i are a pair, channels from 2 * half on stay as they are.
template <typename S, typename D>
VB_INLINE void rotate_head(D* to, const S* from, const float* cos, const float* sin, int64_t half, int64_t head_dim) {
  for (int64_t i = 0; i < half; i += VL) {
    const int64_t left = half - i;
    const vf c = load_n(cos + i, left), s = load_n(sin + i, left);
    const vf first = load_n(from + i, left), second = load_n(from + half + i, left);
    store_n(to + i, first * c - second * s, left);
    store_n(to + half + i, second * c + first * s, left);
  }
  for (int64_t i = 2 * half; i < head_dim; i += VL) store_n(to + i, load_n(from + i, head_dim - i), head_dim - i);
}

template <typename T, typename C>
static int rope(T* q_out, T* k_out, const T* q, const T* k, const T* v, const float* cos, const float* sin,
                C* key_cache, C* value_cache, const int64_t* slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                int64_t head_dim, int64_t half, int64_t q_stride, int64_t k_stride, int64_t v_stride, int32_t threads) {
  const int64_t row = kv_heads * head_dim;
  VB_PARALLEL_FOR(tokens * (heads + kv_heads) * head_dim)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* c = cos + t * half;
    const float* s = sin + t * half;
    for (int64_t h = 0; h < heads; ++h)
      rotate_head(q_out + (t * heads + h) * head_dim, q + t * q_stride + h * head_dim, c, s, half, head_dim);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const T* from = k + t * k_stride + h * head_dim;
      if (key_cache) rotate_head(key_cache + slots[t] * row + h * head_dim, from, c, s, half, head_dim);
      if (k_out) rotate_head(k_out + t * row + h * head_dim, from, c, s, half, head_dim);
    }
    if (key_cache) copy_row(value_cache + slots[t] * row, v + t * v_stride, row);
  }
  return VB_OK;
}

template <typename T, typename C>
static int reshape_and_cache(const T* k, const T* v, C* key_cache, C* value_cache, const int64_t* slots, int64_t tokens,
                             int64_t row, int64_t k_stride, int64_t v_stride, int32_t threads) {
  VB_PARALLEL_FOR(2 * tokens * row)
  for (int64_t t = 0; t < tokens; ++t) {
    copy_row(key_cache + slots[t] * row, k + t * k_stride, row);
    copy_row(value_cache + slots[t] * row, v + t * v_stride, row);
  }
  return VB_OK;
}

struct Placement {
  const void *k, *v;
  const float *cos, *sin;
  void *key_cache, *value_cache;
  const int64_t* slots;
  int64_t layers, tokens, kv_heads, head_dim, half, k_layer, v_layer, key_cache_layer, value_cache_layer;
  int32_t threads;
};

template <typename S, typename D>
static int place_chunk(const Placement& p) {
  const int64_t row = p.kv_heads * p.head_dim, total = p.layers * p.tokens;
  const int32_t threads = p.threads;
  VB_PARALLEL_FOR(2 * total * row)
  for (int64_t i = 0; i < total; ++i) {
    const int64_t layer = i / p.tokens, t = i % p.tokens;
    const S* k = (const S*)p.k + layer * p.k_layer + t * row;
    D* key = (D*)p.key_cache + layer * p.key_cache_layer + p.slots[t] * row;
    for (int64_t h = 0; h < p.kv_heads; ++h)
      rotate_head(key + h * p.head_dim, k + h * p.head_dim, p.cos + t * p.half, p.sin + t * p.half, p.half, p.head_dim);
    copy_row((D*)p.value_cache + layer * p.value_cache_layer + p.slots[t] * row,
             (const S*)p.v + layer * p.v_layer + t * row, row);
  }
  return VB_OK;
}

template <typename S>
static int place_chunk_to(const Placement& p, int32_t target) {
  switch (target) {
    case VB_F32:
      return place_chunk<S, float>(p);
    case VB_BF16:
      return place_chunk<S, bf16>(p);
    case VB_F16:
      return place_chunk<S, f16>(p);
    case VB_F8:
      return place_chunk<S, f8>(p);
  }
  return VB_BAD_DTYPE;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(rope)(void* q_out, void* k_out, const void* q, const void* k, const void* v, const float* cos,
                const float* sin, void* key_cache, void* value_cache, const int64_t* slots, int64_t tokens,
                int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t half, int64_t q_stride, int64_t k_stride,
                int64_t v_stride, int64_t num_slots, int32_t dtype, int32_t cache_dtype, int32_t threads) {
  if (key_cache && !slots_ok(slots, tokens, num_slots)) return VB_BAD_SLOT;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    return rope<T, C>((T*)q_out, (T*)k_out, (const T*)q, (const T*)k, (const T*)v, cos, sin, (C*)key_cache,
                      (C*)value_cache, slots, tokens, heads, kv_heads, head_dim, half, q_stride, k_stride, v_stride,
                      threads);
  });
}

int VB_FN(reshape_and_cache)(const void* k, const void* v, void* key_cache, void* value_cache, const int64_t* slots,
                             int64_t tokens, int64_t row, int64_t k_stride, int64_t v_stride, int64_t num_slots,
                             int32_t dtype, int32_t cache_dtype, int32_t threads) {
  if (!slots_ok(slots, tokens, num_slots)) return VB_BAD_SLOT;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    return reshape_and_cache<T, C>((const T*)k, (const T*)v, (C*)key_cache, (C*)value_cache, slots, tokens, row,
                                   k_stride, v_stride, threads);
  });
}

int VB_FN(place_chunk)(const void* k, const void* v, const float* cos, const float* sin, void* key_cache,
                       void* value_cache, const int64_t* slots, int64_t layers, int64_t tokens, int64_t kv_heads,
                       int64_t head_dim, int64_t half, int64_t k_layer, int64_t v_layer, int64_t key_cache_layer,
                       int64_t value_cache_layer, int64_t num_slots, int32_t source, int32_t target, int32_t threads) {
  if (!slots_ok(slots, tokens, num_slots)) return VB_BAD_SLOT;
  const Placement p = {k,      v,        cos,      sin,  key_cache, value_cache, slots,           layers,
                       tokens, kv_heads, head_dim, half, k_layer,   v_layer,     key_cache_layer, value_cache_layer,
                       threads};
  switch (source) {
    case VB_F32:
      return place_chunk_to<float>(p, target);
    case VB_BF16:
      return place_chunk_to<bf16>(p, target);
    case VB_F16:
      return place_chunk_to<f16>(p, target);
    case VB_F8:
      return place_chunk_to<f8>(p, target);
  }
  return VB_BAD_DTYPE;
}
