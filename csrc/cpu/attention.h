// What the attention kernels share: the arguments of a call, and how a key's position finds its row in the paged cache.
#ifndef VLLM_BLEND_ATTENTION_H
#define VLLM_BLEND_ATTENTION_H

#include "dispatch.h"
#include "parallel.h"

namespace VB_NAMESPACE {

constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t DECODE_CHUNK =
    128;  // keys of a decode unit: fixed, so that a request's sums never depend on its batch
constexpr int64_t TILE_ROWS = 8 * VL;  // rows (queries x heads of a KV head) of a prefill unit
constexpr int64_t TILE_KEYS = 64;

struct Paged {
  void* out;
  const void *q, *keys, *values;
  const int64_t* positions;
  const int32_t* tables;
  const int64_t *starts, *seq_lens;
  int64_t requests, table_stride, num_blocks, block_size, heads, kv_heads, head_dim, q_stride, window;
  float scale;
  float* lse;          // [tokens, heads], or null; for requests with one query
  const float* sinks;  // [heads], or null: a score of each head that belongs to no key

  int64_t group() const { return heads / kv_heads; }
  int64_t row() const { return kv_heads * head_dim; }
  int64_t first_key(int64_t position) const { return window ? max64(0, position - window + 1) : 0; }

  // Element offsets of `count` keys from position `first` on, for KV head 0.
  void offsets(int64_t* to, int64_t request, int64_t first, int64_t count) const {
    const int32_t* table = tables + request * table_stride;
    int64_t block = first / block_size, slot = first % block_size;
    for (int64_t i = 0; i < count; ++block, slot = 0) {
      int64_t offset = (int64_t(table[block]) * block_size + slot) * row();
      for (; slot < block_size && i < count; ++slot, offset += row()) to[i++] = offset;
    }
  }

  // Every table entry and position that a kernel will follow, checked before it is followed.
  int check(const int64_t* first, const int64_t* last) const {
    if (head_dim % 16 || head_dim > MAX_HEAD_DIM || heads % kv_heads) return VB_BAD_DTYPE;
    for (int64_t r = 0; r < requests; ++r) {
      if (first[r] == last[r]) continue;
      const int64_t blocks = (seq_lens[r] + block_size - 1) / block_size;
      if (blocks > table_stride) return VB_BAD_BLOCK;
      bool ok = true;
      for (int64_t b = 0; b < blocks; ++b) ok &= uint32_t(tables[r * table_stride + b]) < uint64_t(num_blocks);
      if (!ok) return VB_BAD_BLOCK;
      for (int64_t t = first[r]; t < last[r]; ++t) ok &= uint64_t(positions[t]) < uint64_t(seq_lens[r]);
      if (!ok) return VB_BAD_POSITION;
    }
    return VB_OK;
  }
};

// Whether this build has bf16 tile registers for queries of T, and whether they fit a call: its heads, channels and blocks.
template <typename T>
inline constexpr bool kTiles = false;
#if defined(VB_AMX)
template <>
inline constexpr bool kTiles<bf16> = true;
#endif
template <typename T>
VB_INLINE bool takes_tiles(const Paged& a) {
  return kTiles<T> && a.head_dim % 32 == 0 && a.block_size % 16 == 0 && a.group() <= 16;
}

// A stretch of one request's keys for its single query; what it writes is merged over the request's chunks.
struct Chunk {
  int64_t request, first, count;
};

// Brings the K and V of a chunk into the second-level cache while the chunk before it is computed: a few lines at every
// touch(), taken from all of its blocks in turn. A thread that reads block after block waits for memory at each of
// them, because the hardware's prefetchers stop at page ends; in this order they work on all blocks at once: 16 x 750
// keys of 79 MB in 12 layers, bf16, one thread, 392 us a layer against 540.
class Ahead {
 public:
  void aim(const Paged& a, const Chunk& chunk, int64_t element_bytes) {
    keys_ = (const char*)a.keys;
    values_ = (const char*)a.values;
    const int32_t* table = a.tables + chunk.request * a.table_stride;
    blocks_ = 0;
    for (int64_t b = chunk.first / a.block_size; b * a.block_size < chunk.first + chunk.count; ++b)
      starts_[blocks_++] = table[b] * a.block_size * a.row() * element_bytes;
    lines_ = (a.block_size * a.row() * element_bytes + 63) / 64;
    line_ = block_ = 0;
  }
  void rest() { lines_ = line_ = blocks_ = 0; }
  // Lines of one of `parts` equal helpings.
  int64_t share(int64_t parts) const { return (lines_ * blocks_ + parts - 1) / parts; }
  VB_INLINE void touch(Ahead& to, int64_t lines) {
    for (; lines > 0 && to.line_ < to.lines_; --lines) {
      const int64_t at = to.starts_[to.block_] + to.line_ * 64;
      __builtin_prefetch(to.keys_ + at, 0, 2);
      __builtin_prefetch(to.values_ + at, 0, 2);
      if (++to.block_ == to.blocks_) {
        to.block_ = 0;
        ++to.line_;
      }
    }
  }

 private:
  const char *keys_ = nullptr, *values_ = nullptr;
  int64_t starts_[DECODE_CHUNK + 1];
  int64_t blocks_ = 0, lines_ = 0, line_ = 0, block_ = 0;
};

// Decode: partial [heads * (head_dim + 2)] = unnormalised output rows, then maxima (log2) and sums of each head.
size_t decode_scratch_bytes(const Paged& a);
template <typename T, typename C>
void decode_chunk(const Paged& a, const Chunk& chunk, float* partial, void* scratch, Ahead& ahead);
size_t decode_amx_scratch_bytes(const Paged& a);
template <typename C>
void decode_chunk_amx(const Paged& a, const Chunk& chunk, float* partial, void* scratch,
                      Ahead& ahead);  // bf16 and a cache of C, tiles_begin() called

template <typename T>
void merge_chunks(const Paged& a, int64_t request, const float* partials, int64_t chunks);

}  // namespace VB_NAMESPACE
#endif
