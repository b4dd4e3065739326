// Vectors of bytes of the instruction set this unit is compiled for: four bytes for each of kLanes rows of weights, and
// exact sums of their products with four bytes of x. Nothing here rounds: every instruction set has the same sums.
#pragma once

#include "simd.h"

namespace TI_ISA {

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

static inline Words splat_word(uint32_t word) { return word - Words{}; }
static inline F as_float(Words bits) { return (F)bits; }
static inline F to_float(Words integers) { return (F)__builtin_convertvector((Integers)integers, Floats); }
static inline Words low_nibbles(Words bytes) { return bytes & 0x0f0f0f0fu; }
static inline Words high_nibbles(Words bytes) { return (bytes >> 4) & 0x0f0f0f0fu; }

template <class Word>
static inline Word at(const void* p) {
  Word word;
  memcpy(&word, p, sizeof word);
  return word;
}

// The first bytes, as many as a Word has, of each of kLanes rows that lie `s` bytes apart.
template <class Word>
static inline Words load_words(const uint8_t* p, int64_t s) {
  const uint8_t *q = p + 4 * s, *r = p + 8 * s, *t = p + 12 * s;
#define TI_FOUR(p) at<Word>(p), at<Word>(p + s), at<Word>(p + 2 * s), at<Word>(p + 3 * s)
#if defined(__AVX512F__)
  return Words{TI_FOUR(p), TI_FOUR(q), TI_FOUR(r), TI_FOUR(t)};
#elif defined(__AVX2__)
  (void)r, (void)t;
  return Words{TI_FOUR(p), TI_FOUR(q)};
#else
  (void)q, (void)r, (void)t;
  return Words{TI_FOUR(p)};
#endif
#undef TI_FOUR
}

// load_quads: the first 16 bytes of each of kLanes rows; to[j] has bytes 4j..4j+3. halves: the two 16-bit floats of
// each lane. store_rounded: to the nearest integers, ties to the even one.
#if defined(__AVX512F__)

static inline I four_rows(const uint8_t* p, int64_t s) {  // rows 0, 4, 8 and 12
  I low = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
  low = _mm512_inserti32x4(low, _mm_loadu_si128((const __m128i*)(p + 4 * s)), 1);
  low = _mm512_inserti32x4(low, _mm_loadu_si128((const __m128i*)(p + 8 * s)), 2);
  return _mm512_inserti32x4(low, _mm_loadu_si128((const __m128i*)(p + 12 * s)), 3);
}
static inline void load_quads(const uint8_t* p, int64_t s, Words* to) {
  I a = four_rows(p, s), b = four_rows(p + s, s), c = four_rows(p + 2 * s, s), d = four_rows(p + 3 * s, s);
  I ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  to[0] = (Words)_mm512_unpacklo_epi64(ab, cd);
  to[1] = (Words)_mm512_unpackhi_epi64(ab, cd);
  ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
  to[2] = (Words)_mm512_unpacklo_epi64(ab, cd);
  to[3] = (Words)_mm512_unpackhi_epi64(ab, cd);
}
static inline void halves(Words words, F& low, F& high) {
  low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((I)words));
  high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((I)(words >> 16)));
}
static inline void store_rounded(int32_t* p, F a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a)); }

#elif defined(__AVX2__)

static inline I two_rows(const uint8_t* p, int64_t s) {  // rows 0 and 4
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                 _mm_loadu_si128((const __m128i*)(p + 4 * s)), 1);
}
static inline void load_quads(const uint8_t* p, int64_t s, Words* to) {
  I a = two_rows(p, s), b = two_rows(p + s, s), c = two_rows(p + 2 * s, s), d = two_rows(p + 3 * s, s);
  I ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
  to[0] = (Words)_mm256_unpacklo_epi64(ab, cd);
  to[1] = (Words)_mm256_unpackhi_epi64(ab, cd);
  ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
  to[2] = (Words)_mm256_unpacklo_epi64(ab, cd);
  to[3] = (Words)_mm256_unpackhi_epi64(ab, cd);
}
static inline void halves(Words words, F& low, F& high) {
  I both = _mm256_packus_epi32((I)(words & 0xffffu), (I)(words >> 16));
  both = _mm256_permute4x64_epi64(both, 0xd8);
  low = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
  high = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
}
static inline void store_rounded(int32_t* p, F a) { _mm256_storeu_si256((I*)p, _mm256_cvtps_epi32(a)); }

#else

static inline void load_quads(const uint8_t* p, int64_t s, Words* to) {
  uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(p)), b = vreinterpretq_u32_u8(vld1q_u8(p + s));
  uint32x4_t c = vreinterpretq_u32_u8(vld1q_u8(p + 2 * s)), d = vreinterpretq_u32_u8(vld1q_u8(p + 3 * s));
  uint64x2_t even = (uint64x2_t)vtrn1q_u32(a, b), odd = (uint64x2_t)vtrn2q_u32(a, b);
  uint64x2_t even_cd = (uint64x2_t)vtrn1q_u32(c, d), odd_cd = (uint64x2_t)vtrn2q_u32(c, d);
  to[0] = (Words)vtrn1q_u64(even, even_cd);
  to[1] = (Words)vtrn1q_u64(odd, odd_cd);
  to[2] = (Words)vtrn2q_u64(even, even_cd);
  to[3] = (Words)vtrn2q_u64(odd, odd_cd);
}
static inline void halves(Words words, F& low, F& high) {
  low = vcvt_f32_f16((float16x4_t)vmovn_u32((uint32x4_t)words));
  high = vcvt_f32_f16((float16x4_t)vshrn_n_u32((uint32x4_t)words, 16));
}
static inline void store_rounded(int32_t* p, F a) { vst1q_s32(p, vcvtnq_s32_f32(a)); }

#endif

// Sums of products of weights, 0..15 or where `is_signed` any int8, with x, -127..127, in every lane; good for the
// eight steps of 32 elements. Weights are passed through `prepared` once; the sum of x is that of the same elements.
template <bool is_signed>
struct Dot {
  Words sum = {};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)  // unsigned times signed: a signed weight is made 128 greater

  static inline Words prepared(Words w) { return is_signed ? w ^ 0x80808080u : w; }
  inline void step(Words w, Words x) {
#if defined(__AVX512VNNI__)
    sum = (Words)_mm512_dpbusd_epi32((I)sum, (I)w, (I)x);
#else
    sum = (Words)_mm256_dpbusd_avx_epi32((I)sum, (I)w, (I)x);
#endif
  }
  inline F total(F sum_of_x) const {
    return is_signed ? fma(sum_of_x, splat(-128.0f), to_float(sum)) : to_float(sum);
  }

#elif defined(__AVX2__)  // sums of two products have 16 bits: eight of nibbles fit, but one of int8

#if defined(__AVX512F__)
  static inline I pairs(I w, I x) { return _mm512_maddubs_epi16(w, x); }
  static inline I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static inline Words widened(I a) { return (Words)_mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  static inline I magnitude(I w) { return _mm512_abs_epi8(w); }
  static inline I signed_as(I x, I w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  }
#else
  static inline I pairs(I w, I x) { return _mm256_maddubs_epi16(w, x); }
  static inline I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static inline Words widened(I a) { return (Words)_mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  static inline I magnitude(I w) { return _mm256_abs_epi8(w); }
  static inline I signed_as(I x, I w) { return _mm256_sign_epi8(x, w); }
#endif

  static inline Words prepared(Words w) { return w; }
  inline void step(Words w, Words x) {
    if (is_signed) {
      sum += widened(pairs(magnitude((I)w), signed_as((I)x, (I)w)));
    } else {
      sum = (Words)add16((I)sum, pairs((I)w, (I)x));
    }
  }
  inline F total(F) const { return to_float(is_signed ? sum : widened((I)sum)); }

#else

  static inline Words prepared(Words w) { return w; }
  inline void step(Words w, Words x) {
    int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
    sum = (Words)vdotq_s32((int32x4_t)sum, a, b);
#else
    int16x8_t two = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    sum = (Words)vpadalq_s16((int32x4_t)sum, two);
#endif
  }
  inline F total(F) const { return to_float(sum); }

#endif
};

}  // namespace TI_ISA
