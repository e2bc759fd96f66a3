// Rewards to go and GAE, in one pass over each row from its end. A return waits for the one after it, eight cycles; eight
// neighbours of the mask are solved at once, and only the first of them is waited for. In float32, of rewards a token: reads
// and writes 9 bytes a token without values, 17 with them.
#include <vector>

#include "cpu/eight.h"
#include "cpu/kernels.h"
#include "cpu/row_ranges.h"
#include "cpu/spread.h"

namespace fastadv {
namespace {

constexpr int64_t kScanTile = 512;

// Memory of a tile's tokens, and of those before it. A row is walked backwards, which a processor does not see through by
// itself: what is kAhead tokens away is asked for, a bit at a time, since only a dozen lines can be under way.
constexpr int64_t kAhead = 2 * kScanTile + 64;

class Streams {
 public:
  void reads(const Rows& rows, const TokenView& view, int64_t token) {
    if (!view.present() || view.stride != 1) return;
    const int64_t size = view.dtype == DType::kFloat32 ? 4 : 2;
    read_[read_count_++] = {reinterpret_cast<uintptr_t>(view.data) + rows.element(view, token) * size, size};
  }

  void writes(const float* first) { written_[written_count_++] = {reinterpret_cast<uintptr_t>(first), sizeof(float)}; }

  FASTADV_INLINE void ask(int64_t i) const {
    for (int k = 0; k < read_count_; ++k) __builtin_prefetch(read_[k].before(i), 0);
    for (int k = 0; k < written_count_; ++k) __builtin_prefetch(written_[k].before(i), 1);
  }

 private:
  struct Stream {
    uintptr_t address;  // of the tile's first token; a number, since what is ahead may lie outside of the array
    int64_t size;       // bytes a token
    const void* before(int64_t i) const { return reinterpret_cast<const void*>(address + (i - kAhead) * size); }
  };
  Stream read_[2], written_[2];
  int read_count_ = 0, written_count_ = 0;
};

// What is known of a row behind the tokens that are still to come, and how it changes.
struct RowScan {
  ReturnRule rule;
  double on_kept, gap_kept;
  Eight powers;               // on_kept^8, ..., on_kept^1
  double gap_power = 1.0;     // gap_kept^8
  double following = 0.0;     // return of what follows
  double next_value = 0.0;    // of the next token that counts
  bool reward_to_come;        // the row's reward belongs to its last token that counts

  RowScan(const ReturnRule& how, bool values, bool row_reward)
      : rule(how), on_kept(kept(how, values)), gap_kept(kept_in_gaps(how, values)), reward_to_come(row_reward) {
    double power = 1.0;
    for (int k = 7; k >= 0; --k) powers[k] = power *= on_kept;
    for (int k = 0; k < 8; ++k) gap_power *= gap_kept;
  }

  // `x` holds what the token adds, and then its return, of GAE its advantage.
  void step(double& x, const float* value) {
    if (value) {
      x += value_error(rule, *value, next_value);
      next_value = *value;
    }
    x = following = x + on_kept * following;
  }

  void eight_steps(double* x, const float* value) {
    Eight added = load_eight<Eight>(x);
    if (value) {
      const Eight here = __builtin_convertvector(load_eight<EightFloats>(value), Eight);
      const Eight after = __builtin_shuffle(here, next_value - Eight{}, EightIndices{1, 2, 3, 4, 5, 6, 7, 8});
      added += rule.gamma * after - here;
      next_value = here[0];
    }
    // Each lane has what it adds; then what two, four and eight of them add.
    added += on_kept * later<1>(added);
    added += powers[6] * later<2>(added);
    added += powers[4] * later<4>(added);
    added += powers * following;
    following = added[0];
    std::memcpy(x, &added, sizeof(added));
  }

  // The returns of a tile, in place of what its tokens add; nothing is written outside of the mask.
  void tile(double* x, const float* values, const uint8_t* on, int64_t n, double row_reward, const Streams& streams) {
    const auto value = [&](int64_t i) { return values ? values + i : nullptr; };
    int64_t i = n;
    while (i > 0) {
      streams.ask(i);
      uint64_t eight = 0;
      if (i >= 8) std::memcpy(&eight, on + i - 8, 8);
      const bool all = i >= 8 && !((eight - 0x0101010101010101u) & ~eight & 0x8080808080808080u);  // no byte of them is 0
      if (i >= 8 && eight == 0) {
        i -= 8;
        following *= gap_power;
      } else if (all && !reward_to_come) {
        i -= 8;
        eight_steps(x + i, value(i));
      } else {
        for (const int64_t end = std::max<int64_t>(0, i - 8); i > end;) {
          --i;
          if (!on[i]) {
            following *= gap_kept;
            continue;
          }
          if (reward_to_come) x[i] += row_reward;
          reward_to_come = false;
          step(x[i], value(i));
        }
      }
    }
  }
};

int scan_row(const TokenReturnsInputs& in, const ReturnRule& rule, const TokenReturnsOutputs& out, int64_t row, Spread& spread) {
  alignas(64) float reward_buffer[kScanTile], value_buffer[kScanTile];
  alignas(64) uint8_t mask_buffer[kScanTile];
  alignas(64) double x[kScanTile];
  bool fractional = false;
  const double reward = in.row_rewards ? in.row_rewards[row] : 0.0;
  RowScan scan(rule, in.values.present(), in.row_rewards != nullptr);
  for (int64_t end = in.rows.end(row), first; end > in.rows.begin(row); end = first) {
    first = std::max(in.rows.begin(row), end - kScanTile);
    const int64_t n = end - first;
    const uint8_t* const on = load_mask_bytes(in.rows, in.mask, first, n, mask_buffer, fractional);
    const float* const values = in.values.present() ? load_floats(in.rows, in.values, first, n, value_buffer) : nullptr;
    std::fill(x, x + n, 0.0);
    if (in.token_rewards.present()) {
      const float* added = load_floats(in.rows, in.token_rewards, first, n, reward_buffer);
      for (int64_t i = 0; i < n; ++i) x[i] = added[i];
    }
    float* const __restrict returns = out.returns + first;
    const float* centred = returns;
    Streams streams;
    streams.reads(in.rows, in.token_rewards, first);
    streams.reads(in.rows, in.values, first);
    streams.writes(returns);
    if (values || in.row_baselines) streams.writes(out.advantages + first);
    scan.tile(x, values, on, n, reward, streams);
    for (int64_t i = 0; i < n; ++i) {
      const float value = float(values ? x[i] + double(values[i]) : x[i]);
      returns[i] = on[i] ? value : 0.0f;
    }
    if (values || in.row_baselines) {
      float* const __restrict advantages = out.advantages + first;
      const double baseline = in.row_baselines ? in.row_baselines[row] : 0.0;
      for (int64_t i = 0; i < n; ++i) {
        const float advantage = float(x[i] - baseline);
        advantages[i] = on[i] ? advantage : 0.0f;
      }
      centred = advantages;
    }
    spread = merged(spread, tile_spread(centred, on, n));
  }
  return fractional ? kFractionalMask : 0;
}

// A row whose return is its reward at each token.
int fill_row(const TokenReturnsInputs& in, const TokenReturnsOutputs& out, int64_t row, Spread& spread) {
  alignas(64) uint8_t buffer[kTile];
  bool fractional = false;
  const float reward = float(in.row_rewards[row]);
  const float advantage = in.row_baselines ? float(in.row_rewards[row] - in.row_baselines[row]) : reward;
  int64_t count = 0;
  for (int64_t token = in.rows.begin(row); token < in.rows.end(row); token += kTile) {
    const int64_t n = std::min(kTile, in.rows.end(row) - token);
    const uint8_t* on = load_mask_bytes(in.rows, in.mask, token, n, buffer, fractional);
    int32_t tile = 0;
    for (int64_t i = 0; i < n; ++i) tile += on[i] != 0;
    count += tile;
    for (int64_t i = 0; i < n; ++i) out.returns[token + i] = on[i] ? reward : 0.0f;
    if (!in.row_baselines) continue;
    for (int64_t i = 0; i < n; ++i) out.advantages[token + i] = on[i] ? advantage : 0.0f;
  }
  if (count) spread = {double(count), advantage, advantage - advantage};  // 0, or NaN if it is not finite
  return fractional ? kFractionalMask : 0;
}

}  // namespace

int token_returns(const TokenReturnsInputs& in, const ReturnRule& rule, const TokenReturnsOutputs& out, int threads) {
  in.rows.validate();
  std::vector<Spread> spreads(in.rows.count);
  const bool undiscounted = kept(rule, false) == 1.0 && kept_in_gaps(rule, false) == 1.0;
  const bool constant = undiscounted && in.row_rewards && !in.token_rewards.present() && !in.values.present();
  const int faults = for_row_ranges(in.rows, threads, [&](int64_t row) {
    return constant ? fill_row(in, out, row, spreads[row]) : scan_row(in, rule, out, row, spreads[row]);
  });
  Spread all;
  for (const Spread& row : spreads) all = merged(all, row);
  write(all, out.spread);
  return faults;
}

}  // namespace fastadv
