// What each group knows of its voters' rewards: smallest, sum, spread, and sums over those that reached each turn.
// Everything is float64 and shifted by the group's smallest voting reward. Groups are summed in row order; turns are summed
// over the rows that end with them, in row order, then from the last turn to the first.
#include <limits>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace fastadv {
namespace {

constexpr int64_t kBlockGroups = 256;

template <class Body>
void for_groups(const Groups& groups, int threads, const Body& body) {
  parallel_blocks((groups.count + kBlockGroups - 1) / kBlockGroups, threads, [&](int64_t block) {
    const int64_t last = std::min(groups.count, (block + 1) * kBlockGroups);
    for (int64_t group = block * kBlockGroups; group < last; ++group) body(group);
  });
}

}  // namespace

void Groups::validate() const {
  if (count < 0 || rows < 0) throw std::invalid_argument("negative size");
  if (offsets[0] != 0 || offsets[count] != rows) throw std::invalid_argument("group offsets must start at 0 and end at the number of rows");
  for (int64_t group = 0; group < count; ++group)
    if (offsets[group + 1] < offsets[group]) throw std::invalid_argument("group offsets decrease");
  for (int64_t i = 0; i < rows; ++i)
    if (order[i] < 0 || order[i] >= rows) throw std::invalid_argument("group order names a row that does not exist");
  for (int64_t group = 0; group < count; ++group)
    for (int64_t i = offsets[group] + 1; i < offsets[group + 1]; ++i)
      if (order[i] <= order[i - 1]) throw std::invalid_argument("group order does not increase within a group");
}

void TurnTable::validate(int64_t groups) const {
  if (offsets[0] < 0 || offsets[groups] > size) throw std::invalid_argument("turn offsets leave the table");
  for (int64_t group = 0; group < groups; ++group)
    if (offsets[group + 1] < offsets[group]) throw std::invalid_argument("turn offsets decrease");
}

void group_moments(const Groups& groups, const double* rewards, const double* votes, const MomentArrays& out, int threads) {
  groups.validate();
  for_groups(groups, threads, [&](int64_t group) {
    const int64_t *first = groups.order + groups.offsets[group], *last = groups.order + groups.offsets[group + 1];
    double minimum = std::numeric_limits<double>::infinity(), weight = 0.0;
    int64_t voters = 0;
    for (const int64_t* row = first; row != last; ++row) {
      if (votes[*row] == 0.0) continue;
      minimum = smaller(minimum, rewards[*row]);
      weight += votes[*row];
      ++voters;
    }
    double sum = 0.0, squares = 0.0;
    for (const int64_t* row = first; row != last; ++row)
      if (votes[*row] != 0.0) sum += weighted(votes[*row], rewards[*row], minimum);
    const double mean = mean_of(sum, weight);
    for (const int64_t* row = first; row != last; ++row)
      if (votes[*row] != 0.0) squares += weighted_square(votes[*row], rewards[*row], minimum, mean);
    out.minimum[group] = voters ? minimum : 0.0;
    out.weight[group] = weight;
    out.sum[group] = sum;
    out.squares[group] = squares;
    out.voters[group] = voters;
  });
}

void turn_moments(const Groups& groups, const double* rewards, const double* votes, const int64_t* turn_counts,
                  const double* minimum, const TurnTable& out, int threads) {
  groups.validate();
  out.validate(groups.count);
  for_groups(groups, threads, [&](int64_t group) {
    const int64_t base = out.offsets[group], turns = out.offsets[group + 1] - base;
    for (int64_t turn = 0; turn < turns; ++turn) out.count[base + turn] = out.sum[base + turn] = 0.0;
    // A row of k turns reached turns 0 .. k-1: count it at its last turn, then sum from the end.
    for (int64_t i = groups.offsets[group]; i < groups.offsets[group + 1]; ++i) {
      const int64_t row = groups.order[i], reached = std::min(turn_counts[row], turns);
      if (votes[row] == 0.0 || reached <= 0) continue;
      out.count[base + reached - 1] += votes[row];
      out.sum[base + reached - 1] += weighted(votes[row], rewards[row], minimum[group]);
    }
    for (int64_t turn = turns - 1; turn > 0; --turn) {
      out.count[base + turn - 1] += out.count[base + turn];
      out.sum[base + turn - 1] += out.sum[base + turn];
    }
  });
}

}  // namespace fastadv
