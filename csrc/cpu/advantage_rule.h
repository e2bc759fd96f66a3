// The rules that the group and the turn-reached advantages share: who gets 0, what a singleton gets, how it is scaled.
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

struct RowContext {
  const AdvantageRule& rule;
  bool settled = false;  // excluded, no voter, or a singleton: the advantage is settled_value whatever the turn
  double settled_value = 0.0;
  int64_t group;
  GroupMoments mean, spread;
  double reward, left_out, vote;  // rewards shifted by the group's minimum

  RowContext(const AdvantageInputs& in, const AdvantageRule& r, int64_t row) : rule(r), group(in.group[row]) {
    mean = moments_of(in.mean, group);
    spread = moments_of(in.spread, group);
    reward = in.rewards[row] - mean.minimum;
    vote = in.votes[row];
    left_out = vote != 0.0 ? in.left_out[row] - mean.minimum : 0.0;
    if (in.include && !in.include[row]) {
      settled = true;
    } else if (mean.voters <= 1 && (rule.baseline != Baseline::kNone || rule.scaled)) {  // the reward itself needs no voter
      settled = true;
      if (mean.voters == 1 && rule.singleton == Singleton::kRaw) settled_value = in.rewards[row];
    }
  }

  double scaled(double advantage) const {
    return rule.scaled ? scale_advantage(advantage, spread, rule.ddof, rule.eps, rule.eps_form) : advantage;
  }
};

}  // namespace fastadv
