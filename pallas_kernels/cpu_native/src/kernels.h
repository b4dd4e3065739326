// What each instruction-set unit offers to the drivers. Plain structs only.
#pragma once

#include <cstdint>
#include <string_view>

namespace ti {

enum class Type : int32_t { kFloat32, kBFloat16 };

// y[t, n] = sum over m of x[t, m] * w[n, m]; w is one layer of a stack, rows contiguous.
struct Matmul {
  const void* x;  // [rows, depth]
  Type x_type;
  const void* w;  // [columns, depth]
  Type w_type;
  void* y;  // [rows, columns]
  Type y_type;
  int64_t rows, columns, depth;
  float* packed_x;  // [rows, packed_depth], in the order that the weight's decoder gives
  int64_t packed_depth;  // depth rounded up; the padding is zero
  int64_t block_depth;   // summed in one chain; a multiple of 32, from depth alone
};

struct Kernels {
  const char* name;
  // Packs rows [row0, row1) of x.
  void (*matmul_pack)(const Matmul&, int64_t row0, int64_t row1);
  // Computes a rectangle of y. Any split into rectangles gives the same bits.
  void (*matmul_tile)(const Matmul&, int64_t row0, int64_t row1, int64_t column0, int64_t column1);
};

// The named unit, or the best for "auto"; null when this processor or build has none.
const Kernels* select_kernels(std::string_view isa);

}  // namespace ti
