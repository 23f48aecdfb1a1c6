// Draws after min-p, top-k and top-p: every filter is a threshold on the logit, found by radix selection among the logits that can
// matter. Weights are fixed-point integers, so nothing depends on the order in which threads add them.
#include "sampling.cuh"

namespace vb {
namespace {

constexpr int kBins = 1024, kThreads = 1024, kWarps = kThreads / 32;
constexpr int kList = 8192;       // candidates that fit in shared memory
constexpr float kUnit = 0x1p39f;  // of weights: the best token weighs 1.0
constexpr int kDigit = 13;        // bits of a weight in each of a bin's three words: 2^19 weights (see kMaxVocab) fit in 32

// Low bits of a logit's key that are always alike.
template <typename T>
constexpr int kUnusedBits = sizeof(T) == 4 ? 0 : std::is_same<T, __half>::value ? 13 : 16;

// Order-preserving integers for floats; zeros of either sign have the same.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

// A number of logits and their weight.
struct Mass {
  uint32_t count;
  uint64_t weight;
};

struct Bins {
  uint32_t count[kBins], digits[3][kBins];

  __device__ __forceinline__ void clear(int bin) {
    count[bin] = 0;
#pragma unroll
    for (int d = 0; d < 3; ++d) digits[d][bin] = 0;
  }
  __device__ __forceinline__ void add_weight(int bin, uint64_t w) {
    constexpr uint32_t kMask = (1u << kDigit) - 1;
    const uint32_t parts[3] = {uint32_t(w) & kMask, uint32_t(w >> kDigit) & kMask, uint32_t(w >> 2 * kDigit)};
#pragma unroll
    for (int d = 0; d < 3; ++d)
      if (parts[d]) atomicAdd(&digits[d][bin], parts[d]);
  }
  __device__ __forceinline__ Mass read(int bin) const {
    return {count[bin], digits[0][bin] + (uint64_t(digits[1][bin]) << kDigit) + (uint64_t(digits[2][bin]) << 2 * kDigit)};
  }
};

struct Candidate {
  float value;
  int index;
};

struct Choice {
  Mass above;
  uint32_t equal;
  int bin;
};

struct Shared {
  Candidate list[kList];
  Bins first, bins;  // of the first round of every selection, and of other rounds: empty at their start
  Mass totals[2][kWarps];
  Choice choices[2][kWarps];
  uint64_t before;
  int listed, chunk;
  float bound;
};
static_assert(sizeof(Shared) <= 99 * 1024, "a block has no more on some GPUs");

// One row in the hands of a thread block: its candidates are the logits of at least `low`, in a list if they fit there.
template <typename T>
struct Filter {
  Shared& s;
  const LogitRow<T> row;
  const float best, scale;
  float low = -INFINITY;
  int parity = 0;  // which half of what is exchanged between warps is free
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  __device__ Filter(Shared& shared, const LogitRow<T>& r, float maximum, float scale)
      : s(shared), row(r), best(maximum), scale(scale) {}

  __device__ __forceinline__ uint64_t weight(float x) const { return __float2ull_rn(exp2_fast((x - best) * scale) * kUnit); }
  __device__ __forceinline__ uint32_t offset(float x) const {
    return (key_of(best) >> kUnusedBits<T>) - (key_of(x) >> kUnusedBits<T>);
  }
  __device__ __forceinline__ int first_shift() const { return max(0, 22 - __clz(offset(low))); }  // kBins bins cover all
  __device__ __forceinline__ bool is_candidate(float x) const { return x >= low && x > -INFINITY; }

  // Masses of all threads before this one, and of all of them.
  __device__ __forceinline__ Mass scan(Mass own, bool weighs, Mass* total) {
    Mass upto{warp_scan(own.count, lane), weighs ? warp_scan(own.weight, lane) : 0};
    if (lane == 31) s.totals[parity][warp] = upto;
    __syncthreads();
    Mass sums = s.totals[parity][lane];
    parity ^= 1;
    sums.count = warp_scan(sums.count, lane);
    if (weighs) sums.weight = warp_scan(sums.weight, lane);
    *total = {__shfl_sync(kAllLanes, sums.count, 31), __shfl_sync(kAllLanes, sums.weight, 31)};
    Mass before{__shfl_sync(kAllLanes, sums.count, (warp + 31) & 31), __shfl_sync(kAllLanes, sums.weight, (warp + 31) & 31)};
    if (warp == 0) before = {0, 0};
    return {before.count + upto.count - own.count, before.weight + upto.weight - own.weight};
  }

  // The choice of the last thread that has one.
  __device__ __forceinline__ Choice last(bool chosen, const Choice& own) {
    const uint32_t mine = __ballot_sync(kAllLanes, chosen);
    if (mine ? lane == 31 - __clz(mine) : lane == 0) {
      s.choices[parity][warp] = own;
      if (!mine) s.choices[parity][warp].bin = -1;
    }
    __syncthreads();
    const int bin = __reduce_max_sync(kAllLanes, s.choices[parity][lane].bin);
    const Choice result = s.choices[parity][bin >> 5];
    parity ^= 1;
    return result;
  }

  // f(x, index of the first) for this lane's 8 logits of every block of 256 in the chunks with a logit of at least `least`.
  template <typename F>
  __device__ __forceinline__ void each_block(float least, F&& f) const {
    constexpr int kAtOnce = sizeof(T) == 4 ? 2 : 4;
    for (int c = warp; c < row.chunks; c += kWarps) {
      if (!(row.parts[c].max >= least)) continue;
      for (int b = 0; b < 4; b += kAtOnce) {
        Eight<T> raw[kAtOnce];
        row.load(c, b, lane, raw);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float x[8];
          raw[i].unpack(x);
          f(x, c * kChunk + 256 * (b + i) + 8 * lane);
        }
      }
    }
  }

  // Lists the candidates and, if there will be a selection, puts them into the bins of its first round.
  __device__ void gather(bool selects, bool weighs) {
    const int shift = first_shift();
    each_block(low, [&](const float (&x)[8], int at) {
      int count = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count += is_candidate(x[i]);
      if (!__any_sync(kAllLanes, count)) return;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (selects && is_candidate(x[i])) {
          const int bin = offset(x[i]) >> shift;
          atomicAdd(&s.first.count[bin], 1u);
          if (weighs) s.first.add_weight(bin, weight(x[i]));
        }
      if (__shfl_sync(kAllLanes, *const_cast<volatile int*>(&s.listed), 0) > kList) return;  // it is of no use any more
      const int upto = warp_scan(count, lane);
      int to = lane == 31 ? atomicAdd(&s.listed, upto) : 0;
      to = __shfl_sync(kAllLanes, to, 31) + upto - count;
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

  struct Cut {
    float value;  // the least one kept
    Mass above;
    uint32_t equal;
  };

  // The least candidate with fewer than top_k candidates above it and less than `share` of the weight `total` (below zero:
  // that of all candidates). Radix selection from the largest value down, kBins bins a round. Only if it `weighs`, weights
  // count and are returned.
  __device__ Cut select(uint32_t top_k, bool weighs, double share, double total) {
    int shift = first_shift();
    uint32_t start = 0;
    Choice choice{{0, 0}, 0, 0};
    const Mass own = s.first.read(threadIdx.x);
    choose(&choice, own, top_k, weighs, share, &total);
    while (true) {
      start += uint32_t(choice.bin) << shift;
      if (shift == 0) break;
      const uint32_t width = 1u << shift;
      shift = max(0, shift - 10);
      each_candidate([&](float x, int) {
        const uint32_t from = offset(x) - start;  // wraps around for what is above
        if (from >= width) return;
        atomicAdd(&s.bins.count[from >> shift], 1u);
        if (weighs) s.bins.add_weight(from >> shift, weight(x));
      });
      __syncthreads();
      const Mass mass = s.bins.read(threadIdx.x);
      s.bins.clear(threadIdx.x);
      choose(&choice, mass, top_k, weighs, share, &total);
    }
    // Unused bits of a negative value's key are ones, of another's zeros.
    const uint32_t key = ((key_of(best) >> kUnusedBits<T>) - start) << kUnusedBits<T>;
    return {value_of(key >> 31 ? key : key | ((1u << kUnusedBits<T>) - 1)), choice.above, choice.equal};
  }

  // One round: the last bin with a logit that is kept. `choice` has what is above all bins, and gets what is above that bin.
  __device__ __forceinline__ void choose(Choice* choice, Mass own, uint32_t top_k, bool weighs, double share, double* total) {
    Mass all;
    const Mass before = scan(own, weighs, &all);
    if (*total < 0.0) *total = static_cast<double>(all.weight);
    const Choice mine{{choice->above.count + before.count, choice->above.weight + before.weight}, own.count, int(threadIdx.x)};
    const bool light = !weighs || static_cast<double>(mine.above.weight) < share * *total;
    *choice = last(own.count && mine.above.count < top_k && light, mine);
  }

  // The candidate of at least `least` at which their cumulative weight passes the share `uniform` of it. Only one thread,
  // the token's, gets it; the others get -1.
  __device__ int draw(float least, double uniform) {
    if (s.listed <= kList) {
      each_candidate([&](float x, int index) {
        if (x >= least) s.bins.add_weight(index / kChunk, weight(x));
      });
    } else {
      int chunk = -1;
      uint64_t sum = 0;
      const auto add = [&] {
#pragma unroll
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
        if (lane == 0 && chunk >= 0) s.bins.add_weight(chunk, sum);
        sum = 0;
      };
      each_block(least, [&](const float (&x)[8], int at) {
        if (at / kChunk != chunk) add();
        chunk = at / kChunk;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] >= least ? weight(x[i]) : 0;
      });
      add();
    }
    __syncthreads();
    Mass total, own = s.bins.read(threadIdx.x);
    uint64_t before = scan(own, true, &total).weight;
    // A double below 1 times the total rounds to less than the total, so the target is passed; by one thread, as sums rise.
    const double target = uniform * static_cast<double>(total.weight);
    if (static_cast<double>(before + own.weight) > target && !(static_cast<double>(before) > target))
      s.chunk = threadIdx.x, s.before = before;
    __syncthreads();
    const int index = s.chunk * kChunk + threadIdx.x;
    const float x = index < row.vocab ? static_cast<float>(row.logits[index]) : -INFINITY;
    own = {0, x >= least ? weight(x) : 0};
    before = s.before + scan(own, true, &total).weight;
    return static_cast<double>(before + own.weight) > target && !(static_cast<double>(before) > target) ? index : -1;
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
__global__ void __launch_bounds__(kThreads, 1) filter_kernel(SampleParams p) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int index = blockIdx.x, lane = threadIdx.x & 31;
  const SampleSettings s = settings_of(p, index);
  if (!s.filtered) return;
  const LogitRow<T> row(p, index);
  const float best = row_max(row.parts, p.chunks, lane);
  if (!is_finite(best)) {
    if (threadIdx.x == 0) p.write(index, VB_TOKEN_BROKEN);
    return;
  }
  shared.first.clear(threadIdx.x);
  shared.bins.clear(threadIdx.x);
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  Filter<T> f(shared, row, best, s.scale);
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
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    total = sum * kUnit;
    // Tokens of less than this weight have, all together, half the weight that top-p may leave out.
    f.low = best + static_cast<float>(log2(0.5 * (1.0 - s.top_p) * sum / p.vocab)) / s.scale;
  }
  f.gather(by_k || by_p, by_p);
  float least = f.low;
  if (by_k) {
    const auto cut = f.select(s.top_k, by_p, INFINITY, total);
    least = cut.value;
    // Of several tokens at the threshold, top-p counts as many as make up top_k, though all of them stay.
    const uint32_t equal = min(static_cast<uint32_t>(s.top_k) - cut.above.count, cut.equal);
    total = static_cast<double>(cut.above.weight + equal * f.weight(least));
  }
  if (by_p) least = f.select(s.top_k, true, s.top_p, total).value;
  const int token = f.draw(least, p.uniform(index));
  if (token >= 0) p.write(index, token);
}

}  // namespace

int launch_filter(const SampleParams& p, int dtype, cudaStream_t stream) {
  return dispatch_logits(dtype, [&](auto t) -> int {
    const auto kernel = filter_kernel<decltype(t)>;
    if (int e = allow_smem(kernel, sizeof(Shared))) return e;
    kernel<<<p.rows, kThreads, sizeof(Shared), stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace vb
