// Runs a paged attention over XLA's threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "ragged_batch.h"
#include "scratch.h"

namespace ti {

// Groups of queries of the live sequences, at most kMaxQueryRows rows each.
inline std::vector<Queries> group_queries(const RaggedBatch& batch, const Attention& a) {
  std::vector<Queries> all;
  int64_t group = a.heads / a.kv_heads;
  int64_t heads = std::min(group, kMaxQueryRows), tokens = std::max<int64_t>(1, kMaxQueryRows / heads);
  for (int64_t s = 0; s < batch.live; ++s)
    for (int64_t t = 0; t < batch.extend(s); t += tokens)
      for (int64_t h = 0, count; h < a.heads; h += count) {
        Queries q = {};
        q.kv_head = h / group;
        count = std::min(heads, (q.kv_head + 1) * group - h);
        q.sequence = s, q.token = batch.cu_q_lens[s] + t, q.tokens = std::min(tokens, batch.extend(s) - t);
        q.position = batch.cached(s) + t, q.head = h, q.heads = count;
        all.push_back(q);
      }
  return all;
}

// Attends after the new rows are in their pages. With few groups their splits run in parallel, else whole groups;
// results are merged in the order of positions either way, to the same bits.
template <class Pool>
void run_attention(Pool& pool, const Kernels& kernels, const RaggedBatch& batch, const Attention& a) {
  std::vector<Queries> all = group_queries(batch, a);
  auto first_split = [&](const Queries& q) { return batch.below(batch.first_visible(q.position)) / kSplit; };
  auto last_split = [&](const Queries& q) {
    return std::max(first_split(q), (batch.below(q.position + q.tokens) - 1) / kSplit);
  };
  int64_t result = kernels.attention_result(a, kMaxQueryRows), work = kernels.attention_work(a, kMaxQueryRows);

  if (static_cast<int64_t>(all.size()) >= 8 * pool.num_threads()) {
    parallel_for(pool, static_cast<int64_t>(all.size()), [&](int64_t i) {
      const Queries& q = all[all.size() - 1 - i];  // the longest of a prompt first
      float *total = scratch<float, 1>(2 * result + work), *more = total + result;
      kernels.attention_split(a, q, first_split(q), more + result, total);
      for (int64_t split = first_split(q) + 1; split <= last_split(q); ++split) {
        kernels.attention_split(a, q, split, more + result, more);
        kernels.attention_merge(a, q.rows(), total, more);
      }
      kernels.attention_finish(a, q, total);
    });
    return;
  }
  struct Part {
    const Queries* queries;
    int64_t split, at;
  };
  std::vector<Part> parts;
  int64_t size = 0;
  for (const Queries& q : all)
    for (int64_t split = first_split(q); split <= last_split(q); ++split) {
      parts.push_back({&q, split, size});
      size += kernels.attention_result(a, q.rows());
    }
  float* results = scratch<float, 0>(size);
  parallel_for(pool, static_cast<int64_t>(parts.size()), [&](int64_t i) {
    float* memory = scratch<float, 1>(work);
    kernels.attention_split(a, *parts[i].queries, parts[i].split, memory, results + parts[i].at);
  });
  for (size_t i = 0; i < parts.size();) {
    const Queries& q = *parts[i].queries;
    float* total = results + parts[i].at;
    for (++i; i < parts.size() && parts[i].queries == &q; ++i)
      kernels.attention_merge(a, q.rows(), total, results + parts[i].at);
    kernels.attention_finish(a, q, total);
  }
}

}  // namespace ti
