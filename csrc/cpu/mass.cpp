// How much attention each key receives from a few queries, without a matrix of probabilities: one pass over the keys
// finds each row's maximum and sum, a second adds up the normalised weights. Each unit owns the keys it writes, so the
// sums come out the same for any number of threads.
#include "products.h"

namespace VB_NAMESPACE {

constexpr int64_t MASS_KEYS = 4 * TILE_KEYS;  // keys of a unit

struct MassScratch {
  Rows rows;
  alignas(64) float q[MAX_HEAD_DIM * TILE_ROWS];  // [head_dim, rows], in log2 units
  alignas(64) float scores[SCORES];
  alignas(64) float keys[TILE_KEYS * MAX_HEAD_DIM];
  const float* key[TILE_KEYS + BLOCK_ROWS];
  int64_t offsets[TILE_KEYS];
};

// What the passes share for one request. Row statistics are [kv_heads, padded rows], padded rows a multiple of VL.
struct Job {
  int64_t request, first_query, rows, padded, end,
      chunks;            // rows (queries x group) of a KV head; keys below `end` are seen
  float *maxima, *sums;  // [chunks, kv_heads * padded], merged into chunk 0
  float* mass;
};

template <typename C>
VB_INLINE void scores_of(MassScratch& s, const Paged& a, const Tile& tile, int64_t first, int64_t count) {
  a.offsets(s.offsets, tile.request, first, count);
  rows_of(s.key, s.keys, (const C*)a.keys + tile.kv_head * a.head_dim, s.offsets, count, a.head_dim);
  score_tile(s.scores, s.key, s.q, s.rows.vectors, count, a.head_dim);
  if (s.rows.needs_mask(first, count, a.window))
    for (int64_t v = 0; v < s.rows.vectors; ++v)
      Rows::mask(s.scores + v * COLUMN, s.rows.positions + v * VL, first, count, a.window);
}

template <typename T>
VB_INLINE void begin_tile(MassScratch& s, const Paged& a, const Tile& tile) {
  s.rows.begin(a, tile, VL);
  pack_queries<T>(s.q, a, s.rows, a.scale * kLog2e);
}

// First pass: maximum and sum of each row over one chunk of keys, one KV head.
template <typename T, typename C>
static void chunk_statistics(const Paged& a, const Job& job, int64_t chunk, int64_t kv_head, MassScratch& s) {
  const int64_t begin = chunk * MASS_KEYS, end = min64(begin + MASS_KEYS, job.end);
  for (int64_t row = 0; row < job.rows; row += TILE_ROWS) {
    const Tile tile = {job.request, kv_head, job.first_query, row, min64(TILE_ROWS, job.rows - row)};
    begin_tile<T>(s, a, tile);
    float* maxima = job.maxima + (chunk * a.kv_heads + kv_head) * job.padded + row;
    float* sums = job.sums + (chunk * a.kv_heads + kv_head) * job.padded + row;
    for (int64_t v = 0; v < s.rows.vectors; ++v) store(maxima + v * VL, splat(-kInfinity));
    for (int64_t v = 0; v < s.rows.vectors; ++v) store(sums + v * VL, vf{});
    for (int64_t first = begin; first < end; first += TILE_KEYS) {
      const int64_t count = min64(TILE_KEYS, end - first);
      scores_of<C>(s, a, tile, first, count);
      for (int64_t v = 0; v < s.rows.vectors; ++v) {
        const vf before = load(maxima + v * VL);
        vf top = before;
        for (int64_t k = 0; k < count; ++k) top = vmax(top, load(s.scores + v * COLUMN + k * VL));
        const vf safe = top == splat(-kInfinity) ? vf{} : top;
        vf sum = load(sums + v * VL) * exp2_(before - safe);
        for (int64_t k = 0; k < count; ++k) sum += exp2_(load(s.scores + v * COLUMN + k * VL) - safe);
        store(maxima + v * VL, top);
        store(sums + v * VL, sum);
      }
    }
  }
}

// Statistics over all chunks, into chunk 0: the maximum, and 1 / sum for real rows, 0 for those that pad.
static void merge_statistics(const Paged& a, const Job& job) {
  const int64_t size = a.kv_heads * job.padded;
  for (int64_t i = 0; i < size; i += VL) {
    vf top = splat(-kInfinity), sum = {};
    for (int64_t c = 0; c < job.chunks; ++c) top = vmax(top, load(job.maxima + c * size + i));
    for (int64_t c = 0; c < job.chunks; ++c)
      sum += load(job.sums + c * size + i) * exp2_(load(job.maxima + c * size + i) - top);
    store(job.maxima + i, top);
    store(job.sums + i, 1.0f / sum);
  }
  for (int64_t h = 0; h < a.kv_heads; ++h)
    for (int64_t r = job.rows; r < job.padded; ++r) job.sums[h * job.padded + r] = 0.0f;
}

// Second pass: the mass of one chunk of keys.
template <typename T, typename C>
static void chunk_mass(const Paged& a, const Job& job, int64_t chunk, MassScratch& s) {
  const int64_t begin = chunk * MASS_KEYS, end = min64(begin + MASS_KEYS, job.end);
  for (int64_t k = begin; k < end; ++k) job.mass[k] = 0.0f;
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
    for (int64_t row = 0; row < job.rows; row += TILE_ROWS) {
      const Tile tile = {job.request, kv_head, job.first_query, row, min64(TILE_ROWS, job.rows - row)};
      begin_tile<T>(s, a, tile);
      const float* maxima = job.maxima + kv_head * job.padded + row;
      const float* inverse = job.sums + kv_head * job.padded + row;
      for (int64_t first = begin; first < end; first += TILE_KEYS) {
        const int64_t count = min64(TILE_KEYS, end - first);
        scores_of<C>(s, a, tile, first, count);
        for (int64_t k = 0; k < count; ++k) {
          vf sum = {};
          for (int64_t v = 0; v < s.rows.vectors; ++v)
            sum += exp2_(load(s.scores + v * COLUMN + k * VL) - load(maxima + v * VL)) * load(inverse + v * VL);
          job.mass[first + k] += sum_lanes(sum);
        }
      }
    }
  for (int64_t k = begin; k < end; ++k) job.mass[k] /= float(a.heads);
}

template <typename T, typename C>
static int mass_of(const Paged& a, float* mass, const int64_t* first, const int64_t* last, const int64_t* offsets,
                   int32_t threads) {
  for (int64_t r = 0; r < a.requests; ++r) {
    for (int64_t k = offsets[r]; k < offsets[r + 1]; ++k) mass[k] = 0.0f;
    if (first[r] == last[r]) continue;
    int64_t highest = 0;
    for (int64_t t = first[r]; t < last[r]; ++t) highest = max64(highest, a.positions[t]);
    Job job = {};
    job.request = r;
    job.first_query = first[r];
    job.rows = (last[r] - first[r]) * a.group();
    job.padded = (job.rows + VL - 1) / VL * VL;
    job.end = highest + 1;
    job.chunks = (job.end + MASS_KEYS - 1) / MASS_KEYS;
    job.mass = mass + offsets[r];
    const int64_t statistics = job.chunks * a.kv_heads * job.padded;
    job.maxima = (float*)vb_scratch(VB_SCRATCH_SHARED, size_t(2 * statistics) * sizeof(float));
    if (!job.maxima) return VB_NO_MEMORY;
    job.sums = job.maxima + statistics;

    int status = VB_OK;
    const int team = job.chunks * a.kv_heads > 1 ? threads : 1;  // all or one, as in attention.cpp
#pragma omp parallel num_threads(team) if (team > 1)
    {
      MassScratch* s = (MassScratch*)vb_scratch(VB_SCRATCH_PRIVATE, sizeof(MassScratch));
      if (!s) {
#pragma omp atomic write
        status = VB_NO_MEMORY;
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < job.chunks * a.kv_heads; ++i)
        if (s) chunk_statistics<T, C>(a, job, i / a.kv_heads, i % a.kv_heads, *s);
#pragma omp single
      merge_statistics(a, job);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < job.chunks; ++i)
        if (s) chunk_mass<T, C>(a, job, i, *s);
    }
    if (status != VB_OK) return status;
  }
  return VB_OK;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(attention_mass)(float* mass, const void* q, const void* key_cache, const int64_t* positions,
                          const int32_t* block_tables, const int64_t* first, const int64_t* last,
                          const int64_t* seq_lens, const int64_t* offsets, int64_t requests, int64_t table_stride,
                          int64_t num_blocks, int64_t block_size, int64_t heads, int64_t kv_heads, int64_t head_dim,
                          int64_t q_stride, int64_t window, float scale, int32_t dtype, int32_t cache_dtype,
                          int32_t threads) {
  const Paged a = {nullptr,      q,          key_cache,  nullptr, positions, block_tables, nullptr,  seq_lens, requests,
                   table_stride, num_blocks, block_size, heads,   kv_heads,  head_dim,     q_stride, window,   scale};
  const int status = a.check(first, last);
  if (status != VB_OK) return status;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    return mass_of<decltype(t), decltype(c)>(a, mass, first, last, offsets, threads);
  });
}
