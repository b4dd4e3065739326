// Softmax attention of a few query rows over a run of pages, in float32.
//
// A result is, for R rows: the maximum [R], the sum of weights [R], the weighted values [R, value stride].
// Every row is computed as it would be alone: masked positions weigh exactly 0.
#pragma once

#include <math.h>

#include "kernels.h"
#include "tiles.h"

namespace TI_ISA {

constexpr int64_t kPositionBlock = kLanes == 16 ? 96 : 48;
static_assert(ti::kSplit % kPositionBlock == 0 && kPositionBlock % (2 * kLanes) == 0, "blocks must fill splits");
constexpr float kLowest = -1e30f;

static inline int64_t padded(int64_t dim) { return (dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

static int64_t attention_result(const ti::Attention& a, int64_t rows) { return rows * (2 + padded(a.value_dim)); }

static int64_t attention_work(const ti::Attention& a, int64_t rows) {
  int64_t key = padded(a.key_dim), value = padded(a.value_dim);
  return rows * (key + ti::kSplit) + kPositionBlock * (key + (key > value ? key : value));
}

static inline int64_t first_visible(const ti::Attention& a, int64_t position) {
  int64_t first = 0;
  if (a.window > 0 && position - a.window + 1 > first) first = position - a.window + 1;
  if (a.chunk > 0 && position / a.chunk * a.chunk > first) first = position / a.chunk * a.chunk;
  return first;
}

static inline int64_t below(const ti::Attention& a, int64_t position) {
  return ti::slots_below(position, a.page_size, a.shard, a.shards);
}

// `dim` stored elements as f32, zeros up to the padded length.
template <ti::PoolType type>
static inline void read_row(const ti::Attention& a, const uint8_t* p, int64_t dim, float* out) {
  using ti::PoolType;
  int64_t i = 0;
  if constexpr (type == PoolType::kFloat32) {
    for (; i + kLanes <= dim; i += kLanes) store(out + i, load((const float*)p + i));
    for (; i < dim; ++i) out[i] = ((const float*)p)[i];
  } else if constexpr (type == PoolType::kBFloat16) {
    for (; i + kLanes <= dim; i += kLanes) store(out + i, load_bf16((const uint16_t*)p + i));
    for (; i < dim; ++i) out[i] = bf16_to_float(((const uint16_t*)p)[i]);
  } else if constexpr (type == PoolType::kFloat16) {
    for (; i + kLanes <= dim; i += kLanes) store(out + i, load_half((const uint16_t*)p + i));
    if (i < dim) {
      uint16_t tail[kLanes] = {};
      float wide[kLanes];
      memcpy(tail, (const uint16_t*)p + i, (size_t)(dim - i) * 2);
      store(wide, load_half(tail));
      memcpy(out + i, wide, (size_t)(dim - i) * 4);
      i = dim;
    }
  } else if constexpr (type == PoolType::kInt8) {
    for (; i + kLanes <= dim; i += kLanes) store(out + i, load_i8((const int8_t*)p + i));
    for (; i < dim; ++i) out[i] = (float)((const int8_t*)p)[i];
  } else {
    for (; i < dim; ++i) out[i] = a.float8[p[i]];
  }
  for (int64_t end = padded(dim); i < end; ++i) out[i] = 0.0f;
}

// Walks the rows of one KV head, slot after slot, over the pages of a sequence.
struct Cursor {
  const ti::Attention& a;
  const int32_t* page;
  int64_t slot, offset;
  const uint8_t* row;

  inline float scale(int64_t number) const { return a.scales[(*page * a.scale_rows + number) * a.page_size + slot]; }

  Cursor(const ti::Attention& a, const ti::Queries& q, int64_t number, int64_t offset)
      : a(a),
        page(a.page_table + q.sequence * a.blocks + number / a.page_size),
        slot(number % a.page_size),
        offset(offset + q.kv_head * a.head_bytes) {
    row = a.pool + *page * a.page_bytes + slot * a.row_bytes + this->offset;
  }
  // To the next slot, which must be one of the sequence.
  inline void next() {
    row += a.row_bytes;
    if (++slot < a.page_size) return;
    slot = 0;
    row = a.pool + *++page * a.page_bytes + offset;
  }
};

// Multiplies elements [from, to) of a row.
static inline void scale_row(float by, int64_t from, int64_t to, float* out) {
  for (F factor = splat(by); from + kLanes <= to; from += kLanes) store(out + from, mul(load(out + from), factor));
  for (; from < to; ++from) out[from] *= by;
}

// Keys (offset 0) or values of slots [from, to) of a KV head, a row each. While keys are read, the cache lines of
// key and value some slots ahead are fetched, up to slot `last`.
template <ti::PoolType type>
static void read_typed(const ti::Attention& a, const ti::Queries& q, int64_t from, int64_t to, int64_t last,
                       int64_t offset, int64_t dim, float* out) {
  constexpr int64_t item = type == ti::PoolType::kFloat32 ? 4 : type <= ti::PoolType::kFloat16 ? 2 : 1;
  constexpr int64_t distance = 16;
  const int64_t first = a.first_scale_dim < dim ? a.first_scale_dim : dim;
  const int64_t scale = 2 * q.kv_head + (offset != 0);
  const int64_t stride = padded(dim), fetched = (dim * item + a.value_offset + 63) / 64 * 64;
  Cursor here(a, q, from, offset);
  int64_t ahead = from + distance < last ? from + distance : last;
  Cursor there(a, q, ahead, 0);
  for (int64_t i = from;; out += stride) {
    if (offset == 0)
      for (int64_t line = 0; line < fetched; line += 64) __builtin_prefetch(there.row + line, 0, 3);
    read_row<type>(a, here.row, dim, out);
    if (a.scales != nullptr) {
      scale_row(here.scale(scale), 0, first, out);
      if (first < dim) scale_row(here.scale(scale + 1), first, dim, out);
    }
    if (++i == to) return;
    here.next();
    if (ahead < last) ++ahead, there.next();
  }
}

static void read_slots(const ti::Attention& a, const ti::Queries& q, int64_t from, int64_t to, int64_t last,
                           int64_t offset, int64_t dim, float* out) {
  using ti::PoolType;
  switch (a.pool_type) {
    case PoolType::kFloat32: return read_typed<PoolType::kFloat32>(a, q, from, to, last, offset, dim, out);
    case PoolType::kBFloat16: return read_typed<PoolType::kBFloat16>(a, q, from, to, last, offset, dim, out);
    case PoolType::kFloat16: return read_typed<PoolType::kFloat16>(a, q, from, to, last, offset, dim, out);
    case PoolType::kInt8: return read_typed<PoolType::kInt8>(a, q, from, to, last, offset, dim, out);
    default: return read_typed<PoolType::kFloat8E4M3>(a, q, from, to, last, offset, dim, out);
  }
}

// rows [kPositionBlock, dim] to columns [dim, kPositionBlock]; dim is a multiple of 8.
static void transpose(const float* rows, int64_t dim, float* columns) {
#if defined(__AVX2__)
  for (int64_t r = 0; r < kPositionBlock; r += 8)
    for (int64_t c = 0; c < dim; c += 8) {
      __m256 in[8], pair[8];
      for (int i = 0; i < 8; ++i) in[i] = _mm256_loadu_ps(rows + (r + i) * dim + c);
      for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        in[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        in[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
        in[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        in[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
      }
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(columns + (c + i) * kPositionBlock + r, _mm256_permute2f128_ps(in[i], in[i + 4], 0x20));
        _mm256_storeu_ps(columns + (c + i + 4) * kPositionBlock + r, _mm256_permute2f128_ps(in[i], in[i + 4], 0x31));
      }
    }
#else
  for (int64_t r = 0; r < kPositionBlock; ++r)
    for (int64_t c = 0; c < dim; ++c) columns[c * kPositionBlock + r] = rows[r * dim + c];
#endif
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

// Caps scores at +-soft_cap: tanh(x) = 1 - 2 / (e**2x + 1), odd in x, by the exponential of a negative number.
static void cap_scores(float soft_cap, float* s) {
  F cap = splat(soft_cap), factor = splat(2.0f / soft_cap), one = splat(1.0f), minus = splat(-1.0f);
  for (int64_t i = 0; i < ti::kSplit; i += kLanes) {
    F x = mul(load(s + i), factor);
    F magnitude = max(x, mul(x, minus));
    F e = exp_negative(mul(magnitude, minus));
    F sign = div(x, max(magnitude, splat(1e-30f)));
    store(s + i, mul(cap, mul(sign, div(add(one, mul(e, minus)), add(one, e)))));
  }
}

// Scores of one row become weights; entries outside [from, to) become 0.
static void soften_row(const ti::Attention& a, float* s, int64_t from, int64_t to, float* top, float* total) {
  if (a.soft_cap > 0) cap_scores(a.soft_cap, s);
  for (int64_t i = 0; i < from; ++i) s[i] = kLowest;
  for (int64_t i = to; i < ti::kSplit; ++i) s[i] = kLowest;
  F tops = splat(kLowest);
  for (int64_t i = 0; i < ti::kSplit; i += kLanes) tops = max(load(s + i), tops);
  float lanes[kLanes];
  store(lanes, tops);
  float peak = lanes[0];
  for (int j = 1; j < kLanes; ++j) peak = lanes[j] > peak ? lanes[j] : peak;
  F minus = splat(-peak);
  int64_t first = from / kLanes * kLanes, end = (to + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = first; i < end; i += kLanes) store(s + i, exp_negative(add(load(s + i), minus)));
  for (int64_t i = 0; i < from; ++i) s[i] = 0.0f;
  for (int64_t i = to; i < ti::kSplit; ++i) s[i] = 0.0f;
  F sums = zero();
  for (int64_t i = first; i < end; i += kLanes) sums = add(sums, load(s + i));
  *top = peak;
  *total = sum(sums);
}

// acc[r, c] += factors[r, j] * vectors[j, c] for j in order; strides in floats.
struct Strides {
  int64_t factors, vectors, acc;
};
template <int MR, int NV>
__attribute__((noinline)) static void outer_tile(const float* factors, const float* vectors, int64_t count, Strides by,
                                                 float* acc) {
  F sums[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) sums[r][c] = load(acc + r * by.acc + c * kLanes);
  for (int64_t j = 0; j < count; ++j) {
    const float* row = vectors + j * by.vectors;
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      F factor = splat(factors[r * by.factors + j]);
#pragma GCC unroll 8
      for (int c = 0; c < NV; ++c) sums[r][c] = fma(factor, load(row + c * kLanes), sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) store(acc + r * by.acc + c * kLanes, sums[r][c]);
}

template <int MR, int NV>
static void outer_columns(const float* factors, const float* vectors, int64_t count, int64_t columns, Strides by,
                          float* acc) {
  int64_t c = 0;
  for (; c + NV * kLanes <= columns; c += NV * kLanes) outer_tile<MR, NV>(factors, vectors + c, count, by, acc + c);
  for (; c < columns; c += 2 * kLanes) outer_tile<MR, 2>(factors, vectors + c, count, by, acc + c);
}

// `columns` is a multiple of 2 * kLanes.
static void outer_rows(const float* factors, const float* vectors, int64_t rows, int64_t count, int64_t columns,
                       Strides by, float* acc) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6)
    outer_columns<6, 2>(factors + r * by.factors, vectors, count, columns, by, acc + r * by.acc);
  for (; r + 3 <= rows; r += 3)
    outer_columns<3, 4>(factors + r * by.factors, vectors, count, columns, by, acc + r * by.acc);
  for (; r < rows; ++r)
    outer_columns<1, 8>(factors + r * by.factors, vectors, count, columns, by, acc + r * by.acc);
}

static void attention_split(const ti::Attention& a, const ti::Queries& q, int64_t split, float* work, float* result) {
  int64_t rows = q.rows(), key = padded(a.key_dim), value = padded(a.value_dim);
  float *queries = work, *scores = queries + rows * key, *columns = scores + rows * ti::kSplit;
  float* held = columns + kPositionBlock * key;
  float *top = result, *total = top + rows, *acc = total + rows;
  int64_t base = split * ti::kSplit;
  int64_t from = below(a, first_visible(a, q.position)), to = below(a, q.position + q.tokens);
  from = from > base ? from : base;
  to = to < base + ti::kSplit ? to : base + ti::kSplit;
  memset(acc, 0, (size_t)(rows * value) * 4);
  if (from >= to) {
    for (int64_t r = 0; r < rows; ++r) top[r] = kLowest, total[r] = 0.0f;
    return;
  }
  int64_t first_block = base + (from - base) / kPositionBlock * kPositionBlock;

  pack_queries(a, q, queries);
  memset(scores, 0, (size_t)(rows * ti::kSplit) * 4);
  for (int64_t block = first_block; block < to; block += kPositionBlock) {
    int64_t begin = block > from ? block : from, end = block + kPositionBlock < to ? block + kPositionBlock : to;
    if (end - begin < kPositionBlock) memset(held, 0, (size_t)(kPositionBlock * key) * 4);
    read_slots(a, q, begin, end, to - 1, 0, a.key_dim, held + (begin - block) * key);
    transpose(held, key, columns);
    outer_rows(queries, columns, rows, a.key_dim, kPositionBlock, {key, kPositionBlock, ti::kSplit},
               scores + (block - base));
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t position = q.position + r / q.heads;
    int64_t first = below(a, first_visible(a, position)), stop = below(a, position + 1);
    first = first > from ? first : from;
    stop = stop < to ? stop : to;
    if (stop < first) stop = first = from;
    soften_row(a, scores + r * ti::kSplit, first - base, stop - base, top + r, total + r);
  }
  for (int64_t begin = from; begin < to; begin += kPositionBlock) {
    int64_t end = begin + kPositionBlock < to ? begin + kPositionBlock : to;
    read_slots(a, q, begin, end, to - 1, a.value_offset, a.value_dim, held);
    outer_rows(scores + (begin - base), held, rows, end - begin, value, {ti::kSplit, value, value}, acc);
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
    float sum = total[rows + r], factor = a.value_scale, top = total[r];
    if (a.sinks != nullptr) {
      top = top > a.sinks[head] ? top : a.sinks[head];
      float keep = exp_one(total[r] - top);
      sum = sum * keep + exp_one(a.sinks[head] - top);
      factor *= keep;
    }
    factor = sum > 0 ? factor / sum : 0.0f;
    const float* acc = total + 2 * rows + r * value;
    int64_t row = (q.token + r / q.heads) * a.heads + head;
    if (a.lse != nullptr) a.lse[row] = sum > 0 ? top + logf(sum) : -HUGE_VALF;
    for (int64_t i = 0; i < a.value_dim; ++i) {
      float y = acc[i] * factor;
      if (a.out_type == ti::Type::kFloat32) {
        ((float*)a.out)[row * a.value_dim + i] = y;
      } else {
        ((uint16_t*)a.out)[row * a.value_dim + i] = float_to_bf16(y);
      }
    }
  }
}

}  // namespace TI_ISA
