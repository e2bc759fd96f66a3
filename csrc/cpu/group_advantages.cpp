// Reward minus the group's baseline, one number a rollout.
#include "cpu/advantage_rule.h"
#include "cpu/parallel.h"

namespace fastadv {

template <class Out>
void group_advantages(const AdvantageInputs& in, const AdvantageRule& rule, Out* advantages, int threads) {
  validate(in);
  for_row_blocks(in.rows, threads, [&](int64_t row) {
    const RowContext context(in, rule, row);
    if (context.settled) {
      advantages[row] = Out(context.settled_value);
      return;
    }
    double advantage = in.rewards[row];
    if (rule.baseline != Baseline::kNone)
      advantage = context.reward - group_baseline(rule.baseline, context.mean, context.left_out, context.vote);
    advantages[row] = Out(context.scaled(advantage));
  });
}

template void group_advantages(const AdvantageInputs&, const AdvantageRule&, float*, int);
template void group_advantages(const AdvantageInputs&, const AdvantageRule&, double*, int);

}  // namespace fastadv
