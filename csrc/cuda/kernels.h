// The CUDA kernels, as bindings_cuda.cpp calls them. Each op has its own file beside this one. Pointers are to contiguous
// memory of the launcher's device; sizes come from the caller, who checked them. Nothing here waits for a kernel, so a value
// without a meaning leaves NaN where it would have counted.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/policy_loss.h"
#include "cuda/rows.h"
#include "fastadv/baselines.h"
#include "fastadv/gram.h"
#include "fastadv/log_softmax.h"

namespace fastadv::cuda {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kUInt8 = 3, kInt32 = 4, kInt64 = 5 };  // as in cpu/token_view.h

// ---- device.cu: throws where the launcher's device has no code in this build
void check_device(const Launcher& launcher);

// ---- segments.cu: values of a segment table [size] at tokens
template <class T>  // float or double
void segment_tokens(const Launcher& launcher, const Rows& rows, const T* table, int64_t size, const int64_t* offsets, DType ids,
                    const void* turn_ids, const uint8_t* mask, T* tokens);

// ---- turn_ids.cu: numbers of the mask's runs, -2 at a fraction and in no row; and 1 + the largest turn id of each row, -1 if one is below -1 or the row is none
constexpr int kTurnIdsBlock = 2048;  // tokens; `runs` has a number for each block of them
void turn_ids_from_mask(const Launcher& launcher, const Rows& rows, const uint8_t* mask, int32_t* runs, int32_t* turn_ids);
void turn_counts(const Launcher& launcher, const Rows& rows, DType ids, const void* turn_ids, int64_t* counts);

// ---- token_counts.cu: tokens with a non-zero mask in each row, a negative number where one is a fraction or the row is none
void token_counts(const Launcher& launcher, const Rows& rows, const uint8_t* mask, int64_t* counts);

// ---- moments.cu
constexpr int kFloat64 = 6;  // beside the numbers of DType
struct RowValues {           // a number a row, which is float64 once it is read
  const void* data = nullptr;
  int dtype = kFloat64;
};
struct Voters {
  int64_t rows = 0, groups = 0;
  const int64_t* index = nullptr;    // [rows]: the group that a row says it is in; null: not asked
  const int64_t* order = nullptr;    // [rows]: rows by group
  const int64_t* offsets = nullptr;  // [groups + 1] into order
  RowValues rewards;
  RowValues votes;                   // null: one each
  const uint8_t* include = nullptr;  // [rows] or null
  bool survivors = false;            // only rows with `include` vote
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
};
void group_moments(const Launcher& launcher, const Voters& voters, const MomentArrays& out);
void turn_moments(const Launcher& launcher, const Voters& voters, const int64_t* turn_counts, const double* minimum,
                  const TurnTable& out);

// ---- group_advantages.cu and turn_advantages.cu: computed in double, written as float or double; from moments, or from
// the rewards at once
struct AdvantageInputs {
  int64_t rows = 0, groups = 0;
  const int64_t* group = nullptr;    // [rows]
  const double* rewards = nullptr;   // [rows]
  const double* left_out = nullptr;  // [rows]: the reward that the moments hold for the row
  const double* votes = nullptr;     // [rows]: its votes there
  const uint8_t* include = nullptr;  // [rows] or null: excluded rows get 0
  MomentArrays mean, spread;         // of the populations that the mean and the scale are over
};
struct TurnRule {
  double kappa = 0.0;
  bool shrink_to_mean = false;
};
struct SegmentIndex {
  const int64_t* offsets = nullptr;  // [rows + 1]: each row's first segment
  int64_t count = 0;
};
template <class Out>
void group_advantages(const Launcher& launcher, const AdvantageInputs& in, const AdvantageRule& rule, Out* advantages);
template <class Out>
void group_advantages(const Launcher& launcher, const Voters& voters, const AdvantageRule& rule, Out* advantages);
template <class Out>
void turn_advantages(const Launcher& launcher, const AdvantageInputs& in, const AdvantageRule& rule, const TurnTable& table,
                     const SegmentIndex& segments, const TurnRule& turns, Out* values);
template <class Out>
void turn_advantages(const Launcher& launcher, const Voters& voters, const AdvantageRule& rule, const SegmentIndex& segments,
                     const TurnRule& turns, Out* values);

// ---- sequence_log_ratios.cu, policy_loss.cu, policy_gradients.cu
struct RowLogRatios {  // of one row
  double sum;          // of log_prob - old_log_prob
  double minimum;      // the smallest, 0 where none is negative
  int64_t tokens, missing;
};
struct SequenceLogRatios {  // each [rows]
  double* sum;
  double* minimum;
  int64_t* tokens;
  int64_t* missing;
};
// `parts` blocks share each row; where that is more than one, they need `partials` [rows, parts] and `counter`, 0 between launches.
void sequence_log_ratios(const Launcher& launcher, const Rows& rows, DType dtype, const void* log_probs, DType old_dtype,
                         const void* old_log_probs, const uint8_t* mask, bool skip_missing, unsigned parts,
                         const SequenceLogRatios& out, RowLogRatios* partials, unsigned* counter);
// `dtype`: of all per-token inputs. The caller fills all but by_row, aligned and steps.
void policy_loss(const Launcher& launcher, DType dtype, Loss loss, PolicyLoss arguments, unsigned blocks);
// gradient = what is there, if `add`, + the mean of the row's `shared` over its tokens that count, at those.
void share_gradients(const Launcher& launcher, const Rows& rows, const uint8_t* mask, const float* token_weights,
                     const float* shared, bool add, float* gradient);
// gradient[count] times a number on the device. Where that is 1, nothing else is read.
void scale_gradient(const Launcher& launcher, int64_t count, DType dtype, void* gradient, const float* factor);

// ---- token_log_probs.cu, logits_gradient.cu: log-softmax of rows of logits
struct LogitsView {  // [rows / inner, inner, vocab], the vocabulary contiguous
  void* data;
  DType dtype;
  int64_t rows, vocab, inner, outer_stride, inner_stride;
};
struct LogitsInputs {
  LogitsView logits;
  const int64_t* labels;               // [rows]: column, kNoLabel or kSkippedRow; any other gives NaN
  const double* inverse_temperatures;  // [rows] or null
  double inverse_temperature;          // of every row, where there is no array
  float softcap, inverse_softcap;      // 0: none
};
struct LogProbsOutputs {  // each [rows]; entropy, sum_p2 and state 1 and 2 are not computed where entropy is null
  float *log_probs, *entropy, *sum_p2;
  double* state;  // [3, rows] or [1, rows]: lse, entropy, sum_p2, what the gradient needs
};
struct LogProbsState {  // [rows]; entropy and sum_p2 may be null where nothing flows back from them
  const double *lse, *entropy, *sum_p2;
};
struct LogProbsGradients {  // each [rows]; null: nothing flows back from it
  const float *log_probs, *entropy, *sum_p2;
};
// Numbers of scratch with which rows are split over blocks, since there are few of them; 0: a block a row is enough. The
// results are the same to the bit with and without (null).
int64_t row_sums_scratch(int64_t rows, int64_t vocab);
// statistics [5, rows]: the label's logit (-inf: none), maximum, s, w, q (see fastadv/log_softmax.h)
void row_statistics(const Launcher& launcher, const LogitsInputs& in, double* scratch, double* statistics);
// statistics [parts, 5, rows], merged in order of parts; results [4, rows]: log_prob, entropy, sum_p2, lse
void finish_statistics(const Launcher& launcher, int64_t parts, int64_t rows, const double* statistics, double* results);
void token_log_probs(const Launcher& launcher, const LogitsInputs& in, double* scratch, const LogProbsOutputs& out);
// `gradient` may be the logits themselves. That of float32 logits may be bfloat16, else both have one type.
void logits_gradient(const Launcher& launcher, const LogitsInputs& in, const LogProbsState& state,
                     const LogProbsGradients& upstream, const LogitsView& gradient);

// ---- multi_dot_gram.cu: inner products of all pairs of at most kGramVectors vectors of n elements, [count, count]
constexpr int kGramBlock = 16384;  // elements; `partials` has a number a pair for each block of them
void multi_dot_gram(const Launcher& launcher, DType dtype, int count, const void* const* vectors, int64_t n, double* partials,
                    double* gram);

// ---- count_sketch.cu: adds a piece of a parameter, which begins at the offsets, to its sketches, [copies, size]
struct SketchPiece {
  int64_t rows, columns, row_offset, column_offset;
};
void count_sketch(const Launcher& launcher, const SketchPiece& piece, DType dtype, const void* values, uint64_t key, float scale,
                  int64_t copies, int64_t size, int64_t* out);

}  // namespace fastadv::cuda
