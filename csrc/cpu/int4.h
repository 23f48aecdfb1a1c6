// Weights in 4 bits with a scale and a zero point for each group of inputs, unpacked a block of rows at a time.
//
// 32 inputs of a row are 16 bytes: input i < 16 is the lower half of byte i, input 16 + i the upper one. So 16 bytes
// widen to two vectors of inputs that follow one another, and a group may be any multiple of 16 inputs.
#ifndef VLLM_BLEND_INT4_H
#define VLLM_BLEND_INT4_H

#include "../vllm_blend_cpu.h"
#include "parallel.h"
#include "simd.h"

namespace VB_NAMESPACE {

constexpr int64_t INT4_RUN = 16;  // inputs that follow one another in one half of the bytes

struct Int4 {
  const uint8_t* values;  // [features, in / 2]
  const void* scales;     // [features, in / group] of scale_dtype
  const uint8_t* zeros;   // the same shape
  int64_t in, group;
  int32_t scale_dtype;
};

VB_INLINE float scale_at(const Int4& from, int64_t index) {
  if (from.scale_dtype == VB_F32) return ((const float*)from.scales)[index];
  const uint16_t bits = ((const uint16_t*)from.scales)[index];
  if (from.scale_dtype == VB_BF16) return bit_cast<float>(uint32_t(bits) << 16);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return load_n((const f16*)&bits, 1)[0];
#endif
}

// What the 16 numbers stand for in a group, and a run of inputs looked up in that: with AVX-512 it is one shuffle.
#if defined(__AVX512F__)
VB_INLINE vf sixteen() {
  vf numbers;
  for (int i = 0; i < VL; ++i) numbers[i] = float(i);
  return numbers;
}

template <typename Stored, typename To>
struct Group {
  __m512i table;  // the lower half of it for 16-bit numbers

  __attribute__((always_inline)) Group(float zero, float scale) {
    const vf numbers = (sixteen() - zero) * scale;
    if constexpr (sizeof(To) == 4) {
      table = bit_cast<__m512i>(round_to(numbers, (const Stored*)nullptr));
    } else {
      To narrow[16];
      store(narrow, numbers);  // which rounds
      __m256i half;
      __builtin_memcpy(&half, narrow, sizeof(half));
      table = _mm512_castsi256_si512(half);
    }
  }

  // Of a run, the VL numbers from the i-th on, for a table of floats.
  __attribute__((always_inline)) vf floats(const uint8_t* bytes, bool upper, int64_t) const {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
    return bit_cast<vf>(_mm512_permutexvar_epi32(upper ? _mm512_srli_epi32(wide, 4) : wide, table));
  }

  __attribute__((always_inline)) void unpack(To* to, const uint8_t* bytes, bool upper) const {
    const __m128i run = _mm_loadu_si128((const __m128i*)bytes);  // shuffles read the lower 4 bits of each lane
    if constexpr (sizeof(To) == 4) {
      store((float*)to, floats(bytes, upper, 0));
    } else {
      const __m256i wide = _mm256_cvtepu8_epi16(run);
      const __m256i found =
          _mm256_permutexvar_epi16(upper ? _mm256_srli_epi16(wide, 4) : wide, _mm512_castsi512_si256(table));
      _mm256_storeu_si256((__m256i*)to, found);
    }
  }
};
#else
template <typename Stored, typename To>
struct Group {
  float zero, scale;
  Group(float zero, float scale) : zero(zero), scale(scale) {}

  __attribute__((always_inline)) vf floats(const uint8_t* bytes, bool upper, int64_t i) const {
    vi numbers;
    for (int lane = 0; lane < VL; ++lane) numbers[lane] = bytes[i + lane];
    const vf found = __builtin_convertvector(upper ? numbers >> 4 : numbers & 15, vf);
    return round_to((found - zero) * scale, (const Stored*)nullptr);
  }

  void unpack(To* to, const uint8_t* bytes, bool upper) const {
    for (int64_t i = 0; i < INT4_RUN; i += VL) store(to + i, floats(bytes, upper, i));
  }
};
#endif

// Calls visit(k, upper) for each run of inputs from k to end.
template <typename Visit>
VB_INLINE void each_run(int64_t k, int64_t end, const Visit& visit) {
  if (k & INT4_RUN) {
    visit(k, true);
    k += INT4_RUN;
  }
  for (; k + 2 * INT4_RUN <= end; k += 2 * INT4_RUN) {
    visit(k, false);
    visit(k + INT4_RUN, true);
  }
  if (k < end) visit(k, false);
}
VB_INLINE int64_t byte_of(int64_t k, bool upper) { return (k - (upper ? INT4_RUN : 0)) / 2; }

template <typename Stored, typename To>
VB_INLINE Group<Stored, To> group_at(const Int4& from, int64_t row, int64_t group) {
  const int64_t index = row * (from.in / from.group) + group;
  return Group<Stored, To>(from.zeros[index], scale_at(from, index));
}

// to [in] = (number - zero point) * scale of one row, rounded to Stored: what a matrix that is dequantized at load
// holds.
template <typename Stored, typename To>
VB_INLINE void unpack_row(To* to, const Int4& from, int64_t row) {
  const uint8_t* bytes = from.values + row * (from.in / 2);
  for (int64_t g = 0, k = 0; k < from.in; ++g, k += from.group) {
    const Group<Stored, To> group = group_at<Stored, To>(from, row, g);
    each_run(k, k + from.group, [&](int64_t run, bool upper) __attribute__((always_inline)) {
      group.unpack(to + run, bytes + byte_of(run, upper), upper);
    });
  }
}

}  // namespace VB_NAMESPACE
#endif
