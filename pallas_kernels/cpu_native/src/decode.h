// Weights of every stored format as f32, a row at a time.
//
// Each struct has decode(m, row, k, depth, padded, out): elements [k, k + depth) of the row to `out`, zeros up to
// `padded`. k is a multiple of kBlockDepth, padded of 32. Where kInterleaved, every run of 2 * kLanes elements comes
// out as its even elements and then its odd ones, which is what the bits give for free; packed_x follows suit.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TI_ISA {

// Columns that are decoded together; the next ones are prefetched meanwhile.
constexpr int kColumnBlock = 6;

static inline float value_at(const void* p, ti::Type type, int64_t i) {
  return type == ti::Type::kFloat32 ? ((const float*)p)[i] : bf16_to_float(((const uint16_t*)p)[i]);
}

// Formats that a kernel can also multiply straight from memory: load2 gives 2 * kLanes elements.
template <class Source>
struct Plain : Source {
  using Element = typename Source::Element;

  static inline void decode(const ti::Matmul& m, int64_t row, int64_t k, int64_t depth, int64_t padded, float* out) {
    const Element* w = (const Element*)(m.w + row * m.row_bytes) + k;
    expand(w, depth, padded, out, kColumnBlock * m.row_bytes);
  }

  // Bytes `ahead` of those read are prefetched.
  static inline void expand(const Element* w, int64_t depth, int64_t padded, float* out, int64_t ahead) {
    constexpr int64_t step = 2 * kLanes;
    int64_t k = 0;
    for (; k + step <= depth; k += step) {
      __builtin_prefetch((const char*)(w + k) + ahead, 0, 3);
      put(w + k, out + k);
    }
    for (; k < padded; k += step) {
      Element tail[step];
      memset(tail, 0, sizeof tail);
      if (k < depth) memcpy(tail, w + k, (size_t)(depth - k < step ? depth - k : step) * sizeof(Element));
      put(tail, out + k);
    }
  }

  static inline void put(const Element* w, float* out) {
    F a, b;
    Source::load2(w, a, b);
    store(out, a);
    store(out + kLanes, b);
  }
};

struct FloatSource {
  using Element = float;
  static constexpr bool kInterleaved = false;
  static inline void load2(const float* p, F& a, F& b) {
    a = load(p);
    b = load(p + kLanes);
  }
};
struct BFloatSource {
  using Element = uint16_t;
  static constexpr bool kInterleaved = true;
  static inline void load2(const uint16_t* p, F& a, F& b) { load_bf16_pairs(p, a, b); }
};
// Without the scale of the row, which is applied to the sums.
struct Int8Source {
  using Element = int8_t;
  static constexpr bool kInterleaved = false;
  static inline void load2(const int8_t* p, F& a, F& b) {
    a = load_i8(p);
    b = load_i8(p + kLanes);
  }
};
using FloatRows = Plain<FloatSource>;
using BFloatRows = Plain<BFloatSource>;
using Int8Rows = Plain<Int8Source>;

// kLanes bytes to their low and their high nibbles.
static inline void load_nibbles(const uint8_t* p, F& low, F& high);

#if defined(__AVX512F__)
static inline void load_nibbles(const uint8_t* p, F& low, F& high) {
  I bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  low = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
  high = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
}
#elif defined(__AVX2__)
static inline void load_nibbles(const uint8_t* p, F& low, F& high) {
  I bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  low = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
  high = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
}
#else
static inline void load_nibbles(const uint8_t* p, F& low, F& high) {
  uint32_t four;
  memcpy(&four, p, 4);
  I bytes = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
  low = vcvtq_f32_u32(vandq_u32(bytes, vdupq_n_u32(15)));
  high = vcvtq_f32_u32(vshrq_n_u32(bytes, 4));
}
#endif

static inline float half_at(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
#if defined(__AVX2__)
  return _cvtsh_ss(h);
#else
  __fp16 value;
  memcpy(&value, &h, 2);
  return (float)value;
#endif
}

// q + 8 in nibbles, the first of a byte in its low bits; w = (nibble - 8) * scale of its group.
struct Int4Rows {
  static constexpr bool kInterleaved = true;
  static inline void decode(const ti::Matmul& m, int64_t row, int64_t k, int64_t depth, int64_t, float* out) {
    const uint8_t* w = m.w + row * m.row_bytes + k / 2;
    int64_t groups = m.depth / m.group;
    for (int64_t g = 0; g < depth; g += m.group) {
      float scale = value_at(m.scale, m.scale_type, row * groups + (k + g) / m.group);
      F s = splat(scale), minus = splat(-8.0f * scale);
      __builtin_prefetch(w + g / 2 + kColumnBlock * m.row_bytes, 0, 3);
      for (int64_t i = g; i < g + m.group; i += 2 * kLanes) {
        F low, high;
        load_nibbles(w + i / 2, low, high);
        store(out + i, fma(low, s, minus));
        store(out + i + kLanes, fma(high, s, minus));
      }
    }
  }
};

// 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones; w = nibble * scale + offset.
static inline void put_nibbles32(const uint8_t* p, float scale, float offset, float* out) {
  F s = splat(scale), o = splat(offset);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += kLanes) {
    F low, high;
    load_nibbles(p + i, low, high);
    store(out + i, fma(low, s, o));
    store(out + 16 + i, fma(high, s, o));
  }
}

// One block after another; Block::put writes a block's elements.
template <class Block, ti::Format format>
struct BlockRows {
  static constexpr bool kInterleaved = false;
  static inline void decode(const ti::Matmul& m, int64_t row, int64_t k, int64_t depth, int64_t, float* out) {
    constexpr ti::BlockSize size = ti::block_size(format);
    const uint8_t* w = m.w + row * m.row_bytes + k / size.values * size.bytes;
    for (int64_t i = 0; i < depth; i += size.values, w += size.bytes) {
      for (int64_t line = 0; line < size.bytes; line += 64)
        __builtin_prefetch(w + line + kColumnBlock * m.row_bytes, 0, 3);
      Block::put(w, out + i);
    }
  }
};

struct Q8_0 {
  static inline void put(const uint8_t* p, float* out) {
    F scale = splat(half_at(p));
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += kLanes) store(out + i, mul(load_i8((const int8_t*)p + 2 + i), scale));
  }
};
struct Q4_0 {
  static inline void put(const uint8_t* p, float* out) {
    float scale = half_at(p);
    put_nibbles32(p + 2, scale, -8.0f * scale, out);
  }
};
struct Q4_1 {
  static inline void put(const uint8_t* p, float* out) { put_nibbles32(p + 4, half_at(p), half_at(p + 2), out); }
};
// 8 groups of 32 with 6-bit scales and minima, packed in 12 bytes; 64 elements share 32 bytes.
struct Q4_K {
  static inline void put(const uint8_t* p, float* out) {
    float d = half_at(p), dmin = half_at(p + 2);
    const uint8_t* packed = p + 4;
    for (int g = 0; g < 8; ++g) {
      int scale, least;
      if (g < 4) {
        scale = packed[g] & 63;
        least = packed[g + 4] & 63;
      } else {
        scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
        least = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
      }
      const uint8_t* q = p + 16 + g / 2 * 32;
      F s = splat(d * (float)scale), o = splat(-dmin * (float)least);
#pragma GCC unroll 8
      for (int i = 0; i < 32; i += kLanes) {
        F low, high;
        load_nibbles(q + i, low, high);
        store(out + g * 32 + i, fma(g % 2 == 0 ? low : high, s, o));
      }
    }
  }
};

}  // namespace TI_ISA
