// Working memory of one op call, kept by the calling thread and reused by its next call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ti {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// At least `count` elements, aligned to 64 bytes, valid until this thread's next call with the same slot: 0 for
// what outlives tasks, 1 within a task. Throws std::bad_alloc.
template <class T, int slot>
T* scratch(int64_t count) {
  thread_local std::unique_ptr<void, Free> held;
  thread_local size_t held_bytes = 0;
  size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  if (bytes > held_bytes) {
    held.reset();
    held_bytes = 0;
    held.reset(std::aligned_alloc(64, bytes));
    if (held == nullptr) throw std::bad_alloc();
    held_bytes = bytes;
  }
  return static_cast<T*>(held.get());
}

}  // namespace ti
