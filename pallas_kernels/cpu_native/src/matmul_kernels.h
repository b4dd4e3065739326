// Matrix products by dot products along depth: one vector chain per output and block of depth, so the
// bits of a row depend neither on the other rows of the batch nor on how the work is split.
#pragma once

#include "decode.h"
#include "packed.h"
#include "tiles.h"

namespace TI_ISA {

// Products of MR rows of x with NR rows of weights as they are stored; x is a memory operand. Bytes from `ahead` on are
// prefetched, as many as are read and line after line: rows by turns would be slower for the memory.
template <class Rows, int MR, int NR>
__attribute__((noinline)) static void raw_tile(const float* x, int64_t x_stride, const typename Rows::Element* w,
                                               int64_t w_stride, int64_t depth, float* out, int64_t out_stride,
                                               bool first, const char* ahead) {
  constexpr int step = NR * 2 * kLanes * (int)sizeof(typename Rows::Element);
  F acc[MR][NR];
  for (auto& row : acc)
    for (F& a : row) a = zero();
  for (int64_t k = 0; k < depth; k += 2 * kLanes, ahead += step) {
#pragma GCC unroll 8
    for (int line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, 3);
#pragma GCC unroll 8
    for (int c = 0; c < NR; ++c) {
      F w0, w1;
      Rows::load2(w + c * w_stride + k, w0, w1);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        acc[r][c] = fma(w0, load(x + r * x_stride + k), acc[r][c]);
        acc[r][c] = fma(w1, load(x + r * x_stride + k + kLanes), acc[r][c]);
      }
    }
  }
  store_tile(acc, out, out_stride, first);
}

// The same over the whole depth, while the rows of weights behind these are fetched.
template <class Rows, int MR, int NR>
static void raw_rows(const ti::Matmul& m, const float* x, const typename Rows::Element* w, float* out,
                     int64_t out_stride) {
  const char* ahead = (const char*)(w + NR * m.depth);
  for (int64_t k = 0; k < m.depth; k += ti::kBlockDepth) {
    int64_t depth = m.depth - k < ti::kBlockDepth ? m.depth - k : ti::kBlockDepth;
    raw_tile<Rows, MR, NR>(x + k, m.packed_depth, w + k, m.depth, depth, out, out_stride, k == 0,
                           ahead + k * NR * (int64_t)sizeof(typename Rows::Element));
  }
}

template <class Rows>
static void pack_rows(const ti::Matmul& m, int64_t row0, int64_t row1) {
  for (int64_t t = row0; t < row1; ++t) {
    float* out = m.packed_x + t * m.packed_depth;
    if (m.x_type == ti::Type::kBFloat16) {
      const uint16_t* x = (const uint16_t*)m.x + t * m.depth;
      if (Rows::kInterleaved) {
        BFloatRows::expand(x, m.depth, m.packed_depth, out, 0);
      } else {
        for (int64_t k = 0; k < m.packed_depth; ++k) out[k] = k < m.depth ? bf16_to_float(x[k]) : 0.0f;
      }
      continue;
    }
    const float* x = (const float*)m.x + t * m.depth;
    if (!Rows::kInterleaved) {
      memcpy(out, x, (size_t)m.depth * 4);
      memset(out + m.depth, 0, (size_t)(m.packed_depth - m.depth) * 4);
      continue;
    }
    for (int64_t k = 0; k < m.packed_depth; k += 2 * kLanes)
      for (int j = 0; j < kLanes; ++j)
        for (int odd = 0; odd < 2; ++odd) {
          int64_t from = k + 2 * j + odd;
          out[k + odd * kLanes + j] = from < m.depth ? x[from] : 0.0f;
        }
  }
}

static void store_row(const ti::Matmul& m, int64_t row, int64_t column, int64_t count, float* from) {
  if (m.format == ti::Format::kInt8 || m.format == ti::Format::kFloat8) {
    float factor = m.format == ti::Format::kFloat8 ? kFloat8Factor : 1.0f;
    for (int64_t c = 0; c < count; ++c) from[c] *= factor * value_at(m.scale, m.scale_type, column + c);
  }
  if (m.y_type == ti::Type::kFloat32) {
    memcpy((float*)m.y + row * m.columns + column, from, (size_t)count * 4);
    return;
  }
  uint16_t* y = (uint16_t*)m.y + row * m.columns + column;
  for (int64_t c = 0; c < count; ++c) y[c] = float_to_bf16(from[c]);
}

// Few rows: weights straight from memory, each read once.
template <class Rows, int MR, int NR>
static void stream_tile(const ti::Matmul& m, int64_t row0, int64_t column0, int64_t column1) {
  constexpr int64_t wide = 96;
  float out[MR * wide];
  const float* x = m.packed_x + row0 * m.packed_depth;
  for (int64_t start = column0; start < column1; start += wide) {
    int64_t columns = column1 - start < wide ? column1 - start : wide;
    const auto* w = (const typename Rows::Element*)(m.w + start * m.row_bytes);
    int64_t c = 0;
    for (; c + NR <= columns; c += NR) raw_rows<Rows, MR, NR>(m, x, w + c * m.depth, out + c, wide);
    for (; c < columns; ++c) raw_rows<Rows, MR, 1>(m, x, w + c * m.depth, out + c, wide);
    for (int r = 0; r < MR; ++r) store_row(m, row0 + r, start, columns, out + r * wide);
  }
}

// As raw_tile, with the weights in registers, so that each is loaded once for all rows. Prefetched is part `part` of
// 2**shift of the next NR rows of weights: with several tiles over the same weights memory is read all the time.
template <class Rows, int MR, int NR>
__attribute__((noinline)) static void held_tile(const float* x, int64_t x_stride, const typename Rows::Element* w,
                                                int64_t w_stride, int64_t depth, float* out, int64_t out_stride,
                                                bool first, int64_t part, int shift) {
  F acc[MR][NR];
  for (auto& row : acc)
    for (F& a : row) a = zero();
  const typename Rows::Element* next = w + NR * w_stride + (depth >> shift) * part;
  for (int64_t k = 0; k < depth; k += 2 * kLanes) {
#pragma GCC unroll 8
    for (int c = 0; c < NR; ++c) __builtin_prefetch(next + c * w_stride + (k >> shift), 0, 3);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      F ws[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; ++c) {
        F low, high;
        Rows::load2(w + c * w_stride + k, low, high);
        ws[c] = half == 0 ? low : high;
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        F xr = load(x + r * x_stride + k + half * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < NR; ++c) acc[r][c] = fma(ws[c], xr, acc[r][c]);
      }
    }
  }
  store_tile(acc, out, out_stride, first);
}

// The products of a few columns with all rows, up to four at a time.
template <class Rows, int NR>
static inline void held_rows(const float* x, int64_t x_stride, int64_t rows, const typename Rows::Element* w,
                             int64_t w_stride, int64_t depth, float* out, int64_t out_stride, bool first) {
  int shift = rows <= 4 ? 0 : rows <= 8 ? 1 : 2;
  for (int64_t part = 0; rows > 0; ++part, rows -= 4, x += 4 * x_stride, out += 4 * out_stride) switch (rows) {
      case 1: held_tile<Rows, 1, NR>(x, x_stride, w, w_stride, depth, out, out_stride, first, part, shift); break;
      case 2: held_tile<Rows, 2, NR>(x, x_stride, w, w_stride, depth, out, out_stride, first, part, shift); break;
      case 3: held_tile<Rows, 3, NR>(x, x_stride, w, w_stride, depth, out, out_stride, first, part, shift); break;
      default: held_tile<Rows, 4, NR>(x, x_stride, w, w_stride, depth, out, out_stride, first, part, shift);
    }
}

// Five to sixteen rows, weights read once.
template <class Rows>
static void stream_rows(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  constexpr int64_t wide = 48, most = 16;
  static_assert(Rows::kStreamed <= most);
  float out[most * wide];
  const float* x = m.packed_x + row0 * m.packed_depth;
  int64_t rows = row1 - row0;
  for (int64_t start = column0; start < column1; start += wide) {
    int64_t columns = column1 - start < wide ? column1 - start : wide;
    const auto* w = (const typename Rows::Element*)(m.w + start * m.row_bytes);
    for (int64_t k = 0; k < m.depth; k += ti::kBlockDepth) {
      int64_t depth = m.depth - k < ti::kBlockDepth ? m.depth - k : ti::kBlockDepth, c = 0;
      for (; c + kColumnTile <= columns; c += kColumnTile)
        held_rows<Rows, kColumnTile>(x + k, m.packed_depth, rows, w + c * m.depth + k, m.depth, depth, out + c, wide,
                                    k == 0);
      for (; c < columns; ++c)
        held_rows<Rows, 1>(x + k, m.packed_depth, rows, w + c * m.depth + k, m.depth, depth, out + c, wide, k == 0);
    }
    for (int64_t r = 0; r < rows; ++r) store_row(m, row0 + r, start, columns, out + r * wide);
  }
}

// Products of MR rows of x with NR rows of packed weights, decoded in registers.
template <class Cursor, int MR, int NR>
__attribute__((noinline)) static void packed_tile(const ti::Matmul& m, const float* x, int64_t column, int64_t k,
                                                  int64_t depth, float* out, int64_t out_stride, bool first) {
  F acc[MR][NR];
  for (auto& row : acc)
    for (F& a : row) a = zero();
  Cursor at[NR];
  for (int c = 0; c < NR; ++c) at[c] = Cursor(m, column + c, k);
  for (int64_t i = k; i < k + depth; i += 32) {
#pragma GCC unroll 4
    for (int c = 0; c < NR; ++c) {
      __builtin_prefetch(at[c].p + NR * m.row_bytes, 0, 3);
      F w[kVectors];
      at[c].next(w);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) acc[r][c] = fma(w[v], load(x + r * m.packed_depth + i + v * kLanes), acc[r][c]);
    }
  }
  store_tile(acc, out, out_stride, first);
}

// Few rows of a packed format: each weight is decoded once, and never stored.
template <class Cursor, int MR, int NR>
static void stream_packed(const ti::Matmul& m, int64_t row0, int64_t column0, int64_t column1) {
  constexpr int64_t wide = 96;
  float out[MR * wide];
  const float* x = m.packed_x + row0 * m.packed_depth;
  for (int64_t start = column0; start < column1; start += wide) {
    int64_t columns = column1 - start < wide ? column1 - start : wide;
    for (int64_t k = 0; k < m.depth; k += ti::kBlockDepth) {
      int64_t depth = m.depth - k < ti::kBlockDepth ? m.depth - k : ti::kBlockDepth;
      int64_t c = 0;
      for (; c + NR <= columns; c += NR) packed_tile<Cursor, MR, NR>(m, x, start + c, k, depth, out + c, wide, k == 0);
      for (; c < columns; ++c) packed_tile<Cursor, MR, 1>(m, x, start + c, k, depth, out + c, wide, k == 0);
    }
    for (int r = 0; r < MR; ++r) store_row(m, row0 + r, start, columns, out + r * wide);
  }
}

// Many rows: a block of columns is decoded to f32 in the first-level cache and used by every row.
template <class Rows>
static void block_tile(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  constexpr int64_t chunk = 128;
  alignas(64) float w[kColumnBlock * ti::kBlockDepth];
  alignas(64) float out[chunk * kColumnBlock];
  for (int64_t t0 = row0; t0 < row1; t0 += chunk) {
    int64_t rows = row1 - t0 < chunk ? row1 - t0 : chunk;
    for (int64_t c = column0; c < column1; c += kColumnBlock) {
      int64_t columns = column1 - c < kColumnBlock ? column1 - c : kColumnBlock;
      for (int64_t k = 0; k < m.packed_depth; k += ti::kBlockDepth) {
        int64_t padded = m.packed_depth - k < ti::kBlockDepth ? m.packed_depth - k : ti::kBlockDepth;
        int64_t depth = m.depth - k < padded ? m.depth - k : padded;
        for (int64_t j = 0; j < columns; ++j)
          Rows::decode(m, c + j, k, depth, padded, w + j * padded);
        const float* x = m.packed_x + t0 * m.packed_depth + k;
        int64_t r = 0;
        for (; r + kRowTile <= rows; r += kRowTile)
          float_columns<kRowTile, kColumnTile>(x + r * m.packed_depth, m.packed_depth, w, columns, padded,
                                               out + r * kColumnBlock, kColumnBlock, k == 0);
        for (; r + 2 <= rows; r += 2)
          float_columns<2, kColumnBlock>(x + r * m.packed_depth, m.packed_depth, w, columns, padded,
                                         out + r * kColumnBlock, kColumnBlock, k == 0);
        for (; r < rows; ++r)
          float_columns<1, kColumnBlock>(x + r * m.packed_depth, m.packed_depth, w, columns, padded,
                                         out + r * kColumnBlock, kColumnBlock, k == 0);
      }
      for (int64_t r = 0; r < rows; ++r) store_row(m, t0 + r, c, columns, out + r * kColumnBlock);
    }
  }
}

// Few rows of a plain format are streamed.
template <class Rows>
static void plain_tile(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  int64_t rows = row1 - row0;
  if (m.depth != m.packed_depth || rows > Rows::kStreamed) return block_tile<Rows>(m, row0, row1, column0, column1);
  if (rows > 4) return stream_rows<Rows>(m, row0, row1, column0, column1);
  constexpr int wide = kRegisters == 32 ? 2 : 1;
  // What is read and what is fetched have to fit the first-level cache together.
  if (rows == 1 && m.row_bytes > 2048) return stream_tile<Rows, 1, 2>(m, row0, column0, column1);
  if (rows == 1) return stream_tile<Rows, 1, 4>(m, row0, column0, column1);
  if (rows == 2) return stream_tile<Rows, 2, 4>(m, row0, column0, column1);
  if (rows == 3) return stream_tile<Rows, 3, 4 * wide>(m, row0, column0, column1);
  if (rows == 4) return stream_tile<Rows, 4, 3 * wide>(m, row0, column0, column1);
}

template <class Cursor>
static void packed_rows_tile(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  switch (row1 - row0) {
    case 1: return stream_packed<Cursor, 1, 4>(m, row0, column0, column1);
    case 2: return stream_packed<Cursor, 2, 2>(m, row0, column0, column1);
    case 3: return stream_packed<Cursor, 3, 2>(m, row0, column0, column1);
    case 4: return stream_packed<Cursor, 4, 2>(m, row0, column0, column1);
    default: return block_tile<PackedRows<Cursor>>(m, row0, row1, column0, column1);
  }
}

static void matmul_pack(const ti::Matmul& m, int64_t row0, int64_t row1) {
  if (m.format == ti::Format::kBFloat16 || m.format == ti::Format::kInt4 || m.format == ti::Format::kInt4Affine)
    return pack_rows<BFloatRows>(m, row0, row1);
  pack_rows<FloatRows>(m, row0, row1);
}

static void matmul_tile(const ti::Matmul& m, int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
  using ti::Format;
  switch (m.format) {
    case Format::kFloat32: return plain_tile<FloatRows>(m, row0, row1, column0, column1);
    case Format::kBFloat16: return plain_tile<BFloatRows>(m, row0, row1, column0, column1);
    case Format::kInt8: return plain_tile<Int8Rows>(m, row0, row1, column0, column1);
    case Format::kFloat8: return plain_tile<Float8Rows>(m, row0, row1, column0, column1);
    case Format::kInt4: return packed_rows_tile<Int4Cursor>(m, row0, row1, column0, column1);
    case Format::kInt4Affine: return packed_rows_tile<Int4AffineCursor>(m, row0, row1, column0, column1);
    case Format::kQ8_0: return packed_rows_tile<Q8_0Cursor>(m, row0, row1, column0, column1);
    case Format::kQ4_0: return packed_rows_tile<Q4_0Cursor>(m, row0, row1, column0, column1);
    case Format::kQ4_1: return packed_rows_tile<Q4_1Cursor>(m, row0, row1, column0, column1);
    case Format::kQ4_K: return packed_rows_tile<Q4_KCursor>(m, row0, row1, column0, column1);
  }
}

}  // namespace TI_ISA
