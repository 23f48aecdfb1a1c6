// Where PyTorch's layout of 4-bit matrices (aten::_convert_weight_to_int4pack on CUDA) has the numbers of a matrix [out, in]:
// [out / 8, in / (32 * words), 32 lanes, words] of 32 bits, with 1, 2 or 4 words a lane. Of 8 rows, four lanes share one, and a
// word of each of the four holds 32 inputs together: in lane c these are inputs 2c and 2c + 1 of every eight. The lower half of
// the word has the first of each two, the upper half the second; both begin with the first eight in the lowest bits.
//
// For the host as well: tests/ops/test_int4_tiles.py compiles it and compares it with the layout's definition.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define VB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define VB_HOST_DEVICE inline
#endif

namespace vb {

struct Int4Tiles {
  int size;       // inputs of a row
  int log_words;  // log2 of the words of a lane

  // The first of the four words with inputs 8 * unit to 8 * unit + 7 of a row. They are `stride` apart and have two each.
  VB_HOST_DEVICE int64_t word(int row, int unit) const {
    const int run = unit >> 2;  // of 32 inputs
    const int64_t tile = int64_t(row >> 3) * (size >> (5 + log_words)) + (run >> log_words);
    return ((tile * 32 + (row & 7) * 4) << log_words) + (run & (stride() - 1));
  }
  VB_HOST_DEVICE int stride() const { return 1 << log_words; }

  // The bit at which the first of the two is; the second is 16 bits higher.
  VB_HOST_DEVICE int bit(int unit) const { return (unit & 3) * 4; }
};

}  // namespace vb
