// Reward minus the baseline of the turn reached, one number a segment.
#include "cpu/advantage_rule.h"

namespace fastadv {

template <class Out>
void turn_advantages(const AdvantageInputs& in, const AdvantageRule& rule, const TurnTable& table, const int64_t* offsets,
                     double kappa, bool shrink_to_mean, Out* segments, int threads) {
  validate(in);
  table.validate(in.groups);
  for (int64_t row = 0; row < in.rows; ++row) {
    const int64_t turns = offsets[row + 1] - offsets[row], table_turns = table.offsets[in.group[row] + 1] - table.offsets[in.group[row]];
    if (turns < 0 || turns > table_turns) throw std::invalid_argument("a row has more turns than its group's table");
  }
  for_row_blocks(in.rows, threads, [&](int64_t row) {
    const RowContext context = context_of(in, rule, row);
    Out* out = segments + offsets[row];
    const int64_t turns = offsets[row + 1] - offsets[row], base = table.offsets[in.group[row]];
    const double target = turn_target(context, shrink_to_mean);
    for (int64_t turn = 0; turn < turns; ++turn)
      out[turn] = Out(turn_advantage(rule, context, table.count[base + turn], table.sum[base + turn], target, kappa));
  });
}

template void turn_advantages(const AdvantageInputs&, const AdvantageRule&, const TurnTable&, const int64_t*, double, bool, float*, int);
template void turn_advantages(const AdvantageInputs&, const AdvantageRule&, const TurnTable&, const int64_t*, double, bool, double*, int);

}  // namespace fastadv
