// Weights of the formats whose elements are whole bytes, as f32, a row at a time (see packed.h for the others).
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

// Formats that a kernel can also multiply straight from memory: load2 gives 2 * kLanes elements. That is done for
// up to kStreamed rows: the more work load2 is, the fewer, since each four rows do it again.
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
  static constexpr int kStreamed = 16;
  static constexpr bool kInterleaved = false;
  static inline void load2(const float* p, F& a, F& b) {
    a = load(p);
    b = load(p + kLanes);
  }
};
struct BFloatSource {
  using Element = uint16_t;
  static constexpr int kStreamed = 8;
  static constexpr bool kInterleaved = true;
  static inline void load2(const uint16_t* p, F& a, F& b) { load_bf16_pairs(p, a, b); }
};
// Without the scale of the row, which is applied to the sums.
struct Int8Source {
  using Element = int8_t;
  static constexpr int kStreamed = 4;
  static constexpr bool kInterleaved = false;
  static inline void load2(const int8_t* p, F& a, F& b) {
    a = load_i8(p);
    b = load_i8(p + kLanes);
  }
};
// e4m3, without the scale of the row and 2**-8 of each value (see kFloat8Factor).
struct Float8Source {
  using Element = uint8_t;
  static constexpr int kStreamed = 4;
  static constexpr bool kInterleaved = false;
  static inline void load2(const uint8_t* p, F& a, F& b) {
    a = load_float8(p);
    b = load_float8(p + kLanes);
  }
};
using FloatRows = Plain<FloatSource>;
using BFloatRows = Plain<BFloatSource>;
using Int8Rows = Plain<Int8Source>;
using Float8Rows = Plain<Float8Source>;

}  // namespace TI_ISA
