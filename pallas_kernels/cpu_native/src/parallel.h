// Shares tasks between the calling thread and XLA's thread pool.
//
// The caller works too and never waits for a helper that has not begun, so a busy or blocked pool costs
// speed but cannot deadlock, whatever number of virtual devices call at once.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace ti {

inline int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Runs work(i) for i in [0, tasks). Pool needs Schedule(callable) and num_threads().
template <class Pool, class Work>
void parallel_for(Pool& pool, int64_t tasks, const Work& work) {
  int64_t helpers = 0;
  if (tasks > 1) {
    static const int64_t cores = available_cores();
    int64_t threads = pool.num_threads();
    threads = threads < cores ? threads : cores;
    helpers = (threads < tasks ? threads : tasks) - 1;
  }
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; ++i) work(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  // `work` lives on the caller's stack: a helper touches it only while it holds an unfinished task.
  auto run = [shared, tasks, &work] {
    for (;;) {
      int64_t i = shared->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks) return;
      work(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule(decltype(run)(run));
  run();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 4096) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace ti
