// Fixed-width float vectors of the instruction set this unit is compiled for.
// Units of several instruction sets are linked together, so everything here lives in the unit's own
// namespace TI_ISA and nothing of the C++ library that could be shared across units is used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace TI_ISA {

#if defined(__AVX512F__)

using F = __m512;
using I = __m512i;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;

static inline F zero() { return _mm512_setzero_ps(); }
static inline F splat(float a) { return _mm512_set1_ps(a); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline __m128 fold(F a) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F round_even(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F power_of_two(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline F load_float8(const uint8_t* p) {
  __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff)));
}
// Elements 0,2,4,… of 2 * kLanes bf16 values, then elements 1,3,5,…
static inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  I raw = _mm512_loadu_si512((const void*)p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000u)));
}

#elif defined(__AVX2__)

using F = __m256;
using I = __m256i;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;

static inline F zero() { return _mm256_setzero_ps(); }
static inline F splat(float a) { return _mm256_set1_ps(a); }
static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
static inline __m128 fold(F a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
static inline F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
static inline F round_even(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F power_of_two(F n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline F load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline F load_float8(const uint8_t* p) {
  __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8);
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xbfff)));
}
static inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  I raw = _mm256_loadu_si256((const __m256i*)p);
  even = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32((int)0xffff0000u)));
}

#elif defined(__aarch64__)

using F = float32x4_t;
using I = uint32x4_t;
constexpr int kLanes = 4;
constexpr int kRegisters = 32;

static inline F zero() { return vdupq_n_f32(0.0f); }
static inline F splat(float a) { return vdupq_n_f32(a); }
static inline F load(const float* p) { return vld1q_f32(p); }
static inline void store(float* p, F a) { vst1q_f32(p, a); }
static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
static inline F add(F a, F b) { return vaddq_f32(a, b); }
static inline F mul(F a, F b) { return vmulq_f32(a, b); }
static inline F max(F a, F b) { return vmaxq_f32(a, b); }
static inline float sum(F a) { return vaddvq_f32(a); }
static inline void sum4(F a, F b, F c, F d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
static inline F load_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline F div(F a, F b) { return vdivq_f32(a, b); }
static inline F round_even(F a) { return vrndnq_f32(a); }
static inline F power_of_two(F n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline F load_i8(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
static inline F load_float8(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  int16x4_t high = vreinterpret_s16_u16(vshl_n_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))), 8));
  return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(vreinterpret_u16_s16(vshr_n_s16(high, 1)), vdup_n_u16(0xbfff))));
}
static inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  I raw = vreinterpretq_u32_u16(vld1q_u16(p));
  even = vreinterpretq_f32_u32(vshlq_n_u32(raw, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(raw, vdupq_n_u32(0xffff0000u)));
}

#else
#error "this unit needs AVX2 or NEON"
#endif

#if defined(__AVX2__)
// Both add the lanes of a vector in the same order, so that one is as good as the other to the bit.
static inline void sum4(F a, F b, F c, F d, float* out) {
  _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
}
static inline float sum(F a) {
  __m128 q = fold(a);
  q = _mm_hadd_ps(q, q);
  return _mm_cvtss_f32(_mm_hadd_ps(q, q));
}
#endif

// e**a for a <= 0, with a relative error of about 2e-7; below -87 it is e**-87; exactly 1 at 0.
static inline F exp_negative(F a) {
  a = max(a, splat(-87.0f));
  F n = round_even(mul(a, splat(1.44269504f)));
  F r = fma(n, splat(-0.693359375f), a);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return mul(p, power_of_two(n));
}

static inline float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// An e4m3 becomes a half by moving its bits, which divides it by 2**8 (also a subnormal one); load_float8 leaves it so.
constexpr float kFloat8Factor = 256.0f;

// Round to nearest even; a NaN stays a quiet NaN.
static inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace TI_ISA
