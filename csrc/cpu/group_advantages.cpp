// Reward minus the group's baseline, one number a rollout.
#include "cpu/advantage_rule.h"
#include "cpu/parallel.h"

namespace fastadv {

template <class Out>
void group_advantages(const AdvantageInputs& in, const AdvantageRule& rule, Out* advantages, int threads) {
  validate(in);
  for_row_blocks(in.rows, threads, [&](int64_t row) { advantages[row] = Out(group_advantage(rule, context_of(in, rule, row))); });
}

template void group_advantages(const AdvantageInputs&, const AdvantageRule&, float*, int);
template void group_advantages(const AdvantageInputs&, const AdvantageRule&, double*, int);

}  // namespace fastadv
