// Token losses from log-probs: loss, gradient and metrics in one pass. Per token it reads 4 bytes each of log_probs,
// old_log_probs and advantages (or turn_ids) and 1 of mask, and writes 4 of gradient: 17 bytes in float32.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/segment_lookup.h"

namespace fastadv {
namespace {

// Contiguous float32 tiles of every per-token input of one piece of one row, and where its results go.
struct Tile {
  const float* log_probs;
  const float* old_log_probs;
  const float* advantages;  // null: `row_advantage` for the whole tile
  const float* weights;     // null: 1
  const float* is_weights;  // null: 1
  const uint8_t* mask;
  float* gradient;      // null: not wanted
  float* token_losses;  // null: not wanted
  float row_advantage;
  float row_scale;
};

struct TileSums {
  LaneSum loss, negative_log_ratio;
  LaneCount clipped, bounded, saturated, tokens;
};

// Sixteen tokens. A token outside the mask or with weight 0 is replaced before any arithmetic, so whatever lies there
// (NaN, inf, garbage) reaches neither value, gradient nor metric.
template <Loss kLoss, bool kWeighted>
FASTADV_INLINE void sixteen_tokens(const Tile& t, int64_t i, const LossParameters& p, TileSums& sums) {
  const Lanes zero(0.0f), one(1.0f), row_scale(t.row_scale);
  LaneMask on = load_mask(t.mask + i);
  Lanes weight = one;
  if constexpr (kWeighted) {
    if (t.weights) weight = load(t.weights + i);
    on = on & (weight != zero);
  }
  const Lanes log_prob = select(on, load(t.log_probs + i), zero);
  const Lanes old_log_prob = select(on, load(t.old_log_probs + i), zero);
  const Lanes advantage = select(on, t.advantages ? load(t.advantages + i) : Lanes(t.row_advantage), zero);
  const auto term = token_term<kLoss>(log_prob, old_log_prob, advantage, p);

  LaneMask used = on;  // an importance weight of 0 rejects the token, even where its loss is NaN; metrics still count it
  Lanes loss = term.loss, gradient = term.gradient;
  if constexpr (kWeighted) {
    if (t.is_weights) {
      const Lanes is_weight = load(t.is_weights + i);
      used = used & (is_weight != zero);
      weight = weight * is_weight;
    }
    loss = loss * weight;
    gradient = gradient * weight;
  }
  loss = select(used, loss, zero);
  if (t.gradient) store(t.gradient + i, select(used, gradient * row_scale, zero));
  if (t.token_losses) store(t.token_losses + i, loss * row_scale);

  sums.loss.add(loss);
  sums.clipped.add(term.clipped);
  sums.bounded.add(term.bounded);
  sums.saturated.add(term.saturated);
  sums.negative_log_ratio.add(-term.log_ratio);
  sums.tokens.add(on);
}

template <Loss kLoss, bool kWeighted>
void run_tile(const Tile& given, int64_t n, const LossParameters& parameters, TileSums& total) {
  // Copies: what the loop stores could otherwise alias what it reads, and each step would read it again.
  const Tile tile = given;
  const LossParameters p = parameters;
  TileSums sums = total;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sixteen_tokens<kLoss, kWeighted>(tile, i, p, sums);
  if (i == n) {
    total = sums;
    return;
  }

  // The rest goes through the same code, padded by tokens outside the mask.
  const int64_t rest = n - i;
  float inputs[5][kLanes] = {}, gradient[kLanes], token_losses[kLanes];
  uint8_t mask[kLanes] = {};
  const auto padded = [&](const float* source, int slot) -> const float* {
    if (!source) return nullptr;
    std::copy(source + i, source + n, inputs[slot]);
    return inputs[slot];
  };
  std::copy(tile.mask + i, tile.mask + n, mask);
  const Tile last{padded(tile.log_probs, 0),  padded(tile.old_log_probs, 1), padded(tile.advantages, 2),
                  padded(tile.weights, 3),    padded(tile.is_weights, 4),    mask,
                  tile.gradient ? gradient : nullptr, tile.token_losses ? token_losses : nullptr,
                  tile.row_advantage,         tile.row_scale};
  sixteen_tokens<kLoss, kWeighted>(last, 0, p, sums);
  total = sums;
  if (tile.gradient) std::copy(gradient, gradient + rest, tile.gradient + i);
  if (tile.token_losses) std::copy(token_losses, token_losses + rest, tile.token_losses + i);
}

struct Buffers {
  alignas(64) float log_probs[kTile], old_log_probs[kTile], advantages[kTile], weights[kTile], is_weights[kTile], gradient[kTile];
  alignas(64) int32_t ids[kTile];
  alignas(64) uint8_t mask[kTile];
};

template <Loss kLoss>
void run_piece(const PolicyLossInputs& in, const LossParameters& p, const TokenView& gradient, float* token_losses, int64_t row,
               int64_t from, int64_t to, PolicyLossSums& block) {
  const Rows& rows = in.rows;
  const double row_weight = in.row_weights ? in.row_weights[row] : 1.0;
  double row_scale = row_weight * in.scale;
  if (in.row_tokens) row_scale /= double(std::max<int64_t>(1, in.row_tokens[row]));

  static thread_local Buffers buffers;
  TileSums sums;
  bool fractional = false;
  const bool in_place = gradient.dtype == DType::kFloat32 && gradient.stride == 1 && rows.even(gradient);
  for (int64_t token = from; token < to; token += kTile) {
    const int64_t n = std::min(kTile, to - token);
    float* gradient_tile = nullptr;
    if (gradient.present()) gradient_tile = in_place ? reinterpret_cast<float*>(gradient.data) + token : buffers.gradient;
    float* losses_tile = token_losses ? token_losses + token : nullptr;

    if (row_weight == 0.0) {  // an excluded row is not read at all
      if (gradient_tile) std::fill(gradient_tile, gradient_tile + n, 0.0f);
      if (losses_tile) std::fill(losses_tile, losses_tile + n, 0.0f);
      if (gradient_tile && !in_place) store_floats(rows, gradient, token, n, gradient_tile);
      continue;
    }

    const auto tile_of = [&](const TokenView& view, float* buffer) {
      return view.present() ? load_floats(rows, view, token, n, buffer) : nullptr;
    };
    Tile tile{};
    tile.mask = load_mask_bytes(rows, in.mask, token, n, buffers.mask, fractional);
    tile.log_probs = tile_of(in.log_probs, buffers.log_probs);
    tile.old_log_probs = in.old_log_probs.present() ? tile_of(in.old_log_probs, buffers.old_log_probs) : tile.log_probs;
    tile.weights = tile_of(in.token_weights, buffers.weights);
    tile.is_weights = tile_of(in.is_weights, buffers.is_weights);
    tile.gradient = gradient_tile;
    tile.token_losses = losses_tile;
    tile.row_scale = float(row_scale);
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
    if (tile.weights || tile.is_weights) {
      run_tile<kLoss, true>(tile, n, p, sums);
    } else {
      run_tile<kLoss, false>(tile, n, p, sums);
    }
    if (gradient_tile && !in_place) store_floats(rows, gradient, token, n, gradient_tile);
  }
  if (fractional) block.faults |= kFractionalMask;
  block.loss += sums.loss.total() * row_scale;
  block.clipped += sums.clipped.total();
  block.bounded += sums.bounded.total();
  block.saturated += sums.saturated.total();
  block.negative_log_ratio += sums.negative_log_ratio.total();
  block.tokens += sums.tokens.total();
}

}  // namespace

PolicyLossSums policy_loss(const PolicyLossInputs& in, Loss loss, const LossParameters& parameters, const TokenView& gradient,
                           float* token_losses, int threads) {
  in.rows.validate();
  const int64_t blocks = block_count(in.rows);
  std::vector<PolicyLossSums> partial(blocks);
  const auto run = [&](int64_t block, int64_t row, int64_t from, int64_t to) {
    if (loss == Loss::kPpo) {
      run_piece<Loss::kPpo>(in, parameters, gradient, token_losses, row, from, to, partial[block]);
    } else {
      run_piece<Loss::kReinforce>(in, parameters, gradient, token_losses, row, from, to, partial[block]);
    }
  };
  // Where nothing is said per row, a block is one piece, however short the rows are.
  const bool by_row = in.row_weights || in.row_tokens || in.advantage_kind != AdvantageKind::kToken;
  parallel_blocks(blocks, threads, [&](int64_t block) {
    if (by_row) {
      for_rows_in_block(in.rows, block, [&](int64_t row, int64_t from, int64_t to) { run(block, row, from, to); });
    } else {
      run(block, 0, block * kBlockTokens, std::min(in.rows.tokens, (block + 1) * kBlockTokens));
    }
  });
  PolicyLossSums total;
  for (const PolicyLossSums& p : partial) {
    total.loss += p.loss;
    total.clipped += p.clipped;
    total.bounded += p.bounded;
    total.saturated += p.saturated;
    total.negative_log_ratio += p.negative_log_ratio;
    total.tokens += p.tokens;
    total.faults |= p.faults;
  }
  return total;
}

}  // namespace fastadv
