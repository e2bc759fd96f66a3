// What the group and the turn-reached advantages share: a row beside the moments of its group, in memory.
#pragma once

#include "cuda/kernels.h"

namespace fastadv::cuda {

__device__ inline GroupMoments moments_of(const MomentArrays& m, int64_t group) {
  return {m.minimum[group], m.weight[group], m.sum[group], m.squares[group], static_cast<long long>(m.voters[group])};
}

__device__ inline bool has_group(const AdvantageInputs& in, int64_t row) { return in.group[row] >= 0 && in.group[row] < in.groups; }

// Of a row whose group is there.
__device__ inline RowContext context_of(const AdvantageInputs& in, const AdvantageRule& rule, int64_t row) {
  const int64_t group = in.group[row];
  return row_context(rule, moments_of(in.mean, group), moments_of(in.spread, group), in.rewards[row], in.left_out[row], in.votes[row],
                     !in.include || in.include[row]);
}

}  // namespace fastadv::cuda
