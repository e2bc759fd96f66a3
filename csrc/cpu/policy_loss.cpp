// Token losses from log-probs: loss, gradient and metrics in one pass. Per token it reads 4 bytes each of log_probs,
// old_log_probs and advantages (or turn_ids) and 1 of mask, and writes 4 of gradient: 17 bytes in float32. Each of the
// optional inputs adds 4.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/segment_lookup.h"

namespace fastadv {
namespace {

// The optional per-token inputs, in the order of their buffers.
enum Optional : int { kTokenWeights, kIsWeights, kRolloutLogProbs, kRefLogProbs, kEntropy, kOptional };

// Contiguous float32 tiles of every per-token input of one piece of one row, and where its results go.
struct Tile {
  const float* log_probs;
  const float* old_log_probs;
  const float* advantages;         // null: `row_advantage` for the whole tile
  const float* extra[kOptional];   // null: absent
  const uint8_t* mask;
  float* gradient;          // null: not wanted
  float* entropy_gradient;  // null: not wanted
  float* token_losses;      // null: not wanted
  float row_advantage, row_log_ratio, row_is_weight, row_scale;
  bool corrected;        // there is an importance weight of some kind
  bool shared_gradient;  // the row shares its sum of policy gradients: they are left out of `gradient`
};

struct TileSums {
  LaneSum loss, policy, gradient, negative_log_ratio, kl, entropy, is_weight;
  LaneCount clipped, bounded, saturated, tokens, rejected, capped, missing;
};

// Sums over the tiles of a piece; counts run on in `tile`.
struct PieceSums {
  TileSums tile;
  WideSum loss, policy, gradient, negative_log_ratio, kl, entropy, is_weight;
  void settle(bool extended) {
    const auto move = [](WideSum& wide, LaneSum& lanes) {
      wide.add(lanes);
      lanes = LaneSum();
    };
    move(loss, tile.loss);
    move(negative_log_ratio, tile.negative_log_ratio);
    if (!extended) return;
    for (auto [wide, lanes] : {std::pair{&policy, &tile.policy}, {&gradient, &tile.gradient}, {&kl, &tile.kl},
                               {&entropy, &tile.entropy}, {&is_weight, &tile.is_weight}})
      move(*wide, *lanes);
  }
};

// Sixteen tokens, up to their ratios. A token outside the mask or with weight 0 is replaced before any arithmetic, so whatever
// lies there (NaN, inf, garbage) reaches neither value, gradient nor metric.
struct Begun {
  LaneMask on;
  Lanes weight, log_prob, old_log_prob;
  Ratio<Lanes, LaneMask> ratio;
};

// kExtended: anything beside log-probs, advantages and mask.
template <Loss kLoss, bool kExtended>
FASTADV_INLINE Begun begin_sixteen(const Tile& t, int64_t i, const PolicyLossRule& rule) {
  const Lanes zero(0.0f);
  Begun b;
  b.on = load_mask(t.mask + i);
  b.weight = Lanes(1.0f);
  if constexpr (kExtended) {
    if (t.extra[kTokenWeights]) b.weight = load(t.extra[kTokenWeights] + i);
    b.on = b.on & (b.weight != zero);
    b.weight = select(b.on, b.weight, zero);
  }
  b.log_prob = select(b.on, load(t.log_probs + i), zero);
  b.old_log_prob = select(b.on, load(t.old_log_probs + i), zero);
  b.ratio = ratio_of<kLoss>(b.log_prob, b.old_log_prob, Lanes(t.row_log_ratio), rule.parameters);
  return b;
}

// The same tokens from their ratios on: loss, gradient, sums.
template <Loss kLoss, bool kExtended>
FASTADV_INLINE void finish_sixteen(const Begun& b, const Tile& t, int64_t i, const PolicyLossRule& rule, TileSums& sums) {
  const Lanes zero(0.0f), one(1.0f), row_scale(t.row_scale);
  const LaneMask on = b.on;
  const Lanes weight = b.weight, log_prob = b.log_prob, old_log_prob = b.old_log_prob;
  const auto selected = [&](const float* values) { return select(on, load(values + i), zero); };
  const Lanes advantage = select(on, t.advantages ? load(t.advantages + i) : Lanes(t.row_advantage), zero);
  const auto term = token_term<kLoss>(b.ratio, log_prob, advantage, rule.parameters);

  if constexpr (!kExtended) {
    const Lanes loss = select(on, term.loss, zero);
    if (t.gradient) store(t.gradient + i, select(on, term.gradient * row_scale, zero));
    if (t.token_losses) store(t.token_losses + i, select(on, loss * row_scale, zero));
    sums.loss.add(loss);
  } else {
    // An importance weight of 0 rejects the token, even where its policy term is NaN; KL, entropy and metrics still count it.
    LaneMask used = on;
    Lanes policy = term.loss, policy_gradient = term.gradient;
    if (t.corrected) {
      Lanes correction(t.row_is_weight);
      if (t.extra[kIsWeights]) correction = correction * select(on, load(t.extra[kIsWeights] + i), one);
      if (t.extra[kRolloutLogProbs]) {
        const auto w = importance_weight(old_log_prob, selected(t.extra[kRolloutLogProbs]), rule.correction);
        correction = correction * w.weight;
        sums.capped.add(w.capped & on);
        sums.missing.add(w.missing & on);
      }
      const LaneMask rejected = !(correction != zero);
      used = on & !rejected;
      sums.rejected.add(on & rejected);
      sums.is_weight.add(select(on, correction, zero));
      policy = policy * correction;
      policy_gradient = policy_gradient * correction;
    }
    policy = select(used, policy, zero) * weight;
    policy_gradient = select(used, policy_gradient, zero) * weight;
    Lanes loss = policy, gradient = t.shared_gradient ? zero : policy_gradient;
    if (t.extra[kRefLogProbs]) {
      const auto kl = kl_term(log_prob, old_log_prob, selected(t.extra[kRefLogProbs]), rule.parameters.log_ratio_bound, rule.kl);
      const Lanes factor = Lanes(rule.kl.coef) * weight;
      sums.kl.add(select(on, kl.value, zero));
      loss = loss + select(on, kl.value * factor, zero);
      gradient = gradient + select(on, kl.gradient * factor, zero);
    }
    if (t.extra[kEntropy]) {
      const Lanes entropy = selected(t.extra[kEntropy]), factor = Lanes(-rule.entropy_coef) * weight;
      sums.entropy.add(entropy);
      loss = loss + entropy * factor;
      if (t.entropy_gradient) store(t.entropy_gradient + i, select(on, factor * row_scale, zero));
    }
    if (t.gradient) store(t.gradient + i, select(on, gradient * row_scale, zero));
    if (t.token_losses) store(t.token_losses + i, select(on, loss * row_scale, zero));
    sums.loss.add(loss);
    if (t.extra[kRefLogProbs] || t.extra[kEntropy]) sums.policy.add(policy);
    if (t.shared_gradient) sums.gradient.add(policy_gradient);
  }
  if constexpr (kLoss != Loss::kReinforce && kLoss != Loss::kSapo) sums.clipped.add(term.clipped & on);
  if constexpr (kLoss == Loss::kPpo || kLoss == Loss::kGspo) sums.bounded.add(term.bounded & on);
  if constexpr (kLoss != Loss::kReinforce) sums.saturated.add(b.ratio.saturated & on);
  sums.negative_log_ratio.add(-b.ratio.log_ratio);
  sums.tokens.add(on);
}

// Whether the next sixteen are begun before these are finished. Either half is a chain of operations that wait for each other;
// a processor holds about a hundred that wait, too few to reach the next sixteen by itself. Where sixteen numbers take more
// registers than one, there are several chains already, and no registers left.
constexpr bool kBeginEarly = detail::kRegisters == 1;

template <Loss kLoss, bool kExtended>
__attribute__((noinline)) void run_tile(const Tile& given, int64_t n, const PolicyLossRule& given_rule, TileSums& total) {
  // Copies: what the loop stores could otherwise alias what it reads, and each step would read it again.
  const Tile tile = given;
  const PolicyLossRule rule = given_rule;
  TileSums sums = total;
  int64_t i = 0;
  if constexpr (kBeginEarly) {
    if (n >= kLanes) {
      Begun next = begin_sixteen<kLoss, kExtended>(tile, 0, rule);
      for (; i + 2 * kLanes <= n; i += kLanes) {
        const Begun now = next;
        next = begin_sixteen<kLoss, kExtended>(tile, i + kLanes, rule);
        finish_sixteen<kLoss, kExtended>(now, tile, i, rule, sums);
      }
      finish_sixteen<kLoss, kExtended>(next, tile, i, rule, sums);
      i += kLanes;
    }
  } else {
    for (; i + kLanes <= n; i += kLanes)
      finish_sixteen<kLoss, kExtended>(begin_sixteen<kLoss, kExtended>(tile, i, rule), tile, i, rule, sums);
  }
  if (i == n) {
    total = sums;
    return;
  }

  // The rest goes through the same code, padded by tokens outside the mask.
  const int64_t rest = n - i;
  float inputs[3 + kOptional][kLanes] = {}, gradient[kLanes], entropy_gradient[kLanes], token_losses[kLanes];
  uint8_t mask[kLanes] = {};
  const auto padded = [&](const float* source, int slot) -> const float* {
    if (!source) return nullptr;
    std::copy(source + i, source + n, inputs[slot]);
    return inputs[slot];
  };
  std::copy(tile.mask + i, tile.mask + n, mask);
  Tile last = tile;
  last.mask = mask;
  last.log_probs = padded(tile.log_probs, 0);
  last.old_log_probs = padded(tile.old_log_probs, 1);
  last.advantages = padded(tile.advantages, 2);
  for (int k = 0; k < kOptional; ++k) last.extra[k] = padded(tile.extra[k], 3 + k);
  if (tile.gradient) last.gradient = gradient;
  if (tile.entropy_gradient) last.entropy_gradient = entropy_gradient;
  if (tile.token_losses) last.token_losses = token_losses;
  finish_sixteen<kLoss, kExtended>(begin_sixteen<kLoss, kExtended>(last, 0, rule), last, 0, rule, sums);
  total = sums;
  if (tile.gradient) std::copy(gradient, gradient + rest, tile.gradient + i);
  if (tile.entropy_gradient) std::copy(entropy_gradient, entropy_gradient + rest, tile.entropy_gradient + i);
  if (tile.token_losses) std::copy(token_losses, token_losses + rest, tile.token_losses + i);
}

struct Buffers {
  alignas(64) float log_probs[kTile], old_log_probs[kTile], advantages[kTile], extra[kOptional][kTile];
  alignas(64) float gradient[kTile], entropy_gradient[kTile];
  alignas(64) int32_t ids[kTile];
  alignas(64) uint8_t mask[kTile];
};

// What one block found of one row: the sum of its policy gradients, for losses whose tokens share it.
struct SharedGradient {
  int64_t row;
  double sum, tokens;
};

struct Block {
  double sums[kPolicyLossSums] = {};
  int faults = 0;
  std::vector<SharedGradient> shared;
};

// A tile of an output: where it belongs if that is contiguous float32, else a buffer that `store_floats` copies from.
struct OutputTile {
  const Rows& rows;
  const TokenView& view;
  float* buffer;
  bool in_place;
  OutputTile(const Rows& r, const TokenView& v, float* b)
      : rows(r), view(v), buffer(b), in_place(v.dtype == DType::kFloat32 && v.stride == 1 && r.even(v)) {}
  float* at(int64_t token) const {
    if (!view.present()) return nullptr;
    return in_place ? reinterpret_cast<float*>(view.data) + token : buffer;
  }
  void flush(int64_t token, int64_t n) const {
    if (view.present() && !in_place) store_floats(rows, view, token, n, buffer);
  }
};

// Whether a row's share is all that its tokens get: the first pass then leaves the gradient to the second.
bool writes_shares_alone(const PolicyLossInputs& in, const PolicyLossRule& rule) {
  return rule.shared_gradient && !in.ref_log_probs.present();
}

Buffers& buffers_of_thread() {
  static thread_local Buffers buffers;
  return buffers;
}

template <Loss kLoss>
void run_piece(const PolicyLossInputs& in, const PolicyLossRule& rule, const PolicyLossOutputs& out, int64_t row, int64_t from, int64_t to,
               Block& block) {
  const Rows& rows = in.rows;
  const double row_weight = in.row_weights ? in.row_weights[row] : 1.0;
  double row_scale = row_weight * in.scale;
  if (in.row_tokens) row_scale /= double(std::max<int64_t>(1, in.row_tokens[row]));

  Buffers& buffers = buffers_of_thread();
  const OutputTile gradient(rows, out.gradient, buffers.gradient), entropy_gradient(rows, out.entropy_gradient, buffers.entropy_gradient);
  const TokenView* const optional[kOptional] = {&in.token_weights, &in.is_weights, &in.rollout_log_probs, &in.ref_log_probs, &in.entropy};
  const bool extended = in.row_is_weights || rule.shared_gradient ||
                        std::any_of(std::begin(optional), std::end(optional), [](const TokenView* view) { return view->present(); });
  const bool shared_alone = writes_shares_alone(in, rule);
  PieceSums sums;
  bool fractional = false;
  for (int64_t token = from; token < to; token += kTile) {
    const int64_t n = std::min(kTile, to - token);
    Tile tile{};
    tile.gradient = shared_alone ? nullptr : gradient.at(token);
    tile.entropy_gradient = entropy_gradient.at(token);
    tile.token_losses = out.token_losses ? out.token_losses + token : nullptr;
    if (row_weight == 0.0) {  // an excluded row is not read at all
      for (float* zeros : {tile.gradient, tile.entropy_gradient, tile.token_losses})
        if (zeros) std::fill(zeros, zeros + n, 0.0f);
    } else {
      const auto tile_of = [&](const TokenView& view, float* buffer) {
        return view.present() ? load_floats(rows, view, token, n, buffer) : nullptr;
      };
      tile.mask = load_mask_bytes(rows, in.mask, token, n, buffers.mask, fractional);
      tile.log_probs = tile_of(in.log_probs, buffers.log_probs);
      tile.old_log_probs = in.old_log_probs.present() ? tile_of(in.old_log_probs, buffers.old_log_probs) : tile.log_probs;
      for (int k = 0; k < kOptional; ++k) tile.extra[k] = tile_of(*optional[k], buffers.extra[k]);
      tile.row_log_ratio = in.row_log_ratios ? in.row_log_ratios[row] : 0.0f;
      tile.row_is_weight = in.row_is_weights ? in.row_is_weights[row] : 1.0f;
      tile.row_scale = float(row_scale);
      tile.corrected = in.row_is_weights || in.is_weights.present() || in.rollout_log_probs.present();
      tile.shared_gradient = rule.shared_gradient;
      if (in.advantage_kind == AdvantageKind::kToken) {
        tile.advantages = tile_of(in.token_advantages, buffers.advantages);
      } else if (in.advantage_kind == AdvantageKind::kRow) {
        tile.row_advantage = in.advantages[row];
      } else {
        const int64_t first = in.segment_offsets[row];
        const int32_t* ids = load_ids(rows, in.turn_ids, token, n, buffers.ids);
        look_up_segments(in.advantages + first, in.segment_offsets[row + 1] - first, ids, tile.mask, n, buffers.advantages,
                         block.faults);
        tile.advantages = buffers.advantages;
      }
      if (extended) {
        run_tile<kLoss, true>(tile, n, rule, sums.tile);
      } else {
        run_tile<kLoss, false>(tile, n, rule, sums.tile);
      }
      sums.settle(extended);
    }
    if (!shared_alone) gradient.flush(token, n);
    entropy_gradient.flush(token, n);
  }
  if (fractional) block.faults |= kFractionalMask;
  const double tokens = sums.tile.tokens.total();
  if (tokens == 0.0) return;  // whatever the scale is: no token, nothing to add
  double* total = block.sums;
  total[kLossSum] += sums.loss.total() * row_scale;
  const bool penalised = in.ref_log_probs.present() || in.entropy.present();
  total[kPolicySum] += (penalised ? sums.policy : sums.loss).total() * row_scale;
  total[kClipped] += sums.tile.clipped.total();
  total[kBounded] += sums.tile.bounded.total();
  total[kSaturated] += sums.tile.saturated.total();
  total[kNegativeLogRatio] += sums.negative_log_ratio.total();
  total[kTokens] += tokens;
  if (!extended) return;
  total[kKlSum] += sums.kl.total();
  total[kEntropySum] += sums.entropy.total();
  total[kIsWeight] += sums.is_weight.total();  // 0 where there is no importance weight: nobody asks
  total[kRejected] += sums.tile.rejected.total();
  total[kCapped] += sums.tile.capped.total();
  total[kMissing] += sums.tile.missing.total();
  if (rule.shared_gradient) block.shared.push_back({row, sums.gradient.total() * row_scale, tokens});
}

// gradient = before + share where a token counts.
void add_share(float share, const uint8_t* mask, const float* weights, const float* before, float* gradient, int64_t n) {
  const Lanes zero(0.0f), all(share);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    LaneMask on = load_mask(mask + i);
    if (weights) on = on & (load(weights + i) != zero);
    const Lanes given = select(on, all, zero);
    store(gradient + i, before ? load(before + i) + given : given);
  }
  for (; i < n; ++i) {
    const float given = mask[i] && (!weights || weights[i] != 0.0f) ? share : 0.0f;
    gradient[i] = before ? before[i] + given : given;
  }
}

// Gives every token of a row the mean of the row's policy gradients, beside what is there already.
void share_gradients(const PolicyLossInputs& in, const PolicyLossRule& rule, const PolicyLossOutputs& out, const std::vector<Block>& blocks,
                     int threads) {
  const Rows& rows = in.rows;
  const bool alone = writes_shares_alone(in, rule);
  std::vector<double> sum(rows.count, 0.0), tokens(rows.count, 0.0);
  for (const Block& block : blocks)
    for (const SharedGradient& piece : block.shared) {
      sum[piece.row] += piece.sum;
      tokens[piece.row] += piece.tokens;
    }
  parallel_blocks(int64_t(blocks.size()), threads, [&](int64_t block) {
    Buffers& buffers = buffers_of_thread();
    const OutputTile gradient(rows, out.gradient, buffers.gradient);
    for_rows_in_block(rows, block, [&](int64_t row, int64_t from, int64_t to) {
      const float share = float(sum[row] / std::max(1.0, tokens[row]));
      bool fractional = false;
      for (int64_t token = from; token < to; token += kTile) {
        const int64_t n = std::min(kTile, to - token);
        const uint8_t* mask = load_mask_bytes(rows, in.mask, token, n, buffers.mask, fractional);
        const float* weights = in.token_weights.present() ? load_floats(rows, in.token_weights, token, n, buffers.advantages) : nullptr;
        const float* before = alone ? nullptr : load_floats(rows, out.gradient, token, n, buffers.log_probs);
        add_share(share, mask, weights, before, gradient.at(token), n);
        gradient.flush(token, n);
      }
    });
  });
}

}  // namespace

int policy_loss(const PolicyLossInputs& in, const PolicyLossRule& rule, const PolicyLossOutputs& out, double* sums, float* means, int threads) {
  in.rows.validate();
  const int64_t count = block_count(in.rows);
  std::vector<Block> blocks(count);
  const auto run = [&](int64_t block, int64_t row, int64_t from, int64_t to) {
    switch (rule.loss) {
      case Loss::kReinforce: return run_piece<Loss::kReinforce>(in, rule, out, row, from, to, blocks[block]);
      case Loss::kPpo: return run_piece<Loss::kPpo>(in, rule, out, row, from, to, blocks[block]);
      case Loss::kCispo: return run_piece<Loss::kCispo>(in, rule, out, row, from, to, blocks[block]);
      case Loss::kSapo: return run_piece<Loss::kSapo>(in, rule, out, row, from, to, blocks[block]);
      case Loss::kGspo: return run_piece<Loss::kGspo>(in, rule, out, row, from, to, blocks[block]);
    }
  };
  if (rule.loss < Loss::kReinforce || rule.loss > Loss::kGspo) throw std::invalid_argument("policy_loss: no such loss");
  // Where nothing is said per row, a block is one piece, however short the rows are.
  const bool by_row = in.row_weights || in.row_tokens || in.row_log_ratios || in.row_is_weights || rule.shared_gradient ||
                      in.advantage_kind != AdvantageKind::kToken;
  parallel_blocks(count, threads, [&](int64_t block) {
    if (by_row) {
      for_rows_in_block(in.rows, block, [&](int64_t row, int64_t from, int64_t to) { run(block, row, from, to); });
    } else {
      run(block, 0, block * kBlockTokens, std::min(in.rows.tokens, (block + 1) * kBlockTokens));
    }
  });
  std::fill(sums, sums + kPolicyLossSums, 0.0);
  int faults = 0;
  for (const Block& block : blocks) {
    for (int k = 0; k < kPolicyLossSums; ++k) sums[k] += block.sums[k];
    faults |= block.faults;
  }
  for (int k = 0; means && k < kPolicyLossSums; ++k) means[k] = metric_of(PolicyLossSum(k), sums[k], sums[kTokens]);
  if (rule.shared_gradient && out.gradient.present()) share_gradients(in, rule, out, blocks, threads);
  return faults;
}

}  // namespace fastadv
