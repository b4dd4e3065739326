// Weights of the formats that pack elements with their scales, as f32, 32 elements at a time.
//
// A cursor is made for a row and an element (a multiple of kBlockDepth) and walks along the row: next(w) gives the 32
// elements that follow, in kVectors vectors, in the order in which packed_x has them (see decode.h on kInterleaved).
// Whoever multiplies them gets the same bits, be it straight from the registers or by way of a decoded tile.
#pragma once

#include "decode.h"

namespace TI_ISA {

constexpr int kVectors = 32 / kLanes;

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

// q + 8 in nibbles, the first of a byte in its low bits; w = (nibble - 8) * scale of its group, and where `affine` its
// offset more.
template <bool affine>
struct NibbleCursor {
  static constexpr bool kInterleaved = true;
  const ti::Matmul* m;
  const uint8_t* p;
  int64_t scale, left;  // index of the group's scale, elements of the group that are left

  NibbleCursor() = default;
  NibbleCursor(const ti::Matmul& matmul, int64_t row, int64_t k)
      : m(&matmul),
        p(matmul.w + row * matmul.row_bytes + k / 2),
        scale((row * matmul.depth + k) / matmul.group),
        left(matmul.group) {}

  inline void next(F (&w)[kVectors]) {
    float factor, offset = 0.0f;
    if (affine) {
      uint32_t pair = ((const uint32_t*)m->scale)[scale];
      factor = bf16_to_float((uint16_t)(pair >> 16));
      offset = bf16_to_float((uint16_t)pair);
    } else {
      factor = value_at(m->scale, m->scale_type, scale);
    }
    F s = splat(factor), minus = splat(offset - 8.0f * factor);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i += 2) {
      F low, high;
      load_nibbles(p + i * kLanes / 2, low, high);
      w[i] = fma(low, s, minus);
      w[i + 1] = fma(high, s, minus);
    }
    p += 16;
    left -= 32;
    if (left == 0) {
      left = m->group;
      ++scale;
    }
  }
};

using Int4Cursor = NibbleCursor<false>;
using Int4AffineCursor = NibbleCursor<true>;

// 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones; w = nibble * scale + offset.
static inline void nibbles32(const uint8_t* p, float scale, float offset, F (&w)[kVectors]) {
  F s = splat(scale), o = splat(offset);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors / 2; ++i) {
    F low, high;
    load_nibbles(p + i * kLanes, low, high);
    w[i] = fma(low, s, o);
    w[kVectors / 2 + i] = fma(high, s, o);
  }
}

// Blocks of 32 elements, one after another.
template <class Block, ti::Format format>
struct BlockCursor {
  static constexpr bool kInterleaved = false;
  const uint8_t* p;

  BlockCursor() = default;
  BlockCursor(const ti::Matmul& m, int64_t row, int64_t k)
      : p(m.w + row * m.row_bytes + k / 32 * ti::block_size(format).bytes) {}

  inline void next(F (&w)[kVectors]) {
    Block::load(p, w);
    p += ti::block_size(format).bytes;
  }
};

struct Q8_0 {
  static inline void load(const uint8_t* p, F (&w)[kVectors]) {
    F scale = splat(half_at(p));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) w[i] = mul(load_i8((const int8_t*)p + 2 + i * kLanes), scale);
  }
};
struct Q4_0 {
  static inline void load(const uint8_t* p, F (&w)[kVectors]) {
    float scale = half_at(p);
    nibbles32(p + 2, scale, -8.0f * scale, w);
  }
};
struct Q4_1 {
  static inline void load(const uint8_t* p, F (&w)[kVectors]) { nibbles32(p + 4, half_at(p), half_at(p + 2), w); }
};

// 8 groups of 32 with 6-bit scales and minima, packed in 12 bytes; 64 elements share 32 bytes.
struct Q4_KCursor {
  static constexpr bool kInterleaved = false;
  const uint8_t* p;
  int g = 0;  // of the block's groups

  Q4_KCursor() = default;
  Q4_KCursor(const ti::Matmul& m, int64_t row, int64_t k) : p(m.w + row * m.row_bytes + k / 256 * 144) {}

  inline void next(F (&w)[kVectors]) {
    const uint8_t* packed = p + 4;
    int scale, least;
    if (g < 4) {
      scale = packed[g] & 63;
      least = packed[g + 4] & 63;
    } else {
      scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
      least = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
    const uint8_t* q = p + 16 + g / 2 * 32;
    F s = splat(half_at(p) * (float)scale), o = splat(-half_at(p + 2) * (float)least);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      F low, high;
      load_nibbles(q + i * kLanes, low, high);
      w[i] = fma(g % 2 == 0 ? low : high, s, o);
    }
    if (++g == 8) {
      g = 0;
      p += 144;
    }
  }
};

using Q8_0Cursor = BlockCursor<Q8_0, ti::Format::kQ8_0>;
using Q4_0Cursor = BlockCursor<Q4_0, ti::Format::kQ4_0>;
using Q4_1Cursor = BlockCursor<Q4_1, ti::Format::kQ4_1>;

// Rows of a packed format for a decoded tile.
template <class Cursor>
struct PackedRows {
  static constexpr bool kInterleaved = Cursor::kInterleaved;
  static inline void decode(const ti::Matmul& m, int64_t row, int64_t k, int64_t depth, int64_t, float* out) {
    Cursor cursor(m, row, k);
    for (int64_t i = 0; i < depth; i += 32) {
      __builtin_prefetch(cursor.p + kColumnBlock * m.row_bytes, 0, 3);
      F w[kVectors];
      cursor.next(w);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(out + i + v * kLanes, w[v]);
    }
  }
};

}  // namespace TI_ISA
