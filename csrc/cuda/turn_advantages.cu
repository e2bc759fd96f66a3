// Reward minus the baseline of the turn reached, one number a segment, in float64.
//
// From the rewards: one launch, a block a group, or several where a group has many turns. A tile of turns has as many as the block
// has threads: their sums lie in shared memory, and then the group's rows write their segments of the tile. Reads 36 bytes a
// row with float32 rewards (order, index, reward, two offsets), 8 more of votes and 1 of `include` where there are any; again for each
// tile, from the cache. Writes 4 bytes a segment (8 of float64).
// From moments: one launch. Reads a segment's row's 33 bytes, its offset and its turn's moments, which stay in the cache.
#include <climits>

#include "cuda/advantage_rule.h"
#include "cuda/groups.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostTiles = 64;  // of a group that get a block each

template <class Out>
__global__ void __launch_bounds__(kThreads, kBlocks)
turn_advantages_kernel(AdvantageInputs in, AdvantageRule rule, TurnTable table, SegmentIndex segments, TurnRule turns,
                       Out* __restrict__ values) {
  const int64_t segment = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (segment >= segments.count) return;
  const Rows rows{in.rows, segments.count, 0, segments.offsets};
  const RowPlace at = rows.place(rows.row_of(segment), segment);
  const int64_t row = at.row;
  double value = NAN;
  if (at.held && has_group(in, row)) {
    const int64_t group = in.group[row], slot = table.offsets[group] + segment - segments.offsets[row];
    const RowContext c = context_of(in, rule, row);
    const bool in_table = slot >= 0 && slot < table.offsets[group + 1] && slot < table.size;
    const double count = in_table ? table.count[slot] : NAN, sum = in_table ? table.sum[slot] : NAN;
    value = turn_advantage(rule, c, count, sum, turn_target(c, turns.shrink_to_mean), turns.kappa);
  }
  values[segment] = Out(value);
}

__device__ Segments segments_of(const SegmentIndex& segments, int64_t row) {
  return row_segments(segments.offsets, row, segments.count);
}

constexpr long long kNoTurns = LLONG_MAX;  // of a row whose offsets lead out of the table

__device__ long long row_turns(const SegmentIndex& segments, int64_t row) {
  const Segments of_row = segments_of(segments, row);
  return of_row.inside ? of_row.count : kNoTurns;
}

// NaN for those of the segments [from, to) that there are.
template <class Out>
__device__ void forget(const SegmentIndex& segments, int64_t from, int64_t to, Out* values) {
  if (to > segments.count) to = segments.count;
  for (int64_t segment = from > 0 ? from : 0; segment < to; ++segment) values[segment] = Out(NAN);
}
// The same for what no row has: before the first, behind the last.
template <class Out>
__device__ void forget_stray(const SegmentIndex& segments, int64_t row, int64_t rows, Out* values) {
  if (row == 0) forget(segments, 0, segments.offsets[0], values);
  if (row == rows - 1) forget(segments, segments.offsets[rows], segments.count, values);
}
// The same for what a row has, and what no row has beside it.
template <class Out>
__device__ void forget_row(const SegmentIndex& segments, int64_t row, int64_t rows, Out* values) {
  forget_stray(segments, row, rows, values);
  forget(segments, segments.offsets[row], segments.offsets[row + 1], values);
}

template <int kThreads, class Out>
__global__ void __launch_bounds__(kThreads, kBlocks)
fused_turn_advantages_kernel(Voters voters, AdvantageRule rule, SegmentIndex segments, TurnRule turns, Out* __restrict__ values) {
  __shared__ TurnSums<kThreads> sums;
  const Group group(voters, blockIdx.x);
  if (!group.consistent<kThreads>()) {
    return group.for_rows_in_doubt<kThreads>([&](int64_t row) { forget_row(segments, row, voters.rows, values); });
  }
  const GroupMoments moments = group.moments<kThreads>(rule.scaled);
  long long longest = 0;
  for (int64_t place = group.first + threadIdx.x; place < group.last; place += kThreads) {
    const int64_t row = voters.order[place];
    if (blockIdx.y == 0) forget_stray(segments, row, voters.rows, values);
    const long long reached = row_turns(segments, row);
    longest = reached > longest ? reached : longest;
  }
  longest = reduced<kThreads>(longest, [](long long a, long long b) { return a < b ? b : a; });
  if (longest == kNoTurns) {  // which turns that row reached nobody knows
    for (int64_t place = group.first + threadIdx.x; place < group.last; place += kThreads)
      forget_row(segments, voters.order[place], voters.rows, values);
    return;
  }

  for (int64_t from = int64_t{blockIdx.y} * kThreads; from < longest; from += int64_t{gridDim.y} * kThreads) {
    const int width = tile_width<kThreads>(longest - from);
    const auto reached = [&](int64_t row) { return segments_of(segments, row).count; };
    sum_turns<kThreads>(group, moments.minimum, from, width, reached, sums);
    const int column = threadIdx.x & (width - 1);
    for (int64_t place = group.first + threadIdx.x / width; place < group.last; place += kThreads / width) {
      const Member m = group.member(place);
      const Segments of_row = segments_of(segments, m.row);
      if (from + column >= of_row.count) continue;
      const RowContext c = row_context(rule, moments, moments, m.reward, m.reward, m.vote, m.included);
      const double target = turn_target(c, turns.shrink_to_mean);
      values[of_row.first + from + column] = Out(turn_advantage(rule, c, sums.count[column], sums.sum[column], target, turns.kappa));
    }
  }
}

template <int kThreads, class Out>
void launch_fused(const Launcher& launcher, const Voters& voters, const AdvantageRule& rule, const SegmentIndex& segments,
                  const TurnRule& turns, Out* values) {
  const unsigned blocks = launcher.blocks(voters.groups, 1);
  const int64_t tiles = segments.count / (voters.rows * kThreads) + 1;  // of an average row
  const dim3 grid(blocks, unsigned(tiles < kMostTiles ? tiles : kMostTiles));
  fused_turn_advantages_kernel<kThreads, Out><<<grid, kThreads, 0, launcher.stream()>>>(voters, rule, segments, turns, values);
  launcher.launched();
}

}  // namespace

template <class Out>
void turn_advantages(const Launcher& launcher, const AdvantageInputs& in, const AdvantageRule& rule, const TurnTable& table,
                     const SegmentIndex& segments, const TurnRule& turns, Out* values) {
  const unsigned blocks = launcher.blocks(segments.count, kThreads);
  if (!blocks) return;
  turn_advantages_kernel<Out><<<blocks, kThreads, 0, launcher.stream()>>>(in, rule, table, segments, turns, values);
  launcher.launched();
}

template <class Out>
void turn_advantages(const Launcher& launcher, const Voters& voters, const AdvantageRule& rule, const SegmentIndex& segments,
                     const TurnRule& turns, Out* values) {
  if (!segments.count || !voters.rows) return;
  if (many_threads(voters.rows + segments.count, voters.groups)) {
    launch_fused<kManyThreads>(launcher, voters, rule, segments, turns, values);
  } else {
    launch_fused<kFewThreads>(launcher, voters, rule, segments, turns, values);
  }
}

#define FASTADV_INSTANTIATE(Out)                                                                                               \
  template void turn_advantages(const Launcher&, const AdvantageInputs&, const AdvantageRule&, const TurnTable&,               \
                                const SegmentIndex&, const TurnRule&, Out*);                                                   \
  template void turn_advantages(const Launcher&, const Voters&, const AdvantageRule&, const SegmentIndex&, const TurnRule&, Out*);
FASTADV_INSTANTIATE(float)
FASTADV_INSTANTIATE(double)
#undef FASTADV_INSTANTIATE

}  // namespace fastadv::cuda
