// Reward minus the group's baseline, one number a rollout, in float64.
//
// From the rewards: one launch, a block a group. Reads 20 bytes a row with float32 rewards (order, index, reward), 8 more of votes
// and 1 of `include` where there are any, up to four times, all but the first from the cache; writes 4 (8 of float64).
// From moments: one launch. Reads 33 bytes a row and the moments of its group, which stay in the cache.
#include "cuda/advantage_rule.h"
#include "cuda/groups.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kThreads) group_advantages_kernel(AdvantageInputs in, AdvantageRule rule, Out* __restrict__ advantages) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  advantages[row] = has_group(in, row) ? Out(group_advantage(rule, context_of(in, rule, row))) : Out(NAN);
}

template <int kThreads, class Out>
__global__ void __launch_bounds__(kThreads, kBlocks)
fused_group_advantages_kernel(Voters voters, AdvantageRule rule, Out* __restrict__ advantages) {
  const Group group(voters, blockIdx.x);
  if (!group.consistent<kThreads>()) return group.for_rows_in_doubt<kThreads>([&](int64_t row) { advantages[row] = Out(NAN); });
  const GroupMoments moments = group.moments<kThreads>(rule.scaled);
  for (int64_t place = group.first + threadIdx.x; place < group.last; place += kThreads) {
    const Member m = group.member(place);
    advantages[m.row] = Out(group_advantage(rule, row_context(rule, moments, moments, m.reward, m.reward, m.vote, m.included)));
  }
}

}  // namespace

template <class Out>
void group_advantages(const Launcher& launcher, const AdvantageInputs& in, const AdvantageRule& rule, Out* advantages) {
  const unsigned blocks = launcher.blocks(in.rows, kThreads);
  if (!blocks) return;
  group_advantages_kernel<Out><<<blocks, kThreads, 0, launcher.stream()>>>(in, rule, advantages);
  launcher.launched();
}

template <class Out>
void group_advantages(const Launcher& launcher, const Voters& voters, const AdvantageRule& rule, Out* advantages) {
  const unsigned blocks = launcher.blocks(voters.groups, 1);
  if (!blocks) return;
  if (many_threads(voters.rows, voters.groups)) {
    fused_group_advantages_kernel<kManyThreads, Out><<<blocks, kManyThreads, 0, launcher.stream()>>>(voters, rule, advantages);
  } else {
    fused_group_advantages_kernel<kFewThreads, Out><<<blocks, kFewThreads, 0, launcher.stream()>>>(voters, rule, advantages);
  }
  launcher.launched();
}

template void group_advantages(const Launcher&, const AdvantageInputs&, const AdvantageRule&, float*);
template void group_advantages(const Launcher&, const AdvantageInputs&, const AdvantageRule&, double*);
template void group_advantages(const Launcher&, const Voters&, const AdvantageRule&, float*);
template void group_advantages(const Launcher&, const Voters&, const AdvantageRule&, double*);

}  // namespace fastadv::cuda
