// XLA custom call "ti_matmul".
#include <algorithm>
#include <string>

#include "call.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace {

constexpr int64_t kMaxBlockDepth = 768;

bool type_of(ffi::DataType from, ti::Type* to) {
  if (from != ffi::DataType::F32 && from != ffi::DataType::BF16) return false;
  *to = from == ffi::DataType::F32 ? ti::Type::kFloat32 : ti::Type::kBFloat16;
  return true;
}

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Tasks are rectangles of about 64 KiB of weights (few rows) or 128 rows by 96 columns (many).
void run(ffi::ThreadPool& pool, const ti::Kernels& kernels, ti::Matmul& m) {
  m.packed_depth = round_up(m.depth, 32);
  int64_t blocks = (m.depth + kMaxBlockDepth - 1) / kMaxBlockDepth;
  m.block_depth = round_up((m.depth + blocks - 1) / blocks, 32);
  m.packed_x = ti::scratch<float>(m.rows * m.packed_depth);
  if (m.rows <= 16) {
    kernels.matmul_pack(m, 0, m.rows);
  } else {
    int64_t tasks = (m.rows + 31) / 32;
    ti::parallel_for(pool, tasks, [&](int64_t i) {
      kernels.matmul_pack(m, i * 32, std::min(m.rows, i * 32 + 32));
    });
  }
  int64_t row_bytes = m.depth * (m.w_type == ti::Type::kBFloat16 ? 2 : 4);
  int64_t columns = m.rows <= 16 ? round_up(std::max<int64_t>(1, 65536 / row_bytes), 24) : 96;
  int64_t rows = m.rows <= 16 ? m.rows : 128;
  int64_t across = (m.columns + columns - 1) / columns, down = (m.rows + rows - 1) / rows;
  ti::parallel_for(pool, across * down, [&](int64_t i) {
    int64_t c = i / down * columns, r = i % down * rows;
    kernels.matmul_tile(m, r, std::min(m.rows, r + rows), c, std::min(m.columns, c + columns));
  });
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                  ffi::Result<ffi::AnyBuffer> y, std::string_view isa) {
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (kernels == nullptr) return ti::no_kernels(isa);
  auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 3 || ys.size() != 2 || xs[1] != ws[2] || ys[0] != xs[0] || ys[1] != ws[1])
    return ffi::Error::InvalidArgument("matmul: shapes must be x [T,M], w [L,N,M], y [T,N]");
  ti::Matmul m = {};
  if (!type_of(x.element_type(), &m.x_type) || !type_of(w.element_type(), &m.w_type) ||
      !type_of(y->element_type(), &m.y_type))
    return ffi::Error::InvalidArgument("matmul: x, w and y must be float32 or bfloat16");
  int64_t index = *layer.typed_data();
  if (index < 0 || index >= ws[0])
    return ffi::Error::InvalidArgument("matmul: layer " + std::to_string(index) + " is outside [0, " +
                                       std::to_string(ws[0]) + ")");
  m.x = x.untyped_data();
  m.w = static_cast<const char*>(w.untyped_data()) +
        index * ws[1] * ws[2] * (m.w_type == ti::Type::kBFloat16 ? 2 : 4);
  m.y = y->untyped_data();
  m.rows = xs[0], m.columns = ws[1], m.depth = xs[1];
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("isa"));
