// Paged attention with explicit query positions: cuts a step into prefill tiles and decode chunks and shares them out.
#include "amx.h"
#include "prefill.h"

namespace VB_NAMESPACE {

struct Plan {
  int64_t tiles = 0, chunks = 0, work = 0;
};

static Plan plan_step(const Paged& a) {
  Plan plan;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t queries = a.starts[r + 1] - a.starts[r];
    plan.work += queries * a.seq_lens[r] * a.heads * a.head_dim;
    if (queries == 1) {
      const int64_t position = a.positions[a.starts[r]];
      plan.chunks += position / DECODE_CHUNK - a.first_key(position) / DECODE_CHUNK + 1;
    } else {
      plan.tiles += a.kv_heads * ((queries * a.group() + TILE_ROWS - 1) / TILE_ROWS);
    }
  }
  return plan;
}

// Fills the lists; chunk_starts [requests + 1] says which chunks belong to which request.
static void list_units(const Paged& a, Tile* tiles, Chunk* chunks, int64_t* chunk_starts) {
  int64_t chunk = 0;
  for (int64_t r = 0; r < a.requests; ++r) {
    chunk_starts[r] = chunk;
    const int64_t queries = a.starts[r + 1] - a.starts[r];
    if (queries == 1) {
      const int64_t end = a.positions[a.starts[r]] + 1;
      for (int64_t first = a.first_key(end - 1); first < end;) {
        const int64_t next = min64(end, (first / DECODE_CHUNK + 1) * DECODE_CHUNK);
        chunks[chunk++] = {r, first, next - first};
        first = next;
      }
      continue;
    }
    const int64_t rows = queries * a.group();
    // The last tiles see the most keys: started first, they leave the short ones to even out the threads.
    for (int64_t first = (rows - 1) / TILE_ROWS * TILE_ROWS; first >= 0 && queries; first -= TILE_ROWS)
      for (int64_t h = 0; h < a.kv_heads; ++h) *tiles++ = {r, h, a.starts[r], first, min64(TILE_ROWS, rows - first)};
  }
  chunk_starts[a.requests] = chunk;
}

template <typename T, typename C>
VB_INLINE void decode(const Paged& a, const Chunk& chunk, float* partial, void* scratch, bool on_tiles, Ahead& ahead) {
  if constexpr (kTiles<T>) {
    if (on_tiles) return decode_chunk_amx<C>(a, chunk, partial, scratch, ahead);
  }
  decode_chunk<T, C>(a, chunk, partial, scratch, ahead);
}

template <typename T, typename C>
VB_INLINE void prefill(const Paged& a, const Tile& tile, void* scratch, bool on_tiles) {
  if constexpr (kTiles<T>) {
    if (on_tiles) return prefill_tile_amx<C>(a, tile, scratch);
  }
  prefill_tile<T, C>(a, tile, scratch);
}

static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <typename T, typename C>
static int run(const Paged& a, int32_t threads) {
  const Plan plan = plan_step(a);
  const size_t partial_size = size_t(a.heads * (a.head_dim + 2));
  const size_t tile_bytes = aligned(size_t(plan.tiles) * sizeof(Tile)),
               chunk_bytes = aligned(size_t(plan.chunks) * sizeof(Chunk));
  const size_t start_bytes = aligned(size_t(a.requests + 1) * sizeof(int64_t));
  char* shared = (char*)vb_scratch(
      VB_SCRATCH_SHARED, tile_bytes + chunk_bytes + start_bytes + size_t(plan.chunks) * partial_size * sizeof(float));
  if (!shared) return VB_NO_MEMORY;
  Tile* tiles = (Tile*)shared;
  Chunk* chunks = (Chunk*)(shared + tile_bytes);
  int64_t* chunk_starts = (int64_t*)(shared + tile_bytes + chunk_bytes);
  float* partials = (float*)(shared + tile_bytes + chunk_bytes + start_bytes);
  list_units(a, tiles, chunks, chunk_starts);

  const bool on_tiles = takes_tiles<T>(a);
  size_t tile_scratch = plan.tiles ? prefill_scratch_bytes() : 0, chunk_scratch = decode_scratch_bytes(a);
  if constexpr (kTiles<T>) {
    if (on_tiles) {
      tile_scratch = plan.tiles ? prefill_amx_scratch_bytes() : 0;
      chunk_scratch = decode_amx_scratch_bytes(a);
    }
  }
  const size_t scratch_bytes = tile_scratch > chunk_scratch ? tile_scratch : chunk_scratch;
  int status = VB_OK;
  // All threads or one: a team of another size than the last makes libgomp end threads and start new ones.
  const int team = plan.work > VB_SERIAL_ELEMENTS && plan.tiles + plan.chunks > 1 ? threads : 1;
#pragma omp parallel num_threads(team) if (team > 1)
  {
    void* scratch = vb_scratch(VB_SCRATCH_PRIVATE, scratch_bytes);
    if (!scratch) {
#pragma omp atomic write
      status = VB_NO_MEMORY;
    }
    if (on_tiles) tiles_begin();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < plan.tiles; ++i)
      if (scratch) prefill<T, C>(a, tiles[i], scratch, on_tiles);
    // Equal shares of adjacent chunks, so that each thread knows which chunk to fetch ahead.
    Ahead ahead;
    int64_t fetched = -1;  // the chunk that is on its way
#pragma omp for schedule(static)
    for (int64_t i = 0; i < plan.chunks; ++i) {
      if (!scratch) continue;
      if (fetched != i) {
        ahead.aim(a, chunks[i], sizeof(C));
        Ahead::touch(ahead, ahead.share(1));
      }
      fetched = i + 1;
      if (fetched < plan.chunks)
        ahead.aim(a, chunks[fetched], sizeof(C));
      else
        ahead.rest();
      decode<T, C>(a, chunks[i], partials + size_t(i) * partial_size, scratch, on_tiles, ahead);
    }
    if (plan.chunks) {
#pragma omp for schedule(static) nowait
      for (int64_t r = 0; r < a.requests; ++r) {
        const int64_t count = chunk_starts[r + 1] - chunk_starts[r];
        if (count) merge_chunks<T>(a, r, partials + size_t(chunk_starts[r]) * partial_size, count);
      }
    }
    if (on_tiles) tiles_end();
  }
  return status;
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

static int attend(const Paged& a, int64_t tokens, int32_t dtype, int32_t cache_dtype, int32_t threads) {
  if (a.starts[0] != 0 || a.starts[a.requests] != tokens) return VB_BAD_START;
  for (int64_t r = 0; r < a.requests; ++r)
    if (a.starts[r] > a.starts[r + 1] || (a.lse && a.starts[r] + 1 != a.starts[r + 1])) return VB_BAD_START;
  const int status = a.check(a.starts, a.starts + 1);
  if (status != VB_OK) return status;
  return with_types(dtype, cache_dtype, [&](auto t, auto c) {
    return run<decltype(t), decltype(c)>(a, threads);
  });
}

int VB_FN(paged_attention)(void* out, const void* q, const void* key_cache, const void* value_cache,
                           const int64_t* positions, const int32_t* block_tables, const int64_t* starts,
                           const int64_t* seq_lens, const float* sinks, int64_t tokens, int64_t requests,
                           int64_t table_stride, int64_t num_blocks, int64_t block_size, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, int64_t q_stride, int64_t window, float scale,
                           int32_t dtype, int32_t cache_dtype, int32_t threads) {
  const Paged a = {out,    q,        key_cache, value_cache,  positions,  block_tables,
                   starts, seq_lens, requests,  table_stride, num_blocks, block_size,
                   heads,  kv_heads, head_dim,  q_stride,     window,     scale,        nullptr, sinks};
  return attend(a, tokens, dtype, cache_dtype, threads);
}

int VB_FN(attention_states)(void* out, float* lse, const void* q, const void* key_cache, const void* value_cache,
                            const int64_t* positions, const int32_t* block_tables, const int64_t* starts,
                            const int64_t* seq_lens, int64_t tokens, int64_t table_stride, int64_t num_blocks,
                            int64_t block_size, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t q_stride,
                            float scale, int32_t dtype, int32_t cache_dtype, int32_t threads) {
  const Paged a = {out,    q,        key_cache, value_cache,  positions,  block_tables,
                   starts, seq_lens, tokens,    table_stride, num_blocks, block_size,
                   heads,  kv_heads, head_dim,  q_stride,     0,          scale,        lse};
  return attend(a, tokens, dtype, cache_dtype, threads);
}
