// Dot products of rows with rows, in tiles that fit the registers.
#pragma once

#include "simd.h"

namespace TI_ISA {

constexpr int kRowTile = 4;
constexpr int kColumnTile = kRegisters == 32 ? 6 : 3;

// Adds up the lanes of a tile's accumulators into out[r * out_stride + c].
template <int MR, int NR>
static inline void store_tile(F (&acc)[MR][NR], float* out, int64_t out_stride, bool first) {
  float sums[MR * NR];
#pragma GCC unroll 8
  for (int i = 0; i + 4 <= MR * NR; i += 4)
    sum4(acc[i / NR][i % NR], acc[(i + 1) / NR][(i + 1) % NR], acc[(i + 2) / NR][(i + 2) % NR],
         acc[(i + 3) / NR][(i + 3) % NR], sums + i);
#pragma GCC unroll 4
  for (int i = MR * NR / 4 * 4; i < MR * NR; ++i) sums[i] = sum(acc[i / NR][i % NR]);
  for (int r = 0; r < MR; ++r)
    for (int c = 0; c < NR; ++c) {
      float* o = out + r * out_stride + c;
      *o = first ? sums[r * NR + c] : *o + sums[r * NR + c];
    }
}

// Products of MR rows of x with NR rows of f32 weights. Weights stay in registers over the rows of x.
template <int MR, int NR>
__attribute__((noinline)) static void float_tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                                                 int64_t depth, float* out, int64_t out_stride, bool first) {
  F acc[MR][NR];
  for (auto& row : acc)
    for (F& a : row) a = zero();
  for (int64_t k = 0; k < depth; k += 2 * kLanes) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      F ws[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; ++c) ws[c] = load(w + c * w_stride + k + half * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        F xr = load(x + r * x_stride + k + half * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < NR; ++c) acc[r][c] = fma(xr, ws[c], acc[r][c]);
      }
    }
  }
  store_tile(acc, out, out_stride, first);
}

template <int MR, int NR>
static void float_columns(const float* x, int64_t x_stride, const float* w, int64_t columns, int64_t depth, float* out,
                          int64_t out_stride, bool first) {
  int64_t c = 0;
  for (; c + NR <= columns; c += NR)
    float_tile<MR, NR>(x, x_stride, w + c * depth, depth, depth, out + c, out_stride, first);
  for (; c < columns; ++c)
    float_tile<MR, 1>(x, x_stride, w + c * depth, depth, depth, out + c, out_stride, first);
}

}  // namespace TI_ISA
