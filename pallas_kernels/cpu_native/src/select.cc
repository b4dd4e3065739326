// Picks the instruction-set unit at run time.
#include "kernels.h"

#include <atomic>

#ifdef TI_HAVE_avx2_dot
#include <cpuid.h>

// Not every compiler's __builtin_cpu_supports knows it.
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

#ifdef TI_HAVE_neon_dot
#ifdef __linux__
#include <asm/hwcap.h>
#include <sys/auxv.h>

static bool has_neon_dot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
static bool has_neon_dot() { return true; }  // every Apple processor that runs this
#endif
#endif

// What a build may have of each instruction set: TI_HAVE_avx2, and TI_HAVE_avx2_dot for its dot products of bytes.
#define TI_UNIT(isa)                         \
  namespace isa {                            \
  extern const ti::Kernels kernels;          \
  }                                          \
  namespace isa##_int8 {                     \
  extern const ti::Int8Kernels int8_kernels; \
  }                                          \
  namespace isa##_dot {                      \
  extern const ti::Int8Kernels int8_kernels; \
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
  const Int8Kernels* int8;
  bool runs_here;
};

// The units of this build, best first.
const auto& units() {
  static const Unit all[] = {
#ifdef TI_HAVE_avx512
      {&avx512::kernels,
#ifdef TI_HAVE_avx512_dot
       __builtin_cpu_supports("avx512vnni") ? &avx512_dot::int8_kernels :
#endif
       &avx512_int8::int8_kernels,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq")},
#endif
#ifdef TI_HAVE_avx2
      {&avx2::kernels,
#ifdef TI_HAVE_avx2_dot
       has_avx_vnni() ? &avx2_dot::int8_kernels :
#endif
       &avx2_int8::int8_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#ifdef TI_HAVE_neon
      {&neon::kernels,
#ifdef TI_HAVE_neon_dot
       has_neon_dot() ? &neon_dot::int8_kernels :
#endif
       &neon_int8::int8_kernels, true},
#endif
  };
  return all;
}

// What "auto" means in this process; null: the best.
std::atomic<const Kernels*> preferred{nullptr};

}  // namespace

const Kernels* select_kernels(std::string_view isa) {
  if (const Kernels* kernels = preferred.load(std::memory_order_relaxed); kernels != nullptr && isa == "auto")
    return kernels;
  for (const Unit& unit : units())
    if (unit.runs_here && (isa == "auto" || isa == unit.kernels->name)) return unit.kernels;
  return nullptr;
}

const Int8Kernels& int8_kernels(const Kernels& kernels) {
  const Unit* unit = units();
  while (unit->kernels != &kernels) ++unit;
  return *unit->int8;
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
