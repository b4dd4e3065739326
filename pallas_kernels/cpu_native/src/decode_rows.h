// Rows of packed blocks as numbers, for loading them: the products of GGUF's formats are exact in f32, so a fused sum
// gives the bits of ggml's reference.
#pragma once

#include "packed.h"

namespace TI_ISA {

template <class Cursor>
static void decode_packed(const ti::Matmul& m, int64_t row0, int64_t row1) {
  alignas(64) float values[256];
  for (int64_t row = row0; row < row1; ++row) {
    Cursor cursor(m, row, 0);
    for (int64_t k = 0; k < m.depth;) {
      int64_t count = m.depth - k < 256 ? m.depth - k : 256;
      for (int64_t i = 0; i < count; i += 32) {
        F w[kVectors];
        cursor.next(w);
        for (int v = 0; v < kVectors; ++v) store(values + i + v * kLanes, w[v]);
      }
      int64_t at = row * m.depth + k;
      if (m.y_type == ti::Type::kFloat32) {
        memcpy((float*)m.y + at, values, (size_t)count * 4);
      } else {
        uint16_t* y = (uint16_t*)m.y + at;
        for (int64_t i = 0; i < count; ++i) {  // as float_to_bf16, but for NaN, which no finite block holds
          uint32_t bits;
          memcpy(&bits, values + i, 4);
          y[i] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
        }
      }
      k += count;
    }
  }
}

static void decode_rows(const ti::Matmul& m, int64_t row0, int64_t row1) {
  switch (m.format) {
    case ti::Format::kQ8_0: return decode_packed<Q8_0Cursor>(m, row0, row1);
    case ti::Format::kQ4_0: return decode_packed<Q4_0Cursor>(m, row0, row1);
    case ti::Format::kQ4_1: return decode_packed<Q4_1Cursor>(m, row0, row1);
    case ti::Format::kQ4_K: return decode_packed<Q4_KCursor>(m, row0, row1);
    default: return;
  }
}

}  // namespace TI_ISA
