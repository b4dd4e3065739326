// Runs matrix products over XLA's threads.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace ti {

inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Rows [row, row + rows) of x go with matrix `index` of the stack.
struct Group {
  int64_t index, row, rows;
};

// Matrices of a stack, how far apart they lie, and the groups of rows that use them.
struct Stack {
  const uint8_t* w;
  const char* scale;
  int64_t w_stride, scale_stride;
  std::vector<Group> groups;
};

struct Tile {
  const Group* group;
  int64_t row0, row1, column0, column1;
};

// Tiles are about 32 KiB of weights (few rows) or 128 rows by 96 columns (many).
inline std::vector<Tile> tiles_of(const Matmul& m, const Stack& stack) {
  std::vector<Tile> tiles;
  for (const Group& group : stack.groups) {
    bool few = group.rows <= 16;
    int64_t columns = few ? round_up(std::max<int64_t>(1, 32768 / m.row_bytes), 48) : 96;
    int64_t rows = few ? 16 : 128, end = group.row + group.rows;
    for (int64_t c = 0; c < m.columns; c += columns)
      for (int64_t r = group.row; r < end; r += rows)
        tiles.push_back({&group, r, std::min(end, r + rows), c, std::min(m.columns, c + columns)});
  }
  return tiles;
}

template <class Pool>
void run_matmul(Pool& pool, const Kernels& kernels, Matmul& m, const Stack& stack) {
  auto* pack = m.int8_x ? int8_kernels(kernels).pack : kernels.matmul_pack;
  auto* compute = m.int8_x ? int8_kernels(kernels).tile : kernels.matmul_tile;
  if (m.int8_x) {
    int64_t groups = m.rows * (m.depth / 32);
    m.rounded_scales = scratch<float, 0>(groups * 10);  // two floats and 32 bytes a group
    m.rounded_x = reinterpret_cast<int8_t*>(m.rounded_scales + groups * 2);
  } else {
    m.packed_depth = round_up(m.depth, 32);
    m.packed_x = scratch<float, 0>(m.rows * m.packed_depth);
  }
  constexpr int64_t together = 32;
  parallel_for(pool, (m.rows + together - 1) / together, [&](int64_t i) {
    pack(m, i * together, std::min(m.rows, (i + 1) * together));
  });
  std::vector<Tile> tiles = tiles_of(m, stack);
  parallel_for(pool, static_cast<int64_t>(tiles.size()), [&](int64_t i) {
    const Tile& tile = tiles[i];
    Matmul one = m;
    one.w = stack.w + tile.group->index * stack.w_stride;
    one.scale = stack.scale + tile.group->index * stack.scale_stride;
    compute(one, tile.row0, tile.row1, tile.column0, tile.column1);
  });
}

}  // namespace ti
