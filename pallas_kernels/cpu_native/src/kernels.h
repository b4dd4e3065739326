// What each instruction-set unit offers to the drivers. Plain structs only.
#pragma once

#include <cstdint>
#include <string_view>

namespace ti {

enum class Type : int32_t { kFloat32, kBFloat16 };

// How a weight is stored. The last four are GGUF's blocks as they lie in the file.
enum class Format : int32_t { kFloat32, kBFloat16, kInt8, kFloat8, kInt4, kInt4Affine, kQ8_0, kQ4_0, kQ4_1, kQ4_K };

// A stored row is a sequence of blocks of `values` elements in `bytes` bytes.
struct BlockSize {
  int64_t values, bytes;
};
constexpr BlockSize block_size(Format format) {
  switch (format) {
    case Format::kFloat32: return {1, 4};
    case Format::kBFloat16: return {1, 2};
    case Format::kInt8:
    case Format::kFloat8: return {1, 1};
    case Format::kInt4:
    case Format::kInt4Affine: return {8, 4};
    case Format::kQ8_0: return {32, 34};
    case Format::kQ4_0: return {32, 18};
    case Format::kQ4_1: return {32, 20};
    case Format::kQ4_K: return {256, 144};
  }
  return {1, 1};
}

// False for an unknown name.
inline bool format_of(std::string_view name, Format* format) {
  constexpr std::string_view names[] = {"float32", "bfloat16", "int8", "fp8_row", "int4", "int4_affine", "Q8_0", "Q4_0", "Q4_1", "Q4_K"};
  for (int i = 0; i < 10; ++i) {
    if (names[i] != name) continue;
    *format = static_cast<Format>(i);
    return true;
  }
  return false;
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
  const void* scale;  // kInt8, kFloat8: [columns]; kInt4: [columns, depth / group], kInt4Affine: words of two
  Type scale_type;
  int64_t group;
  void* y;  // [rows, columns]
  Type y_type;
  int64_t rows, columns, depth;
  float* packed_x;  // [rows, packed_depth], in the order in which the format is decoded
  int64_t packed_depth;  // depth rounded up to 32; the padding is zero
  bool int8_x;            // x is rounded to int8, in groups of 32, and these two take the place of packed_x:
  int8_t* rounded_x;      // [depth / 32, rows, 32]
  float* rounded_scales;  // [depth / 32, rows, 2]: the scale of a group and the sum of its int8
};

// Columns that every instruction set can take at once where x is rounded.
constexpr int64_t kMostColumns = 32;

// Whether there are products of this weight with x in int8.
inline bool multiplies_int8(const Matmul& m) {
  return m.format >= Format::kInt8 && m.format != Format::kFloat8 && m.depth % 32 == 0 && m.columns >= kMostColumns;
}

// How keys and values are stored in pages.
enum class PoolType : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8E4M3, kFloat8E5M2 };

// Attention over pages. A key is `key_dim` elements, a value `value_dim`; both lie in the row of their position.
struct Attention {
  const void* q;       // [tokens, heads, q_dim]
  const void* q_rest;  // [tokens, heads, key_dim - q_dim], the rest of each query; null where q_dim == key_dim
  Type q_type;
  int64_t q_dim, key_dim, value_dim;
  int64_t heads, kv_heads;
  const uint8_t* pool;  // one layer
  PoolType pool_type;
  const float* float8;  // the value of every code of a float8 pool
  int64_t page_bytes, row_bytes, head_bytes, value_offset;  // bytes from a page, position, head to the next; k to v
  int64_t page_size, blocks;                                // slots that this pool has of a page
  int64_t shard, shards;                                    // pools over which the slots of a page are split
  const int32_t* page_table;                                // [sequences, blocks]
  float scale, value_scale, soft_cap;  // soft_cap 0: none
  int64_t window, chunk;               // 0: none
  const float* sinks;                  // [heads] or null
  void* out;                           // [tokens, heads, value_dim]
  Type out_type;
  float* scales;            // one layer, [pages, scale_rows, page_size], or null
  int64_t scale_rows;       // of a slot: k0, v0, k1, v1, …, or those of the two parts of a key
  int64_t first_scale_dim;  // elements of a row that its first scale is of; the next scale is of the rest
  float* lse;  // [tokens, heads], log-sum-exp of each row, or null
};

// How many slots of a shard hold positions less than `position`; slots are numbered block after block.
static inline int64_t slots_below(int64_t position, int64_t page_size, int64_t shard, int64_t shards) {
  int64_t page = page_size * shards, rest = position % page - shard * page_size;
  return position / page * page_size + (rest < 0 ? 0 : rest > page_size ? page_size : rest);
}

// Queries that share keys: tokens [token, token + tokens) of one sequence, `heads` query heads of one KV head.
struct Queries {
  int64_t sequence, token, tokens, position;  // position of the first token
  int64_t kv_head, head, heads;
  int64_t rows() const { return tokens * heads; }
};

// Slots are taken in splits that begin at multiples of this, so that a row's sums do not depend on its batch.
constexpr int64_t kSplit = 192;
constexpr int64_t kMaxQueryRows = 48;

struct Kernels {
  const char* name;
  // Packs rows [row0, row1) of x.
  void (*matmul_pack)(const Matmul&, int64_t row0, int64_t row1);
  // Computes a rectangle of y. Any split into rectangles gives the same bits.
  void (*matmul_tile)(const Matmul&, int64_t row0, int64_t row1, int64_t column0, int64_t column1);
  // The values of rows [row0, row1) of w, each of `depth` elements, to the same rows of y, which is [rows, depth].
  void (*decode_rows)(const Matmul&, int64_t row0, int64_t row1);
  // Floats of a split's result and of its working memory, for so many rows.
  int64_t (*attention_result)(const Attention&, int64_t rows);
  int64_t (*attention_work)(const Attention&, int64_t rows);
  // One split's softmax for its own maximum; then the sum of two; then the rows of `out`.
  void (*attention_split)(const Attention&, const Queries&, int64_t split, float* work, float* result);
  void (*attention_merge)(const Attention&, int64_t rows, float* total, const float* result);
  void (*attention_finish)(const Attention&, const Queries&, float* total);
};

// As matmul_pack and matmul_tile, where int8_x.
struct Int8Kernels {
  void (*pack)(const Matmul&, int64_t row0, int64_t row1);
  void (*tile)(const Matmul&, int64_t row0, int64_t row1, int64_t column0, int64_t column1);
};

// The named unit, or the best for "auto"; null when this processor or build has none.
const Kernels* select_kernels(std::string_view isa);

// Those that go with a unit, with dot products of bytes where this processor has them; all give the same bits.
const Int8Kernels& int8_kernels(const Kernels& unit);

}  // namespace ti
