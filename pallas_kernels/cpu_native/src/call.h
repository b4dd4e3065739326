// What every custom call needs of XLA's interface.
#pragma once

#include <new>
#include <string>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// Handlers are the only symbols that the library shows.
#define TI_EXPORT(name) extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*)

namespace ti {

inline ffi::Error no_kernels(std::string_view isa) {
  return ffi::Error::InvalidArgument("cpu_native: this processor or build has no kernels for isa=" + std::string(isa));
}

inline bool float_type_of(ffi::DataType from, Type* to) {
  if (from != ffi::DataType::F32 && from != ffi::DataType::BF16) return false;
  *to = from == ffi::DataType::F32 ? Type::kFloat32 : Type::kBFloat16;
  return true;
}

// Runs `work`; no exception crosses into XLA.
template <class Work>
ffi::Error guarded(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cpu_native: no memory for a kernel's working buffers");
  }
  return ffi::Error::Success();
}

}  // namespace ti
