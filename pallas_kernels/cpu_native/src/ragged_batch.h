// The ragged batch of a paged attention call: its checks, and the copy of new rows into their pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels.h"

namespace ti {

// Arrays of the op contract. Tokens [cu_q_lens[s], cu_q_lens[s + 1]) are the last ones of kv_lens[s] positions.
struct RaggedBatch {
  const int32_t *kv_lens, *page_table, *cu_q_lens;
  int64_t sequences, live;  // live: sequences without padding
  int64_t blocks, tokens, page_size, pages;
  int64_t shard, shards;  // this pool has slots [shard * page_size, (shard + 1) * page_size) of every page
  int64_t window, chunk;

  int64_t extend(int64_t s) const { return cu_q_lens[s + 1] - cu_q_lens[s]; }
  int64_t cached(int64_t s) const { return kv_lens[s] - extend(s); }
  int64_t live_tokens() const { return live == 0 ? 0 : cu_q_lens[live]; }

  int64_t page() const { return page_size * shards; }  // positions
  int64_t below(int64_t position) const { return slots_below(position, page_size, shard, shards); }

  int64_t first_visible(int64_t position) const {
    int64_t first = 0;
    if (window > 0) first = std::max(first, position - window + 1);
    if (chunk > 0) first = std::max(first, position / chunk * chunk);
    return first;
  }

  // What is wrong with the values, in a sentence; empty when every access that follows is in range.
  std::string wrong() const {
    if (live < 0 || live > sequences)
      return "num_seqs says " + std::to_string(live) + " sequences, the batch has room for " +
             std::to_string(sequences);
    if (live > 0 && cu_q_lens[0] != 0) return "cu_q_lens must begin with 0";
    for (int64_t s = 0; s < live; ++s) {
      std::string of = " of sequence " + std::to_string(s);
      if (extend(s) < 0 || cu_q_lens[s + 1] > tokens)
        return "cu_q_lens" + of + " must not fall or pass the " + std::to_string(tokens) + " tokens of q";
      if (extend(s) == 0) continue;
      if (cached(s) < 0 || kv_lens[s] > blocks * page())
        return "kv_len " + std::to_string(kv_lens[s]) + of + " must hold its new tokens and fit its " +
               std::to_string(blocks) + " pages of " + std::to_string(page());
      for (int64_t b = first_visible(cached(s)) / page(); b * page() < kv_lens[s]; ++b) {
        int64_t page = page_table[s * blocks + b];
        if (page < 0 || page >= pages)
          return "page " + std::to_string(page) + " of block " + std::to_string(b) + of + " is outside [0, " +
                 std::to_string(pages) + ")";
      }
    }
    return "";
  }

  // Calls visit(token, page, slot) for the tokens of sequence s that the shard holds.
  template <class Visit>
  void each_slot(int64_t s, const Visit& visit) const {
    for (int64_t i = 0; i < extend(s); ++i) {
      int64_t position = cached(s) + i, slot = position % page() - shard * page_size;
      if (slot < 0 || slot >= page_size) continue;
      visit(cu_q_lens[s] + i, page_table[s * blocks + position / page()], slot);
    }
  }
};

}  // namespace ti
