// Reward minus the group's baseline, one number a rollout.
#include "cpu/advantage_rule.h"
#include "cpu/parallel.h"

namespace fastadv {

void group_advantages(const AdvantageInputs& in, const AdvantageRule& rule, float* advantages, int threads) {
  validate(in);
  for_row_blocks(in.rows, threads, [&](int64_t row) {
    const RowContext context(in, rule, row);
    if (context.settled) {
      advantages[row] = context.settled_value;
      return;
    }
    double advantage = in.rewards[row];
    if (rule.baseline != Baseline::kNone)
      advantage = context.reward - group_baseline(rule.baseline, context.mean, context.left_out, context.vote);
    advantages[row] = float(context.scaled(advantage));
  });
}

}  // namespace fastadv
