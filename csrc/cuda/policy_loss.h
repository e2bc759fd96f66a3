// What the kernels of the policy loss are given: a launch takes it by value.
#pragma once

#include <cstdint>

#include "cuda/rows.h"
#include "fastadv/corrections.h"
#include "fastadv/policy_loss.h"

namespace fastadv::cuda {

enum class AdvantageKind : int { kToken = 0, kRow = 1, kSegment = 2 };

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
  const double* divisor;           // one number: everything is multiplied by scale_of(numerator, *divisor)
  int64_t segments;                // of the segment table

  // Written, per token: bfloat16 if the inputs are, else float.
  void* gradient;
  void* entropy_gradient;
  float* token_losses;
  float* shared;     // policy gradients that the tokens of a row share; `gradient` is then without them
  double* sums;      // [kPolicyLossSums]
  float* loss;       // one number, sums[kLossSum]
  float* means;      // [kPolicyLossSums]: the sums as metrics
  double* partials;  // [kPolicyLossSums, blocks]
  unsigned* counter; // 0 between launches

  AdvantageKind kind;  // of the advantages: per token, row or segment
  LossParameters parameters;
  CorrectionParameters correction;
  KlParameters kl;
  float entropy_coef;
  double numerator;  // without a divisor, the scale itself
  int steps;     // of a block
  bool by_row;   // anything is per row
  bool aligned;  // 16 bytes can be moved at a time
};

}  // namespace fastadv::cuda
