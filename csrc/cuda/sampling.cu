// The next token of every row of logits: its argmax, or a draw by inverting the cumulative distribution at a given uniform number.
// A row is cut into chunks of kChunk logits, one warp each, whatever the batch; every sum is made in an order (or in integers,
// where order is nothing) that the row alone decides, so a row's token never depends on its batch.
#include "sampling.cuh"

namespace vb {
namespace {

constexpr int kScanWarps = 8, kDrawWarps = 4;
constexpr int kMaxVocab = (1 << 19) - 1;  // see sampling_filter.cu

template <typename T>
__global__ void __launch_bounds__(kScanWarps * 32) scan_kernel(SampleParams p) {
  const int blocks_per_row = (p.chunks + kScanWarps - 1) / kScanWarps;
  const int row = blockIdx.x / blocks_per_row, lane = threadIdx.x & 31;
  const int chunk = blockIdx.x % blocks_per_row * kScanWarps + (threadIdx.x >> 5);
  if (chunk >= p.chunks) return;
  Eight<T> raw[4];
  LogitRow<T>(p, row).load(chunk, 0, lane, raw);
  const SampleSettings s = settings_of(p, row);
  float x[32];
#pragma unroll
  for (int b = 0; b < 4; ++b) raw[b].unpack(x + 8 * b);
  Part part{x[0], 0.f, 0, 0};
#pragma unroll
  for (int i = 1; i < 32; ++i) part.max = max_nan(part.max, x[i]);
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    part.max = max_nan(part.max, __shfl_xor_sync(kAllLanes, part.max, o));
    if (o == 2 && (lane & 3) == 0 && s.top_k < p.vocab)
      p.group_max[(int64_t(row) * p.chunks + chunk) * kGroups + lane / 4] = part.max;
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
    part.best = __reduce_min_sync(kAllLanes, first);
  }
  if (lane == 0) p.parts[int64_t(row) * p.chunks + chunk] = part;
}

__device__ __forceinline__ int first_best(const Part* parts, int chunks, float best, int lane) {
  int first = INT32_MAX;
  for (int c = lane; c < chunks; c += 32)
    if (parts[c].max == best) first = min(first, parts[c].best);
  return __reduce_min_sync(kAllLanes, first);
}

// The token of a warp's row at `target`, the weight before it counted from the chunk's start, in units of the chunk's maximum.
template <typename T>
__device__ int draw_in_chunk(const LogitRow<T>& row, int chunk, double target, float scale, int lane) {
  Eight<T> raw[4];
  row.load(chunk, 0, lane, raw);
  const float best = row.parts[chunk].max;
  double before = 0.0;
  int last = -1;  // with a weight: what rounding of the chunk's sum leaves beyond all tokens is this one's
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int at = chunk * kChunk + 256 * b + 8 * lane;
    float w[8];
    raw[b].unpack(w);
    double own = 0.0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = exp2_fast((w[i] - best) * scale);
      own += w[i];
      last = w[i] > 0.f ? at + i : last;
    }
    const double upto = before + warp_scan(own, lane), previous = __shfl_up_sync(kAllLanes, upto, 1);
    const uint32_t hits = __ballot_sync(kAllLanes, upto > target);
    if (hits) {
      double sum = lane ? previous : before;
      int token = -1;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (w[i] > 0.f && (token < 0 || !(sum > target))) token = at + i, sum += w[i];
      return __shfl_sync(kAllLanes, token, __ffs(hits) - 1);
    }
    before = __shfl_sync(kAllLanes, upto, 31);
  }
  return __reduce_max_sync(kAllLanes, last);
}

template <typename T>
__device__ int draw_in_row(const LogitRow<T>& row, float best, float scale, double uniform, int lane) {
  double total = 0.0, target = 0.0, passed = 0.0;
  int chunk = -1;
  // Twice the same sums: for their total, then for the chunk in which they pass the target, which is below the total as a
  // double below 1 times the total rounds to less than the total.
  for (int pass = 0; pass < 2; ++pass) {
    double before = 0.0;
    for (int c = 0; c < row.chunks && chunk < 0; c += 32) {
      const double own = c + lane < row.chunks ? chunk_weight(row.parts[c + lane], best, scale) : 0.0;
      const double upto = before + warp_scan(own, lane), previous = __shfl_up_sync(kAllLanes, upto, 1);
      const uint32_t hits = pass ? __ballot_sync(kAllLanes, upto > target) : 0;
      if (hits) {
        const int first = __ffs(hits) - 1;
        chunk = c + first;
        passed = __shfl_sync(kAllLanes, lane ? previous : before, first);
      }
      before = __shfl_sync(kAllLanes, upto, 31);
    }
    if (pass == 0) total = before, target = uniform * total;
  }
  const double unit = exp2_fast((row.parts[chunk].max - best) * scale);
  return draw_in_chunk(row, chunk, (target - passed) / unit, scale, lane);
}

// Greedy and unfiltered rows, a warp each.
template <typename T>
__global__ void __launch_bounds__(kDrawWarps * 32) draw_kernel(SampleParams p) {
  const int index = blockIdx.x * kDrawWarps + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (index >= p.rows) return;
  const SampleSettings s = settings_of(p, index);
  if (s.filtered) return;
  const LogitRow<T> row(p, index);
  const float best = row_max(row.parts, p.chunks, lane);
  int token = VB_TOKEN_BROKEN;
  if (is_finite(best)) {
    token = s.temperature == 0.f ? first_best(row.parts, p.chunks, best, lane)
                                 : draw_in_row(row, best, s.scale, p.uniform(index), lane);
  }
  if (lane == 0) p.write(index, token);
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
  const SampleParams p{a->logits, a->row_stride, a->settings, a->uniforms, a->places, a->tokens, parts,
                       reinterpret_cast<float*>(parts + size_t(a->rows) * chunks), a->rows, a->vocab, chunks};
  const auto s = static_cast<cudaStream_t>(stream);
  const int e = dispatch_logits(a->dtype, [&](auto t) -> int {
    using T = decltype(t);
    scan_kernel<T><<<(chunks + kScanWarps - 1) / kScanWarps * a->rows, kScanWarps * 32, 0, s>>>(p);
    if (a->kinds & VB_SAMPLE_UNFILTERED)
      draw_kernel<T><<<(a->rows + kDrawWarps - 1) / kDrawWarps, kDrawWarps * 32, 0, s>>>(p);
    return cudaGetLastError();
  });
  return e || !(a->kinds & VB_SAMPLE_FILTERED) ? e : launch_filter(p, a->dtype, s);
}
