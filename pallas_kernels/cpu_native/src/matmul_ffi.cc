// XLA custom call "ti_matmul".
#include <algorithm>
#include <cstring>
#include <string>

#include "call.h"
#include "matmul_run.h"

namespace {

// Bytes between the layers of a stack `[L, ...]`.
int64_t layer_bytes(const ffi::AnyBuffer& stack) {
  return stack.dimensions()[0] == 0 ? 0 : static_cast<int64_t>(stack.size_bytes()) / stack.dimensions()[0];
}

// One group of all rows, or those of group_sizes [E] with a stack of layers of E matrices. Returns what is wrong.
std::string group_rows(const ti::Matmul& m, int64_t layer, int64_t matrices, const ffi::Buffer<ffi::S32>& group_sizes,
                       ti::Stack* stack) {
  int64_t experts = static_cast<int64_t>(group_sizes.element_count()), each = std::max<int64_t>(1, experts);
  if (layer < 0 || layer >= matrices / each)
    return "layer " + std::to_string(layer) + " is outside [0, " + std::to_string(matrices / each) + ")";
  if (experts == 0) {
    stack->groups.push_back({layer, 0, m.rows});
    return "";
  }
  int64_t row = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t rows = group_sizes.typed_data()[e];
    if (rows < 0 || row + rows > m.rows)
      return "group_sizes[" + std::to_string(e) + "] = " + std::to_string(rows) + " is negative or passes the " +
             std::to_string(m.rows) + " rows of x";
    if (rows > 0) stack->groups.push_back({layer * experts + e, row, rows});
    row += rows;
  }
  return "";
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                  ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> group_sizes, ffi::Result<ffi::AnyBuffer> y,
                  std::string_view format, bool int8_activations, std::string_view isa) {
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (kernels == nullptr) return ti::no_kernels(isa);
  ti::Matmul m = {};
  if (!ti::format_of(format, &m.format))
    return ffi::Error::InvalidArgument("matmul: unknown format " + std::string(format));
  auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions(), ss = scale.dimensions();
  if (xs.size() != 2 || ws.size() != 3 || ys.size() != 2 || ss.size() != 3 || ss[0] != ws[0] || ys[0] != xs[0] ||
      ys[1] != ws[1])
    return ffi::Error::InvalidArgument("matmul: shapes must be x [T,M], w [L,N,...], scale [L,...], y [T,N]");
  m.rows = xs[0], m.columns = ws[1], m.depth = xs[1];
  ti::BlockSize block = ti::block_size(m.format);
  m.row_bytes = m.depth / block.values * block.bytes;
  if (m.depth % block.values != 0 || layer_bytes(w) != m.columns * m.row_bytes)
    return ffi::Error::InvalidArgument("matmul: rows of w do not hold as many elements as rows of x");
  if ((m.format == ti::Format::kInt8 || m.format == ti::Format::kFloat8) && ss[2] != m.columns)
    return ffi::Error::InvalidArgument("matmul: int8 and fp8_row take a scale for each row of w");
  bool affine = m.format == ti::Format::kInt4Affine;
  if (affine || m.format == ti::Format::kInt4) {
    m.group = ss[2] == 0 ? 0 : m.depth / ss[2];
    if (ss[1] != m.columns || (m.group != 32 && m.group != 64 && m.group != 128) || m.depth % m.group != 0)
      return ffi::Error::InvalidArgument("matmul: int4 takes a scale for each group of 32, 64 or 128 elements");
  }
  if (!ti::float_type_of(x.element_type(), &m.x_type) || !ti::float_type_of(y->element_type(), &m.y_type) ||
      (affine ? scale.element_type() != ffi::DataType::S32
              : !ti::float_type_of(scale.element_type(), &m.scale_type)))
    return ffi::Error::InvalidArgument("matmul: x, scale and y must be float32 or bfloat16, the scale of int4_affine int32");
  ti::Stack stack = {static_cast<const uint8_t*>(w.untyped_data()), static_cast<const char*>(scale.untyped_data()),
                 layer_bytes(w), layer_bytes(scale), {}};
  std::string wrong = group_rows(m, *layer.typed_data(), ws[0], group_sizes, &stack);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("matmul: " + wrong);
  m.int8_x = int8_activations && ti::multiplies_int8(m);
  m.x = x.untyped_data();
  m.y = y->untyped_data();
  if (m.rows == 0 || m.columns == 0) return ffi::Error::Success();
  return ti::guarded([&] {
    ti::run_matmul(pool, *kernels, m, stack);
    int64_t used = stack.groups.empty() ? 0 : stack.groups.back().row + stack.groups.back().rows;
    size_t row = y->size_bytes() / m.rows;
    std::memset(static_cast<char*>(m.y) + used * row, 0, (m.rows - used) * row);
  });
}

}  // namespace

TI_EXPORT(ti_matmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("format")
                                  .Attr<bool>("int8_activations")
                                  .Attr<std::string_view>("isa"));
