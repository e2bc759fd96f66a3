// What the kernels of the policy loss are given: a launch takes it by value.
#pragma once

#include <cstdint>

#include "cuda/rows.h"
#include "fastadv/corrections.h"
#include "fastadv/policy_loss.h"

namespace fastadv::cuda {

enum class AdvantageKind : int { kToken = 0, kRow = 1, kSegment = 2 };

// What is summed over the batch; fastadv.ops._policy_loss_kernel.SUMS has the names in this order.
enum PolicyLossSum : int {
  kLossSum, kPolicySum, kClipped, kBounded, kSaturated, kNegativeLogRatio, kTokens, kKlSum, kEntropySum, kIsWeight, kRejected,
  kCapped, kMissing, kPolicyLossSums
};

// Null stands for absence.
struct PolicyLoss {
  Rows rows;
  // Per token, all in one dtype.
  const void* log_probs;
  const void* old_log_probs;
  const void* token_advantages;
  const void* token_weights;
  const void* is_weights;
  const void* rollout_log_probs;
  const void* ref_log_probs;
  const void* entropy;
  // Per token, in dtypes of their own.
  const uint8_t* mask;
  const int32_t* turn_ids;
  // Per row or segment.
  const float* advantages;         // [rows] or the segment table
  const int64_t* segment_offsets;  // [rows + 1]
  const double* row_weights;
  const int64_t* row_tokens;       // each row's sum is divided by it
  const float* row_log_ratios;     // of sequence losses
  const float* row_is_weights;
  const double* scale;             // one number, which everything is multiplied by
  int64_t segments;                // of the segment table

  // Written, per token: bfloat16 if the inputs are, else float.
  void* gradient;
  void* entropy_gradient;
  float* token_losses;
  float* shared;     // policy gradients that the tokens of a row share; `gradient` is then without them
  double* sums;      // [kPolicyLossSums]
  float* loss;       // one number, sums[kLossSum]
  double* partials;  // [kPolicyLossSums, blocks]
  unsigned* counter; // 0 between launches

  AdvantageKind kind;  // of the advantages: per token, row or segment
  LossParameters parameters;
  CorrectionParameters correction;
  KlParameters kl;
  float entropy_coef;
  int steps;     // of a block
  bool by_row;   // anything is per row
  bool aligned;  // 16 bytes can be moved at a time
};

}  // namespace fastadv::cuda
