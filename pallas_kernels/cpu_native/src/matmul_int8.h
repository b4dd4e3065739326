// Products of packed weights with x rounded to int8: x = q * scale for 32 elements each, scale their greatest
// magnitude / 127. Products of a group are summed exactly, groups in float32 from the first to the last, in a lane a
// column, so that the bits of a result depend on nothing but its row, its column and neither tiles nor lanes.
#pragma once

#include "byte_rows.h"

namespace TI_ISA {

// A group whose greatest magnitude is below 2**-100 is taken as zeros; one with an infinity or NaN gives NaN.
constexpr float kLeast = 7.8886091e-31f;

template <bool interleaved>
static void round_group(const float* x, int8_t* q, float* scale_and_sum) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  float greatest;
  memcpy(&greatest, &most, 4);
  bool finite = most < 0x7f800000u;
  if (!finite || greatest < kLeast) {
    memset(q, 0, 32);
    scale_and_sum[0] = finite ? 0.0f : __builtin_nanf("");
    scale_and_sum[1] = 0.0f;
    return;
  }
  F by = splat(127.0f / greatest);
  int32_t rounded[32], sum = 0;
  for (int i = 0; i < 32; i += kLanes) store_rounded(rounded + i, mul(load(x + i), by));
  for (int i = 0; i < 32; ++i) {
    int32_t value = rounded[interleaved ? i % 16 * 2 + i / 16 : i];
    q[i] = (int8_t)value;
    sum += value;
  }
  scale_and_sum[0] = greatest / 127.0f;
  scale_and_sum[1] = (float)sum;
}

template <bool interleaved>
static void round_rows(const ti::Matmul& m, int64_t row0, int64_t row1) {
  float wide[32];
  for (int64_t t = row0; t < row1; ++t)
    for (int64_t k = 0; k < m.depth; k += 32) {
      const float* x = (const float*)m.x + t * m.depth + k;
      if (m.x_type == ti::Type::kBFloat16) {
        const uint16_t* narrow = (const uint16_t*)m.x + t * m.depth + k;
        for (int i = 0; i < 32; i += kLanes) store(wide + i, load_bf16(narrow + i));
        x = wide;
      }
      int64_t place = k / 32 * m.rows + t;
      round_group<interleaved>(x, m.rounded_x + place * 32, m.rounded_scales + place * 2);
    }
}

static void int8_pack(const ti::Matmul& m, int64_t row0, int64_t row1) {
  if (m.format == ti::Format::kInt4 || m.format == ti::Format::kInt4Affine) return round_rows<true>(m, row0, row1);
  round_rows<false>(m, row0, row1);
}

// 32 elements of kWide columns, unpacked.
constexpr int kVectorsWide = 2, kWide = kVectorsWide * kLanes;
static_assert(kWide <= ti::kMostColumns, "columns that are too few for this have other products");
struct Unpacked {
  Words w[kVectorsWide][kQuads];
  F scale[kVectorsWide], offset[kVectorsWide];
};

// Has a sum in a register here. Left free, a compiler puts all products before all sums, more than registers hold.
static inline void keep_order(Words& sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#elif defined(__AVX2__)
  asm("" : "+x"(sum));
#else
  asm("" : "+w"(sum));
#endif
}

// Adds the products of a group with MR rows of x to sums [MR, kWide].
template <class Rows, int MR>
static inline void add_products(const Unpacked& u, const int8_t* x, const float* x_scales, float* sums) {
  Dot<Rows::kSigned> dots[MR][kVectorsWide];
#pragma GCC unroll 8
  for (int j = 0; j < kQuads; ++j)
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
      Words four = splat_word(at<uint32_t>(x + r * 32 + 4 * j));
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsWide; ++v) {
        dots[r][v].step(u.w[v][j], four);
        keep_order(dots[r][v].sum);
      }
    }
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    F by = splat(x_scales[2 * r]), sum_of_x = splat(x_scales[2 * r + 1]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsWide; ++v) {
      F total = dots[r][v].total(sum_of_x);
      total = Rows::kOffset ? fma(total, u.scale[v], mul(u.offset[v], sum_of_x)) : mul(total, u.scale[v]);
      float* sum = sums + r * kWide + v * kLanes;
      store(sum, fma(total, by, load(sum)));
    }
  }
}

static inline void store_sums(const ti::Matmul& m, int64_t row, int64_t column, int64_t count, const float* sums) {
  if (m.y_type == ti::Type::kFloat32) {
    memcpy((float*)m.y + row * m.columns + column, sums, (size_t)count * 4);
    return;
  }
  uint16_t* y = (uint16_t*)m.y + row * m.columns + column;
  for (int64_t c = 0; c < count; ++c) y[c] = float_to_bf16(sums[c]);
}

// Columns are taken kWide at a time; each group of theirs is unpacked once for up to 128 rows.
template <class Rows>
static void int8_columns(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  constexpr int64_t chunk = 128;
  alignas(64) float sums[chunk * kWide];
  int64_t group_bytes = kWide * 32 * m.row_bytes / m.depth;
  for (int64_t t = row0; t < row1; t += chunk) {
    int64_t rows = row1 - t < chunk ? row1 - t : chunk;
    for (int64_t c = column0; c < column1; c += kWide) {
      int64_t from = c + kWide <= m.columns ? c : m.columns - kWide;  // some of the last columns may be done twice
      const char* next = (const char*)m.w + (from + kWide) * m.row_bytes;
      memset(sums, 0, sizeof(float) * (size_t)(rows * kWide));
      Rows cursors[kVectorsWide] = {Rows(m, from), Rows(m, from + kLanes)};
      for (int64_t g = 0; g < m.depth / 32; ++g) {
        for (int64_t line = 0; line < group_bytes; line += 64) __builtin_prefetch(next + line, 0, 3);
        next += group_bytes;
        Unpacked u;
        for (int v = 0; v < kVectorsWide; ++v) {
          cursors[v].next(u.w[v], u.scale[v], u.offset[v]);
          for (Words& quad : u.w[v]) quad = Dot<Rows::kSigned>::prepared(quad);
        }
        int64_t place = g * m.rows + t, r = 0;
        const int8_t* x = m.rounded_x + place * 32;
        const float* scales = m.rounded_scales + place * 2;
        for (; r + 4 <= rows; r += 4) add_products<Rows, 4>(u, x + r * 32, scales + r * 2, sums + r * kWide);
        switch (rows - r) {
          case 3: add_products<Rows, 3>(u, x + r * 32, scales + r * 2, sums + r * kWide); break;
          case 2: add_products<Rows, 2>(u, x + r * 32, scales + r * 2, sums + r * kWide); break;
          case 1: add_products<Rows, 1>(u, x + r * 32, scales + r * 2, sums + r * kWide); break;
        }
      }
      int64_t count = column1 - c < kWide ? column1 - c : kWide;
      for (int64_t r = 0; r < rows; ++r) store_sums(m, t + r, c, count, sums + r * kWide + (c - from));
    }
  }
}

static void int8_tile(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  using ti::Format;
  switch (m.format) {
    case Format::kInt8: return int8_columns<Int8Bytes>(m, row0, row1, column0, column1);
    case Format::kInt4: return int8_columns<Int4Bytes>(m, row0, row1, column0, column1);
    case Format::kInt4Affine: return int8_columns<Int4AffineBytes>(m, row0, row1, column0, column1);
    case Format::kQ8_0: return int8_columns<Q8_0Bytes>(m, row0, row1, column0, column1);
    case Format::kQ4_0: return int8_columns<Q4_0Bytes>(m, row0, row1, column0, column1);
    case Format::kQ4_1: return int8_columns<Q4_1Bytes>(m, row0, row1, column0, column1);
    case Format::kQ4_K: return int8_columns<Q4_KBytes>(m, row0, row1, column0, column1);
    default: return;
  }
}

}  // namespace TI_ISA
