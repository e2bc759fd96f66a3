// Rewards to go and GAE, in one pass over each row from its end. A return waits for the one after it, eight cycles a token, so
// several rows are taken at a time; each is computed alike whoever its neighbours are. In float32, of rewards a token: reads
// and writes 9 bytes a token without values, 17 with them.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/spread.h"

namespace fastadv {
namespace {

constexpr int64_t kRowsTogether = 8;
constexpr int64_t kScanTile = 256;

// A row on its way from its end to its beginning, and its tile: token i of the tile's n lies at the end of `kept` and `added`.
struct RowScan {
  int64_t row = 0, begin = 0, first = 0;  // tokens before `first` are still to come
  int64_t n = 0;
  double following = 0.0;     // return of what follows the tile
  double next_value = 0.0;    // of the next token that counts
  bool reward_to_come = false;  // the row's reward belongs to its last token that counts
  Spread spread;
  const uint8_t* on = nullptr;
  double kept[kScanTile + 8], added[kScanTile + 8];  // 8 more, so that not all rows fall on the same sets of the cache
  uint8_t mask_buffer[kScanTile];

  double* kept_tile() { return kept + kScanTile - n; }
  double* added_tile() { return added + kScanTile - n; }
};

struct Scan {
  const TokenReturnsInputs& in;
  const ReturnRule& rule;
  const TokenReturnsOutputs& out;

  void start(RowScan& s, int64_t row) const {
    s.row = row;
    s.begin = in.rows.begin(row);
    s.first = in.rows.end(row);
    s.reward_to_come = in.row_rewards != nullptr;
  }

  // What each token of the next tile keeps and adds.
  int prepare(RowScan& s) const {
    alignas(64) float buffer[kScanTile];
    bool fractional = false;
    s.first -= s.n;
    s.on = load_mask_bytes(in.rows, in.mask, s.first, s.n, s.mask_buffer, fractional);
    const double on_kept = kept(rule, in.values.present()), off_kept = kept_in_gaps(rule, in.values.present());
    double *const __restrict keep = s.kept_tile(), *const __restrict add = s.added_tile();
    const uint8_t* const on = s.on;
    for (int64_t i = 0; i < s.n; ++i) keep[i] = on[i] ? on_kept : off_kept;
    if (in.token_rewards.present()) {
      const float* reward = load_floats(in.rows, in.token_rewards, s.first, s.n, buffer);
      for (int64_t i = 0; i < s.n; ++i) {
        const double x = reward[i];
        add[i] = on[i] ? x : 0.0;
      }
    } else {
      std::fill(add, add + s.n, 0.0);
    }
    for (int64_t i = s.n - 1; s.reward_to_come && i >= 0; --i) {
      if (!on[i]) continue;
      add[i] += in.row_rewards[s.row];
      s.reward_to_come = false;
    }
    if (in.values.present()) {
      const float* value = load_floats(in.rows, in.values, s.first, s.n, buffer);
      for (int64_t i = s.n - 1; i >= 0; --i) {
        if (!on[i]) continue;
        add[i] += value_error(rule, value[i], s.next_value);
        s.next_value = value[i];
      }
    }
    return fractional ? kFractionalMask : 0;
  }

  // Writes the tile; `added` holds the returns, of GAE the advantages.
  void finish(RowScan& s) const {
    const double* const found = s.added_tile();
    const uint8_t* const on = s.on;
    float* const __restrict returns = out.returns + s.first;
    const float* centred = returns;
    if (in.values.present()) {
      alignas(64) float buffer[kScanTile];
      float* const __restrict advantages = out.advantages + s.first;
      const float* value = load_floats(in.rows, in.values, s.first, s.n, buffer);
      for (int64_t i = 0; i < s.n; ++i) {
        const float advantage = float(found[i]), target = float(found[i] + double(value[i]));
        advantages[i] = on[i] ? advantage : 0.0f;
        returns[i] = on[i] ? target : 0.0f;
      }
      centred = advantages;
    } else {
      for (int64_t i = 0; i < s.n; ++i) {
        const float value = float(found[i]);
        returns[i] = on[i] ? value : 0.0f;
      }
      if (in.row_baselines) {
        float* const __restrict advantages = out.advantages + s.first;
        const double baseline = in.row_baselines[s.row];
        for (int64_t i = 0; i < s.n; ++i) {
          const float advantage = float(found[i] - baseline);
          advantages[i] = on[i] ? advantage : 0.0f;
        }
        centred = advantages;
      }
    }
    s.spread = merged(s.spread, tile_spread(centred, on, s.n));
  }

  // Rows first, ..., first + count - 1 side by side, a tile of each at a time.
  int rows(int64_t first, int64_t count, Spread* spreads) const {
    RowScan scans[kRowsTogether];
    int faults = 0;
    for (int64_t k = 0; k < count; ++k) start(scans[k], first + k);
    for (;;) {
      int64_t longest = 0;
      for (RowScan& s : scans) longest = std::max(longest, s.n = std::min(kScanTile, s.first - s.begin));
      if (longest == 0) break;
      for (RowScan& s : scans) {
        // A row that is shorter, or none, waits with what it has.
        std::fill(s.kept + kScanTile - longest, s.kept_tile(), 1.0);
        std::fill(s.added + kScanTile - longest, s.added_tile(), 0.0);
        if (s.n) faults |= prepare(s);
      }
      double following[kRowsTogether];
      for (int k = 0; k < kRowsTogether; ++k) following[k] = scans[k].following;
      for (int64_t i = kScanTile - 1; i >= kScanTile - longest; --i)
        for (int k = 0; k < kRowsTogether; ++k) scans[k].added[i] = following[k] = scans[k].added[i] + scans[k].kept[i] * following[k];
      for (int k = 0; k < kRowsTogether; ++k) scans[k].following = following[k];
      for (RowScan& s : scans)
        if (s.n) finish(s);
    }
    for (int64_t k = 0; k < count; ++k) spreads[first + k] = scans[k].spread;
    return faults;
  }
};

}  // namespace

int token_returns(const TokenReturnsInputs& in, const ReturnRule& rule, const TokenReturnsOutputs& out, int threads) {
  in.rows.validate();
  std::vector<Spread> spreads(in.rows.count);
  const int64_t together = std::clamp<int64_t>(in.rows.count / (2 * int64_t{threads}), 1, kRowsTogether);
  std::atomic<int> faults{0};
  parallel_blocks((in.rows.count + together - 1) / together, threads, [&](int64_t block) {
    const int64_t first = block * together;
    const int mine = Scan{in, rule, out}.rows(first, std::min(together, in.rows.count - first), spreads.data());
    if (mine) faults.fetch_or(mine, std::memory_order_relaxed);
  });
  Spread all;
  for (const Spread& row : spreads) all = merged(all, row);
  write(all, out.spread);
  return faults.load();
}

}  // namespace fastadv
