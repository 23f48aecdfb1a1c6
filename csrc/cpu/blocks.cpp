// Products with matrices of blocks.h, and parts of them unpacked.
//
// Lanes are rows. A number is widened, multiplied by an activation and added, and the scale of a run of inputs comes
// last: products are exact in the numbers of the matrix. Activations are not rounded to 8 bits: with a matrix that comes
// from memory there is time for both. Where the processor multiplies pairs of bf16, 3 rows and more of bf16 take 0.7 to
// 0.95 of the time with weights rounded to bf16, as `unpack` rounds them; 1 row would take 1.3 to 2.4 times as long.
#include "blocks.h"

namespace VB_NAMESPACE {

constexpr int64_t MOST_ROWS = VL == 16 ? 8 : 4;  // of x whose sums fit the registers

struct Blocks {
  void* out;
  const void *x, *bias;
  const uint8_t* weight;
  int64_t rows, in, features, out_stride, x_stride;
};

// out [M, BAND] = M rows of x, as [in, M] floats, times a band; sums [in / 16, M] are those of 16 inputs.
template <typename K, int M>
static __attribute__((noinline)) void multiply_band(float* out, const uint8_t* band, const float* x, const float* sums, int64_t in) {
  constexpr int CHAINS = M <= 2 ? 2 : 1;  // a sum that waits for itself would leave the multipliers idle
  for (int part = 0; part < BAND / VL; ++part) {
    vf total[M] = {};
    const uint8_t* block = band;
    const float *column = x, *sum = sums;
    for (int64_t k = 0; k < in; k += TILE_INPUTS * K::TILES, block += K::PACKED)
      for (int tile = 0; tile < K::TILES; ++tile, column += TILE_INPUTS * M, sum += 2 * M) {
        vf dots[2][M][CHAINS] = {};
        each_pair<K>(
            block + K::HEAD + tile * K::NUMBERS, part, [&](int j, vf a, vf b) __attribute__((always_inline)) {
              for (int m = 0; m < M; ++m) dots[0][m][j % CHAINS] += a * column[j * M + m];
              for (int m = 0; m < M; ++m) dots[1][m][j % CHAINS] += b * column[(16 + j) * M + m];
            });
        const BlockScale one = scale_of<K>(block, tile, 0, part), two = scale_of<K>(block, tile, K::RUNS - 1, part);
        for (int m = 0; m < M; ++m) {
          vf first = dots[0][m][0], second = dots[1][m][0];
          if constexpr (CHAINS == 2) first += dots[0][m][1], second += dots[1][m][1];
          if constexpr (K::RUNS == 2) {
            total[m] += first * one.scale + one.offset * sum[m];
            total[m] += second * two.scale + two.offset * sum[M + m];
          } else {
            total[m] += (first + second) * one.scale;
            if constexpr (K::HAS_OFFSET || K::ZERO) total[m] += one.offset * (sum[m] + sum[M + m]);
          }
        }
      }
    for (int m = 0; m < M; ++m) store(out + m * BAND + part * VL, total[m]);
  }
}

// Whether groups of M rows of T are multiplied in pairs.
#if defined(__AVX512BF16__)
template <typename T, int M>
constexpr bool IN_PAIRS = false;
template <int M>
constexpr bool IN_PAIRS<bf16, M> = M >= 4;

// The same with weights rounded to bf16, and x as pairs of bf16, [in / 32, 16, M]: inputs j and 16 + j of a tile.
template <typename K, int M>
static __attribute__((noinline)) void multiply_pairs(float* out, const uint8_t* band, const float* x, int64_t in) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  vf total[M] = {};
  for (int64_t k = 0; k < in; k += TILE_INPUTS * K::TILES, band += K::PACKED)
    for (int tile = 0; tile < K::TILES; ++tile, x += 16 * M) {
      const BlockScale one = scale_of<K>(band, tile, 0, 0), two = scale_of<K>(band, tile, K::RUNS - 1, 0);
      each_pair<K>(band + K::HEAD + tile * K::NUMBERS, 0, [&](int j, vf a, vf b) __attribute__((always_inline)) {
        const __m512 first = bit_cast<__m512>(value_of(a, one)), second = bit_cast<__m512>(value_of(b, two));
        const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
        const __m512bh pairs = bit_cast<__m512bh>(_mm512_permutexvar_epi16(order, halves));
        for (int m = 0; m < M; ++m) {
          const __m512bh own = bit_cast<__m512bh>(_mm512_set1_epi32(bit_cast<int32_t>(x[j * M + m])));
          total[m] = bit_cast<vf>(_mm512_dpbf16_ps(bit_cast<__m512>(total[m]), pairs, own));
        }
      });
    }
  for (int m = 0; m < M; ++m) store(out + m * BAND, total[m]);
}
#else
template <typename T, int M>
constexpr bool IN_PAIRS = false;
#endif

template <typename T>
static void store_band(const Blocks& job, const float* block, int64_t band, int64_t first_row, int64_t rows) {
  const int64_t n = band * BAND;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t i = 0; i < min64(BAND, job.features - n); i += VL) {
      const int64_t count = min64(VL, job.features - n - i);
      vf values = load(block + m * BAND + i);
      if (job.bias) values += load_n((const T*)job.bias + n + i, count);
      store_n((T*)job.out + (first_row + m) * job.out_stride + n + i, values, count);
    }
}

template <typename K, typename T, int M>
VB_INLINE void multiply_rows(const Blocks& job, const float* x, const float* sums, int64_t band, int64_t m) {
  alignas(64) float block[M * BAND];
  const uint8_t* own = job.weight + band * band_bytes<K>(job.in);
#if defined(__AVX512BF16__)
  if constexpr (IN_PAIRS<T, M>)
    multiply_pairs<K, M>(block, own, x, job.in);
  else
#endif
    multiply_band<K, M>(block, own, x, sums, job.in);
  store_band<T>(job, block, band, m, min64(M, job.rows - m));
}

// Rows m to m + width of x as columns, as `multiply_rows` reads them, and the sums of each 16 inputs; rows that are not
// there are zeros.
template <typename T>
static void pack_rows(float* to, float* sums, const Blocks& job, int64_t m, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const T* row = m + i < job.rows ? (const T*)job.x + (m + i) * job.x_stride : nullptr;
    if constexpr (IN_PAIRS<T, MOST_ROWS>)
      if (width >= 4) {
        for (int64_t k = 0; k < job.in; k += TILE_INPUTS)
          for (int j = 0; j < 16; ++j) {
            const uint32_t pair = row ? row[k + j].bits | uint32_t(row[k + 16 + j].bits) << 16 : 0;
            to[(k / 2 + j) * width + i] = bit_cast<float>(pair);
          }
        continue;
      }
    for (int64_t k = 0; k < job.in; k += 16) {
      float values[16] = {}, sum = 0;
      if (row)
        for (int j = 0; j < 16; j += VL) store(values + j, load(row + k + j));
      for (int j = 0; j < 16; ++j) {
        to[(k + j) * width + i] = values[j];
        sum += values[j];
      }
      sums[k / 16 * width + i] = sum;
    }
  }
}

template <typename K, typename T>
static int multiply(const Blocks& job, int32_t threads) {
  if (job.rows < 1) return VB_OK;
  int64_t width = 1;  // of a group of rows
  while (width < min64(job.rows, MOST_ROWS)) width *= 2;
  const int64_t groups = (job.rows + width - 1) / width, size = job.in * width;
  float* x = (float*)vb_scratch(VB_SCRATCH_SHARED, size_t(groups * (size + size / 16)) * sizeof(float));
  if (!x) return VB_NO_MEMORY;
  float* sums = x + groups * size;
  for (int64_t g = 0; g < groups; ++g) pack_rows<T>(x + g * size, sums + g * size / 16, job, g * width, width);
  VB_PARALLEL_FOR(job.in * job.features)
  for (int64_t band = 0; band < (job.features + BAND - 1) / BAND; ++band)
    for (int64_t g = 0; g < groups; ++g) {
      const float *own = x + g * size, *own_sums = sums + g * size / 16;
      if (width == 1)
        multiply_rows<K, T, 1>(job, own, own_sums, band, g);
      else if (width == 2)
        multiply_rows<K, T, 2>(job, own, own_sums, band, g * 2);
      else if (width == 4)
        multiply_rows<K, T, 4>(job, own, own_sums, band, g * 4);
      else
        multiply_rows<K, T, MOST_ROWS>(job, own, own_sums, band, g * MOST_ROWS);
    }
  return VB_OK;
}

// out [rows, in] = rows of the matrix from `first` on, which is a multiple of BAND.
template <typename K, typename T>
static int unpack(T* out, const uint8_t* weight, int64_t first, int64_t rows, int64_t in, int32_t threads) {
  VB_PARALLEL_FOR(rows * in)
  for (int64_t n = 0; n < rows; n += BAND) {
    alignas(64) float tile[TILE_INPUTS * VL];
    const uint8_t* block = weight + (first + n) / BAND * band_bytes<K>(in);
    for (int64_t k = 0; k < in; block += K::PACKED)
      for (int t = 0; t < K::TILES; ++t, k += TILE_INPUTS)
        for (int part = 0; part < BAND / VL; ++part) {
          unpack_tile<K>(tile, block, t, part);
          for (int j = 0; j < TILE_INPUTS; j += VL) {
            vf square[VL];
            for (int i = 0; i < VL; ++i) square[i] = load(tile + (j + i) * VL);
            transpose(square);
            for (int i = 0; i < VL; ++i) {
              const int64_t row = n + part * VL + i;
              if (row < rows) store(out + row * in + k + j, square[i]);
            }
          }
        }
  }
  return VB_OK;
}

// out [count, in] = the rows of the matrix with these numbers.
template <typename K, typename T>
static int take(T* out, const uint8_t* weight, const int64_t* ids, int64_t count, int64_t in, int32_t threads) {
  VB_PARALLEL_FOR(count * in)
  for (int64_t n = 0; n < count; ++n) {
    alignas(64) float tile[TILE_INPUTS * VL];
    const int lane = int(ids[n] % BAND);
    const uint8_t* block = weight + ids[n] / BAND * band_bytes<K>(in);
    for (int64_t k = 0; k < in; block += K::PACKED)
      for (int t = 0; t < K::TILES; ++t, k += TILE_INPUTS) {
        unpack_tile<K>(tile, block, t, lane / VL);
        for (int j = 0; j < TILE_INPUTS; j += VL) {
          vf row;
          for (int i = 0; i < VL; ++i) row[i] = tile[(j + i) * VL + lane % VL];
          store(out + n * in + k + j, row);
        }
      }
  }
  return VB_OK;
}

// Returns f(type of the blocks, of the numbers), unless a row of `in` is not made of whole blocks.
template <typename F>
VB_INLINE int with_types(int32_t kind, int32_t dtype, int64_t in, F f) {
  return with_block_type(kind, [&](auto type) -> int {
    if (in % (TILE_INPUTS * decltype(type)::TILES)) return VB_BAD_DTYPE;
    if (dtype == VB_F32) return f(type, float{});
    if (dtype == VB_BF16) return f(type, bf16{});
    if (dtype == VB_F16) return f(type, f16{});
    return VB_BAD_DTYPE;
  });
}

}  // namespace VB_NAMESPACE

using namespace VB_NAMESPACE;

int VB_FN(blocks_linear)(void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t in,
                         int64_t features, int64_t out_stride, int64_t x_stride, int32_t kind, int32_t dtype,
                         int32_t threads) {
  const Blocks job = {out, x, bias, (const uint8_t*)weight, rows, in, features, out_stride, x_stride};
  return with_types(kind, dtype, in, [&](auto type, auto number) {
    return multiply<decltype(type), decltype(number)>(job, threads);
  });
}

int VB_FN(blocks_unpack)(void* out, const void* weight, int64_t first, int64_t rows, int64_t in, int32_t kind,
                         int32_t dtype, int32_t threads) {
  if (first % BAND) return VB_BAD_DTYPE;
  return with_types(kind, dtype, in, [&](auto type, auto number) {
    return unpack<decltype(type)>((decltype(number)*)out, (const uint8_t*)weight, first, rows, in, threads);
  });
}

int VB_FN(blocks_rows)(void* out, const void* weight, const int64_t* ids, int64_t count, int64_t in, int32_t kind,
                       int32_t dtype, int32_t threads) {
  return with_types(kind, dtype, in, [&](auto type, auto number) {
    return take<decltype(type)>((decltype(number)*)out, (const uint8_t*)weight, ids, count, in, threads);
  });
}
