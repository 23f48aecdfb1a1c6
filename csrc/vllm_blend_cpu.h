// The C ABI of the CPU kernels. No torch, no C++ types: pointers, int64 sizes and strides (in elements), a dtype code.
//
// Every kernel is compiled once per instruction set, under the name vb_<isa>_<kernel>; vb_cpu_isas() lists the sets
// that are both in this binary and runnable on this machine, best first. The Python side (vllm_blend/ops/bindings.py)
// takes the first.
//
// Shapes use: T tokens, R requests, H query heads, K KV heads, D head size, S = num_blocks * block_size cache slots.
// A cache is [num_blocks, block_size, K, D], contiguous; `cache_dtype` is `dtype` or VB_F8, in which numbers are rounded to
// nearest even and limited to 448. `*_stride` is the distance between two tokens' rows; what is
// inside a row is contiguous. All arithmetic is float32, whatever the storage. `threads` is an upper bound for OpenMP.
// Every kernel returns a vb_status; anything but VB_OK means that no promise is made about the outputs.
#ifndef VLLM_BLEND_CPU_H
#define VLLM_BLEND_CPU_H

#include <stdint.h>

#define VB_ABI_VERSION 6

#if defined(_WIN32)
#define VB_EXPORT extern "C" __declspec(dllexport)
#else
#define VB_EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum vb_dtype { VB_F32 = 0, VB_BF16 = 1, VB_F16 = 2, VB_F8 = 3 };  // VB_F8 is e4m3, for caches and chunks alone

enum vb_status {
  VB_OK = 0,
  VB_BAD_DTYPE = 1,     // a dtype code, or a head size, that the kernel does not know
  VB_BAD_SLOT = 2,      // a slot outside the cache
  VB_BAD_BLOCK = 3,     // a block table entry outside the cache, or a table shorter than its request
  VB_BAD_POSITION = 4,  // a query position outside its request
  VB_NO_MEMORY = 5,
  VB_BAD_START = 6,  // request offsets that do not rise from 0 to the number of tokens
};

// Space-separated names of the usable instruction sets, best first, such as "avx512 avx2 generic".
VB_EXPORT const char* vb_cpu_isas(void);
VB_EXPORT int64_t vb_cpu_abi_version(void);

#ifdef VB_ISA  // from here on: once per instruction set

#define VB_JOIN_(a, b, c) a##b##_##c
#define VB_JOIN(a, b, c) VB_JOIN_(a, b, c)
#define VB_FN(name) VB_JOIN(vb_, VB_ISA, name)

// out [rows, n] = rms_norm(x + residual) * weight; residual and sum may both be null, else sum [rows, n] = x +
// residual. out, sum and residual are contiguous.
VB_EXPORT int VB_FN(rms_norm)(void* out, void* sum, const void* x, const void* residual, const void* weight,
                              int64_t rows, int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t threads);

// out [rows, n] = silu(gate) * up for gate_up rows of [gate n | up n].
VB_EXPORT int VB_FN(silu_and_mul)(void* out, const void* gate_up, int64_t rows, int64_t n, int64_t stride,
                                  int32_t dtype, int32_t threads);

// Rotate q [T, H, D] and k [T, K, D] by cos, sin [T, half] float32; write q_out, k_out (contiguous; k_out may be null)
// and, where key_cache is not null, the rotated k and v [T, K, D] to the cache slots [T]. H or K may be 0.
VB_EXPORT int VB_FN(rope)(void* q_out, void* k_out, const void* q, const void* k, const void* v, const float* cos,
                          const float* sin, void* key_cache, void* value_cache, const int64_t* slots, int64_t tokens,
                          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t half, int64_t q_stride,
                          int64_t k_stride, int64_t v_stride, int64_t num_slots, int32_t dtype, int32_t cache_dtype,
                          int32_t threads);

// Write k, v [T, K, D] (row = K * D elements) to cache slots [T].
VB_EXPORT int VB_FN(reshape_and_cache)(const void* k, const void* v, void* key_cache, void* value_cache,
                                       const int64_t* slots, int64_t tokens, int64_t row, int64_t k_stride,
                                       int64_t v_stride, int64_t num_slots, int32_t dtype, int32_t cache_dtype,
                                       int32_t threads);

// Every layer of a stored chunk: k (before RoPE) and v [layers, T, K, D] of dtype `source`, K rotated, both written to
// the slots [T] of the layers' caches of dtype `target`. Layers lie *_layer elements apart; within a layer all is
// contiguous.
VB_EXPORT int VB_FN(place_chunk)(const void* k, const void* v, const float* cos, const float* sin, void* key_cache,
                                 void* value_cache, const int64_t* slots, int64_t layers, int64_t tokens,
                                 int64_t kv_heads, int64_t head_dim, int64_t half, int64_t k_layer, int64_t v_layer,
                                 int64_t key_cache_layer, int64_t value_cache_layer, int64_t num_slots, int32_t source,
                                 int32_t target, int32_t threads);

// out [T, H, D] = attention of q [T, H, D] over the paged cache. Rows starts[r]:starts[r+1] are request r's queries at
// `positions`; a key at position p is seen from position t iff p <= t and (window == 0 or p > t - window).
// block_tables is [R, table_stride] int32; D is a multiple of 16, at most 256. sinks [H], or null: a score of each head
// that takes part in its softmaxes and belongs to no key.
VB_EXPORT int VB_FN(paged_attention)(void* out, const void* q, const void* key_cache, const void* value_cache,
                                     const int64_t* positions, const int32_t* block_tables, const int64_t* starts,
                                     const int64_t* seq_lens, const float* sinks, int64_t tokens, int64_t requests,
                                     int64_t table_stride, int64_t num_blocks, int64_t block_size, int64_t heads,
                                     int64_t kv_heads, int64_t head_dim, int64_t q_stride, int64_t window, float scale,
                                     int32_t dtype, int32_t cache_dtype, int32_t threads);

// paged_attention for T requests of one query each (starts is 0 .. T), with lse [T, H]: the natural logarithm of the sum
// of exponentials of the scaled scores, to merge parts over disjoint keys.
VB_EXPORT int VB_FN(attention_states)(void* out, float* lse, const void* q, const void* key_cache,
                                      const void* value_cache, const int64_t* positions, const int32_t* block_tables,
                                      const int64_t* starts, const int64_t* seq_lens, int64_t tokens,
                                      int64_t table_stride, int64_t num_blocks, int64_t block_size, int64_t heads,
                                      int64_t kv_heads, int64_t head_dim, int64_t q_stride, float scale, int32_t dtype,
                                      int32_t cache_dtype, int32_t threads);

// mass[offsets[r] + p] = probability that key p of request r receives, summed over the rows first[r]:last[r] of q and
// averaged over heads. Every element of mass [offsets[R]] is written.
VB_EXPORT int VB_FN(attention_mass)(float* mass, const void* q, const void* key_cache, const int64_t* positions,
                                    const int32_t* block_tables, const int64_t* first, const int64_t* last,
                                    const int64_t* seq_lens, const int64_t* offsets, int64_t requests,
                                    int64_t table_stride, int64_t num_blocks, int64_t block_size, int64_t heads,
                                    int64_t kv_heads, int64_t head_dim, int64_t q_stride, int64_t window, float scale,
                                    int32_t dtype, int32_t cache_dtype, int32_t threads);

// sums[h * keys + k] = sum over Q queries of p ^ power (1 or 2), p the probability that head h of the query gives key k
// of one request: q [Q, H, D] at `positions` [Q], a softmax over the keys at most there; keys with k > position -
// buffer get nothing. block_table [blocks] names the blocks of keys 0 .. keys - 1. Every element of sums [H, keys] is written.
VB_EXPORT int VB_FN(window_sums)(float* sums, const void* q, const void* key_cache, const int64_t* positions,
                                 const int32_t* block_table, int64_t queries, int64_t keys, int64_t blocks,
                                 int64_t num_blocks, int64_t block_size, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim, int64_t q_stride, int64_t buffer, float scale, int32_t power,
                                 int32_t dtype, int32_t cache_dtype, int32_t threads);

// For each of R rows, one KV head of one request: metric[slot] += sum over G query heads of p ^ power (1 or 2), p the
// softmax over the row's keys, for those with key_positions[slot] <= query_positions[row] - buffer. q [R, G, D]; row r
// has lengths[r] keys in the pages tables[r] ([R, table_stride]) of head_keys [pages, block_size, D]; slot = page *
// block_size + offset. Rows of length 0 are skipped, and no two others may share a page.
VB_EXPORT int VB_FN(accumulate_sums)(float* metric, const void* q, const void* head_keys, const int32_t* tables,
                                     const int64_t* lengths, const int32_t* key_positions,
                                     const int64_t* query_positions, int64_t rows, int64_t table_width,
                                     int64_t table_stride, int64_t pages, int64_t block_size, int64_t group,
                                     int64_t head_dim, int64_t q_stride, int64_t buffer, float scale, int32_t power,
                                     int32_t dtype, int32_t cache_dtype, int32_t threads);

// out [rows, features] = x [rows, in] . weight [features, in]^T + bias (which may be null), for few rows. float32 in
// every set, bf16 in the "amx" set only; in a multiple of 32, features a multiple of 16.
VB_EXPORT int VB_FN(linear)(void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t in,
                            int64_t features, int64_t x_stride, int32_t dtype, int32_t threads);

// The same with a weight in 4 bits, [features, in / 2] bytes as csrc/cpu/int4.h says, and a scale and a zero point (one
// byte) for each `group` of inputs of each feature: (number - zero point) * scale, rounded to dtype. A group is a
// multiple of 16 that divides `in`. In every set, for every dtype.
VB_EXPORT int VB_FN(int4_linear)(void* out, const void* x, const void* weight, const void* scales, const void* zeros,
                                 const void* bias, int64_t rows, int64_t in, int64_t features, int64_t group,
                                 int64_t x_stride, int32_t scale_dtype, int32_t dtype, int32_t threads);

// out [features, in] = the weight that int4_linear multiplies; features may be any number.
VB_EXPORT int VB_FN(int4_unpack)(void* out, const void* weight, const void* scales, const void* zeros, int64_t in,
                                 int64_t features, int64_t group, int32_t scale_dtype, int32_t dtype, int32_t threads);

// Matrices in ggml's blocks, of the types that csrc/cpu/blocks.h has; `kind` is ggml's number of the type. `weight` is
// packed as that file says: bands of 16 features, the last one padded with zeros. In every set, for every dtype.
//
// out [count, in], packed, = the rows `rows` of a matrix as a file has it; they must be there.
VB_EXPORT int VB_FN(blocks_pack)(void* out, const void* from, const int64_t* rows, int64_t count, int64_t in,
                                 int32_t kind, int32_t threads);

// out [rows, features] = x [rows, in] . weight [features, in]^T + bias (which may be null), for few rows.
VB_EXPORT int VB_FN(blocks_linear)(void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                                   int64_t in, int64_t features, int64_t out_stride, int64_t x_stride, int32_t kind,
                                   int32_t dtype, int32_t threads);

// out [rows, in] = the features of the weight from `first` on, a multiple of 16.
VB_EXPORT int VB_FN(blocks_unpack)(void* out, const void* weight, int64_t first, int64_t rows, int64_t in, int32_t kind,
                                   int32_t dtype, int32_t threads);

// out [count, in] = the features `ids` of the weight, which must be there.
VB_EXPORT int VB_FN(blocks_rows)(void* out, const void* weight, const int64_t* ids, int64_t count, int64_t in,
                                 int32_t kind, int32_t dtype, int32_t threads);

#endif  // VB_ISA
#endif
