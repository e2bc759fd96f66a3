// The policy loss of every token, its gradient, and the sums that metrics are made of, in one pass and one launch.
//
// Plain losses read 4 bytes a token each of log_probs, old_log_probs and advantages (4 of turn_ids; nothing where advantages
// are per row) and 1 of the mask, and write 4 of the gradient: 17 bytes in float32, 9 in bfloat16. Each optional input adds 4
// or 2. What rows have in common is looked up once a thread and row.
//
// A block takes neighbouring tokens, its threads 16 bytes at a time of each input. Where a thread's tokens lie in several rows,
// at the end of the batch, and where pointers are not aligned, it takes them one by one. The same formulas run on either way,
// so a token's gradient does not depend on where it lies.
#include "cuda/policy_tokens.h"

#include "cuda/kernels.h"
#include "cuda/sums.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// The warp's sum of one of four counts.
__device__ unsigned warp_count(unsigned four, int which) { return __reduce_add_sync(kWholeWarp, four >> 8 * which & 0xffu); }

// Adds a thread's sums to those of its block, and the last block all of them, in float64 and in the order of blocks.
template <bool kExtended>
__device__ void finish(const PolicyLoss& a, const PolicySums& sums) {
  __shared__ double of_warps[kWarps][kPolicyLossSums];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, blocks = gridDim.x;
  double total[kPolicyLossSums] = {};
  total[kLossSum] = warp_sum(sums.loss);
  total[kPolicySum] = kExtended ? warp_sum(sums.policy) : total[kLossSum];
  total[kNegativeLogRatio] = warp_sum(sums.negative_log_ratio);
  total[kTokens] = warp_count(sums.counts, 0);
  total[kClipped] = warp_count(sums.counts, 1);
  total[kBounded] = warp_count(sums.counts, 2);
  total[kSaturated] = warp_count(sums.counts, 3);
  if constexpr (kExtended) {
    total[kKlSum] = warp_sum(sums.kl);
    total[kEntropySum] = warp_sum(sums.entropy);
    total[kIsWeight] = warp_sum(sums.is_weight);
    total[kRejected] = warp_count(sums.weighed, 0);
    total[kCapped] = warp_count(sums.weighed, 1);
    total[kMissing] = warp_count(sums.weighed, 2);
  }
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kPolicyLossSums; ++k) of_warps[warp][k] = total[k];
  }
  __syncthreads();
  if (threadIdx.x < kPolicyLossSums) {
    double of_block = 0.0;
    for (int w = 0; w < kWarps; ++w) of_block += of_warps[w][threadIdx.x];
    a.partials[threadIdx.x * int64_t{blocks} + blockIdx.x] = of_block;
  }

  if (!last_block(a.counter)) return;
  double* of_all = of_warps[0];  // what was there has been read
  for (int k = warp; k < kPolicyLossSums; k += kWarps) {
    double of_column = 0.0;
    for (int block = lane; block < blocks; block += kWarp) of_column += __ldcg(a.partials + k * int64_t{blocks} + block);
    of_column = warp_sum(of_column);
    if (lane == 0) of_all[k] = of_column;
  }
  __syncthreads();
  if (threadIdx.x >= kPolicyLossSums) return;
  const auto k = PolicyLossSum(threadIdx.x);
  a.sums[k] = of_all[k];
  if (a.means) a.means[k] = metric_of(k, of_all[k], of_all[kTokens]);
  if (a.loss && k == kLossSum) *a.loss = float(of_all[k]);
}

// Tokens that a thread takes at once: 16 bytes of each input. Eight tokens of eight inputs would not fit into the registers.
template <bool kExtended, class T>
__host__ __device__ constexpr int tokens_at_once() {
  return kExtended ? 4 : kLoadBytes / sizeof(T);
}

// Blocks of a processor at a time: as many as their registers allow without a spill on any architecture.
template <Loss kLoss, bool kExtended, class T>
__host__ __device__ constexpr int resident_blocks() {
  if (kExtended || sizeof(T) == 4) return kExtended ? 3 : 4;
  return kLoss == Loss::kGspo ? 2 : 3;
}

template <Loss kLoss, bool kExtended, class T>
__global__ void __launch_bounds__(kThreads, (resident_blocks<kLoss, kExtended, T>())) policy_loss_kernel(const PolicyLoss a) {
  constexpr int kTokens = tokens_at_once<kExtended, T>();
  constexpr int kBlock = kThreads * kTokens;
  const int64_t first = int64_t{blockIdx.x} * a.steps * kBlock;
  const int64_t left = a.rows.tokens > first ? a.rows.tokens - first : 0;
  const Chunk chunk{first, left < a.steps * kBlock ? int(left) : a.steps * kBlock};
  __shared__ double scale;  // a division in float64, once a block
  if (threadIdx.x == 0) scale = a.divisor ? scale_of(a.numerator, *a.divisor) : a.numerator;
  __syncthreads();
  PolicySums sums;
  Row row;
  if (chunk.count > 0) row.enter(a, scale, chunk, 0, 0);  // the same search in all threads, which the cache then knows
  for (int start = threadIdx.x * kTokens; start < chunk.count; start += kBlock) {
    if (start >= row.end) row.enter(a, scale, chunk, start, row.row);
    const bool together = a.aligned && start + kTokens <= row.end;
    if (together && add_tokens<kLoss, kExtended, T, kTokens>(a, row, chunk.first, start, sums)) continue;
    for (int at = start; at < start + kTokens && at < chunk.count; ++at) {
      if (at >= row.end) row.enter(a, scale, chunk, at, row.row);
      add_tokens<kLoss, kExtended, T, 1>(a, row, chunk.first, at, sums);
    }
  }
  finish<kExtended>(a, sums);
}

template <bool kExtended, class T>
void launch(const Launcher& launcher, Loss loss, PolicyLoss a, unsigned blocks) {
  const int64_t per_step = int64_t{blocks} * kThreads * tokens_at_once<kExtended, T>();
  a.steps = int((a.rows.tokens + per_step - 1) / per_step);
  if (a.steps * tokens_at_once<kExtended, T>() > kThreadTokens) throw std::invalid_argument("policy_loss: too few blocks");
  const auto start = [&](auto kernel) { kernel<<<blocks, kThreads, 0, launcher.stream()>>>(a); };
  switch (loss) {
    case Loss::kReinforce: start(policy_loss_kernel<Loss::kReinforce, kExtended, T>); break;
    case Loss::kPpo: start(policy_loss_kernel<Loss::kPpo, kExtended, T>); break;
    case Loss::kCispo: start(policy_loss_kernel<Loss::kCispo, kExtended, T>); break;
    case Loss::kSapo: start(policy_loss_kernel<Loss::kSapo, kExtended, T>); break;
    case Loss::kGspo: start(policy_loss_kernel<Loss::kGspo, kExtended, T>); break;
  }
  launcher.launched();
}

template <class T>
void launch(const Launcher& launcher, Loss loss, const PolicyLoss& a, unsigned blocks) {
  const bool extended = a.token_weights || a.is_weights || a.rollout_log_probs || a.ref_log_probs || a.entropy ||
                        a.row_is_weights || a.shared;
  extended ? launch<true, T>(launcher, loss, a, blocks) : launch<false, T>(launcher, loss, a, blocks);
}

}  // namespace

void policy_loss(const Launcher& launcher, DType dtype, Loss loss, PolicyLoss a, unsigned blocks) {
  a.by_row = a.kind != AdvantageKind::kToken || a.row_weights || a.row_tokens || a.row_log_ratios || a.row_is_weights;
  a.aligned = true;
  for (const void* p : {a.log_probs, a.old_log_probs, a.token_advantages, a.token_weights, a.is_weights, a.rollout_log_probs,
                        a.ref_log_probs, a.entropy, static_cast<const void*>(a.mask), static_cast<const void*>(a.turn_ids),
                        static_cast<const void*>(a.gradient), static_cast<const void*>(a.entropy_gradient),
                        static_cast<const void*>(a.token_losses), static_cast<const void*>(a.shared)})
    a.aligned = a.aligned && aligned(p);
  switch (dtype) {
    case DType::kFloat32: return launch<float>(launcher, loss, a, blocks);
    case DType::kBFloat16: return launch<__nv_bfloat16>(launcher, loss, a, blocks);
    default: return launch<__half>(launcher, loss, a, blocks);
  }
}

}  // namespace fastadv::cuda
