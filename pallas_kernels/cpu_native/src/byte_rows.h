// Weights of the packed formats as bytes, 32 elements of kLanes rows at a time.
//
// A cursor is made for kLanes rows, the first of them `row`, and walks along them: next(w, scale, offset) gives the
// 32 elements that follow, four in each lane of w[0..7], and what makes numbers of them: byte * scale + offset.
// kSigned: bytes are int8, else 0..15. kOffset: there are offsets. kInterleaved: the even elements of each eight are
// in w[0..3], the odd ones in w[4..7]; the elements of x are packed in the same order.
#pragma once

#include "bytes.h"
#include "decode.h"

namespace TI_ISA {

constexpr int kQuads = 8;

static inline void load_nibbles32(const uint8_t* p, int64_t stride, Words* w) {
  Words bytes[4];
  load_quads(p, stride, bytes);
  for (int j = 0; j < 4; ++j) {
    w[j] = low_nibbles(bytes[j]);
    w[4 + j] = high_nibbles(bytes[j]);
  }
}

static inline void load_bytes32(const uint8_t* p, int64_t stride, Words* w) {
  load_quads(p, stride, w);
  load_quads(p + 16, stride, w + 4);
}

// A scale a row.
struct Int8Bytes {
  static constexpr bool kSigned = true, kOffset = false, kInterleaved = false;
  const uint8_t* p;
  int64_t stride;
  F factor;

  Int8Bytes(const ti::Matmul& m, int64_t row) : p(m.w + row * m.row_bytes), stride(m.row_bytes) {
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) scales[i] = value_at(m.scale, m.scale_type, row + i);
    factor = load(scales);
  }
  inline void next(Words* w, F& scale, F&) {
    load_bytes32(p, stride, w);
    scale = factor;
    p += 32;
  }
};

// q + 8 in nibbles; a scale a group, and where `affine` an offset beside it.
template <bool affine>
struct NibbleBytes {
  static constexpr bool kSigned = false, kOffset = true, kInterleaved = true;
  const uint8_t *p, *scales;
  int64_t stride, scale_stride, group, left = 0;
  bool narrow;
  F factor = zero(), plus = zero();

  NibbleBytes(const ti::Matmul& m, int64_t row)
      : p(m.w + row * m.row_bytes), stride(m.row_bytes), group(m.group),
        narrow(!affine && m.scale_type == ti::Type::kBFloat16) {
    scale_stride = m.depth / m.group * (narrow ? 2 : 4);
    scales = (const uint8_t*)m.scale + row * scale_stride;
  }
  inline void next(Words* w, F& scale, F& offset) {
    if (left == 0) next_group();
    left -= 32;
    load_nibbles32(p, stride, w);
    scale = factor, offset = plus;
    p += 16;
  }

 private:
  inline void next_group() {
    Words words = narrow ? load_words<uint16_t>(scales, scale_stride) << 16 : load_words<uint32_t>(scales, scale_stride);
    factor = as_float(affine ? words & 0xffff0000u : words);
    plus = fma(factor, splat(-8.0f), affine ? as_float(words << 16) : zero());
    scales += narrow ? 2 : 4;
    left = group;
  }
};
using Int4Bytes = NibbleBytes<false>;
using Int4AffineBytes = NibbleBytes<true>;

struct Q8_0Bytes {
  static constexpr bool kSigned = true, kOffset = false, kInterleaved = false;
  const uint8_t* p;
  int64_t stride;

  Q8_0Bytes(const ti::Matmul& m, int64_t row) : p(m.w + row * m.row_bytes), stride(m.row_bytes) {}
  inline void next(Words* w, F& scale, F&) {
    F rest;
    halves(load_words<uint16_t>(p, stride), scale, rest);
    load_bytes32(p + 2, stride, w);
    p += 34;
  }
};

// Q4_0 has a scale, and its nibbles are q + 8; Q4_1 has a scale and an offset.
template <bool affine>
struct Q4Bytes {
  static constexpr bool kSigned = false, kOffset = true, kInterleaved = false;
  const uint8_t* p;
  int64_t stride;

  Q4Bytes(const ti::Matmul& m, int64_t row) : p(m.w + row * m.row_bytes), stride(m.row_bytes) {}
  inline void next(Words* w, F& scale, F& offset) {
    constexpr int header = affine ? 4 : 2;
    halves(affine ? load_words<uint32_t>(p, stride) : load_words<uint16_t>(p, stride), scale, offset);
    if (!affine) offset = mul(scale, splat(-8.0f));
    load_nibbles32(p + header, stride, w);
    p += header + 16;
  }
};
using Q4_0Bytes = Q4Bytes<false>;
using Q4_1Bytes = Q4Bytes<true>;

// See Q4_KCursor in packed.h: here the 6-bit scales and minima of all lanes are taken apart at once.
struct Q4_KBytes {
  static constexpr bool kSigned = false, kOffset = true, kInterleaved = false;
  const uint8_t* p;
  int64_t stride;
  int g = 0;

  Q4_KBytes(const ti::Matmul& m, int64_t row) : p(m.w + row * m.row_bytes), stride(m.row_bytes) {}
  inline void next(Words* w, F& scale, F& offset) {
    Words head[4], factor, least;  // both halves, then 12 bytes
    load_quads(p, stride, head);
    int at = 8 * (g % 4);
    if (g < 4) {
      factor = (head[1] >> at) & 63u;
      least = (head[2] >> at) & 63u;
    } else {
      factor = ((head[3] >> at) & 15u) | (((head[1] >> at) & 0xc0u) >> 2);
      least = ((head[3] >> (at + 4)) & 15u) | (((head[2] >> at) & 0xc0u) >> 2);
    }
    halves(head[0], scale, offset);
    scale = mul(scale, to_float(factor));
    offset = mul(mul(offset, splat(-1.0f)), to_float(least));
    load_bytes32(p + 16 + g / 2 * 32, stride, w);
    for (int j = 0; j < kQuads; ++j) w[j] = g % 2 == 0 ? low_nibbles(w[j]) : high_nibbles(w[j]);
    if (++g == 8) {
      g = 0;
      p += 144;
    }
  }
};

}  // namespace TI_ISA
