// Whole rows to threads, in ranges of about equal numbers of tokens. For kernels whose rows do not depend on each other.
#pragma once

#include <atomic>

#include "cpu/parallel.h"
#include "cpu/token_view.h"

namespace fastadv {

// Calls body(row) for every row; returns the bitwise or of what the calls returned.
template <class Body>
int for_row_ranges(const Rows& rows, int threads, const Body& body) {
  const int64_t ranges = std::min<int64_t>(rows.count, std::max<int64_t>(1, threads * int64_t{4}));
  const auto first_row = [&](int64_t range) -> int64_t {
    if (range == ranges) return rows.count;
    if (!rows.cu_seqlens) return rows.count * range / ranges;
    const int64_t token = rows.tokens / ranges * range;
    return std::lower_bound(rows.cu_seqlens, rows.cu_seqlens + rows.count, token) - rows.cu_seqlens;
  };
  std::atomic<int> faults{0};
  parallel_blocks(ranges, threads, [&](int64_t range) {
    int mine = 0;
    for (int64_t row = range == 0 ? 0 : first_row(range); row < first_row(range + 1); ++row) mine |= body(row);
    if (mine) faults.fetch_or(mine, std::memory_order_relaxed);
  });
  return faults.load();
}

}  // namespace fastadv
