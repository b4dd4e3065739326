// Products with x in int8. Compiled once per instruction set, and once more with its dot products of bytes.
#include "matmul_int8.h"

namespace TI_ISA {
extern const ti::Int8Kernels int8_kernels;
const ti::Int8Kernels int8_kernels = {int8_pack, int8_tile};
}  // namespace TI_ISA
