// The next token of every row of logits: its argmax, or a draw by inverting the cumulative distribution at a given uniform number,
// after min-p, top-k and top-p. A row is cut into chunks of kChunk logits, one warp each, whatever the batch; every sum is made
// in an order (or in integers, where order is nothing) that the row alone decides, so a row's token never depends on its batch.
#include <type_traits>

#include "common.cuh"

namespace vb {
namespace {

constexpr int kChunk = 1024;        // logits a warp takes: blocks of 256, 8 neighbours a lane
constexpr int kGroups = 8;          // parts of a chunk (four lanes each) whose maxima bound the top-k threshold
constexpr int kScanWarps = 8, kDrawWarps = 4;
constexpr int kBins = 1024, kThreads = 1024, kWarps = kThreads / 32;
constexpr int kList = 8192;         // candidates that fit in shared memory
constexpr float kUnit = 0x1p39f;    // of fixed-point weights: the best token weighs 1.0
constexpr int kDigit = 13;          // bits a word of a bin takes of a weight: 2^19 weights then fit in 32 bits
constexpr int kMaxVocab = (1 << 19) - 1;
constexpr uint32_t kAll = 0xffffffffu;

struct Part {
  float max;  // NaN if there is one
  float sum;  // of exp((x - max) / temperature)
  int best;   // the first position of max; greedy rows only
  int unused;
};

struct Params {
  const void* logits;
  int64_t row_stride;
  const double *settings, *uniforms;
  int64_t* tokens;
  Part* parts;
  float* group_max;
  int rows, vocab, chunks;
};

struct Settings {
  float temperature, log_min_p;  // 0: greedy
  int top_k;                     // the vocabulary's size: off
  double top_p;                  // 1 and more: off
  float scale;                   // weight = exp2((x - max) * scale)
  bool filtered;
};

__device__ __forceinline__ Settings settings_of(const Params& p, int row) {
  const double* s = p.settings + 4 * row;
  Settings r{static_cast<float>(s[0]), static_cast<float>(s[1]), s[2] < p.vocab ? static_cast<int>(s[2]) : p.vocab, s[3]};
  r.scale = kLog2e / r.temperature;
  r.filtered = r.temperature > 0.f && (r.log_min_p > -INFINITY || r.top_k < p.vocab || r.top_p < 1.0);
  return r;
}

__device__ __forceinline__ double uniform_of(const Params& p, int row) {  // in [0, 1), or draws would run off the row
  return fmin(fmax(p.uniforms[row], 0.0), 0x1.fffffffffffffp-1);
}

template <typename T>
struct Element {
  // Low bits of the float32 value's key that are always alike.
  static constexpr int kUnusedBits = sizeof(T) == 4 ? 0 : std::is_same<T, __half>::value ? 13 : 16;
  static __device__ __forceinline__ float value(T v) { return static_cast<float>(v); }
  static __device__ __forceinline__ void load8(const T* from, float* x) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Type<T>::unpack(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
};
template <>
__device__ __forceinline__ void Element<float>::load8(const float* from, float* x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 v = reinterpret_cast<const float4*>(from)[i];
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}

template <typename T>
struct Row {
  const T* logits;
  const Part* parts;
  int vocab, chunks;
  bool aligned;

  __device__ Row(const Params& p, int row)
      : logits(static_cast<const T*>(p.logits) + row * p.row_stride), parts(p.parts + int64_t(row) * p.chunks), vocab(p.vocab),
        chunks(p.chunks), aligned((reinterpret_cast<uintptr_t>(logits) & 15) == 0) {}
  // kBlocks * 8 logits of this lane from block `block` of a chunk; -inf beyond the vocabulary. Which lane has which logit
  // does not depend on the alignment, so neither do sums.
  template <int kBlocks>
  __device__ __forceinline__ void load(int chunk, int block, int lane, float (&x)[8 * kBlocks]) const {
    const int at = chunk * kChunk + block * 256 + 8 * lane;
    if (aligned && (chunk + 1) * kChunk <= vocab) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) Element<T>::load8(logits + at + 256 * b, x + 8 * b);
    } else {
#pragma unroll
      for (int i = 0; i < 8 * kBlocks; ++i) {
        const int j = at + i / 8 * 256 + i % 8;
        x[i] = j < vocab ? Element<T>::value(logits[j]) : -INFINITY;
      }
    }
  }
};

__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ bool finite(float v) { return fabsf(v) < INFINITY; }

template <typename V>
__device__ __forceinline__ V warp_scan(V v, int lane) {  // inclusive
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const V other = __shfl_up_sync(kAll, v, o);
    if (lane >= o) v += other;
  }
  return v;
}

template <typename T>
__global__ void __launch_bounds__(kScanWarps * 32) scan_kernel(Params p) {
  const int blocks_per_row = (p.chunks + kScanWarps - 1) / kScanWarps;
  const int row = blockIdx.x / blocks_per_row, lane = threadIdx.x & 31;
  const int chunk = blockIdx.x % blocks_per_row * kScanWarps + (threadIdx.x >> 5);
  if (chunk >= p.chunks) return;
  float x[32];
  const Row<T> logits(p, row);
  logits.template load<4>(chunk, 0, lane, x);
  const Settings s = settings_of(p, row);
  Part part{x[0], 0.f, 0, 0};
#pragma unroll
  for (int i = 1; i < 32; ++i) part.max = max_nan(part.max, x[i]);
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    part.max = max_nan(part.max, __shfl_xor_sync(kAll, part.max, o));
    if (o == 2 && (lane & 3) == 0 && s.top_k < p.vocab) p.group_max[(int64_t(row) * p.chunks + chunk) * kGroups + lane / 4] = part.max;
  }
  if (s.temperature > 0.f) {
    if (part.max > -INFINITY) {
#pragma unroll
      for (int i = 0; i < 32; ++i) part.sum += exp2_fast((x[i] - part.max) * s.scale);
    }
    part.sum = warp_sum(part.sum);
  } else {
    int first = INT32_MAX;
#pragma unroll
    for (int i = 31; i >= 0; --i) first = x[i] == part.max ? chunk * kChunk + i / 8 * 256 + 8 * lane + i % 8 : first;
    part.best = __reduce_min_sync(kAll, first);
  }
  if (lane == 0) p.parts[int64_t(row) * p.chunks + chunk] = part;
}

__device__ __forceinline__ float row_max(const Part* parts, int chunks, int lane) {
  float best = -INFINITY;
  for (int c = lane; c < chunks; c += 32) best = max_nan(best, parts[c].max);
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max_nan(best, __shfl_xor_sync(kAll, best, o));
  return best;
}

// A chunk's share of the row's weight, for which the best token weighs 1.
__device__ __forceinline__ double chunk_weight(const Part& part, float best, float scale) {
  return static_cast<double>(part.sum) * exp2_fast((part.max - best) * scale);
}

__device__ __forceinline__ int first_best(const Part* parts, int chunks, float best, int lane) {
  int first = INT32_MAX;
  for (int c = lane; c < chunks; c += 32)
    if (parts[c].max == best) first = min(first, parts[c].best);
  return __reduce_min_sync(kAll, first);
}

// The token of a warp's row at `target`, the weight before it counted from the chunk's start, in units of the chunk's maximum.
template <typename T>
__device__ int draw_in_chunk(const Row<T>& row, int chunk, double target, float scale, int lane) {
  float w[32];
  row.template load<4>(chunk, 0, lane, w);
  const float best = row.parts[chunk].max;
  double before = 0.0;
  int last = -1;  // with a weight: what rounding of the chunk's sum leaves beyond all tokens is this one's
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int at = chunk * kChunk + 256 * b + 8 * lane;
    double own = 0.0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[8 * b + i] = exp2_fast((w[8 * b + i] - best) * scale);
      own += w[8 * b + i];
      last = w[8 * b + i] > 0.f ? at + i : last;
    }
    const double upto = before + warp_scan(own, lane);
    const uint32_t hits = __ballot_sync(kAll, upto > target);
    if (hits) {
      const double previous = __shfl_up_sync(kAll, upto, 1);
      double sum = lane ? previous : before;
      int token = -1;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (w[8 * b + i] > 0.f && (token < 0 || !(sum > target))) token = at + i, sum += w[8 * b + i];
      return __shfl_sync(kAll, token, __ffs(hits) - 1);
    }
    before = __shfl_sync(kAll, upto, 31);
  }
  return __reduce_max_sync(kAll, last);
}

// Greedy and unfiltered rows, a warp each.
template <typename T>
__global__ void __launch_bounds__(kDrawWarps * 32) draw_kernel(Params p) {
  const int index = blockIdx.x * kDrawWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (index >= p.rows) return;
  const Settings s = settings_of(p, index);
  if (s.filtered) return;
  const Row<T> row(p, index);
  const float best = row_max(row.parts, p.chunks, lane);
  int token = VB_TOKEN_BROKEN;
  if (finite(best) && s.temperature == 0.f) {
    token = first_best(row.parts, p.chunks, best, lane);
  } else if (finite(best)) {
    double total = 0.0, target = 0.0, passed = 0.0;
    int chunk = -1;
    // Twice the same sums: for their total, then for the chunk in which they pass the target, which is below the total.
    for (int pass = 0; pass < 2; ++pass) {
      double before = 0.0;
      for (int c = 0; c < p.chunks && chunk < 0; c += 32) {
        const double own = c + lane < p.chunks ? chunk_weight(row.parts[c + lane], best, s.scale) : 0.0;
        const double upto = before + warp_scan(own, lane), previous = __shfl_up_sync(kAll, upto, 1);
        const uint32_t hits = pass ? __ballot_sync(kAll, upto > target) : 0;
        if (hits) {
          const int first = __ffs(hits) - 1;
          chunk = c + first;
          passed = __shfl_sync(kAll, lane ? previous : before, first);
        }
        before = __shfl_sync(kAll, upto, 31);
      }
      if (pass == 0) total = before, target = uniform_of(p, index) * total;
    }
    const double unit = exp2_fast((row.parts[chunk].max - best) * s.scale);
    token = draw_in_chunk(row, chunk, (target - passed) / unit, s.scale, lane);
  }
  if (lane == 0) p.tokens[index] = token;
}

// Order-preserving integers for floats; -0 must be made +0 before.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.f);
  return bits ^ (bits >> 31 ? kAll : 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : kAll));
}

struct Candidate {
  float value;
  int index;
};

struct Shared {
  Candidate list[kList];
  uint32_t count[kBins], digits[3][kBins];
  uint64_t warp_totals[kWarps];
  uint32_t warp_counts[kWarps];
  uint32_t chosen, above, equal;
  uint64_t weight_above;
  int listed, chunk, token;
  float bound;
};

template <typename V>
__device__ V block_scan(V own, V* warp_totals, V* total) {  // exclusive
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const V upto = warp_scan(own, lane);
  if (lane == 31) warp_totals[warp] = upto;
  __syncthreads();
  if (warp == 0) warp_totals[lane] = warp_scan(warp_totals[lane], lane);
  __syncthreads();
  const V before = warp ? warp_totals[warp - 1] : V(0);
  *total = warp_totals[kWarps - 1];
  __syncthreads();
  return before + upto - own;
}

// One row in the hands of a thread block: its candidates are the logits of at least `low`, in a list if they fit there.
template <typename T>
struct Filter {
  Shared& s;
  const Row<T> row;
  const float best, scale;
  float low;

  __device__ Filter(Shared& shared, const Row<T>& r, float maximum, float scale)
      : s(shared), row(r), best(maximum), scale(scale), low(-INFINITY) {}

  __device__ __forceinline__ uint64_t weight(float x) const { return __float2ull_rn(exp2_fast((x - best) * scale) * kUnit); }
  __device__ __forceinline__ uint32_t offset(float x) const {
    return (key_of(best) >> Element<T>::kUnusedBits) - (key_of(x) >> Element<T>::kUnusedBits);
  }

  // f(x, first index) for this lane's 8 logits of every block of 256 in a chunk with a logit of at least `least`.
  template <typename F>
  __device__ __forceinline__ void each_block(float least, F&& f) const {
    for (int c = threadIdx.x >> 5; c < row.chunks; c += kWarps) {
      if (!(row.parts[c].max >= least)) continue;
      for (int b = 0; b < 4; ++b) {
        float x[8];
        row.template load<1>(c, b, threadIdx.x & 31, x);
        f(x, c * kChunk + 256 * b + 8 * (static_cast<int>(threadIdx.x) & 31));
      }
    }
  }
  __device__ __forceinline__ bool is_candidate(float x) const { return x >= low && x > -INFINITY; }

  __device__ void gather() {
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    const int lane = threadIdx.x & 31;
    each_block(low, [&](const float (&x)[8], int at) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count += is_candidate(x[i]);
      if (!__any_sync(kAll, count)) return;
      const int upto = warp_scan(count, lane);
      int to = lane == 31 ? atomicAdd(&s.listed, upto) : 0;
      to = __shfl_sync(kAll, to, 31) + upto - count;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (is_candidate(x[i])) {
          if (to < kList) s.list[to] = {x[i], at + i};
          ++to;
        }
    });
    __syncthreads();
  }

  // f(x, index) for every candidate, in no order.
  template <typename F>
  __device__ __forceinline__ void each_candidate(F&& f) const {
    if (s.listed <= kList) {
      for (int i = threadIdx.x; i < s.listed; i += kThreads) f(s.list[i].value, s.list[i].index);
    } else {
      each_block(low, [&](const float (&x)[8], int at) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (is_candidate(x[i])) f(x[i], at + i);
      });
    }
  }

  __device__ __forceinline__ void clear_bins() const {
    s.count[threadIdx.x] = 0;
    for (int d = 0; d < 3; ++d) s.digits[d][threadIdx.x] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add_weight(int bin, uint64_t w) const {
    constexpr uint32_t kMask = (1u << kDigit) - 1;
    const uint32_t digits[3] = {uint32_t(w) & kMask, uint32_t(w >> kDigit) & kMask, uint32_t(w >> 2 * kDigit)};
#pragma unroll
    for (int d = 0; d < 3; ++d)
      if (digits[d]) atomicAdd(&s.digits[d][bin], digits[d]);
  }
  __device__ __forceinline__ uint64_t bin_weight() const {
    return s.digits[0][threadIdx.x] + (uint64_t(s.digits[1][threadIdx.x]) << kDigit) +
           (uint64_t(s.digits[2][threadIdx.x]) << 2 * kDigit);
  }

  struct Cut {
    float value;  // the least one kept
    uint32_t above, equal;
    uint64_t weight_above;
  };

  // The least candidate with fewer than top_k candidates above it and less than `share` of the weight `total` (below zero:
  // that of all candidates). Radix selection from the largest value down, kBins bins a round. Only if it `weighs`, weights
  // count and are returned.
  __device__ Cut select(uint32_t top_k, bool weighs, double share, double total) {
    const uint32_t range = offset(low);
    int shift = max(0, 32 - __clz(range) - 10);
    uint32_t first = 0, width = kAll;  // the offsets still in question: `width` from `first` on
    Cut cut{best, 0, 0, 0};
    while (true) {
      clear_bins();
      each_candidate([&](float x, int) {
        const uint32_t from = offset(x) - first;  // wraps around for what is above
        if (from >= width) return;
        atomicAdd(&s.count[from >> shift], 1u);
        if (weighs) add_weight(from >> shift, weight(x));
      });
      if (threadIdx.x == 0) s.chosen = 0;
      __syncthreads();
      const uint32_t count = s.count[threadIdx.x];
      uint32_t all;
      uint64_t all_weight = 0;
      const uint32_t above = cut.above + block_scan(count, s.warp_counts, &all);
      uint64_t weight_above = cut.weight_above;
      if (weighs) weight_above += block_scan(bin_weight(), s.warp_totals, &all_weight);
      if (total < 0.0) total = static_cast<double>(all_weight);
      const bool kept = count && above < top_k && (!weighs || static_cast<double>(weight_above) < share * total);
      if (kept) atomicMax(&s.chosen, threadIdx.x);
      __syncthreads();
      if (threadIdx.x == s.chosen) s.above = above, s.equal = count, s.weight_above = weight_above;
      __syncthreads();
      first += s.chosen << shift;
      cut.above = s.above, cut.equal = s.equal, cut.weight_above = s.weight_above;
      if (shift == 0) break;
      width = 1u << shift;
      shift = max(0, shift - 10);
    }
    // Unused bits of a negative value's key are ones, of another's zeros.
    constexpr int kUnused = Element<T>::kUnusedBits;
    const uint32_t key = ((key_of(best) >> kUnused) - first) << kUnused;
    cut.value = value_of(key >> 31 ? key : key | ((1u << kUnused) - 1));
    return cut;
  }

  // The candidate of at least `least` at which their cumulative weight passes the share `uniform` of it.
  __device__ int draw(float least, double uniform) {
    clear_bins();
    if (s.listed <= kList) {
      each_candidate([&](float x, int index) {
        if (x >= least) add_weight(index / kChunk, weight(x));
      });
    } else {
      for (int c = threadIdx.x >> 5; c < row.chunks; c += kWarps) {
        if (!(row.parts[c].max >= least)) continue;
        uint64_t sum = 0;
        for (int b = 0; b < 4; ++b) {
          float x[8];
          row.template load<1>(c, b, threadIdx.x & 31, x);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += x[i] >= least ? weight(x[i]) : 0;
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAll, sum, o);
        if ((threadIdx.x & 31) == 0) add_weight(c, sum);
      }
    }
    __syncthreads();
    uint64_t total;
    uint64_t own = bin_weight(), before = block_scan(own, s.warp_totals, &total);
    // A double below 1 times the total rounds to less than the total, so the target is passed; by one thread, as sums rise.
    const double target = uniform * static_cast<double>(total);
    if (static_cast<double>(before + own) > target && !(static_cast<double>(before) > target))
      s.chunk = threadIdx.x, s.weight_above = before;
    __syncthreads();
    const int index = s.chunk * kChunk + threadIdx.x;
    const float x = index < row.vocab ? Element<T>::value(row.logits[index]) : -INFINITY;
    own = x >= least ? weight(x) : 0;
    before = s.weight_above + block_scan(own, s.warp_totals, &total);
    if (static_cast<double>(before + own) > target && !(static_cast<double>(before) > target)) s.token = index;
    __syncthreads();
    return s.token;
  }

  // A value that at least top_k logits reach: the top_k-th largest maximum of chunks, or of their groups. -inf if too few.
  __device__ float top_k_bound(int top_k, const float* group_max) const {
    const bool by_chunk = top_k <= row.chunks;
    const int count = by_chunk ? row.chunks : row.chunks * kGroups;
    if (top_k > count || count > 2 * kList) return -INFINITY;
    float* values = reinterpret_cast<float*>(s.list);
    for (int i = threadIdx.x; i < count; i += kThreads) values[i] = by_chunk ? row.parts[i].max : group_max[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      int rank = 0;
      for (int j = 0; j < count; ++j) rank += values[j] > values[i] || (values[j] == values[i] && j < i);
      if (rank == top_k - 1) s.bound = values[i];
    }
    __syncthreads();
    return s.bound;
  }
};

// The least value that min-p keeps, by the rule `(x - best) / temperature >= log_min_p` in float32.
__device__ float min_p_bound(float best, float temperature, float log_min_p) {
  if (log_min_p == -INFINITY) return -INFINITY;
  uint32_t low = key_of(-3.4028235e38f), high = key_of(best);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if ((value_of(middle) - best) / temperature >= log_min_p) high = middle;
    else low = middle + 1;
  }
  return value_of(high);
}

// Filtered rows, a block each.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) filter_kernel(Params p) {
  extern __shared__ __align__(16) char memory[];
  const int index = blockIdx.x, lane = threadIdx.x & 31;
  const Settings s = settings_of(p, index);
  if (!s.filtered) return;
  const Row<T> row(p, index);
  const float best = row_max(row.parts, p.chunks, lane);
  if (!finite(best)) {
    if (threadIdx.x == 0) p.tokens[index] = VB_TOKEN_BROKEN;
    return;
  }
  Filter<T> f(*reinterpret_cast<Shared*>(memory), row, best, s.scale);
  const float floor = min_p_bound(best, s.temperature, s.log_min_p);
  const bool by_k = s.top_k < p.vocab, by_p = s.top_p < 1.0;
  double total = -1.0;  // of weight that top-p takes a share of; below zero: that of the candidates
  f.low = floor;
  if (by_k) {
    f.low = fmaxf(floor, f.top_k_bound(s.top_k, p.group_max + int64_t(index) * p.chunks * kGroups));
  } else if (by_p && floor == -INFINITY) {
    double sum = 0.0;
    for (int c = lane; c < p.chunks; c += 32) sum += chunk_weight(row.parts[c], best, s.scale);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAll, sum, o);
    total = sum * kUnit;
    // Tokens of less than this weight have, all together, half the weight that top-p may leave out.
    f.low = best + static_cast<float>(log2(0.5 * (1.0 - s.top_p) * sum / p.vocab)) / s.scale;
  }
  f.gather();
  float least = f.low;
  if (by_k) {
    const auto cut = f.select(s.top_k, by_p, INFINITY, total);
    least = cut.value;
    // Of several tokens at the threshold, top-p counts as many as make up top_k, though all of them stay.
    const uint32_t equal = min(static_cast<uint32_t>(s.top_k) - cut.above, cut.equal);
    total = static_cast<double>(cut.weight_above + equal * f.weight(least));
  }
  if (by_p) least = f.select(s.top_k, true, s.top_p, total).value;
  const int token = f.draw(least, uniform_of(p, index));
  if (threadIdx.x == 0) p.tokens[index] = token;
}

// Repetition, frequency and presence penalties on (row, token) pairs, each pair once; in the order of the torch twin.
__global__ void penalize_kernel(float* logits, int64_t row_stride, const int64_t* rows, const int64_t* tokens, const float* counts,
                                const float* penalties, int num_rows, int64_t pairs) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  const int64_t row = rows[i];
  const float repetition = penalties[row], frequency = penalties[num_rows + row], presence = penalties[2 * num_rows + row];
  float* at = logits + row * row_stride + tokens[i];
  const float v = *at, scaled = v > 0.f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
  *at = __fsub_rn(__fsub_rn(scaled, __fmul_rn(frequency, counts[i])), counts[i] > 0.f ? presence : 0.f);
}

}  // namespace
}  // namespace vb

using namespace vb;

extern "C" size_t vb_sample_workspace_bytes(int rows, int vocab) {
  return size_t(rows) * ((vocab + kChunk - 1) / kChunk) * (sizeof(Part) + kGroups * sizeof(float));
}

extern "C" int vb_sample(const VbSample* a, void* stream) {
  if (a->rows < 0 || a->rows > (1 << 20) || a->vocab < 1 || a->vocab > kMaxVocab) return VB_ERROR_SHAPE;
  if (a->workspace_bytes < vb_sample_workspace_bytes(a->rows, a->vocab)) return VB_ERROR_WORKSPACE;
  if (!aligned16(a->workspace)) return VB_ERROR_ALIGNMENT;
  if (a->rows == 0) return 0;
  const int chunks = (a->vocab + kChunk - 1) / kChunk;
  Part* parts = static_cast<Part*>(a->workspace);
  const Params p{a->logits, a->row_stride, a->settings, a->uniforms, a->tokens, parts,
                 reinterpret_cast<float*>(parts + size_t(a->rows) * chunks), a->rows, a->vocab, chunks};
  const auto s = static_cast<cudaStream_t>(stream);
  const auto launch = [&](auto t) -> int {
    using T = decltype(t);
    scan_kernel<T><<<(chunks + kScanWarps - 1) / kScanWarps * a->rows, kScanWarps * 32, 0, s>>>(p);
    if (a->kinds & VB_SAMPLE_UNFILTERED)
      draw_kernel<T><<<(a->rows + kDrawWarps - 1) / kDrawWarps, kDrawWarps * 32, 0, s>>>(p);
    if (a->kinds & VB_SAMPLE_FILTERED) {
      if (int e = allow_smem(filter_kernel<T>, sizeof(Shared))) return e;
      filter_kernel<T><<<a->rows, kThreads, sizeof(Shared), s>>>(p);
    }
    return cudaGetLastError();
  };
  return a->dtype == 2 ? launch(float{}) : dispatch_dtype(a->dtype, launch);
}

extern "C" int vb_penalize(float* logits, int64_t row_stride, const int64_t* rows, const int64_t* tokens, const float* counts,
                           const float* penalties, int num_rows, int64_t pairs, void* stream) {
  if (pairs < 0 || pairs > int64_t(INT32_MAX) * 256 || num_rows < 0) return VB_ERROR_SHAPE;
  if (pairs == 0) return 0;
  penalize_kernel<<<(pairs + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(logits, row_stride, rows, tokens, counts,
                                                                                    penalties, num_rows, pairs);
  return cudaGetLastError();
}
