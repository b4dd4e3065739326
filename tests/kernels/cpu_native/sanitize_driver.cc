// Random products and attentions over threads of its own, for builds with sanitizers: `driver ISA SEED ROUNDS`. Prints
// a checksum of the products with x in int8, which is the same for every instruction set, and `clean`.
// Every array is its own heap block of the exact size, and every page that is not in use is absent from the table.
// Weights, keys and values are all one number, so that plain products and every attention have a known answer.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention_run.h"
#include "matmul_run.h"

namespace {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      stopping_ = true;
    }
    woken_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(workers_.size()); }
  template <class Work>
  void Schedule(Work&& work) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      waiting_.emplace_back(work);
    }
    woken_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> hold(mutex_);
      woken_.wait(hold, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      std::function<void()> next = std::move(waiting_.front());
      waiting_.pop_front();
      hold.unlock();
      next();
    }
  }
  std::mutex mutex_;
  std::condition_variable woken_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> workers_;
  bool stopping_ = false;
};

using Random = std::mt19937;

int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

std::vector<float> floats(Random& random, size_t count) {
  std::vector<float> all(count);
  for (float& x : all) x = std::normal_distribution<float>()(random);
  return all;
}

// What bytes of 0x3c are in each type.
constexpr float kFloatValue = 0.01148897037f, kBFloatValue = 0.011474609f, kHalfValue = 1.05859375f, kInt8Value = 60,
                kFloat8Value = 1.5f;

// Of a plain format; `scale` is that of the row.
float value_of_bytes(ti::Format format, float scale) {
  switch (format) {
    case ti::Format::kBFloat16: return kBFloatValue;
    case ti::Format::kInt8: return kInt8Value * scale;
    case ti::Format::kFloat8: return kFloat8Value * scale;
    default: return kFloatValue;
  }
}

void expect(const char* what, float got, float wanted, float size) {
  if (std::fabs(got - wanted) <= 1e-5f * size) return;
  std::printf("%s: got %g, wanted %g\n", what, got, wanted);
  std::exit(1);
}

void product(Random& random, Pool& pool, const ti::Kernels& kernels) {
  ti::Matmul m = {};
  m.format = static_cast<ti::Format>(pick(random, 0, 9));
  bool plain = m.format <= ti::Format::kFloat8;
  ti::BlockSize block = ti::block_size(m.format);
  m.group = 32;
  m.rows = pick(random, 1, 40), m.columns = pick(random, 1, 60);
  m.depth = plain ? pick(random, 1, 900) : std::lcm(block.values, m.group) * pick(random, 1, 5);
  m.row_bytes = m.depth / block.values * block.bytes;
  std::vector<float> x = floats(random, m.rows * m.depth), scale = floats(random, m.columns * (m.depth / 32 + 1));
  if (m.format == ti::Format::kInt4Affine) std::fill(scale.begin(), scale.end(), kFloatValue);  // two halves
  std::vector<uint8_t> w(m.columns * m.row_bytes, 0x3c);
  std::vector<float> y(m.rows * m.columns, NAN);
  m.x = x.data(), m.y = y.data(), m.scale = scale.data();
  ti::Stack stack = {w.data(), reinterpret_cast<const char*>(scale.data()), 0, 0, {{0, 0, m.rows}}};
  ti::run_matmul(pool, kernels, m, stack);
  for (int64_t i = 0; i < m.rows * m.columns; ++i) {
    float sum = std::accumulate(&x[i / m.columns * m.depth], &x[i / m.columns * m.depth] + m.depth, 0.0f);
    float by = value_of_bytes(m.format, scale[i % m.columns]);
    expect("product", y[i], plain ? sum * by : y[i], std::fabs(by) * static_cast<float>(m.depth));
  }
  if (m.format < ti::Format::kQ8_0) return;
  std::vector<float> values(m.columns * m.depth, NAN);
  m.w = w.data(), m.y = values.data();
  kernels.decode_rows(m, 0, m.columns);
  for (float value : values) expect("decoded", value, value, 0);  // which no NaN is
}

uint64_t checksum = 0;

// A product of random bytes with x in int8, beside the one with x as it is. Some rows hold what is not finite.
void int8_product(Random& random, Pool& pool, const ti::Kernels& kernels) {
  const ti::Format formats[] = {ti::Format::kInt8, ti::Format::kInt4, ti::Format::kInt4Affine, ti::Format::kQ8_0,
                                ti::Format::kQ4_0, ti::Format::kQ4_1, ti::Format::kQ4_K};
  ti::Matmul m = {};
  m.format = formats[pick(random, 0, 6)], m.group = 32 << pick(random, 0, 2);
  ti::BlockSize block = ti::block_size(m.format);
  m.rows = pick(random, 1, 40), m.columns = pick(random, ti::kMostColumns, 90);
  m.depth = std::lcm(block.values, m.group) * pick(random, 1, 5), m.row_bytes = m.depth / block.values * block.bytes;
  auto draw = [&random] { return static_cast<float>(pick(random, -4096, 4096)) / 1024; };
  std::vector<float> x(m.rows * m.depth), scale(m.columns * (m.depth / 32)), y(m.rows * m.columns, NAN), exact = y;
  std::generate(x.begin(), x.end(), draw), std::generate(scale.begin(), scale.end(), draw);
  if (m.format == ti::Format::kInt4Affine) std::fill(scale.begin(), scale.end(), kFloatValue);
  std::vector<bool> finite(m.rows, true);
  if (int64_t row = pick(random, 0, 3 * m.rows); row < m.rows)
    x[row * m.depth + pick(random, 0, m.depth - 1)] = pick(random, 0, 1) != 0 ? NAN : INFINITY, finite[row] = false;
  std::vector<uint8_t> w(m.columns * m.row_bytes);
  for (uint8_t& byte : w) byte = static_cast<uint8_t>(random());
  if (m.format >= ti::Format::kQ8_0)  // the 16-bit floats of a block are to be finite
    for (size_t i = 0; i < w.size(); i += block.bytes) w[i + 1] &= 0x3f, w[i + 3] &= 0x3f;
  m.x = x.data(), m.y = exact.data(), m.scale = scale.data();
  ti::Stack stack = {w.data(), reinterpret_cast<const char*>(scale.data()), 0, 0, {{0, 0, m.rows}}};
  ti::run_matmul(pool, kernels, m, stack);
  m.y = y.data(), m.int8_x = true;
  ti::run_matmul(pool, kernels, m, stack);
  double off = 0, all = 0;
  for (int64_t i = 0; i < m.rows * m.columns; ++i) {
    if (!finite[i / m.columns]) {
      if (!std::isnan(y[i])) std::printf("%g where x is not finite\n", y[i]), std::exit(1);
      continue;
    }
    off += (y[i] - exact[i]) * (y[i] - exact[i]), all += exact[i] * exact[i];
    uint32_t bits;
    std::memcpy(&bits, &y[i], sizeof bits);
    checksum = checksum * 1000003 + bits;
  }
  if (!(off <= 1e-3 * all)) std::printf("rounded x: %g off of %g\n", off, all), std::exit(1);
}

void attention(Random& random, Pool& pool, const ti::Kernels& kernels) {
  ti::Attention a = {};
  ti::RaggedBatch batch = {};
  a.kv_heads = pick(random, 1, 3), a.heads = a.kv_heads * pick(random, 1, 20);
  a.q_dim = a.key_dim = a.value_dim = pick(random, 1, 70);
  a.pool_type = static_cast<ti::PoolType>(pick(random, 0, 3));
  int64_t item = a.pool_type == ti::PoolType::kFloat32 ? 4 : a.pool_type == ti::PoolType::kInt8 ? 1 : 2;
  a.value_offset = a.key_dim * item, a.head_bytes = 2 * a.value_offset, a.row_bytes = a.kv_heads * a.head_bytes;
  batch.page_size = a.page_size = pick(random, 1, 20), a.page_bytes = a.page_size * a.row_bytes;
  batch.window = a.window = pick(random, 0, 1) * pick(random, 1, 300);
  batch.chunk = a.chunk = pick(random, 0, 1) * pick(random, 1, 300);
  a.soft_cap = static_cast<float>(pick(random, 0, 1)) * 5, a.scale = 0.1f, a.value_scale = 1;
  batch.shards = a.shards = pick(random, 1, 3), batch.shard = a.shard = pick(random, 0, a.shards - 1);
  batch.sequences = batch.live = pick(random, 1, 5), batch.blocks = a.blocks = 600 / a.page_size + 1;
  std::vector<int32_t> lens(batch.live), starts(1, 0), table(batch.live * batch.blocks, -7);
  for (int64_t s = 0; s < batch.live; ++s) {
    int64_t extend = pick(random, 0, 1) != 0 ? 1 : pick(random, 0, 60), cached = pick(random, 0, 500);
    lens[s] = static_cast<int32_t>(cached + extend);
    starts.push_back(starts.back() + static_cast<int32_t>(extend));
    for (int64_t b = batch.first_visible(cached) / batch.page(); b * batch.page() < lens[s]; ++b)
      table[s * batch.blocks + b] = static_cast<int32_t>(batch.pages++);
  }
  batch.pages = std::max<int64_t>(1, batch.pages), batch.tokens = starts.back();
  batch.kv_lens = lens.data(), batch.page_table = a.page_table = table.data(), batch.cu_q_lens = starts.data();
  std::vector<uint8_t> pages(batch.pages * a.page_bytes, 0x3c);
  std::vector<float> q = floats(random, batch.tokens * a.heads * a.q_dim), out(q.size(), NAN);
  std::vector<float> lse(batch.tokens * a.heads, NAN);
  a.pool = pages.data(), a.q = q.data(), a.out = out.data(), a.lse = lse.data();
  if (std::string wrong = batch.wrong(); !wrong.empty()) std::printf("%s\n", wrong.c_str()), std::exit(1);
  ti::run_attention(pool, kernels, batch, a);
  const float values[] = {kFloatValue, kBFloatValue, kHalfValue, kInt8Value};
  float constant = values[static_cast<int>(a.pool_type)];
  for (size_t i = 0; i < out.size(); ++i) {
    float sum = lse[i / a.value_dim];
    if (std::isnan(sum)) std::printf("a row without a sum\n"), std::exit(1);
    expect("attention", out[i], sum == -INFINITY ? 0 : constant, constant);
  }
}

}  // namespace

int main(int, char** arguments) {
  Random random(std::atoi(arguments[2]));
  const ti::Kernels* kernels = ti::select_kernels(arguments[1]);
  if (kernels == nullptr) return std::printf("no kernels\n"), 1;
  Pool pool(3);
  for (int round = 0; round < std::atoi(arguments[3]); ++round) {
    product(random, pool, *kernels);
    int8_product(random, pool, *kernels);
    attention(random, pool, *kernels);
  }
  std::printf("%016llx clean\n", static_cast<unsigned long long>(checksum));
}
