// XLA custom call "ti_matmul".
#include <algorithm>
#include <string>

#include "call.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace {

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Tasks are rectangles of about 64 KiB of weights (few rows) or 128 rows by 96 columns (many).
void run(ffi::ThreadPool& pool, const ti::Kernels& kernels, ti::Matmul& m) {
  m.packed_depth = round_up(m.depth, 32);
  m.packed_x = ti::scratch<float, 0>(m.rows * m.packed_depth);
  if (m.rows <= 16) {
    kernels.matmul_pack(m, 0, m.rows);
  } else {
    int64_t tasks = (m.rows + 31) / 32;
    ti::parallel_for(pool, tasks, [&](int64_t i) {
      kernels.matmul_pack(m, i * 32, std::min(m.rows, i * 32 + 32));
    });
  }
  int64_t columns = m.rows <= 16 ? round_up(std::max<int64_t>(1, 65536 / m.row_bytes), 24) : 96;
  int64_t rows = m.rows <= 16 ? m.rows : 128;
  int64_t across = (m.columns + columns - 1) / columns, down = (m.rows + rows - 1) / rows;
  ti::parallel_for(pool, across * down, [&](int64_t i) {
    int64_t c = i / down * columns, r = i % down * rows;
    kernels.matmul_tile(m, r, std::min(m.rows, r + rows), c, std::min(m.columns, c + columns));
  });
}

struct Named {
  std::string_view name;
  ti::Format format;
};
constexpr Named kFormats[] = {
    {"float32", ti::Format::kFloat32}, {"bfloat16", ti::Format::kBFloat16}, {"int8", ti::Format::kInt8},
    {"int4", ti::Format::kInt4},       {"Q8_0", ti::Format::kQ8_0},         {"Q4_0", ti::Format::kQ4_0},
    {"Q4_1", ti::Format::kQ4_1},       {"Q4_K", ti::Format::kQ4_K},
};

// Bytes between the layers of a stack `[L, ...]`.
int64_t layer_bytes(const ffi::AnyBuffer& stack) {
  return stack.dimensions()[0] == 0 ? 0 : static_cast<int64_t>(stack.size_bytes()) / stack.dimensions()[0];
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                  ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y, std::string_view format,
                  std::string_view isa) {
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (kernels == nullptr) return ti::no_kernels(isa);
  ti::Matmul m = {};
  const Named* named = std::find_if(std::begin(kFormats), std::end(kFormats),
                                    [&](const Named& known) { return known.name == format; });
  if (named == std::end(kFormats)) return ffi::Error::InvalidArgument("matmul: unknown format " + std::string(format));
  m.format = named->format;
  auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions(), ss = scale.dimensions();
  if (xs.size() != 2 || ws.size() != 3 || ys.size() != 2 || ss.size() != 3 || ss[0] != ws[0] || ys[0] != xs[0] ||
      ys[1] != ws[1])
    return ffi::Error::InvalidArgument("matmul: shapes must be x [T,M], w [L,N,...], scale [L,...], y [T,N]");
  m.rows = xs[0], m.columns = ws[1], m.depth = xs[1];
  ti::BlockSize block = ti::block_size(m.format);
  m.row_bytes = m.depth / block.values * block.bytes;
  if (m.depth % block.values != 0 || layer_bytes(w) != m.columns * m.row_bytes)
    return ffi::Error::InvalidArgument("matmul: rows of w do not hold as many elements as rows of x");
  if (m.format == ti::Format::kInt8 && ss[2] != m.columns)
    return ffi::Error::InvalidArgument("matmul: int8 takes a scale for each row of w");
  if (m.format == ti::Format::kInt4) {
    m.group = ss[2] == 0 ? 0 : m.depth / ss[2];
    if (ss[1] != m.columns || (m.group != 32 && m.group != 64 && m.group != 128) || m.depth % m.group != 0)
      return ffi::Error::InvalidArgument("matmul: int4 takes a scale for each group of 32, 64 or 128 elements");
  }
  if (!ti::float_type_of(x.element_type(), &m.x_type) || !ti::float_type_of(scale.element_type(), &m.scale_type) ||
      !ti::float_type_of(y->element_type(), &m.y_type))
    return ffi::Error::InvalidArgument("matmul: x, scale and y must be float32 or bfloat16");
  int64_t index = *layer.typed_data();
  if (index < 0 || index >= ws[0])
    return ffi::Error::InvalidArgument("matmul: layer " + std::to_string(index) + " is outside [0, " +
                                       std::to_string(ws[0]) + ")");
  m.x = x.untyped_data();
  m.w = static_cast<const uint8_t*>(w.untyped_data()) + index * layer_bytes(w);
  m.scale = static_cast<const char*>(scale.untyped_data()) + index * layer_bytes(scale);
  m.y = y->untyped_data();
  if (m.rows == 0 || m.columns == 0) return ffi::Error::Success();
  return ti::guarded([&] { run(pool, *kernels, m); });
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
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("format")
                                  .Attr<std::string_view>("isa"));
