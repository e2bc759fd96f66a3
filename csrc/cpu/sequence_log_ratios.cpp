// Log-ratios of whole rollouts: what sequence-level losses and corrections are made of. Reads 9 bytes a token in float32.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/row_ranges.h"

namespace fastadv {
namespace {

struct Sums {
  LaneSum log_ratio;
  Lanes minimum = Lanes(0.0f);
  LaneCount tokens, missing;
};

FASTADV_INLINE void sixteen_tokens(const float* log_probs, const float* old_log_probs, const uint8_t* mask, bool skip_missing, Sums& sums) {
  const Lanes zero(0.0f);
  const LaneMask on = load_mask(mask);
  const Lanes old = select(on, load(old_log_probs), zero);
  const LaneMask absent = old != old;
  const LaneMask used = skip_missing ? on & !absent : on;
  const Lanes log_ratio = select(used, load(log_probs) - old, zero);
  sums.log_ratio.add(log_ratio);
  sums.minimum = select(log_ratio < sums.minimum, log_ratio, sums.minimum);
  sums.tokens.add(on);
  sums.missing.add(absent);
}

// Sums in float32 stay within one tile; across tiles they are float64.
Sums sum_tile(const float* log_probs, const float* old_log_probs, const uint8_t* mask, int64_t n, bool skip_missing) {
  Sums sums;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sixteen_tokens(log_probs + i, old_log_probs + i, mask + i, skip_missing, sums);
  if (i < n) {  // the rest, padded by tokens outside the mask
    float a[kLanes] = {}, b[kLanes] = {};
    uint8_t m[kLanes] = {};
    std::copy(log_probs + i, log_probs + n, a);
    std::copy(old_log_probs + i, old_log_probs + n, b);
    std::copy(mask + i, mask + n, m);
    sixteen_tokens(a, b, m, skip_missing, sums);
  }
  return sums;
}

}  // namespace

int sequence_log_ratios(const Rows& rows, const TokenView& log_probs, const TokenView& old_log_probs, const TokenView& mask,
                        bool skip_missing, const SequenceLogRatios& out, int threads) {
  rows.validate();
  return for_row_ranges(rows, threads, [&](int64_t row) {
    alignas(64) float log_prob_buffer[kTile], old_buffer[kTile];
    alignas(64) uint8_t mask_buffer[kTile];
    bool fractional = false;
    double sum = 0.0, minimum = 0.0, tokens = 0.0, missing = 0.0;
    for (int64_t token = rows.begin(row); token < rows.end(row); token += kTile) {
      const int64_t n = std::min(kTile, rows.end(row) - token);
      const uint8_t* on = load_mask_bytes(rows, mask, token, n, mask_buffer, fractional);
      const float* a = load_floats(rows, log_probs, token, n, log_prob_buffer);
      const float* b = load_floats(rows, old_log_probs, token, n, old_buffer);
      const Sums tile = sum_tile(a, b, on, n, skip_missing);
      sum += tile.log_ratio.total();
      tokens += tile.tokens.total();
      missing += tile.missing.total();
      float lanes[kLanes];
      store(lanes, tile.minimum);
      for (float x : lanes) minimum = std::min(minimum, double(x));
    }
    out.sum[row] = sum;
    out.minimum[row] = minimum;
    out.tokens[row] = int64_t(tokens);
    out.missing[row] = int64_t(missing);
    return fractional ? kFractionalMask : 0;
  });
}

}  // namespace fastadv
