// C ABI of the CUDA kernels. No torch headers: plain pointers, sizes and an explicit stream (a cudaStream_t).
//
// Every function returns 0, a cudaError_t (positive), or one of the VB_ERROR_* codes below. But for those of shared memory,
// none allocates, synchronises or reads device memory on the host, so all can be captured into a CUDA graph. Strides are in elements. dtype: VB_FP16 or
// VB_BF16, of what is computed. Pages have that dtype or VB_E4M3, to which numbers are rounded to nearest even, those above
// 448 to 448. Head sizes of the attention kernels: 64, 80, 96, 128, 256. A paged cache is [num_blocks, block_size, kv_heads,
// head_dim] with the last dimension contiguous; block_size is a power of two, at least 16.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum {
  VB_ERROR_HEAD_DIM = -1,
  VB_ERROR_DTYPE = -2,
  VB_ERROR_BLOCK_SIZE = -3,
  VB_ERROR_HEADS = -4,
  VB_ERROR_VARIANT = -5,    // the variant does not run on this device
  VB_ERROR_WORKSPACE = -6,  // too small
  VB_ERROR_ALIGNMENT = -7,  // a pointer or stride breaks the 16-byte accesses
  VB_ERROR_TENSOR_MAP = -8,
  VB_ERROR_SHAPE = -9,
};

enum { VB_FP16 = 0, VB_BF16 = 1, VB_FP32 = 2, VB_E4M3 = 3 };  // fp32: of logits and of sums over ranks alone

enum { VB_PREFILL_AUTO = 0, VB_PREFILL_MMA = 1, VB_PREFILL_WGMMA = 2 };

typedef struct {
  const void* key;
  const void* value;
  int64_t page_stride, slot_stride, head_stride;  // the same for key and value
  int32_t num_blocks, block_size, kv_heads, head_dim, dtype;
} VbCache;

typedef struct {
  const void* q;  // [tokens, q_heads, head_dim]
  void* out;      // [tokens, q_heads, head_dim]
  float* lse;     // [tokens, q_heads], natural log, or null
  const int64_t* positions;        // [tokens], ascending inside a request
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* block_tables;     // [num_requests, block_table_stride]
  void* workspace;
  size_t workspace_bytes;
  int64_t q_token_stride, out_token_stride;
  int32_t block_table_stride, num_tokens, num_requests, q_heads;
  int32_t window;  // 0: none; else a key at position p is seen by a query at t iff t - window < p <= t
  int32_t variant;
  int32_t dtype;  // of q and out
  float scale;
} VbPrefill;

// The work of a step is planned once (vb_prefill_plan) and used by every layer's vb_prefill_attention with the same
// positions, offsets, heads, window, variant and workspace.
size_t vb_prefill_workspace_bytes(int num_tokens, int num_requests, int q_heads, int kv_heads, int head_dim);
int vb_prefill_variant(int head_dim, int variant);  // the variant that AUTO means on the current device, or an error
int vb_prefill_plan(const VbPrefill* args, const VbCache* cache, void* stream);
int vb_prefill_attention(const VbPrefill* args, const VbCache* cache, void* stream);

typedef struct {
  const void* q;  // [tokens, q_heads, head_dim]
  void* out;
  float* lse;                      // [tokens, q_heads], natural log, or null
  const int64_t* positions;        // [tokens], ascending inside a request: a query sees keys 0..position
  const int32_t* query_start_loc;  // [num_requests + 1], or null: one query a request
  const int32_t* block_tables;
  void* workspace;
  size_t workspace_bytes;
  int64_t q_token_stride, out_token_stride;
  int32_t block_table_stride, num_requests, q_heads, window;
  int32_t max_queries;  // no request has more; at most vb_decode_max_queries
  int32_t dtype;        // of q and out
  float scale;
} VbDecode;

// Planned once a step like prefill. Memory-bound: K and V are read once for all queries and query heads of a KV head.
int vb_decode_max_queries(int q_heads, int kv_heads, int head_dim);
size_t vb_decode_workspace_bytes(const VbDecode* args, const VbCache* cache);  // 0: bad arguments; reads no pointer
int vb_decode_plan(const VbDecode* args, const VbCache* cache, void* stream);
int vb_decode_attention(const VbDecode* args, const VbCache* cache, void* stream);

// out, lse = the attention over the union of the keys behind two partial states (normalised outputs, natural-log LSE).
int vb_merge_states(const void* out_a, const float* lse_a, const void* out_b, const float* lse_b, void* out, float* lse,
                    int64_t rows, int head_dim, int dtype, void* stream);

// Chunk KV of all layers: k (before RoPE), v [layers, tokens, kv_heads, head_dim] -> pages of key_caches[layer],
// value_caches[layer] (device arrays of pointers). cos, sin: [tokens, rotary_half] float32 at the target positions.
// A negative slot is skipped. dtype: of the chunk and the pages, which may be VB_E4M3.
int vb_place_chunk(const void* k, const void* v, int64_t layer_stride, int64_t token_stride, const float* cos, const float* sin,
                   void* const* key_caches, void* const* value_caches, const int64_t* slots, int64_t page_stride,
                   int64_t slot_stride, int64_t head_stride, int layers, int tokens, int kv_heads, int head_dim, int rotary_half,
                   int block_size, int dtype, void* stream);

// Queues host-to-device copies of one layer of stored KV, one piece after another, to k and to v. pieces: [count][4] on the host:
// addresses of K and of V in layer 0, bytes from a layer to the next, bytes of K (and of V) in a layer. pinned: all pieces are.
// The stream must not be the default one.
int vb_copy_pieces(const int64_t* pieces, int count, int layer, int pinned, void* k, void* v, void* stream);

// Mean shift: the tokens of a segment of stored KV that a step reuses move by the mean change of those that it computes again.
// A segment covers tokens first_token .. first_token + tokens - 1 of all segments' tokens, at positions from `position` on.
typedef struct {
  int64_t k, v;  // addresses of K (before RoPE) and V of its first token in layer 0, [layers, tokens, kv_heads, head_dim]
  int64_t layer_stride, token_stride;  // of both
  int32_t first_token, tokens, position, request;
  int32_t row_start, row_stop;  // of its request in the step
  int32_t first_tile;           // tiles of VB_SHIFT_TILE tokens; a segment begins with a new one
  float strength;
} VbShiftSegment;

enum { VB_SHIFT_TILE = 16 };

// Once for the rows of a step: rows [segments, 2] = the first row in each segment and the one behind its last; slots [all tokens]
// = the slot of each token that moves, ~slot of those that are left alone: computed again, or in a segment without computed rows.
// positions: [rows of the step], ascending inside a request. segments: of VbShiftSegment, on the device.
int vb_mean_shift_plan(const void* segments, const int64_t* positions, const int32_t* block_tables, int64_t* slots, int32_t* rows,
                       int64_t table_stride, int count, int block_size, void* stream);

// One layer. k (before RoPE), v: what the step has computed, [rows, kv_heads, head_dim]. shift [segments, 2, kv_heads * head_dim]
// float32 receives strength * mean(computed - stored) of K and of V, added in a fixed order; then stored + shift, K rotated by
// cos, sin [positions, rotary_half] float32 and cast once, is written to the slots of the tokens that move.
// tiles: [num_tiles], the segment of each. Stored KV has the dtype of the pages.
int vb_mean_shift(const void* segments, const int32_t* tiles, const int64_t* positions, const int32_t* rows, const int64_t* slots,
                  const void* k, const void* v, const float* cos, const float* sin, float* shift, void* key_cache,
                  void* value_cache, int64_t k_token_stride, int64_t v_token_stride, int64_t page_stride, int64_t slot_stride,
                  int64_t head_stride, int layer, int count, int num_tiles, int kv_heads, int head_dim, int rotary_half,
                  int block_size, int dtype, int cache_dtype, void* stream);

// k, v [tokens, kv_heads, head_dim] -> slots. A negative slot is skipped.
int vb_reshape_and_cache(const void* k, const void* v, int64_t k_token_stride, int64_t v_token_stride, void* key_cache,
                         void* value_cache, const int64_t* slots, int64_t page_stride, int64_t slot_stride, int64_t head_stride,
                         int tokens, int kv_heads, int head_dim, int block_size, int dtype, int cache_dtype, void* stream);

// Packed qkv [tokens, (q_heads + 2 * kv_heads) * head_dim]: q is rotated in place, k is rotated into its slot, v is copied
// into its slot. cos, sin: [max_position, rotary_half] float32 tables, indexed by positions.
int vb_rope_and_cache(void* qkv, int64_t token_stride, const float* cos, const float* sin, const int64_t* positions,
                      const int64_t* slots, void* key_cache, void* value_cache, int64_t page_stride, int64_t slot_stride,
                      int64_t head_stride, int tokens, int q_heads, int kv_heads, int head_dim, int rotary_half, int block_size,
                      int dtype, int cache_dtype, void* stream);

// As vb_rope_and_cache, with an RMSNorm over each head of q and k before the rotation. Heads are rotated whole, and
// head_dim / 16 is a power of two. q_weight, k_weight: [head_dim], of the dtype of qkv.
int vb_norm_rope_and_cache(void* qkv, int64_t token_stride, const void* q_weight, const void* k_weight, float eps,
                           const float* cos, const float* sin, const int64_t* positions, const int64_t* slots, void* key_cache,
                           void* value_cache, int64_t page_stride, int64_t slot_stride, int64_t head_stride, int tokens,
                           int q_heads, int kv_heads, int head_dim, int rotary_half, int block_size, int dtype, int cache_dtype,
                           void* stream);

// out = rms_norm(x + residual) * weight and residual += x (residual may be null: out = rms_norm(x) * weight). out may be x.
int vb_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t tokens, int hidden, float eps, int dtype,
                void* stream);

// out [tokens, n] = silu(gate) * up for gate_up [tokens, 2 * n].
int vb_silu_and_mul(const void* gate_up, void* out, int64_t tokens, int n, int dtype, void* stream);

// out [rows, outs] = x [rows, in] times weight [outs, in] transposed, plus bias [outs] (may be null), for at most VB_FEW_ROWS rows, a
// multiple of VB_FEW_ROWS_OUTS outputs, and a multiple of 8 inputs.
#define VB_FEW_ROWS 4
#define VB_FEW_ROWS_OUTS 4
int vb_few_rows(const void* x, const void* weight, const void* bias, void* out, int rows, int in, int outs, int dtype, void* stream);

// Rows of x [rows, n] to e4m3 [rows, n] and one float32 scale a row, value * scale = x: alone, of rms_norm's output, of
// silu_and_mul's. The last two round as vb_rms_norm and vb_silu_and_mul do and then quantise. Their input may be a matrix
// product whose scales are still to be applied, [rows] and [columns]; null where there are none.
int vb_quantize_fp8(const void* x, int64_t row_stride, void* out, float* scales, int64_t rows, int n, int dtype, void* stream);
int vb_rms_norm_quantize_fp8(const void* x, const float* x_row_scales, const float* x_column_scales, void* residual,
                             const void* weight, void* out, float* scales, int64_t rows, int n, float eps, int dtype, void* stream);
int vb_silu_and_mul_quantize_fp8(const void* gate_up, const float* row_scales, const float* column_scales, void* out, float* scales,
                                 int64_t rows, int n, int dtype, void* stream);

// out [features, size] bf16 from PyTorch's layout of 4-bit matrices, see int4_tiles.cuh: tiles [features / 8, size / (32 * words),
// 32, words], words 1, 2 or 4, and scales_and_zeros [size / group, features, 2] bf16; group is a power of two of at least 32.
int vb_int4_tiles_unpack(const void* tiles, const void* scales_and_zeros, void* out, int features, int size, int group, int words,
                         void* stream);

// deviation[i] = sum over heads and channels of (fresh[t] - cached at slots[t])^2, float32, for t = rows[i], or i where rows is null.
int vb_kv_deviation(const void* fresh, int64_t token_stride, const void* cache, const int64_t* slots, const int64_t* rows,
                    int64_t page_stride, int64_t slot_stride, int64_t head_stride, float* deviation, int count, int kv_heads,
                    int head_dim, int block_size, int dtype, int cache_dtype, void* stream);

// mass[kv_head][p] += sum over its query heads and the query rows of exp(score - lse) / q_heads, for p < num_keys: added over KV
// heads it is a key's mass averaged over heads. Heads are apart so that no order of addition varies.
// q: [rows, q_heads, head_dim]; lse: [rows, q_heads], infinite in rows that do not count; positions: [rows]; variant: as above.
// dtype, here and below: of q. One request: requests is null, block_tables one row. Several: requests, on the device, has for each
// its first row, how many rows it has (0: it is left alone), how many keys, and where in `mass` its own [kv_heads, keys] begin;
// block_tables has a row for each; rows and num_keys are the most that any has.
#define VB_MASS_FIELDS 4
int vb_attention_mass(const void* q, int64_t q_token_stride, const float* lse, const int64_t* positions, const int32_t* block_tables,
                      int64_t table_stride, const int64_t* requests, int count, float* mass, int rows, int num_keys, int q_heads,
                      int window, float scale, int variant, int dtype, const VbCache* cache, void* stream);

// What the keys of one request receive from the queries q [rows, q_heads, head_dim] at positions [rows]: sums [q_heads, num_keys]
// = sum over queries of p ^ power (1 or 2), p the softmax probability over keys at most at the position; keys nearer than
// `buffer` get nothing. Keys beyond every position are not written. block_table: one row. workspace: of vb_window_workspace_bytes.
size_t vb_window_workspace_bytes(int rows, int num_keys, int q_heads, int head_dim);
int vb_window_sums(const void* q, int64_t q_token_stride, const int64_t* positions, const int32_t* block_table, float* sums,
                   void* workspace, size_t workspace_bytes, int rows, int num_keys, int q_heads, int64_t buffer, float scale, int power,
                   int dtype, const VbCache* cache, void* stream);

// For each row, one KV head of one request: metric[slot] += sum over the group's query heads q [rows, group, head_dim] of
// p ^ power, p the softmax over the first lengths[row] slots of tables[row], where key_positions[slot] <= query_positions[row] -
// buffer. The cache is one of pages with one KV head; metric and key_positions are [pages, block_size]. Rows of length 0 are
// skipped, others share no page. stats: [rows, splits, group, 2], splits from vb_accumulate_splits (negative: an error); null
// where lse [rows, group], the natural log-sum-exp of the scores, is given: the keys are then read once.
int vb_accumulate_splits(int rows, int max_length);
int vb_accumulate_sums(float* metric, const void* q, int64_t q_row_stride, const int32_t* tables, int64_t table_stride,
                       const int64_t* lengths, const int32_t* key_positions, const int64_t* query_positions, float* stats,
                       const float* lse, int rows, int splits, int group, int64_t buffer, float scale, int power, int dtype,
                       const VbCache* cache, void* stream);

// The next token of every row of logits. settings [rows, 4]: temperature (0: the first largest logit), log of min_p (-inf: off),
// top_k (the vocabulary and above: off), top_p (1 and above: off). uniforms [rows] in [0, 1); may be null if no row is random.
enum { VB_SAMPLE_UNFILTERED = 1, VB_SAMPLE_FILTERED = 2 };  // filtered: random, with min-p, top-k or top-p on
// Instead of a token: the row has no finite maximum; it had one before logits were changed (see places).
enum { VB_TOKEN_BROKEN = -1, VB_TOKEN_NONE_LEFT = -2 };

typedef struct {
  const void* logits;  // [rows, vocab], the last dimension contiguous
  int64_t row_stride;
  const double* settings;
  const double* uniforms;
  int64_t* tokens;  // [rows]
  // Null, or [rows]: where in uniforms and tokens a row stands. Where the token is VB_TOKEN_BROKEN already it stays so.
  const int64_t* places;
  void* workspace;
  size_t workspace_bytes;
  int32_t rows, vocab;  // at most 2^19 - 1 of vocabulary
  int32_t dtype;        // as above, and 2 = fp32
  int32_t kinds;        // which kinds of rows there are
} VbSample;

size_t vb_sample_workspace_bytes(int rows, int vocab);
int vb_sample(const VbSample* args, void* stream);

// Penalties on float32 logits, in place, for the tokens that row i has had: tables[i] has sizes[i] entries (token, how often it
// was generated; 0: it is in the prompt only), each token once. penalties [3, rows]: repetition, frequency, presence. Before,
// changes [num_changes, 4] are written to the tables: row, entry, token, count.
int vb_penalize(float* logits, int64_t row_stride, int32_t* const* tables, const int32_t* sizes, const int32_t* changes,
                int num_changes, const float* penalties, int rows, void* stream);

// Memory of a rank that the other ranks of its machine can read and write, with a handle for them: one rank gives it, and the
// others open it. These three functions are for the time before and after all steps: they allocate and synchronise.
enum { VB_HANDLE_BYTES = 64, VB_MAX_RANKS = 8, VB_ALL_REDUCE_BYTES = 4 << 20 };
int vb_share_memory(int64_t* address, uint8_t* handle);
int vb_open_memory(int64_t* address, const uint8_t* handle);
int vb_close_memory(int64_t address, int is_own);
// Adds up the ranks' data, in place and in float32, with the same bits on all of them: at most VB_ALL_REDUCE_BYTES, a multiple
// of 16. memories [ranks] has the addresses of all ranks' memory, as this rank sees it. All ranks make the same calls in the
// same order. has_ended, in pinned memory of the host: not 0 once another rank has ended. Who waits for it then ends within
// some milliseconds, and this and all later sums are wrong.
int vb_all_reduce(void* data, int64_t bytes, const int64_t* memories, int rank, int ranks, const int32_t* has_ended, int dtype,
                  void* stream);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
