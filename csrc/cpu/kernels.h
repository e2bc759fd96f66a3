// The CPU kernels, as bindings_cpu.cpp calls them. Each op has its own file beside this one. Pointers to per-row arrays are
// contiguous; per-token arrays are views. Sizes and offsets are checked here; what they point to is the caller's promise.
#pragma once

#include <cstdint>

#include "cpu/token_view.h"
#include "fastadv/baselines.h"
#include "fastadv/corrections.h"
#include "fastadv/gram.h"
#include "fastadv/log_softmax.h"
#include "fastadv/policy_loss.h"
#include "fastadv/returns.h"

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
  const int64_t* order = nullptr;    // [rows]: rows sorted by group, and in their order within one
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
  int64_t size = 0;  // of count and sum
  void validate(int64_t groups) const;
};
void group_moments(const Groups& groups, const double* rewards, const double* votes, const MomentArrays& out, int threads);
void turn_moments(const Groups& groups, const double* rewards, const double* votes, const int64_t* turn_counts,
                  const double* minimum, const TurnTable& out, int threads);

// ---- group_advantages.cpp and turn_advantages.cpp: computed in double, written as float or double
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

// ---- optimal_token_baseline.cpp
struct TokenBaselineInputs {
  Rows rows;
  Groups groups;
  TokenView mask, returns, log_probs, sum_p2, is_weights;  // the last may be absent
  bool compact = false;    // positions count the tokens of the mask only, and rows without one are not there
  bool zero_tail = true;   // no baseline for the longest row beyond the second longest
  double eps = 1e-8;       // added to the weights
};
int optimal_token_baseline(const TokenBaselineInputs& in, float* advantages, int threads);

// ---- sequence_log_ratios.cpp: per row, over the tokens of the mask
struct SequenceLogRatios {        // each [rows]
  double* sum = nullptr;          // of log_prob - old_log_prob
  double* minimum = nullptr;      // the smallest, 0 where none is negative
  int64_t* tokens = nullptr;
  int64_t* missing = nullptr;     // tokens whose old log-prob is NaN: left out of sum and minimum if `skip_missing`
};
int sequence_log_ratios(const Rows& rows, const TokenView& log_probs, const TokenView& old_log_probs, const TokenView& mask,
                        bool skip_missing, const SequenceLogRatios& out, int threads);

// ---- whiten.cpp: count, mean and summed squared distance from it of the values of the mask, [3]; and (value - mean) * scale
int masked_spread(const Rows& rows, const TokenView& values, const TokenView& mask, double* spread, int threads);
int standardize(const Rows& rows, const TokenView& values, const TokenView& mask, const double* mean_and_scale, float* out, int threads);

// ---- token_returns.cpp: rewards to go, or GAE where there are values
struct TokenReturnsInputs {
  Rows rows;
  TokenView mask, token_rewards, values;   // the last two may be absent
  const double* row_rewards = nullptr;     // [rows] or null: of each row's last token that counts
  const double* row_baselines = nullptr;   // [rows] or null; without values only
};
struct TokenReturnsOutputs {
  float* returns = nullptr;     // [tokens]
  float* advantages = nullptr;  // [tokens]; where there are values or baselines
  double* spread = nullptr;     // [3]: of the advantages, which without values and baselines are the returns
};
int token_returns(const TokenReturnsInputs& in, const ReturnRule& rule, const TokenReturnsOutputs& out, int threads);

// ---- policy_loss.cpp
enum class AdvantageKind : int { kToken = 0, kRow = 1, kSegment = 2 };
struct PolicyLossInputs {
  Rows rows;
  TokenView log_probs, old_log_probs, mask, token_weights, is_weights, turn_ids;  // absent ones are null
  TokenView rollout_log_probs, ref_log_probs, entropy;
  const float* row_log_ratios = nullptr;   // [rows]: the rollouts' log-ratios, for sequence losses
  const float* row_is_weights = nullptr;   // [rows] or null: importance weights of whole rollouts
  AdvantageKind advantage_kind = AdvantageKind::kToken;
  TokenView token_advantages;
  const float* advantages = nullptr;       // [rows] or the segment table
  const int64_t* segment_offsets = nullptr;  // [rows + 1]
  const double* row_weights = nullptr;     // [rows] or null
  const int64_t* row_tokens = nullptr;     // [rows] or null: divide each row by its number of tokens
  double scale = 1.0;                      // everything else that the sum is multiplied by
};
struct PolicyLossRule {
  Loss loss = Loss::kPpo;
  LossParameters parameters;
  CorrectionParameters correction;
  KlParameters kl;
  float entropy_coef = 0.0f;
  bool shared_gradient = false;  // tokens of a rollout share their policy gradients evenly (GSPO through the mean log-ratio)
};
struct PolicyLossOutputs {
  TokenView gradient, entropy_gradient;  // null: not wanted
  float* token_losses = nullptr;         // null: not wanted
};
// Writes kPolicyLossSums numbers to `sums`, and to `means`, if that is there, what they are as metrics; returns the faults.
int policy_loss(const PolicyLossInputs& in, const PolicyLossRule& rule, const PolicyLossOutputs& out, double* sums, float* means,
                int threads);

// ---- token_log_probs.cpp: log-softmax of rows of logits
constexpr int kLeadingDims = 8;
struct LogitsView {  // rows are counted through all leading dimensions
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0, vocab = 0;
  int64_t stride = 1;  // elements from one logit of a row to the next
  int dims = 0;        // leading dimensions
  int64_t sizes[kLeadingDims] = {}, strides[kLeadingDims] = {};
  int64_t row(int64_t r) const {  // index of the row's first element
    int64_t element = 0;
    for (int d = dims - 1; d >= 0; r /= sizes[d--]) element += r % sizes[d] * strides[d];
    return element;
  }
};
struct LogitsInputs {
  LogitsView logits;
  const int64_t* labels = nullptr;  // [rows]: column, kNoLabel or kSkippedRow; any other gives NaN
  const double* inverse_temperatures = nullptr;  // [rows] or null
  double inverse_temperature = 1.0;              // of every row, where there is no array
  float softcap = 0.0f;                          // 0: none
  double temperature_factor(int64_t row) const { return inverse_temperatures ? inverse_temperatures[row] : inverse_temperature; }
};
struct LogProbsOutputs {  // each [rows]; entropy, sum_p2 and state 1 and 2 are not computed where entropy is null
  float* log_probs = nullptr;
  float* entropy = nullptr;
  float* sum_p2 = nullptr;
  double* state = nullptr;  // [3, rows] or [1, rows]: lse, entropy, sum_p2, what the gradient needs
};
struct LogProbsGradients {  // each [rows]; null: nothing flows back from it
  const float* log_probs = nullptr;
  const float* entropy = nullptr;
  const float* sum_p2 = nullptr;
};
// statistics [5, rows]: the label's logit (-inf: none), maximum, s, w, q (see fastadv/log_softmax.h)
void row_statistics(const LogitsInputs& in, double* statistics, int threads);
// statistics [parts, 5, rows], merged in order of parts; results [4, rows]: log_prob, entropy, sum_p2, lse
void finish_statistics(int64_t parts, int64_t rows, const double* statistics, double* results);
void token_log_probs(const LogitsInputs& in, const LogProbsOutputs& out, int threads);
// `gradient` may be the logits themselves. entropy and sum_p2 may be null where nothing flows back from them.
void logits_gradient(const LogitsInputs& in, const double* lse, const double* entropy, const double* sum_p2,
                     const LogProbsGradients& upstream, const LogitsView& gradient, int threads);

// ---- multi_dot_gram.cpp: inner products of all pairs, [count, count]
struct GramInputs {
  int count = 0;  // 1, ..., kGramVectors
  TokenView vectors[kGramVectors];
  Rows rows;      // their elements, padded
};
void multi_dot_gram(const GramInputs& in, double* gram, int threads);

// ---- count_sketch.cpp: adds a piece of a parameter to its sketches, [copies, size]
struct SketchInputs {
  TokenView values;
  Rows rows;               // those of the piece, padded
  int64_t row_offset = 0;  // where the piece begins in the parameter
  int64_t column_offset = 0;
  uint64_t key = 0;        // of the parameter
  float scale = 1.0f;      // quanta in 1
  int64_t copies = 1;
  int64_t size = 0;        // slots of a copy
};
void count_sketch(const SketchInputs& in, int64_t* out, int threads);

}  // namespace fastadv
