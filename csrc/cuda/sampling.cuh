// What the kernels that choose tokens share: how a row of logits is cut and read.
#pragma once
#include <type_traits>

#include "common.cuh"

namespace vb {

constexpr int kChunk = 1024;  // logits a warp takes: blocks of 256, 8 neighbours a lane
constexpr int kGroups = 8;    // parts of a chunk (four lanes each) whose maxima bound the top-k threshold
constexpr uint32_t kAllLanes = 0xffffffffu;

// What a scan finds in a chunk.
struct Part {
  float max;  // NaN if there is one
  float sum;  // of exp((x - max) / temperature)
  int best;   // the first position of max; greedy rows only
  int unused;
};

struct SampleParams {
  const void* logits;
  int64_t row_stride;
  const double *settings, *uniforms;
  const int64_t* places;
  int64_t* tokens;
  Part* parts;
  float* group_max;
  int rows, vocab, chunks;

  __device__ __forceinline__ double uniform(int row) const {  // in [0, 1), or draws would run off the row
    return fmin(fmax(uniforms[places ? places[row] : row], 0.0), 0x1.fffffffffffffp-1);
  }
  __device__ __forceinline__ void write(int row, int token) const {
    if (!places) {
      tokens[row] = token;
    } else if (tokens[places[row]] != VB_TOKEN_BROKEN) {
      tokens[places[row]] = token == VB_TOKEN_BROKEN ? VB_TOKEN_NONE_LEFT : token;
    }
  }
};

struct SampleSettings {
  float temperature, log_min_p;  // 0: greedy
  int top_k;                     // the vocabulary's size: off
  double top_p;                  // 1 and more: off
  float scale;                   // weight = exp2((x - max) * scale)
  bool filtered;
};

__device__ __forceinline__ SampleSettings settings_of(const SampleParams& p, int row) {
  const double* s = p.settings + 4 * row;
  SampleSettings r{static_cast<float>(s[0]), static_cast<float>(s[1]), s[2] < p.vocab ? static_cast<int>(s[2]) : p.vocab, s[3]};
  r.scale = kLog2e / r.temperature;
  r.filtered = r.temperature > 0.f && (r.log_min_p > -INFINITY || r.top_k < p.vocab || r.top_p < 1.0);
  return r;
}

// Eight neighbouring logits as they lie in memory.
template <typename T>
struct __align__(16) Eight {
  T v[8];

  __device__ __forceinline__ void unpack(float* x) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = v[i];
    } else {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = Type<T>::unpack(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
  }
};

template <typename T>
struct LogitRow {
  const T* logits;
  const Part* parts;
  int vocab, chunks;
  bool aligned;

  __device__ LogitRow(const SampleParams& p, int row)
      : logits(static_cast<const T*>(p.logits) + row * p.row_stride), parts(p.parts + int64_t(row) * p.chunks), vocab(p.vocab),
        chunks(p.chunks), aligned((reinterpret_cast<uintptr_t>(logits) & 15) == 0) {}

  // This lane's 8 logits of kBlocks blocks of 256 of a chunk, from `block` on; -inf beyond the vocabulary. Which lane has
  // which logit does not depend on the alignment, so neither do sums.
  template <int kBlocks>
  __device__ __forceinline__ void load(int chunk, int block, int lane, Eight<T> (&to)[kBlocks]) const {
    const int at = chunk * kChunk + block * 256 + 8 * lane;
    if (aligned && (chunk + 1) * kChunk <= vocab) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint4* from = reinterpret_cast<const uint4*>(logits + at + 256 * b);
#pragma unroll
        for (int i = 0; i < int(sizeof(T)) / 2; ++i) reinterpret_cast<uint4*>(to[b].v)[i] = from[i];
      }
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int j = at + 256 * b + i;
          to[b].v[i] = j < vocab ? logits[j] : static_cast<T>(-INFINITY);
        }
    }
  }
};

__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }

template <typename V>
__device__ __forceinline__ V warp_scan(V v, int lane) {  // inclusive
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const V other = __shfl_up_sync(kAllLanes, v, o);
    if (lane >= o) v += other;
  }
  return v;
}

__device__ __forceinline__ float row_max(const Part* parts, int chunks, int lane) {
  float best = -INFINITY;
  for (int c = lane; c < chunks; c += 32) best = max_nan(best, parts[c].max);
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max_nan(best, __shfl_xor_sync(kAllLanes, best, o));
  return best;
}

// A chunk's share of the row's weight, for which the best token weighs 1.
__device__ __forceinline__ double chunk_weight(const Part& part, float best, float scale) {
  return static_cast<double>(part.sum) * exp2_fast((part.max - best) * scale);
}

// Draws the tokens of filtered rows, after the scan (sampling_filter.cu).
int launch_filter(const SampleParams& params, int dtype, cudaStream_t stream);

// Calls f(T{}) for the element type of logits.
template <typename F>
int dispatch_logits(int dtype, F&& f) {
  return dtype == 2 ? f(float{}) : dispatch_dtype(dtype, f);
}

}  // namespace vb
