// Vectors of float32 in the compiler's own vector types, so that one source serves every instruction set, and the
// conversions between them and the storage types. Included by kernels only: all names live in a namespace of the
// instruction set, and nothing from the standard library's templates is used, or the linker could hand an AVX-512 copy
// of a shared inline function to the generic build.
#ifndef VLLM_BLEND_SIMD_H
#define VLLM_BLEND_SIMD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define VB_NS_(isa) vb_ns_##isa
#define VB_NS(isa) VB_NS_(isa)
#define VB_NAMESPACE VB_NS(VB_ISA)

#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // the second is what Clang said before version 16
#define VB_AMX 1
#endif

#if defined(__AVX512F__)
#define VB_LANES 16
#elif defined(__AVX2__)
#define VB_LANES 8
#else
#define VB_LANES 4
#endif

#define VB_INLINE static inline __attribute__((always_inline))

namespace VB_NAMESPACE {

constexpr int VL = VB_LANES;  // float32 lanes of a vector

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint8_t vb __attribute__((vector_size(VL)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct f8 {  // e4m3: no infinities, and 448 is the largest
  uint8_t bits;
};

template <typename To, typename From>
VB_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

VB_INLINE vf splat(float x) { return x - vf{}; }
VB_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
VB_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
VB_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// --- widening and narrowing of 16-bit lanes: where GCC's own vector conversion goes through halves, spell it out

VB_INLINE vu widen(vh bits) {
#if defined(__AVX512F__)
  return bit_cast<vu>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  return bit_cast<vu>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, vu);
#endif
}
VB_INLINE vh narrow(vu wide) {
#if defined(__AVX512F__)
  return bit_cast<vh>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(wide)));
#else
  return __builtin_convertvector(wide, vh);
#endif
}

// --- storage -> float32

VB_INLINE vf half_bits_to_float(vh bits) {
#if defined(__AVX512F__)
  return bit_cast<vf>(_mm512_cvtph_ps(bit_cast<__m256i>(bits)));
#elif defined(__F16C__)
  return bit_cast<vf>(_mm256_cvtph_ps(bit_cast<__m128i>(bits)));
#else
  // Move exponent and mantissa into place and let a product re-bias the exponent: right for subnormals too.
  vu wide = widen(bits);
  vu sign = (wide & 0x8000u) << 16;
  vu magnitude = (wide & 0x7fffu) << 13;
  vf scaled = bit_cast<vf>(magnitude) * 0x1p112f;
  vu special = bit_cast<vu>((vi)(magnitude >= 0x0f800000u)) & 0x7f800000u;  // infinity and NaN keep a full exponent
  return bit_cast<vf>(bit_cast<vu>(scaled) | special | sign);
#endif
}

VB_INLINE vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
VB_INLINE vf load(const bf16* p) {
  vh bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bit_cast<vf>(widen(bits) << 16);
}
VB_INLINE vf load(const f16* p) {
  vh bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return half_bits_to_float(bits);
}
VB_INLINE vf load(const f8* p) {
  vb bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
#if defined(__AVX512F__)
  const vh bits = bit_cast<vh>(_mm256_cvtepu8_epi16(bit_cast<__m128i>(bytes)));
#else
  const vh bits = __builtin_convertvector(bytes, vh);
#endif
  // Exponent and mantissa in their places of a half, whose exponent is larger by 8; all ones are NaN in both.
  const vh nan = bit_cast<vh>((bits & 0x7f) == 0x7f) & 0x7c00;
  return half_bits_to_float((bits & 0x80) << 8 | (bits & 0x7f) << 7 | nan) * 0x1p8f;
}

// --- float32 -> storage, to nearest even

VB_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof(v)); }
VB_INLINE void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(bit_cast<__m512>(v));  // subnormals become 0
  __builtin_memcpy(p, &rounded, sizeof(rounded));
#else
  vu u = bit_cast<vu>(v);
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = (u >> 16) | 0x40u;
  vh bits = narrow((v != v) ? nan : rounded);
  __builtin_memcpy(p, &bits, sizeof(bits));
#endif
}
VB_INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
  __m256i bits = _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &bits, sizeof(bits));
#elif defined(__F16C__)
  __m128i bits = _mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &bits, sizeof(bits));
#else
  vu u = bit_cast<vu>(v);
  vu sign = (u >> 16) & 0x8000u;
  vu magnitude = u & 0x7fffffffu;
  // Below the smallest normal half: add a number whose last mantissa bit is worth one half subnormal, and read that
  // mantissa.
  vu tiny = bit_cast<vu>(bit_cast<vf>(magnitude) + 0.5f) - 0x3f000000u;
  vu normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  vu large = (vu)(magnitude > 0x7f800000u) & (vu)(vi{} + 0x7e00);
  large = large | ((vu)(magnitude <= 0x7f800000u) & (vu)(vi{} + 0x7c00));
  vu half = magnitude < 0x38800000u ? tiny : normal;
  half = magnitude >= 0x47800000u ? large : half;
  vh bits = narrow(half | sign);
  __builtin_memcpy(p, &bits, sizeof(bits));
#endif
}

VB_INLINE void store(f8* p, vf v) {
  const vu bits = bit_cast<vu>(v), size = bits & 0x7fffffffu, limit = vu{} + bit_cast<uint32_t>(448.0f);
  const vu magnitude = size < limit ? size : limit;
  // As for halves: subnormals are read from the mantissa of a number whose last bit is worth one of them.
  const vu tiny = bit_cast<vu>(bit_cast<vf>(magnitude) + 0x1p14f) - bit_cast<uint32_t>(0x1p14f);
  const vu normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  vu rounded = magnitude < bit_cast<uint32_t>(0x1p-6f) ? tiny : normal;
  rounded = (size > 0x7f800000u ? vu{} + 0x7fu : rounded) | (bits >> 24 & 0x80u);
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8(bit_cast<__m512i>(rounded));
#else
  const vb bytes = __builtin_convertvector(rounded, vb);
#endif
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}

// What a value is after a trip through storage.
VB_INLINE vf round_to(vf v, const float*) { return v; }
template <typename T>
VB_INLINE vf round_to(vf v, const T*) {
  T stored[VL];
  store(stored, v);
  return load(stored);
}

// --- rows whose length is no multiple of the vector: the tail goes through a buffer

template <typename T>
VB_INLINE vf load_n(const T* p, int64_t n) {
  if (n >= VL) return load(p);
  T buffer[VL] = {};
  __builtin_memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}
template <typename T>
VB_INLINE void store_n(T* p, vf v, int64_t n) {
  if (n >= VL) return store(p, v);
  T buffer[VL];
  store(buffer, v);
  __builtin_memcpy(p, buffer, size_t(n) * sizeof(T));
}

template <typename S, typename D>
VB_INLINE void copy_row(D* to, const S* from, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) store_n(to + i, load_n(from + i, n - i), n - i);
}
template <typename T>
VB_INLINE void copy_row(T* to, const T* from, int64_t n) {
  __builtin_memcpy(to, from, size_t(n) * sizeof(T));
}

VB_INLINE float sum_lanes(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bit_cast<__m512>(v));
#else
  float lanes[VL], total = 0.0f;
  store(lanes, v);
  for (int i = 0; i < VL; ++i) total += lanes[i];
  return total;
#endif
}
VB_INLINE float max_lanes(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bit_cast<__m512>(v));
#else
  float lanes[VL];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < VL; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

// 2^f for -0.5 <= f <= 0.5, by our own minimax fit of degree 5 to the relative error: 9e-8 before rounding.
VB_INLINE vf exp2_fraction(vf f) {
  vf p = splat(1.326472709e-3f);
  p = p * f + 9.671512682e-3f;
  p = p * f + 5.550733744e-2f;
  p = p * f + 2.402224208e-1f;
  p = p * f + 6.931469776e-1f;
  return p * f + 1.0f;
}
// 2^x for x <= 127, and an infinity for 128. Below -126 the result is subnormal or 0; 2^-infinity is an exact 0.
VB_INLINE vf exp2_(vf x) {
#if defined(__AVX512F__)
  // f is x minus its nearest integer (0 for an infinity), so x - f is that integer, exactly.
  const vf f = bit_cast<vf>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return bit_cast<vf>(_mm512_scalef_ps(bit_cast<__m512>(exp2_fraction(f)), bit_cast<__m512>(x - f)));
#else
  const vf magic = splat(0x1.8p23f);  // adding it rounds to an integer, which the low mantissa bits then hold
  vf clamped = vmax(x, splat(-127.0f));
  vf shifted = clamped + magic;
  vf whole = shifted - magic;
  vf p = exp2_fraction(clamped - whole);
  vi exponent = (bit_cast<vi>(shifted) - bit_cast<vi>(magic) + 127) << 23;
  vf result = p * bit_cast<vf>(exponent);
  return x < splat(-126.0f) ? vf{} : result;
#endif
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_inff();

}  // namespace VB_NAMESPACE

// Two-source shuffle with compile-time lanes: GCC and Clang spell it differently.
#if VB_LANES == 16
#define VB_EACH(M, s)                                                                                           \
  M(0, s), M(1, s), M(2, s), M(3, s), M(4, s), M(5, s), M(6, s), M(7, s), M(8, s), M(9, s), M(10, s), M(11, s), \
      M(12, s), M(13, s), M(14, s), M(15, s)
#elif VB_LANES == 8
#define VB_EACH(M, s) M(0, s), M(1, s), M(2, s), M(3, s), M(4, s), M(5, s), M(6, s), M(7, s)
#else
#define VB_EACH(M, s) M(0, s), M(1, s), M(2, s), M(3, s)
#endif
#if defined(__clang__)
#define VB_SHUFFLE(a, b, M, s) __builtin_shufflevector(a, b, VB_EACH(M, s))
#else
#define VB_SHUFFLE(a, b, M, s) __builtin_shuffle(a, b, (vi){VB_EACH(M, s)})
#endif
// Lane i keeps a where bit s of i is clear and b where it is set: from its own place, or from the partner's (i ^ s).
#define VB_OWN(i, s) (((i) & (s)) ? VB_LANES + (i) : (i))
#define VB_PARTNER(i, s) (((i) & (s)) ? VB_LANES + ((i) ^ (s)) : ((i) ^ (s)))
#define VB_LOW(i, s) (((i) & (s)) ? VB_LANES + ((i) ^ (s)) : (i))
#define VB_HIGH(i, s) (((i) & (s)) ? VB_LANES + (i) : ((i) ^ (s)))

namespace VB_NAMESPACE {

// Lane i of the result is the sum of the lanes of v[i], for VL vectors; v is used up.
VB_INLINE vf sum_each(vf* v) {
#define VB_STAGE(s)             \
  for (int i = 0; i < (s); ++i) \
    v[i] = VB_SHUFFLE(v[i], v[i + (s)], VB_OWN, s) + VB_SHUFFLE(v[i], v[i + (s)], VB_PARTNER, s);
#if VB_LANES >= 16
  VB_STAGE(8)
#endif
#if VB_LANES >= 8
  VB_STAGE(4)
#endif
  VB_STAGE(2)
  VB_STAGE(1)
#undef VB_STAGE
  return v[0];
}

// Lane j of v[i] and lane i of v[j] change places, for VL vectors.
VB_INLINE void transpose(vf* v) {
#define VB_STAGE(s)                                           \
  for (int i = 0; i < VL; ++i)                                \
    if (!(i & (s))) {                                         \
      const vf low = VB_SHUFFLE(v[i], v[i + (s)], VB_LOW, s); \
      v[i + (s)] = VB_SHUFFLE(v[i], v[i + (s)], VB_HIGH, s);  \
      v[i] = low;                                             \
    }
#if VB_LANES >= 16
  VB_STAGE(8)
#endif
#if VB_LANES >= 8
  VB_STAGE(4)
#endif
  VB_STAGE(2)
  VB_STAGE(1)
#undef VB_STAGE
}

}  // namespace VB_NAMESPACE
#endif
