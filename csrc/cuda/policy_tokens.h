// The policy loss of a few neighbouring tokens of one row. For kernels only: nvcc compiles this.
#pragma once

#include "cuda/policy_loss.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

// The tokens of a block, [first, first + count): few enough for 32 bits from `first` on.
struct Chunk {
  int64_t first;
  int count;
};

// The row that a thread is in, and what all tokens of it have in common.
struct Row {
  int64_t row;
  int end;      // of its part of the chunk
  bool counts;  // its weight is not 0
  float scale, advantage, log_ratio, is_weight;
  const float* table;  // advantages of its segments
  int turns;

  // The row of the chunk's token `at`, which lies in row `least` or behind it if it is in any. `of_all`: the batch's scale.
  __device__ void enter(const PolicyLoss& a, const double& of_all, const Chunk& chunk, int at, int64_t least) {
    row = 0;
    end = chunk.count;
    bool held = true;
    if (a.by_row) {
      const int64_t token = chunk.first + at;
      const RowPlace place = a.rows.place(a.rows.row_of(token, least, a.rows.count - 1), token);
      row = place.row;
      held = place.held;
      if (place.until - chunk.first < end) end = int(place.until - chunk.first);
    }
    const double weight = a.row_weights ? a.row_weights[row] : 1.0;
    counts = weight != 0.0 || !held;
    scale = float(weight * of_all);
    if (a.row_tokens) scale = scale / float(a.row_tokens[row] > 1 ? a.row_tokens[row] : 1);
    if (!held) scale = NAN;  // of a token in no row nobody knows what it counts for
    advantage = a.kind == AdvantageKind::kRow ? a.advantages[row] : 0.0f;
    log_ratio = a.row_log_ratios ? a.row_log_ratios[row] : 0.0f;
    is_weight = a.row_is_weights ? a.row_is_weights[row] : 1.0f;
    if (a.kind == AdvantageKind::kSegment) {
      const Segments of_row = row_segments(a.segment_offsets, row, a.segments);
      table = a.advantages + of_row.first;
      turns = int(of_row.count < INT32_MAX ? of_row.count : INT32_MAX);
    }
  }
};

// Gradients by inputs of a type: of float16, they are float32 until the upstream gradient has multiplied them.
template <class T>
struct GradientOf {
  using Type = float;
};
template <>
struct GradientOf<__nv_bfloat16> {
  using Type = __nv_bfloat16;
};

// What a thread's tokens add up to. Four counts are the bytes of one integer: a thread has at most kThreadTokens.
constexpr int kThreadTokens = 255;

struct PolicySums {
  float loss = 0.0f, negative_log_ratio = 0.0f;
  unsigned counts = 0;  // tokens, clipped, bounded, saturated
  // 0 but in extended losses.
  float policy = 0.0f, kl = 0.0f, entropy = 0.0f, is_weight = 0.0f;
  unsigned weighed = 0;  // rejected, capped, missing
};

// One token in four counts. What counts in the second counts in the first.
__device__ inline unsigned four_counts(bool a, bool b, bool c, bool d) {
  const unsigned low = b ? 0x0101u : a ? 1u : 0u, high = c ? 0x10000u : 0u;
  return low + (d ? high + 0x1000000u : high);
}

// N neighbours of a per-token input, `other` where it is absent.
template <class T, int N>
__device__ Vector<T, N> load_input(const void* from, int64_t first, int at, float other) {
  if (from) return load_vector<N>(static_cast<const T*>(from) + first + at);
  Vector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.values[i] = from_float<T>(other);
  return v;
}

template <class Out, int N>
__device__ void store_output(void* to, int64_t first, int at, const float (&values)[N]) {
  if (!to) return;
  Vector<Out, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.values[i] = from_float<Out>(values[i]);
  store_vector(static_cast<Out*>(to) + first + at, v);
}

// Advantages of N neighbours. What a turn that the table lacks means nobody knows, as of a fraction in the mask.
template <class T, int N>
__device__ void load_advantages(const PolicyLoss& a, const Row& row, int64_t first, int at, Vector<uint8_t, N>& mask,
                                float (&advantages)[N]) {
  if (a.kind == AdvantageKind::kToken) {
    const auto given = load_vector<N>(static_cast<const T*>(a.token_advantages) + first + at);
#pragma unroll
    for (int i = 0; i < N; ++i) advantages[i] = to_float(given.values[i]);
  } else if (a.kind == AdvantageKind::kRow) {
#pragma unroll
    for (int i = 0; i < N; ++i) advantages[i] = row.advantage;
  } else {
    const auto turns = load_vector<N>(a.turn_ids + first + at);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int turn = turns.values[i];
      const bool known = turn >= 0 && turn < row.turns;
      advantages[i] = known ? row.table[turn] : 0.0f;
      if (turn != -1 && !known && mask.values[i]) mask.values[i] = kFractional;
    }
  }
}

struct TokenOutputs {
  float loss, gradient, shared, entropy_gradient;
};

// The inputs of one token beside its own and the old log-prob and the advantage; 1 or 0 where they are absent.
struct TokenOptions {
  float weight, is_weight, rollout_log_prob, ref_log_prob, entropy;
};

// One token that is counted, or replaced by a token of zeros before any arithmetic, so that whatever lies there (NaN, inf,
// garbage) reaches neither value, gradient nor metric. kExtended: there is anything beside log-probs, advantages and mask.
template <Loss kLoss, bool kExtended>
__device__ TokenOutputs add_token(const PolicyLoss& a, const Row& row, bool on, float scale, float log_prob, float old_log_prob,
                                  float advantage, const TokenOptions& options, PolicySums& sums) {
  if constexpr (kExtended) on = on && options.weight != 0.0f;
  log_prob = on ? log_prob : 0.0f;
  old_log_prob = on ? old_log_prob : 0.0f;
  advantage = on ? advantage : 0.0f;
  const auto ratio = ratio_of<kLoss>(log_prob, old_log_prob, row.log_ratio, a.parameters);
  const auto term = token_term<kLoss>(ratio, log_prob, advantage, a.parameters);
  float loss = term.loss, gradient = term.gradient;
  TokenOutputs out{};
  if constexpr (kExtended) {
    // An importance weight of 0 rejects the token, even where its policy term is NaN; KL, entropy and metrics still count it.
    const float weight = options.weight;
    bool used = on;
    if (a.is_weights || a.rollout_log_probs || a.row_is_weights) {
      float correction = row.is_weight * (on ? options.is_weight : 1.0f);
      if (a.rollout_log_probs) {
        const auto w = importance_weight(old_log_prob, on ? options.rollout_log_prob : 0.0f, a.correction);
        correction = correction * w.weight;
        sums.weighed += (on && w.capped ? 0x100u : 0u) + (on && w.missing ? 0x10000u : 0u);
      }
      used = on && correction != 0.0f;
      sums.weighed += on && !used ? 1u : 0u;
      sums.is_weight += on ? correction : 0.0f;
      loss = loss * correction;
      gradient = gradient * correction;
    }
    loss = used ? loss * weight : 0.0f;
    gradient = used ? gradient * weight : 0.0f;
    sums.policy += on ? loss * scale : 0.0f;
    if (a.shared) {
      out.shared = on ? gradient * scale : 0.0f;
      gradient = 0.0f;
    }
    if (a.ref_log_probs) {
      const auto kl = kl_term(log_prob, old_log_prob, on ? options.ref_log_prob : 0.0f, a.parameters.log_ratio_bound, a.kl);
      const float factor = a.kl.coef * weight;
      sums.kl += on ? kl.value : 0.0f;
      loss = loss + kl.value * factor;
      gradient = gradient + kl.gradient * factor;
    }
    if (a.entropy) {
      const float entropy = on ? options.entropy : 0.0f, factor = -a.entropy_coef * weight;
      sums.entropy += entropy;
      loss = loss + entropy * factor;
      out.entropy_gradient = on ? factor * scale : 0.0f;
    }
  }
  out.loss = on ? loss * scale : 0.0f;
  out.gradient = on ? gradient * scale : 0.0f;
  sums.loss += out.loss;
  sums.negative_log_ratio -= ratio.log_ratio;
  // A token of zeros has a ratio of 1, which no bound touches, but for the ratio of its rollout.
  const bool counted = kLoss == Loss::kGspo ? on : true;
  sums.counts += four_counts(on, counted && term.clipped, counted && term.bounded, counted && ratio.saturated);
  return out;
}

template <bool kExtended, class T, int N>
__device__ void store_outputs(const PolicyLoss& a, int64_t first, int at, const float (&losses)[N], const float (&gradients)[N],
                              const float (&shared)[N], const float (&entropy_gradients)[N]) {
  using Gradient = typename GradientOf<T>::Type;
  store_output<Gradient>(a.gradient, first, at, gradients);
  store_output<float>(a.token_losses, first, at, losses);
  if constexpr (kExtended) {
    store_output<float>(a.shared, first, at, shared);
    store_output<Gradient>(a.entropy_gradient, first, at, entropy_gradients);
  }
}

// Whether a byte of a mask may be kFractional, of whose bits 0 and 1 have none.
template <int N>
__device__ bool any_fractional(const Vector<uint8_t, N>& mask) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    unsigned four;
    memcpy(&four, mask.values + i, sizeof(four));
    any = any || (four & 0x01010101u * kFractional);
  }
  return any;
}

// N neighbours in one row from token `first` + `at` on, moved in one go where N is more than 1. False, and nothing was done: of
// one of them nobody knows what it means, and they have to come one by one.
template <Loss kLoss, bool kExtended, class T, int N>
__device__ bool add_tokens(const PolicyLoss& a, const Row& row, int64_t first, int at, PolicySums& sums) {
  if (!row.counts) {  // an excluded row is not read at all
    const float zeros[N] = {};
    store_outputs<kExtended, T>(a, first, at, zeros, zeros, zeros, zeros);
    return true;
  }
  auto mask = load_vector<N>(a.mask + first + at);
  const auto log_probs = load_vector<N>(static_cast<const T*>(a.log_probs) + first + at);
  auto old_log_probs = log_probs;
  if (kLoss != Loss::kReinforce || a.old_log_probs) old_log_probs = load_vector<N>(static_cast<const T*>(a.old_log_probs) + first + at);
  Vector<T, N> weights, is_weights, rollout_log_probs, ref_log_probs, entropy;
  if constexpr (kExtended) {
    weights = load_input<T, N>(a.token_weights, first, at, 1.0f);
    is_weights = load_input<T, N>(a.is_weights, first, at, 1.0f);
    rollout_log_probs = load_input<T, N>(a.rollout_log_probs, first, at, 0.0f);
    ref_log_probs = load_input<T, N>(a.ref_log_probs, first, at, 0.0f);
    entropy = load_input<T, N>(a.entropy, first, at, 0.0f);
  }
  float advantages[N], losses[N], gradients[N], shared[N], entropy_gradients[N];
  load_advantages<T>(a, row, first, at, mask, advantages);
  if constexpr (N > 1) {
    if (any_fractional(mask)) return false;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned on = mask.values[i];
    const float scale = N == 1 && on == kFractional ? NAN : row.scale;  // also where a bound would have hidden it
    TokenOptions options{};
    if constexpr (kExtended) {
      options = {to_float(weights.values[i]), to_float(is_weights.values[i]), to_float(rollout_log_probs.values[i]),
                 to_float(ref_log_probs.values[i]), to_float(entropy.values[i])};
    }
    const auto out = add_token<kLoss, kExtended>(a, row, on != 0, scale, to_float(log_probs.values[i]),
                                                 to_float(old_log_probs.values[i]), advantages[i], options, sums);
    losses[i] = out.loss;
    gradients[i] = out.gradient;
    shared[i] = out.shared;
    entropy_gradients[i] = out.entropy_gradient;
  }
  store_outputs<kExtended, T>(a, first, at, losses, gradients, shared, entropy_gradients);
  return true;
}

}  // namespace fastadv::cuda
