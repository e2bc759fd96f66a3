// The CPU kernels, as bindings_cpu.cpp calls them. Each op has its own file beside this one. Pointers to per-row arrays are
// contiguous; per-token arrays are views. Sizes and offsets are checked here; what they point to is the caller's promise.
#pragma once

#include <cstdint>

#include "cpu/token_view.h"
#include "fastadv/baselines.h"
#include "fastadv/policy_loss.h"

namespace fastadv {

// Set in the result of a kernel when a value had no meaning; the caller turns it into an error.
enum Fault : int { kFractionalMask = 1, kTurnOutOfRange = 2 };

// ---- turn_ids.cpp
int turn_ids_from_mask(const Rows& rows, const TokenView& mask, int32_t* turn_ids, int threads);

// ---- segments.cpp: 1 + the largest turn id of each row (0 where no token belongs to a turn), and table lookup
int turn_counts(const Rows& rows, const TokenView& turn_ids, int64_t* counts, int threads);
template <class T>  // float or double
int segment_tokens(const Rows& rows, const T* table, const int64_t* offsets, const TokenView& turn_ids,
                   const TokenView& mask, T* tokens, int threads);

// ---- token_counts.cpp: tokens with a non-zero mask in each row
int token_counts(const Rows& rows, const TokenView& mask, int64_t* counts, int threads);

// ---- moments.cpp
struct Groups {
  int64_t count = 0;
  int64_t rows = 0;
  const int64_t* order = nullptr;    // [rows]: rows sorted by group
  const int64_t* offsets = nullptr;  // [count + 1] into order
  void validate() const;
};
struct MomentArrays {  // each [groups]
  double* minimum = nullptr;
  double* weight = nullptr;
  double* sum = nullptr;
  double* squares = nullptr;
  int64_t* voters = nullptr;
};
struct TurnTable {  // ragged: group g's turns are [offsets[g], offsets[g + 1])
  const int64_t* offsets = nullptr;
  double* count = nullptr;
  double* sum = nullptr;
};
void group_moments(const Groups& groups, const double* rewards, const double* votes, const MomentArrays& out, int threads);
void turn_moments(const Groups& groups, const double* rewards, const double* votes, const int64_t* turn_counts,
                  const double* minimum, const TurnTable& out, int threads);

// ---- group_advantages.cpp and turn_advantages.cpp: computed in double, written as float or double
struct AdvantageRule {
  Baseline baseline = Baseline::kMean;
  Singleton singleton = Singleton::kZero;
  bool scaled = false;
  double ddof = 1.0;
  double eps = 1e-6;
  EpsForm eps_form = EpsForm::kAdd;
};
struct AdvantageInputs {
  int64_t rows = 0;
  int64_t groups = 0;
  const int64_t* group = nullptr;        // [rows]
  const double* rewards = nullptr;       // [rows]
  const double* left_out = nullptr;      // [rows]: the reward that the moments hold for the row
  const double* votes = nullptr;         // [rows]: its votes there
  const bool* include = nullptr;         // [rows] or null: excluded rows get 0
  MomentArrays mean;                     // moments of the population that the mean is over
  MomentArrays spread;                   // moments that the scale is over
};
template <class Out>
void group_advantages(const AdvantageInputs& in, const AdvantageRule& rule, Out* advantages, int threads);
template <class Out>
void turn_advantages(const AdvantageInputs& in, const AdvantageRule& rule, const TurnTable& table, const int64_t* offsets,
                     double kappa, bool shrink_to_mean, Out* segments, int threads);

// ---- policy_loss.cpp
enum class AdvantageKind : int { kToken = 0, kRow = 1, kSegment = 2 };
struct PolicyLossInputs {
  Rows rows;
  TokenView log_probs, old_log_probs, mask, token_weights, is_weights, turn_ids;  // absent ones are null
  AdvantageKind advantage_kind = AdvantageKind::kToken;
  TokenView token_advantages;
  const float* advantages = nullptr;       // [rows] or the segment table
  const int64_t* segment_offsets = nullptr;  // [rows + 1]
  const double* row_weights = nullptr;     // [rows] or null
  const int64_t* row_tokens = nullptr;     // [rows] or null: divide each row by its number of tokens
  double scale = 1.0;                      // everything else that the sum is multiplied by
};
struct PolicyLossSums {
  double loss = 0.0, clipped = 0.0, bounded = 0.0, saturated = 0.0, negative_log_ratio = 0.0, tokens = 0.0;
  int faults = 0;
};
PolicyLossSums policy_loss(const PolicyLossInputs& in, Loss loss, const LossParameters& parameters, const TokenView& gradient,
                           float* token_losses, int threads);

}  // namespace fastadv
