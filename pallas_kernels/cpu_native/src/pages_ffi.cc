// XLA custom calls "ti_read_pages" and "ti_write_pages": whole pages out of a pool [L, P, ...] and into one, as bytes.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

// As memcpy, past the caches where both ends are aligned: a pool is larger than they are, and to fetch what is
// overwritten whole would cost as much as to write it.
void copy_out(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0) {
    auto* out = reinterpret_cast<__m128i*>(to);
    auto* in = reinterpret_cast<const __m128i*>(from);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(out + i, _mm_load_si128(in + i));
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Orders what `copy_out` has written before whatever this thread does next.
void settle() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

struct Pages {
  int64_t layers, count, bytes;  // of a pool: its pages a layer, and bytes of one
};

bool pages_of(const ffi::AnyBuffer& pool, Pages* out) {
  auto dims = pool.dimensions();
  if (dims.size() < 2 || pool.size_bytes() == 0) return false;
  *out = {dims[0], dims[1], static_cast<int64_t>(pool.size_bytes()) / (dims[0] * dims[1])};
  return true;
}

// Of `data` [l, n, ...] for pages of the pool; -1 where it is no whole number.
int64_t layers_of(const ffi::AnyBuffer& data, const Pages& pool, int64_t ids) {
  int64_t bytes = static_cast<int64_t>(data.size_bytes()), layer = ids * pool.bytes;
  return layer > 0 && bytes % layer == 0 ? bytes / layer : -1;
}

ffi::Error mismatch(const char* name) {
  return ffi::Error::InvalidArgument(std::string(name) +
                                     ": shapes must be pool [L,P,...], ids [n], data [l,n,...], of layers of the pool");
}

ffi::Error read_pages(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> ids,
                      ffi::Result<ffi::AnyBuffer> out) {
  Pages pages;
  int64_t n = static_cast<int64_t>(ids.element_count());
  if (!pages_of(pool, &pages) || layers_of(*out, pages, n) != pages.layers) return mismatch("read_pages");
  const char* from = static_cast<const char*>(pool.untyped_data());
  char* to = static_cast<char*>(out->untyped_data());
  const int32_t* id = ids.typed_data();
  ti::parallel_for(threads, pages.layers, [&](int64_t layer) {
    for (int64_t i = 0; i < n; ++i) {
      int64_t page = std::clamp<int64_t>(id[i], 0, pages.count - 1);
      std::memcpy(to + (layer * n + i) * pages.bytes, from + (layer * pages.count + page) * pages.bytes, pages.bytes);
    }
  });
  return ffi::Error::Success();
}

ffi::Error write_pages(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer data,
                       ffi::BufferR0<ffi::S32> first, ffi::Result<ffi::AnyBuffer> out) {
  Pages pages;
  int64_t n = static_cast<int64_t>(ids.element_count());
  if (!pages_of(pool, &pages) || out->size_bytes() != pool.size_bytes()) return mismatch("write_pages");
  int64_t layers = layers_of(data, pages, n), start = *first.typed_data();
  if (layers < 0 || start < 0 || start + layers > pages.layers) return mismatch("write_pages");
  const char* from = static_cast<const char*>(data.untyped_data());
  char* to = static_cast<char*>(out->untyped_data());
  if (pool.untyped_data() != to) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
  const int32_t* id = ids.typed_data();
  ti::parallel_for(threads, layers, [&](int64_t layer) {
    for (int64_t i = 0; i < n; ++i) {
      if (id[i] < 0 || id[i] >= pages.count) continue;
      char* page = to + ((start + layer) * pages.count + id[i]) * pages.bytes;
      copy_out(page, from + (layer * n + i) * pages.bytes, pages.bytes);
    }
    settle();
  });
  return ffi::Error::Success();
}

}  // namespace

TI_EXPORT(ti_read_pages);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ti_read_pages, read_pages,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());

TI_EXPORT(ti_write_pages);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ti_write_pages, write_pages,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
