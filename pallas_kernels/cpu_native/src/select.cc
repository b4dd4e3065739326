// Picks the instruction-set unit at run time.
#include "kernels.h"

#include <atomic>

#define TI_UNIT(isa)           \
  namespace isa {              \
  extern const ti::Kernels kernels; \
  }
#ifdef TI_HAVE_avx512
TI_UNIT(avx512)
#endif
#ifdef TI_HAVE_avx2
TI_UNIT(avx2)
#endif
#ifdef TI_HAVE_neon
TI_UNIT(neon)
#endif

namespace ti {
namespace {

struct Unit {
  const Kernels* kernels;
  bool runs_here;
};

// What "auto" means in this process; null: the best.
std::atomic<const Kernels*> preferred{nullptr};

}  // namespace

const Kernels* select_kernels(std::string_view isa) {
  if (const Kernels* kernels = preferred.load(std::memory_order_relaxed); kernels != nullptr && isa == "auto")
    return kernels;
  const Unit units[] = {
#ifdef TI_HAVE_avx512
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
#endif
#ifdef TI_HAVE_avx2
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#ifdef TI_HAVE_neon
      {&neon::kernels, true},
#endif
      {nullptr, false},
  };
  for (const Unit& unit : units)
    if (unit.runs_here && (isa == "auto" || isa == unit.kernels->name)) return unit.kernels;
  return nullptr;
}

}  // namespace ti

// Whether the library can serve isa ("auto" or a unit's name) on this processor.
extern "C" __attribute__((visibility("default"))) int ti_serves(const char* isa) {
  return ti::select_kernels(isa) != nullptr;
}

// From here on "auto" is this unit, or with "auto" the best again; 0 where it cannot run here.
extern "C" __attribute__((visibility("default"))) int ti_prefer(const char* isa) {
  ti::preferred.store(nullptr);
  const ti::Kernels* kernels = ti::select_kernels(isa);
  if (std::string_view(isa) != "auto") ti::preferred.store(kernels);
  return kernels != nullptr;
}

// Rows of blocks of a GGUF format as float32 or bfloat16 `out` [rows, depth]; 0 where no unit decodes them here.
extern "C" __attribute__((visibility("default"))) int ti_decode(const char* format, const uint8_t* blocks, int64_t rows,
                                                                int64_t depth, void* out, int as_bfloat16) {
  const ti::Kernels* kernels = ti::select_kernels("auto");
  ti::Matmul m = {};
  if (kernels == nullptr || !ti::format_of(format, &m.format) || m.format < ti::Format::kQ8_0) return 0;
  ti::BlockSize block = ti::block_size(m.format);
  if (depth % block.values != 0) return 0;
  m.w = blocks, m.depth = depth, m.row_bytes = depth / block.values * block.bytes;
  m.y = out, m.y_type = as_bfloat16 ? ti::Type::kBFloat16 : ti::Type::kFloat32;
  kernels->decode_rows(m, 0, rows);
  return 1;
}
