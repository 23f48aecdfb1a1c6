// What each key of a request receives from the prompt's last queries, head by head, without a matrix of probabilities:
// as in mass.cpp one pass over the keys finds each row's maximum and sum, a second adds up powers of the normalised
// weights. Rows of a KV head lie query head by query head, each filled up to whole vectors, so that a vector belongs to
// one head; a unit owns the keys of the KV head that it writes.
#include "products.h"

namespace VB_NAMESPACE {

constexpr int64_t WINDOW_KEYS = 4 * TILE_KEYS;  // keys of a unit

struct WindowScratch {
  Rows rows;
  alignas(64) int32_t reaches[TILE_ROWS];         // the last key that receives anything from the row
  alignas(64) float q[MAX_HEAD_DIM * TILE_ROWS];  // [head_dim, rows], in log2 units
  alignas(64) float scores[SCORES];
  alignas(64) float keys[TILE_KEYS * MAX_HEAD_DIM];
  const float* key[TILE_KEYS + BLOCK_ROWS];
  int64_t offsets[TILE_KEYS];
};

struct WindowJob {
  int64_t queries, keys, buffer;
  int32_t power;
  int64_t vectors, rows;  // of a query head; of a KV head: group * vectors * VL
  int64_t end, chunks;    // keys below `end` are seen
  float *maxima, *sums;   // [chunks, kv_heads * rows], merged into chunk 0
  float* out;             // [heads, keys]

  // Vectors `first` .. first + s.rows.vectors of a KV head's rows.
  template <typename T>
  void begin(WindowScratch& s, const Paged& a, int64_t kv_head, int64_t first) const {
    s.rows.vectors = min64(TILE_ROWS / VL, rows / VL - first);
    s.rows.lowest = s.rows.highest = a.positions[0];
    for (int64_t r = 0; r < s.rows.vectors * VL; ++r) {
      const int64_t vector = first + r / VL, head = kv_head * a.group() + vector / vectors;
      const int64_t query = min64(vector % vectors * VL + r % VL, queries - 1);
      const int64_t position = a.positions[query];
      s.rows.positions[r] = int32_t(position);
      s.reaches[r] = int32_t(position - buffer);
      s.rows.queries[r] = query * a.q_stride + head * a.head_dim;
      s.rows.lowest = min64(s.rows.lowest, position);
    }
    pack_queries<T>(s.q, a, s.rows, a.scale * kLog2e);
  }

  template <typename C>
  void score(WindowScratch& s, const Paged& a, int64_t kv_head, int64_t first, int64_t count,
             const int32_t* last, int64_t lowest) const {
    a.offsets(s.offsets, 0, first, count);
    rows_of(s.key, s.keys, (const C*)a.keys + kv_head * a.head_dim, s.offsets, count, a.head_dim);
    score_tile(s.scores, s.key, s.q, s.rows.vectors, count, a.head_dim);
    if (first + count - 1 > lowest)
      for (int64_t v = 0; v < s.rows.vectors; ++v)
        Rows::mask(s.scores + v * COLUMN, last + v * VL, first, count, 0);
  }
};

// First pass: maximum and sum of each row over one chunk of keys, one KV head.
template <typename T, typename C>
static void window_statistics(const Paged& a, const WindowJob& job, int64_t chunk, int64_t kv_head, WindowScratch& s) {
  const int64_t begin = chunk * WINDOW_KEYS, end = min64(begin + WINDOW_KEYS, job.end);
  for (int64_t vector = 0; vector < job.rows / VL; vector += TILE_ROWS / VL) {
    job.begin<T>(s, a, kv_head, vector);
    float* maxima = job.maxima + (chunk * a.kv_heads + kv_head) * job.rows + vector * VL;
    float* sums = job.sums + (chunk * a.kv_heads + kv_head) * job.rows + vector * VL;
    for (int64_t v = 0; v < s.rows.vectors; ++v) store(maxima + v * VL, splat(-kInfinity));
    for (int64_t v = 0; v < s.rows.vectors; ++v) store(sums + v * VL, vf{});
    for (int64_t first = begin; first < end; first += TILE_KEYS) {
      const int64_t count = min64(TILE_KEYS, end - first);
      job.score<C>(s, a, kv_head, first, count, s.rows.positions, s.rows.lowest);
      for (int64_t v = 0; v < s.rows.vectors; ++v) {
        const float* column = s.scores + v * COLUMN;
        const vf before = load(maxima + v * VL);
        vf top = before;
        for (int64_t k = 0; k < count; ++k) top = vmax(top, load(column + k * VL));
        const vf safe = top == splat(-kInfinity) ? vf{} : top;
        vf sum = load(sums + v * VL) * exp2_(before - safe);
        for (int64_t k = 0; k < count; ++k) sum += exp2_(load(column + k * VL) - safe);
        store(maxima + v * VL, top);
        store(sums + v * VL, sum);
      }
    }
  }
}

// Statistics over all chunks, into chunk 0: the maximum, and 1 / sum for real rows, 0 for those that pad. Every row
// sees key 0, so no maximum of all chunks is -infinity.
static void merge_window(const Paged& a, const WindowJob& job) {
  const int64_t size = a.kv_heads * job.rows;
  for (int64_t i = 0; i < size; i += VL) {
    vf top = splat(-kInfinity), sum = {};
    for (int64_t c = 0; c < job.chunks; ++c) top = vmax(top, load(job.maxima + c * size + i));
    for (int64_t c = 0; c < job.chunks; ++c)
      sum += load(job.sums + c * size + i) * exp2_(load(job.maxima + c * size + i) - top);
    store(job.maxima + i, top);
    store(job.sums + i, 1.0f / sum);
  }
  const int64_t padded = job.vectors * VL;
  for (int64_t i = 0; i < size; i += padded)
    for (int64_t r = job.queries; r < padded; ++r) job.sums[i + r] = 0.0f;
}

// Second pass: what one chunk of keys receives from the heads of one KV head.
template <typename T, typename C>
static void window_chunk(const Paged& a, const WindowJob& job, int64_t chunk, int64_t kv_head, WindowScratch& s) {
  const int64_t begin = chunk * WINDOW_KEYS, end = min64(begin + WINDOW_KEYS, job.end);
  for (int64_t vector = 0; vector < job.rows / VL; vector += TILE_ROWS / VL) {
    job.begin<T>(s, a, kv_head, vector);
    const float* maxima = job.maxima + kv_head * job.rows + vector * VL;
    const float* inverse = job.sums + kv_head * job.rows + vector * VL;
    for (int64_t first = begin; first < end; first += TILE_KEYS) {
      const int64_t count = min64(TILE_KEYS, end - first);
      job.score<C>(s, a, kv_head, first, count, s.reaches, s.rows.lowest - job.buffer);
      for (int64_t v = 0; v < s.rows.vectors; ++v) {
        const float* column = s.scores + v * COLUMN;
        const vf top = load(maxima + v * VL), factor = load(inverse + v * VL);
        float* out = job.out + (kv_head * a.group() + (vector + v) / job.vectors) * job.keys + first;
        for (int64_t k = 0; k < count; k += VL) {
          vf weights[VL];
          for (int i = 0; i < VL; ++i) {  // beyond `count` there is room in a column, and what it holds is not stored
            const vf weight = exp2_(load(column + min64(k + i, count - 1) * VL) - top) * factor;
            weights[i] = job.power == 2 ? weight * weight : weight;
          }
          const int64_t n = min64(VL, count - k);
          store_n(out + k, load_n(out + k, n) + sum_each(weights), n);
        }
      }
    }
  }
}

template <typename T, typename C>
static int window_of(const Paged& a, WindowJob job, int32_t threads) {
  for (int64_t i = 0; i < a.heads * job.keys; ++i) job.out[i] = 0.0f;
  if (job.queries == 0 || job.keys == 0) return VB_OK;
  int64_t highest = 0;
  for (int64_t t = 0; t < job.queries; ++t) highest = max64(highest, a.positions[t]);
  job.vectors = (job.queries + VL - 1) / VL;
  job.rows = a.group() * job.vectors * VL;
  job.end = highest + 1;
  job.chunks = (job.end + WINDOW_KEYS - 1) / WINDOW_KEYS;
  const int64_t statistics = job.chunks * a.kv_heads * job.rows;
  job.maxima = (float*)vb_scratch(VB_SCRATCH_SHARED, size_t(2 * statistics) * sizeof(float));
  if (!job.maxima) return VB_NO_MEMORY;
  job.sums = job.maxima + statistics;

  int status = VB_OK;
  const int team = job.chunks * a.kv_heads > 1 ? threads : 1;  // all or one, as in attention.cpp
#pragma omp parallel num_threads(team) if (team > 1)
  {
    WindowScratch* s = (WindowScratch*)vb_scratch(VB_SCRATCH_PRIVATE, sizeof(WindowScratch));
    if (!s) {
#pragma omp atomic write
      status = VB_NO_MEMORY;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < job.chunks * a.kv_heads; ++i)
      if (s) window_statistics<T, C>(a, job, i / a.kv_heads, i % a.kv_heads, *s);
#pragma omp single
    merge_window(a, job);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < job.chunks * a.kv_heads; ++i)
      if (s) window_chunk<T, C>(a, job, i / a.kv_heads, i % a.kv_heads, *s);
  }
  return status;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(window_sums)(float* sums, const void* q, const void* key_cache, const int64_t* positions,
                       const int32_t* block_table, int64_t queries, int64_t keys, int64_t blocks, int64_t num_blocks,
                       int64_t block_size, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t q_stride,
                       int64_t buffer, float scale, int32_t power, int32_t dtype, int32_t cache_dtype,
                       int32_t threads) {
  const int64_t first = 0;
  const Paged a = {nullptr,    q,          key_cache, nullptr,  positions, block_table, &first, &keys, 1, blocks,
                   num_blocks, block_size, heads,     kv_heads, head_dim,  q_stride,    0,      scale, nullptr};
  const int status = a.check(&first, &queries);
  if (status != VB_OK) return status;
  WindowJob job = {};
  job.queries = queries;
  job.keys = keys;
  job.buffer = min64(buffer, keys);  // what is farther than all keys is as good
  job.power = power;
  job.out = sums;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    return window_of<decltype(t), decltype(c)>(a, job, threads);
  });
}
