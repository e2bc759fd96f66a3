// Moments of the voters' rewards, by group and by the turns of a group, in float64. One launch each, a block a group. Reads 24
// bytes a row, three times for the moments of a group, the second and third time from the cache; 32 a row for every tile of
// turns of a group. A batch has thousands of rows for millions of tokens, so what counts is how long one group takes.
#include "cuda/groups.h"

namespace fastadv::cuda {

namespace {

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocks) group_moments_kernel(Voters voters, MomentArrays out) {
  const Group group(voters, blockIdx.x);
  GroupMoments m{NAN, NAN, NAN, NAN, 2};  // more than one voter, so that what is NaN is not settled as a singleton
  if (group.consistent<kThreads>()) m = group.moments<kThreads>(true);
  if (threadIdx.x) return;
  out.minimum[blockIdx.x] = m.minimum;
  out.weight[blockIdx.x] = m.weight;
  out.sum[blockIdx.x] = m.sum;
  out.squares[blockIdx.x] = m.squares;
  out.voters[blockIdx.x] = m.voters;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocks)
turn_moments_kernel(Voters voters, const int64_t* __restrict__ turn_counts, const double* __restrict__ minimum, TurnTable table) {
  __shared__ TurnSums<kThreads> sums;
  const Group group(voters, blockIdx.x);
  const bool consistent = group.consistent<kThreads>();
  const int64_t base = table.offsets[blockIdx.x], end = table.offsets[blockIdx.x + 1];
  const int64_t turns = base < 0 ? 0 : (end < table.size ? end : table.size) - base;
  for (int64_t from = 0; from < turns; from += kThreads) {
    const int width = tile_width<kThreads>(turns - from);
    if (consistent) {
      const auto reached = [&](int64_t row) { return turn_counts[row]; };
      sum_turns<kThreads>(group, minimum[blockIdx.x], from, width, reached, sums);
    }
    const int64_t turn = from + threadIdx.x;
    if (threadIdx.x >= width || turn >= turns) continue;
    table.count[base + turn] = consistent ? sums.count[threadIdx.x] : NAN;
    table.sum[base + turn] = consistent ? sums.sum[threadIdx.x] : NAN;
  }
}

}  // namespace

void group_moments(const Launcher& launcher, const Voters& voters, const MomentArrays& out) {
  const unsigned blocks = launcher.blocks(voters.groups, 1);
  if (!blocks) return;
  if (many_threads(voters.rows, voters.groups)) {
    group_moments_kernel<kManyThreads><<<blocks, kManyThreads, 0, launcher.stream()>>>(voters, out);
  } else {
    group_moments_kernel<kFewThreads><<<blocks, kFewThreads, 0, launcher.stream()>>>(voters, out);
  }
  launcher.launched();
}

void turn_moments(const Launcher& launcher, const Voters& voters, const int64_t* turn_counts, const double* minimum,
                  const TurnTable& out) {
  const unsigned blocks = launcher.blocks(voters.groups, 1);
  if (!blocks) return;
  if (many_threads(voters.rows + out.size, voters.groups)) {
    turn_moments_kernel<kManyThreads><<<blocks, kManyThreads, 0, launcher.stream()>>>(voters, turn_counts, minimum, out);
  } else {
    turn_moments_kernel<kFewThreads><<<blocks, kFewThreads, 0, launcher.stream()>>>(voters, turn_counts, minimum, out);
  }
  launcher.launched();
}

}  // namespace fastadv::cuda
