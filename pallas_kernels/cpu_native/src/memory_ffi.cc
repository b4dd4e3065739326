// XLA custom calls "ti_unwritten" and "ti_will_need".
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "call.h"

namespace {

// Results of any shape that nobody writes: their pages take no memory before somebody does.
ffi::Error unwritten(ffi::RemainingRets) { return ffi::Error::Success(); }

// Has the system read the pages of a range, without waiting for them.
void ask_for(const char* begin, size_t size) {
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  uintptr_t end = reinterpret_cast<uintptr_t>(begin) + size;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_WILLNEED);  // a hint: what fails is read when it is needed
}

// Stacks are [L, E, ...]; asks for `wanted` experts of a layer.
ffi::Error will_need(ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::PRED> wanted, ffi::Buffer<ffi::PRED> then,
                     ffi::RemainingArgs stacks, ffi::Result<ffi::Buffer<ffi::PRED>> same) {
  int64_t at = *layer.typed_data(), experts = static_cast<int64_t>(wanted.element_count());
  for (size_t i = 0; i < stacks.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> stack = stacks.get<ffi::AnyBuffer>(i);
    if (!stack.has_value()) return stack.error();
    auto shape = stack->dimensions();
    if (shape.size() < 2 || shape[1] != experts)
      return ffi::Error::InvalidArgument("will_need: stacks must be [L, E, ...], and wanted [E]");
    if (at < 0 || at >= shape[0] || stack->element_count() == 0) continue;
    size_t each = stack->size_bytes() / static_cast<size_t>(shape[0] * experts);
    const char* first = static_cast<const char*>(stack->untyped_data()) + static_cast<size_t>(at * experts) * each;
    for (int64_t e = 0; e < experts; ++e)
      if (wanted.typed_data()[e]) ask_for(first + static_cast<size_t>(e) * each, each);
  }
  if (same->typed_data() != then.typed_data()) std::memcpy(same->typed_data(), then.typed_data(), then.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

TI_EXPORT(ti_unwritten);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_unwritten, unwritten, ffi::Ffi::Bind().RemainingRets());

TI_EXPORT(ti_will_need);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_will_need, will_need,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::PRED>>());
