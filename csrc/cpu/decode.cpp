// Attention of requests with one query. The cache is read once, in place and block by block: every head is served
// before the next block is touched, so that memory sees one sequential stream per block.
#include <cmath>

#include "dots.h"

namespace VB_NAMESPACE {

constexpr int64_t SCORE_STRIDE = DECODE_CHUNK + VL;
constexpr int OUTPUT_VECTORS = VL == 16 ? 4 : 2;  // times 4 heads: accumulators that fit the registers
constexpr int64_t VALUE_KEYS = 16;                // keys of the value pass served before accumulators go back to memory

struct DecodeScratch {
  alignas(64) float keys[VL][KEY_STRIDE];  // VL keys of a cache of fewer bits, as float32
  int64_t offsets[SCORE_STRIDE];
  float *q, *scores;  // [heads, head_dim] scaled to log2 units, [heads, SCORE_STRIDE]
};

// Scores of the keys i:i + VL of a chunk, every head.
template <typename C>
VB_INLINE void score_keys(const Paged& a, DecodeScratch& s, int64_t i) {
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
    const C* k[VL];
    for (int j = 0; j < VL; ++j) k[j] = (const C*)a.keys + s.offsets[i + j] + kv_head * a.head_dim;
    const int64_t head = kv_head * a.group();
    score_heads<C>(s.scores + head * SCORE_STRIDE + i, SCORE_STRIDE, s.q + head * a.head_dim, k, s.keys, a.group(),
                   a.head_dim);
  }
}

// out[g][0:V*VL] += sum over keys of weight * value, for G heads of one KV head.
template <typename C, int G, int V>
VB_INLINE void weighted_values(float* out, int64_t head_dim, const float* weights, const C* values,
                               const int64_t* offsets, int64_t count) {
  vf sums[G][V];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) sums[g][v] = load(out + g * head_dim + v * VL);
  for (int64_t i = 0; i < count; ++i) {
    const C* row = values + offsets[i];
    vf value[V];
    for (int v = 0; v < V; ++v) value[v] = load(row + v * VL);
    for (int g = 0; g < G; ++g)
      for (int v = 0; v < V; ++v) sums[g][v] += value[v] * weights[g * SCORE_STRIDE + i];
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) store(out + g * head_dim + v * VL, sums[g][v]);
}

template <typename C, int G>
VB_INLINE void values_of_heads(float* out, int64_t head_dim, const float* weights, const C* values,
                               const int64_t* offsets, int64_t count) {
  int64_t d = 0;
  for (; d + OUTPUT_VECTORS * VL <= head_dim; d += OUTPUT_VECTORS * VL)
    weighted_values<C, G, OUTPUT_VECTORS>(out + d, head_dim, weights, values + d, offsets, count);
  for (; d < head_dim; d += VL) weighted_values<C, G, 1>(out + d, head_dim, weights, values + d, offsets, count);
}

// The values of the keys i:i + count of a chunk, every head.
template <typename C>
VB_INLINE void add_values(const Paged& a, const DecodeScratch& s, float* out, int64_t i, int64_t count) {
  const int64_t head_dim = a.head_dim, group = a.group();
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
    const C* values = (const C*)a.values + kv_head * head_dim;
    const int64_t end = (kv_head + 1) * group;
    for (int64_t head = kv_head * group; head < end; head += 4) {
      float* to = out + head * head_dim;
      const float* weights = s.scores + head * SCORE_STRIDE + i;
      const int64_t* offsets = s.offsets + i;
      switch (min64(4, end - head)) {
        case 1:
          values_of_heads<C, 1>(to, head_dim, weights, values, offsets, count);
          break;
        case 2:
          values_of_heads<C, 2>(to, head_dim, weights, values, offsets, count);
          break;
        case 3:
          values_of_heads<C, 3>(to, head_dim, weights, values, offsets, count);
          break;
        default:
          values_of_heads<C, 4>(to, head_dim, weights, values, offsets, count);
      }
    }
  }
}

template <typename T, typename C>
void decode_chunk(const Paged& a, const Chunk& chunk, float* partial, void* scratch, Ahead& ahead) {
  DecodeScratch& s = *(DecodeScratch*)scratch;
  const int64_t head_dim = a.head_dim;
  s.q = (float*)(&s + 1);
  s.scores = s.q + a.heads * head_dim;
  const T* q = (const T*)a.q + a.starts[chunk.request] * a.q_stride;
  for (int64_t i = 0; i < a.heads * head_dim; i += VL) store(s.q + i, load(q + i) * (a.scale * kLog2e));
  a.offsets(s.offsets, chunk.request, chunk.first, chunk.count);
  for (int64_t i = chunk.count; i < chunk.count + VL; ++i) s.offsets[i] = s.offsets[chunk.count - 1];

  const int64_t lines = ahead.share((chunk.count + VL - 1) / VL + (chunk.count + VALUE_KEYS - 1) / VALUE_KEYS);
  for (int64_t i = 0; i < chunk.count; i += VL) {
    Ahead::touch(ahead, lines);
    score_keys<C>(a, s, i);
  }
  float* maxima = partial + a.heads * head_dim;
  for (int64_t head = 0; head < a.heads; ++head)
    weigh(s.scores + head * SCORE_STRIDE, chunk.count, maxima + head, maxima + a.heads + head);
  for (int64_t i = 0; i < a.heads * head_dim; i += VL) store(partial + i, vf{});
  for (int64_t i = 0; i < chunk.count; i += VALUE_KEYS) {
    Ahead::touch(ahead, lines);
    add_values<C>(a, s, partial, i, min64(VALUE_KEYS, chunk.count - i));
  }
}

template <typename T>
void merge_chunks(const Paged& a, int64_t request, const float* partials, int64_t chunks) {
  const int64_t head_dim = a.head_dim, size = a.heads * (head_dim + 2);
  T* out = (T*)a.out + a.starts[request] * a.heads * head_dim;
  for (int64_t head = 0; head < a.heads; ++head) {
    const float* maxima = partials + a.heads * head_dim + head;
    const float sink = a.sinks ? a.sinks[head] * kLog2e : -kInfinity;
    float top = sink;
    for (int64_t c = 0; c < chunks; ++c) top = maxima[c * size] > top ? maxima[c * size] : top;
    alignas(64) float row[MAX_HEAD_DIM] = {};
    alignas(64) float own[VL];
    store(own, exp2_(splat(sink - top)));
    float total = a.sinks ? own[0] : 0.0f;
    for (int64_t c = 0; c < chunks; ++c) {
      alignas(64) float factor[VL];
      store(factor, exp2_(splat(maxima[c * size] - top)));
      total += factor[0] * maxima[c * size + a.heads];
      const float* part = partials + c * size + head * head_dim;
      for (int64_t d = 0; d < head_dim; d += VL) store(row + d, load(row + d) + load(part + d) * factor[0]);
    }
    if (a.lse) a.lse[a.starts[request] * a.heads + head] = (top + std::log2(total)) / kLog2e;
    const float inverse = 1.0f / total;
    for (int64_t d = 0; d < head_dim; d += VL) store(out + head * head_dim + d, load(row + d) * inverse);
  }
}

size_t decode_scratch_bytes(const Paged& a) {
  return sizeof(DecodeScratch) + size_t(a.heads * (a.head_dim + SCORE_STRIDE)) * sizeof(float);
}

template void decode_chunk<float, float>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk<bf16, bf16>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk<f16, f16>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk<float, f8>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk<bf16, f8>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void decode_chunk<f16, f8>(const Paged&, const Chunk&, float*, void*, Ahead&);
template void merge_chunks<float>(const Paged&, int64_t, const float*, int64_t);
template void merge_chunks<bf16>(const Paged&, int64_t, const float*, int64_t);
template void merge_chunks<f16>(const Paged&, int64_t, const float*, int64_t);

}  // namespace VB_NAMESPACE
