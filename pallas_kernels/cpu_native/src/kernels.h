// What each instruction-set unit offers to the drivers. Plain structs only.
#pragma once

#include <cstdint>
#include <string_view>

namespace ti {

enum class Type : int32_t { kFloat32, kBFloat16 };

// How a weight is stored. The last four are GGUF's blocks as they lie in the file.
enum class Format : int32_t { kFloat32, kBFloat16, kInt8, kInt4, kQ8_0, kQ4_0, kQ4_1, kQ4_K };

// A stored row is a sequence of blocks of `values` elements in `bytes` bytes.
struct BlockSize {
  int64_t values, bytes;
};
constexpr BlockSize block_size(Format format) {
  switch (format) {
    case Format::kFloat32: return {1, 4};
    case Format::kBFloat16: return {1, 2};
    case Format::kInt8: return {1, 1};
    case Format::kInt4: return {8, 4};
    case Format::kQ8_0: return {32, 34};
    case Format::kQ4_0: return {32, 18};
    case Format::kQ4_1: return {32, 20};
    case Format::kQ4_K: return {256, 144};
  }
  return {1, 1};
}

// Depth that is summed in one chain before the next begins; a multiple of every block and group.
constexpr int64_t kBlockDepth = 768;

// y[t, n] = sum over m of x[t, m] * w[n, m]; w is one layer of a stack, rows contiguous.
struct Matmul {
  const void* x;  // [rows, depth]
  Type x_type;
  const uint8_t* w;  // [columns, row_bytes]
  Format format;
  int64_t row_bytes;
  const void* scale;  // kInt8: [columns]; kInt4: [columns, depth / group]
  Type scale_type;
  int64_t group;
  void* y;  // [rows, columns]
  Type y_type;
  int64_t rows, columns, depth;
  float* packed_x;  // [rows, packed_depth], in the order in which the format is decoded
  int64_t packed_depth;  // depth rounded up to 32; the padding is zero
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
