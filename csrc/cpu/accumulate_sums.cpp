// What the keys of compressed requests receive from the query of a decode step, added to their metric in place. A row
// is one KV head of one request and belongs to one thread: sums do not depend on the batch or on the number of threads.
#include "dots.h"

namespace VB_NAMESPACE {

struct Accumulation {
  float* metric;
  const void *q, *keys;
  const int32_t* tables;
  const int64_t* lengths;
  const int32_t* key_positions;
  const int64_t* query_positions;
  int64_t rows, table_width, table_stride, pages, block_size, group, head_dim, q_stride, buffer;
  float scale;
  int32_t power;

  template <typename C>
  void prefetch(const int32_t* table, int64_t first) const {
    const char* page = (const char*)((const C*)keys + int64_t(table[first / block_size]) * block_size * head_dim);
    for (int64_t byte = 0; byte < block_size * head_dim * int64_t(sizeof(C)); byte += 64)
      __builtin_prefetch(page + byte, 0, 2);
  }

  int check() const {
    if (head_dim % 16 || head_dim > MAX_HEAD_DIM) return VB_BAD_DTYPE;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t used = (lengths[r] + block_size - 1) / block_size;
      if (lengths[r] < 0 || used > table_width) return VB_BAD_BLOCK;
      bool ok = true;
      for (int64_t b = 0; b < used; ++b) ok &= uint32_t(tables[r * table_stride + b]) < uint64_t(pages);
      if (!ok) return VB_BAD_BLOCK;
    }
    return VB_OK;
  }
};

// Pages that are asked for before they are read: the hardware's prefetchers stop at their ends. 4 requests of 4096
// keys, 67 MB of float32 in pages of 16 x 128, one thread: 6.1 ms against 11.3.
constexpr int64_t AHEAD = 4;

// Followed by q [group, head_dim] in log2 units and scores [group, stride].
struct AccumulateScratch {
  alignas(64) float keys[VL][KEY_STRIDE];

  static int64_t stride(int64_t longest) { return (longest + VL - 1) / VL * VL; }
  static size_t bytes(const Accumulation& a, int64_t longest) {
    return sizeof(AccumulateScratch) + size_t(a.group * (a.head_dim + stride(longest))) * sizeof(float);
  }
};

template <typename T, typename C>
static void accumulate_row(const Accumulation& a, int64_t row, AccumulateScratch& s) {
  const int64_t count = a.lengths[row], stride = AccumulateScratch::stride(count);
  const int32_t* table = a.tables + row * a.table_stride;
  const T* q = (const T*)a.q + row * a.q_stride;
  float *scaled = (float*)(&s + 1), *scores = scaled + a.group * a.head_dim;
  for (int64_t i = 0; i < a.group * a.head_dim; i += VL) store(scaled + i, load(q + i) * (a.scale * kLog2e));

  int64_t block = 0, slot = 0, ahead = 0;
  const C* k[VL] = {};
  for (int64_t i = 0; i < count; i += VL) {
    for (; ahead < count && ahead < i + AHEAD * a.block_size; ahead += a.block_size) a.prefetch<C>(table, ahead);
    for (int64_t j = 0; j < VL; ++j) {
      if (i + j >= count) {
        k[j] = k[j - 1];
        continue;
      }
      k[j] = (const C*)a.keys + (int64_t(table[block]) * a.block_size + slot) * a.head_dim;
      if (++slot == a.block_size) {
        slot = 0;
        ++block;
      }
    }
    score_heads<C>(scores + i, stride, scaled, k, s.keys, a.group, a.head_dim);
  }

  // The sums over heads, into the scores of the first.
  for (int64_t g = 0; g < a.group; ++g) {
    float *weights = scores + g * stride, maximum, sum;
    weigh(weights, count, &maximum, &sum);
    const float inverse = 1.0f / sum;
    for (int64_t i = 0; i < stride; i += VL) {
      vf p = load(weights + i) * inverse;
      if (a.power == 2) p *= p;
      store(scores + i, g ? load(scores + i) + p : p);
    }
  }

  const int32_t last = int32_t(max64(INT32_MIN, min64(a.query_positions[row] - a.buffer, INT32_MAX)));
  for (int64_t first = 0; first < count; first += a.block_size) {
    const int64_t page = int64_t(table[first / a.block_size]) * a.block_size;
    const int64_t held = min64(a.block_size, count - first);
    for (int64_t i = 0; i < held; ++i)
      a.metric[page + i] += a.key_positions[page + i] <= last ? scores[first + i] : 0.0f;
  }
}

template <typename T, typename C>
static int accumulate(const Accumulation& a, int32_t threads) {
  int64_t longest = 0, total = 0;
  for (int64_t r = 0; r < a.rows; ++r) {
    longest = max64(longest, a.lengths[r]);
    total += a.lengths[r];
  }
  int status = VB_OK;
  const int team = a.rows > 1 && total * a.head_dim > VB_SERIAL_ELEMENTS ? threads : 1;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    AccumulateScratch* s =
        (AccumulateScratch*)vb_scratch(VB_SCRATCH_PRIVATE, AccumulateScratch::bytes(a, longest));
    if (!s) {
#pragma omp atomic write
      status = VB_NO_MEMORY;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < a.rows; ++r)
      if (s && a.lengths[r]) accumulate_row<T, C>(a, r, *s);
  }
  return status;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(accumulate_sums)(float* metric, const void* q, const void* head_keys, const int32_t* tables,
                           const int64_t* lengths, const int32_t* key_positions, const int64_t* query_positions,
                           int64_t rows, int64_t table_width, int64_t table_stride, int64_t pages, int64_t block_size,
                           int64_t group, int64_t head_dim, int64_t q_stride, int64_t buffer, float scale,
                           int32_t power, int32_t dtype, int32_t cache_dtype, int32_t threads) {
  const Accumulation a = {metric,      q,            head_keys, tables,     lengths, key_positions, query_positions,
                          rows,        table_width,  table_stride, pages,   block_size, group,      head_dim,
                          q_stride,    buffer,       scale,     power};
  const int status = a.check();
  if (status != VB_OK) return status;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    return accumulate<decltype(t), decltype(c)>(a, threads);
  });
}
