// Compiled once per instruction set: -DTI_ISA=avx2 with that set's flags, and so on.
#include "attention_kernels.h"
#include "decode_rows.h"
#include "matmul_kernels.h"

#define TI_TEXT_(name) #name
#define TI_TEXT(name) TI_TEXT_(name)

namespace TI_ISA {
extern const ti::Kernels kernels;
const ti::Kernels kernels = {
    TI_TEXT(TI_ISA),  matmul_pack,     matmul_tile,     decode_rows,      attention_result,
    attention_work, attention_split, attention_merge, attention_finish,
};
}  // namespace TI_ISA
