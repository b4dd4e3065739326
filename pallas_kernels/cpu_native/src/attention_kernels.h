// Softmax attention of a few query rows over a run of pages, in float32.
//
// A result is, for R rows: the maximum [R], the sum of weights [R], the weighted values [R, value stride].
// Every row is computed as it would be alone: masked positions weigh exactly 0.
#pragma once

#include "kernels.h"
#include "tiles.h"

namespace TI_ISA {

constexpr int64_t kPositionBlock = 48;
constexpr float kLowest = -1e30f;

static inline int64_t padded(int64_t dim) { return (dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

static int64_t attention_result(const ti::Attention& a, int64_t rows) { return rows * (2 + padded(a.value_dim)); }

static int64_t attention_work(const ti::Attention& a, int64_t rows) {
  int64_t key = padded(a.key_dim), value = padded(a.value_dim);
  return rows * (key + ti::kSplit) + kPositionBlock * (key > value ? key : value);
}

static inline int64_t first_visible(const ti::Attention& a, int64_t position) {
  int64_t first = 0;
  if (a.window > 0 && position - a.window + 1 > first) first = position - a.window + 1;
  if (a.chunk > 0 && position / a.chunk * a.chunk > first) first = position / a.chunk * a.chunk;
  return first;
}

// `dim` stored elements as f32, zeros up to the padded length.
static void read_row(const ti::Attention& a, const uint8_t* p, int64_t dim, float* out) {
  int64_t i = 0;
  switch (a.pool_type) {
    case ti::PoolType::kFloat32:
      for (; i + kLanes <= dim; i += kLanes) store(out + i, load((const float*)p + i));
      for (; i < dim; ++i) out[i] = ((const float*)p)[i];
      break;
    case ti::PoolType::kBFloat16:
      for (; i + kLanes <= dim; i += kLanes) store(out + i, load_bf16((const uint16_t*)p + i));
      for (; i < dim; ++i) out[i] = bf16_to_float(((const uint16_t*)p)[i]);
      break;
    case ti::PoolType::kFloat16:
      for (; i + kLanes <= dim; i += kLanes) store(out + i, load_half((const uint16_t*)p + i));
      if (i < dim) {
        uint16_t tail[kLanes] = {};
        float wide[kLanes];
        memcpy(tail, (const uint16_t*)p + i, (size_t)(dim - i) * 2);
        store(wide, load_half(tail));
        memcpy(out + i, wide, (size_t)(dim - i) * 4);
        i = dim;
      }
      break;
    case ti::PoolType::kInt8:
      for (; i + kLanes <= dim; i += kLanes) store(out + i, load_i8((const int8_t*)p + i));
      for (; i < dim; ++i) out[i] = (float)((const int8_t*)p)[i];
      break;
    case ti::PoolType::kFloat8E4M3:
    case ti::PoolType::kFloat8E5M2:
      for (; i < dim; ++i) out[i] = a.float8[p[i]];
      break;
  }
  for (; i < padded(dim); ++i) out[i] = 0.0f;
}

// Positions [from, to) of the keys (offset 0) or values of a KV head, a row each.
static void read_positions(const ti::Attention& a, const ti::Queries& q, int64_t from, int64_t to, int64_t offset,
                           int64_t dim, float* out) {
  const int32_t* pages = a.page_table + q.sequence * a.blocks;
  for (int64_t i = from; i < to; ++i) {
    const uint8_t* page = a.pool + pages[i / a.page_size] * a.page_bytes;
    read_row(a, page + i % a.page_size * a.row_bytes + q.kv_head * a.head_bytes + offset, dim,
             out + (i - from) * padded(dim));
  }
}

static inline float query_at(const ti::Attention& a, const void* from, int64_t i) {
  return a.q_type == ti::Type::kFloat32 ? ((const float*)from)[i] : bf16_to_float(((const uint16_t*)from)[i]);
}

// Row r is head r % heads of token r / heads, times scale.
static void pack_queries(const ti::Attention& a, const ti::Queries& q, float* out) {
  int64_t rest = a.key_dim - a.q_dim;
  for (int64_t r = 0; r < q.rows(); ++r, out += padded(a.key_dim)) {
    int64_t row = (q.token + r / q.heads) * a.heads + q.head + r % q.heads;
    for (int64_t i = 0; i < a.q_dim; ++i) out[i] = query_at(a, a.q, row * a.q_dim + i) * a.scale;
    for (int64_t i = 0; i < rest; ++i) out[a.q_dim + i] = query_at(a, a.q_rest, row * rest + i) * a.scale;
    for (int64_t i = a.key_dim; i < padded(a.key_dim); ++i) out[i] = 0.0f;
  }
}

static void score_rows(const float* q, const float* keys, int64_t rows, int64_t positions, int64_t dim, float* out) {
  constexpr int wide = kRegisters == 32 ? 2 : 1;
  int64_t r = 0;
  for (; r + kRowTile <= rows; r += kRowTile)
    float_columns<kRowTile, kColumnTile>(q + r * dim, dim, keys, positions, dim, out + r * ti::kSplit, ti::kSplit, true);
  if (rows - r == 3)
    float_columns<3, 4 * wide>(q + r * dim, dim, keys, positions, dim, out + r * ti::kSplit, ti::kSplit, true);
  if (rows - r == 2)
    float_columns<2, 6>(q + r * dim, dim, keys, positions, dim, out + r * ti::kSplit, ti::kSplit, true);
  if (rows - r == 1)
    float_columns<1, 8>(q + r * dim, dim, keys, positions, dim, out + r * ti::kSplit, ti::kSplit, true);
}

// Scores of one row become weights; entries outside [from, to) become 0.
static void soften_row(const ti::Attention& a, float* s, int64_t from, int64_t to, float* top, float* total) {
  for (int64_t i = 0; i < from; ++i) s[i] = 0.0f;
  for (int64_t i = to; i < ti::kSplit; ++i) s[i] = 0.0f;
  if (a.soft_cap > 0) {
    // tanh(x) = 1 - 2 / (e**2x + 1), odd in x, by an exponential of a negative number.
    F cap = splat(a.soft_cap), factor = splat(2.0f / a.soft_cap), one = splat(1.0f);
    for (int64_t i = 0; i < ti::kSplit; i += kLanes) {
      F x = mul(load(s + i), factor);
      F magnitude = max(x, mul(x, splat(-1.0f)));
      F e = exp_negative(mul(magnitude, splat(-1.0f)));
      F sign = div(x, max(magnitude, splat(1e-30f)));
      store(s + i, mul(cap, mul(sign, div(add(one, mul(e, splat(-1.0f))), add(one, e)))));
    }
  }
  float peak = kLowest;
  for (int64_t i = from; i < to; ++i) peak = s[i] > peak ? s[i] : peak;
  F minus = splat(-peak), sums = zero();
  for (int64_t i = 0; i < ti::kSplit; i += kLanes) {
    F e = exp_negative(add(load(s + i), minus));
    if (i < from || i + kLanes > to) {
      float kept[kLanes];
      store(kept, e);
      for (int64_t j = 0; j < kLanes; ++j)
        if (i + j < from || i + j >= to) kept[j] = 0.0f;
      e = load(kept);
    }
    store(s + i, e);
    sums = add(sums, e);
  }
  *top = peak;
  *total = sum(sums);
}

// acc[r] += weights[r, j] * values[j], position after position.
template <int MR, int NV>
__attribute__((noinline)) static void weigh_tile(const float* weights, const float* values, int64_t positions,
                                                 int64_t stride, float* acc) {
  F sums[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) sums[r][c] = load(acc + r * stride + c * kLanes);
  for (int64_t j = 0; j < positions; ++j) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      F weight = splat(weights[r * ti::kSplit + j]);
#pragma GCC unroll 8
      for (int c = 0; c < NV; ++c) sums[r][c] = fma(weight, load(values + j * stride + c * kLanes), sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) store(acc + r * stride + c * kLanes, sums[r][c]);
}

template <int MR, int NV>
static void weigh_rows(const float* weights, const float* values, int64_t positions, int64_t stride, float* acc) {
  int64_t c = 0;
  for (; c + NV * kLanes <= stride; c += NV * kLanes)
    weigh_tile<MR, NV>(weights, values + c, positions, stride, acc + c);
  for (; c < stride; c += 2 * kLanes) weigh_tile<MR, 2>(weights, values + c, positions, stride, acc + c);
}

static void attention_split(const ti::Attention& a, const ti::Queries& q, int64_t split, float* work, float* result) {
  int64_t rows = q.rows(), key = padded(a.key_dim), value = padded(a.value_dim);
  float *queries = work, *scores = queries + rows * key, *held = scores + rows * ti::kSplit;
  float *top = result, *total = top + rows, *acc = total + rows;
  int64_t base = split * ti::kSplit, last = q.position + q.tokens - 1;
  int64_t from = first_visible(a, q.position), to = last + 1;
  from = from > base ? from : base;
  to = to < base + ti::kSplit ? to : base + ti::kSplit;

  pack_queries(a, q, queries);
  for (int64_t i = from; i < to; i += kPositionBlock) {
    int64_t end = i + kPositionBlock < to ? i + kPositionBlock : to;
    read_positions(a, q, i, end, 0, a.key_dim, held);
    score_rows(queries, held, rows, end - i, key, scores + (i - base));
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t position = q.position + r / q.heads;
    int64_t first = first_visible(a, position), stop = position + 1;
    first = first > from ? first : from;
    stop = stop < to ? stop : to;
    if (stop < first) stop = first = from;
    soften_row(a, scores + r * ti::kSplit, first - base, stop - base, top + r, total + r);
  }
  memset(acc, 0, (size_t)(rows * value) * 4);
  for (int64_t i = from; i < to; i += kPositionBlock) {
    int64_t end = i + kPositionBlock < to ? i + kPositionBlock : to;
    read_positions(a, q, i, end, a.value_offset, a.value_dim, held);
    const float* weights = scores + (i - base);
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6)
      weigh_rows<6, 2>(weights + r * ti::kSplit, held, end - i, value, acc + r * value);
    for (; r + 3 <= rows; r += 3)
      weigh_rows<3, 4>(weights + r * ti::kSplit, held, end - i, value, acc + r * value);
    for (; r < rows; ++r) weigh_rows<1, 8>(weights + r * ti::kSplit, held, end - i, value, acc + r * value);
  }
}

static inline float exp_one(float a) {
  float lanes[kLanes];
  store(lanes, exp_negative(splat(a)));
  return lanes[0];
}

static void attention_merge(const ti::Attention& a, int64_t rows, float* total, const float* result) {
  int64_t value = padded(a.value_dim);
  for (int64_t r = 0; r < rows; ++r) {
    float peak = total[r] > result[r] ? total[r] : result[r];
    float keep = exp_one(total[r] - peak), gain = exp_one(result[r] - peak);
    total[r] = peak;
    total[rows + r] = total[rows + r] * keep + result[rows + r] * gain;
    float* acc = total + 2 * rows + r * value;
    const float* more = result + 2 * rows + r * value;
    for (int64_t i = 0; i < value; i += kLanes)
      store(acc + i, fma(load(more + i), splat(gain), mul(load(acc + i), splat(keep))));
  }
}

static void attention_finish(const ti::Attention& a, const ti::Queries& q, float* total) {
  int64_t rows = q.rows(), value = padded(a.value_dim);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t head = q.head + r % q.heads;
    float sum = total[rows + r], factor = a.value_scale;
    if (a.sinks != nullptr) {
      float peak = total[r] > a.sinks[head] ? total[r] : a.sinks[head];
      float keep = exp_one(total[r] - peak);
      sum = sum * keep + exp_one(a.sinks[head] - peak);
      factor *= keep;
    }
    factor = sum > 0 ? factor / sum : 0.0f;
    const float* acc = total + 2 * rows + r * value;
    int64_t row = (q.token + r / q.heads) * a.heads + head;
    for (int64_t i = 0; i < a.value_dim; ++i) {
      float y = acc[i] * factor;
      if (a.q_type == ti::Type::kFloat32) {
        ((float*)a.out)[row * a.value_dim + i] = y;
      } else {
        ((uint16_t*)a.out)[row * a.value_dim + i] = float_to_bf16(y);
      }
    }
  }
}

}  // namespace TI_ISA
