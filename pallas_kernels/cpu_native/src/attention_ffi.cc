// XLA custom calls "ti_ragged_attention" and "ti_latent_attention".
#include <cmath>

#include "attention_run.h"
#include "call.h"

namespace {

using Ints = ffi::Buffer<ffi::S32>;

bool pool_type_of(ffi::DataType from, ti::PoolType* to) {
  switch (from) {
    case ffi::DataType::F32: *to = ti::PoolType::kFloat32; return true;
    case ffi::DataType::BF16: *to = ti::PoolType::kBFloat16; return true;
    case ffi::DataType::F16: *to = ti::PoolType::kFloat16; return true;
    case ffi::DataType::S8: *to = ti::PoolType::kInt8; return true;
    case ffi::DataType::F8E4M3FN: *to = ti::PoolType::kFloat8E4M3; return true;
    case ffi::DataType::F8E5M2: *to = ti::PoolType::kFloat8E5M2; return true;
    default: return false;
  }
}

// The 256 values of a float8: sign, `exponent_bits`, the rest mantissa. e4m3fn has no infinity, one NaN a sign.
struct Float8Table {
  float values[256];
  Float8Table(int exponent_bits, bool has_infinity) {
    int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    for (int code = 0; code < 256; ++code) {
      int exponent = code >> mantissa_bits & top, mantissa = code & ((1 << mantissa_bits) - 1);
      float fraction = static_cast<float>(mantissa) / static_cast<float>(1 << mantissa_bits);
      float value = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
      if (has_infinity && exponent == top) value = mantissa == 0 ? INFINITY : NAN;
      if (!has_infinity && (code & 127) == 127) value = NAN;
      values[code] = code < 128 ? value : -value;
    }
  }
};

const float* float8_values(ti::PoolType type) {
  static const Float8Table e4m3(4, false), e5m2(5, true);
  return type == ti::PoolType::kFloat8E5M2 ? e5m2.values : e4m3.values;
}

ffi::Error invalid(const char* op, const std::string& why) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + why);
}

// Fills in what both ops share; returns what is wrong.
std::string read_batch(const Ints& layer, const Ints& kv_lens, const Ints& page_table, const Ints& cu_q_lens,
                       const Ints& num_seqs, const Ints& shard, ti::RaggedBatch* batch, int64_t layers) {
  auto table = page_table.dimensions();
  if (table.size() != 2 || kv_lens.element_count() != static_cast<size_t>(table[0]) ||
      cu_q_lens.element_count() != static_cast<size_t>(table[0] + 1) || num_seqs.element_count() != 2)
    return "kv_lens, page_table, cu_q_lens and num_seqs must be [S], [S,B], [S+1] and [2]";
  batch->kv_lens = kv_lens.typed_data(), batch->page_table = page_table.typed_data();
  batch->cu_q_lens = cu_q_lens.typed_data();
  batch->sequences = table[0], batch->blocks = table[1], batch->live = num_seqs.typed_data()[1];
  int64_t index = *layer.typed_data();
  if (index < 0 || index >= layers)
    return "layer " + std::to_string(index) + " is outside [0, " + std::to_string(layers) + ")";
  batch->shard = *shard.typed_data();
  if (batch->shard < 0 || batch->shard >= batch->shards)
    return "shard " + std::to_string(batch->shard) + " is outside [0, " + std::to_string(batch->shards) + ")";
  return batch->wrong();
}

using Floats = ffi::Buffer<ffi::F32>;

// The scales of a quantised pool, which may be empty, and those of the new tokens; what is wrong with them.
std::string read_scales(const Floats& fresh, Floats& scales, int64_t rows, ffi::AnyBuffer::Dimensions pool,
                        int64_t layer, ti::Attention* a, const float** fresh_data) {
  if (scales.element_count() == 0) return "";
  auto shape = scales.dimensions(), added = fresh.dimensions();
  if (shape.size() != 4 || shape[0] != pool[0] || shape[1] != pool[1] || shape[2] != rows || shape[3] != pool[2] ||
      added.size() != 2 || added[1] != rows)
    return "scales must be [L,P,rows,p] like the pool, and those of the new tokens [T,rows]";
  a->scales = scales.typed_data() + layer * shape[1] * rows * shape[3], a->scale_rows = rows;
  *fresh_data = fresh.typed_data();
  return "";
}

// Where the results go; what is wrong with them.
std::string read_results(ffi::AnyBuffer out, Floats lse, size_t rows, ti::Attention* a) {
  if (!ti::float_type_of(out.element_type(), &a->out_type)) return "the output must be float32 or bfloat16";
  if (lse.element_count() != 0 && lse.element_count() != rows) return "lse must be [T,H] or empty";
  a->out = out.untyped_data(), a->lse = lse.element_count() == 0 ? nullptr : lse.typed_data();
  return "";
}

// Output 0 and log-sum-exp -inf for the tokens past the last sequence.
void clear_padding(const ti::RaggedBatch& batch, const ti::Attention& a) {
  int64_t live = batch.live_tokens(), padding = batch.tokens - live;
  size_t row_bytes = a.heads * a.value_dim * (a.out_type == ti::Type::kFloat32 ? 4 : 2);
  std::memset(static_cast<char*>(a.out) + live * row_bytes, 0, padding * row_bytes);
  if (a.lse != nullptr) std::fill_n(a.lse + live * a.heads, padding * a.heads, -INFINITY);
}

// Copies the new rows of sequences to their pages, with their scales [T, scale_rows] if any; write(token, row).
template <class Write>
void write_rows(ffi::ThreadPool& threads, const ti::RaggedBatch& batch, uint8_t* layer, const ti::Attention& a,
                const float* scales, const Write& write) {
  auto one = [&](int64_t s) {
    batch.each_slot(s, [&](int64_t token, int64_t page, int64_t slot) {
      write(token, layer + page * a.page_bytes + slot * a.row_bytes);
      for (int64_t i = 0; i < a.scale_rows; ++i)
        a.scales[(page * a.scale_rows + i) * a.page_size + slot] = scales[token * a.scale_rows + i];
    });
  };
  if (batch.live_tokens() * a.row_bytes > (1 << 18)) {
    ti::parallel_for(threads, batch.live, one);
  } else {
    for (int64_t s = 0; s < batch.live; ++s) one(s);
  }
}

ffi::Error ragged_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer pool, Ints layer, Ints kv_lens, Ints page_table, Ints cu_q_lens,
                            Ints num_seqs, Ints shard, Floats sinks, Floats new_scales, Floats,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pool_out,
                            ffi::Result<Floats> lse, ffi::Result<Floats> scales, float scale, float v_scale,
                            float soft_cap, int64_t window, int64_t chunk, int64_t shards, std::string_view isa) {
  constexpr char op[] = "ragged_paged_attention";
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (kernels == nullptr) return ti::no_kernels(isa);
  auto qs = q.dimensions(), ks = k.dimensions(), ps = pool.dimensions();
  ti::Attention a = {};
  if (qs.size() != 3 || ks.size() != 3 || ps.size() != 6 || k.element_type() != pool.element_type() ||
      v.element_type() != pool.element_type() || v.element_count() != k.element_count() || ks[0] != qs[0] ||
      ks[2] != qs[2] || ps[3] * ps[4] != 2 * ks[1] || ps[5] != qs[2] || ks[1] == 0 || qs[1] % ks[1] != 0)
    return invalid(op, "q [T,H,D], k and v [T,K,D] and pool [L,P,p,2K/pack,pack,D] do not fit");
  if (!ti::float_type_of(q.element_type(), &a.q_type) || !pool_type_of(pool.element_type(), &a.pool_type))
    return invalid(op, "no kernels for these dtypes of q and pool");
  if (sinks.element_count() != 0 && sinks.element_count() != static_cast<size_t>(qs[1]))
    return invalid(op, "sinks must have a value for each query head");
  int64_t item = static_cast<int64_t>(ffi::ByteWidth(pool.element_type()));
  a.heads = qs[1], a.kv_heads = ks[1], a.q_dim = a.key_dim = a.value_dim = qs[2];
  a.value_offset = qs[2] * item, a.head_bytes = 2 * a.value_offset, a.row_bytes = a.kv_heads * a.head_bytes;
  a.page_size = ps[2], a.page_bytes = a.page_size * a.row_bytes;

  ti::RaggedBatch batch = {};
  batch.tokens = qs[0], batch.page_size = ps[2], batch.pages = ps[1], batch.window = window, batch.chunk = chunk;
  batch.shards = shards;
  std::string wrong = read_batch(layer, kv_lens, page_table, cu_q_lens, num_seqs, shard, &batch, ps[0]);
  const float* fresh = nullptr;
  if (wrong.empty()) wrong = read_results(*out, *lse, qs[0] * qs[1], &a);
  if (wrong.empty()) wrong = read_scales(new_scales, *scales, 2 * ks[1], ps, *layer.typed_data(), &a, &fresh);
  if (!wrong.empty()) return invalid(op, wrong);
  a.blocks = batch.blocks, a.page_table = batch.page_table, a.window = window, a.chunk = chunk;
  uint8_t* pages = static_cast<uint8_t*>(pool_out->untyped_data()) + *layer.typed_data() * ps[1] * a.page_bytes;
  a.pool = pages, a.float8 = float8_values(a.pool_type);
  a.first_scale_dim = a.key_dim;
  a.scale = scale, a.value_scale = v_scale, a.soft_cap = soft_cap;
  a.sinks = sinks.element_count() == 0 || batch.shard != 0 ? nullptr : sinks.typed_data();  // they count once
  a.shard = batch.shard, a.shards = shards, a.q = q.untyped_data();

  return ti::guarded([&] {
    const char *keys = static_cast<const char*>(k.untyped_data()), *values = static_cast<const char*>(v.untyped_data());
    size_t bytes = a.value_offset;
    write_rows(threads, batch, pages, a, fresh, [&](int64_t token, uint8_t* row) {
      for (int64_t h = 0; h < a.kv_heads; ++h) {
        int64_t from = (token * a.kv_heads + h) * bytes;
        std::memcpy(row + h * a.head_bytes, keys + from, bytes);
        std::memcpy(row + h * a.head_bytes + bytes, values + from, bytes);
      }
    });
    ti::run_attention(threads, *kernels, batch, a);
    clear_padding(batch, a);
  });
}

ffi::Error latent_attention(ffi::ThreadPool threads, ffi::AnyBuffer q_latent, ffi::AnyBuffer q_rope,
                            ffi::AnyBuffer rows, ffi::AnyBuffer pool, Ints layer, Ints kv_lens, Ints page_table,
                            Ints cu_q_lens, Ints num_seqs, Ints shard, Floats new_scales, Floats,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pool_out,
                            ffi::Result<Floats> lse, ffi::Result<Floats> scales, float scale, int64_t shards,
                            std::string_view isa) {
  constexpr char op[] = "latent_paged_attention";
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (kernels == nullptr) return ti::no_kernels(isa);
  auto ls = q_latent.dimensions(), rs = q_rope.dimensions(), ns = rows.dimensions(), ps = pool.dimensions();
  ti::Attention a = {};
  if (ls.size() != 3 || rs.size() != 3 || ns.size() != 2 || ps.size() != 4 || ls[0] != rs[0] || ls[1] != rs[1] ||
      ns[0] != ls[0] || ns[1] != ps[3] || ls[2] + rs[2] > ps[3] || rows.element_type() != pool.element_type() ||
      q_latent.element_type() != q_rope.element_type())
    return invalid(op, "q_latent [T,H,Rl], q_rope [T,H,Rr], rows [T,R] and pool [L,P,p,R] do not fit");
  if (!ti::float_type_of(q_latent.element_type(), &a.q_type) || !pool_type_of(pool.element_type(), &a.pool_type))
    return invalid(op, "no kernels for these dtypes of q and pool");
  a.heads = ls[1], a.kv_heads = 1, a.q_dim = a.value_dim = ls[2], a.key_dim = ls[2] + rs[2];
  a.row_bytes = ps[3] * static_cast<int64_t>(ffi::ByteWidth(pool.element_type()));
  a.page_size = ps[2], a.page_bytes = a.page_size * a.row_bytes;

  ti::RaggedBatch batch = {};
  batch.tokens = ls[0], batch.page_size = ps[2], batch.pages = ps[1], batch.shards = shards;
  std::string wrong = read_batch(layer, kv_lens, page_table, cu_q_lens, num_seqs, shard, &batch, ps[0]);
  const float* fresh = nullptr;
  if (wrong.empty()) wrong = read_results(*out, *lse, ls[0] * ls[1], &a);
  if (wrong.empty()) wrong = read_scales(new_scales, *scales, 2, ps, *layer.typed_data(), &a, &fresh);
  if (!wrong.empty()) return invalid(op, wrong);
  a.blocks = batch.blocks, a.page_table = batch.page_table;
  uint8_t* pages = static_cast<uint8_t*>(pool_out->untyped_data()) + *layer.typed_data() * ps[1] * a.page_bytes;
  a.pool = pages, a.float8 = float8_values(a.pool_type), a.scale = scale, a.value_scale = 1;
  a.first_scale_dim = a.q_dim;
  a.shard = batch.shard, a.shards = shards, a.q = q_latent.untyped_data(), a.q_rest = q_rope.untyped_data();

  return ti::guarded([&] {
    const char* from = static_cast<const char*>(rows.untyped_data());
    write_rows(threads, batch, pages, a, fresh,
               [&](int64_t token, uint8_t* row) { std::memcpy(row, from + token * a.row_bytes, a.row_bytes); });
    ti::run_attention(threads, *kernels, batch, a);
    clear_padding(batch, a);
  });
}

}  // namespace

TI_EXPORT(ti_ragged_attention);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_ragged_attention, ragged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("v_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("shards")
                                  .Attr<std::string_view>("isa"));

TI_EXPORT(ti_latent_attention);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_latent_attention, latent_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("shards")
                                  .Attr<std::string_view>("isa"));
