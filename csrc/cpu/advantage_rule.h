// What the group and the turn-reached advantages share: a row beside the moments of its group.
#pragma once

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace fastadv {

constexpr int64_t kBlockRows = 1024;

template <class Body>
void for_row_blocks(int64_t rows, int threads, const Body& body) {
  parallel_blocks((rows + kBlockRows - 1) / kBlockRows, threads, [&](int64_t block) {
    const int64_t last = std::min(rows, (block + 1) * kBlockRows);
    for (int64_t row = block * kBlockRows; row < last; ++row) body(row);
  });
}

inline GroupMoments moments_of(const MomentArrays& m, int64_t group) {
  return {m.minimum[group], m.weight[group], m.sum[group], m.squares[group], static_cast<long long>(m.voters[group])};
}

inline void validate(const AdvantageInputs& in) {
  if (in.rows < 0 || in.groups < 0) throw std::invalid_argument("negative size");
  for (int64_t row = 0; row < in.rows; ++row)
    if (in.group[row] < 0 || in.group[row] >= in.groups) throw std::invalid_argument("a row names a group that does not exist");
}

inline RowContext context_of(const AdvantageInputs& in, const AdvantageRule& rule, int64_t row) {
  const int64_t group = in.group[row];
  return row_context(rule, moments_of(in.mean, group), moments_of(in.spread, group), in.rewards[row], in.left_out[row], in.votes[row],
                     !in.include || in.include[row]);
}

}  // namespace fastadv
