// The optimal token baseline: at each position the mean return of a group's rollouts that reached it, weighted by the energy of
// their scores so far. A group is one thread's. Reads and writes 17 bytes a token in float32, and returns and mask once more,
// which lie in the cache if a group does.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace fastadv {
namespace {

struct Position {
  double returns = 0.0;  // weighted
  double weight = 0.0;
};

struct Group {
  const TokenBaselineInputs& in;
  const int64_t* rows;
  int64_t count;
  Position* positions;  // as many as its longest row has tokens
  int64_t longest;

  // Calls body(token, n, mask bytes, returns) for the tiles of a row.
  template <class Body>
  bool tiles(int64_t row, const Body& body) const {
    alignas(64) uint8_t mask_buffer[kTile];
    alignas(64) float return_buffer[kTile];
    bool fractional = false;
    for (int64_t token = in.rows.begin(row); token < in.rows.end(row); token += kTile) {
      const int64_t n = std::min(kTile, in.rows.end(row) - token);
      const uint8_t* on = load_mask_bytes(in.rows, in.mask, token, n, mask_buffer, fractional);
      body(token, n, on, load_floats(in.rows, in.returns, token, n, return_buffer));
    }
    return fractional;
  }

  // Adds a row to the positions; returns its number of tokens that count.
  int64_t add(int64_t row, bool& fractional) const {
    double energy = 0.0;
    int64_t tokens = 0, position = 0;
    fractional |= tiles(row, [&](int64_t token, int64_t n, const uint8_t* on, const float* returns) {
      alignas(64) float log_prob_buffer[kTile], sum_p2_buffer[kTile], weight_buffer[kTile];
      double energies[kTile];
      const float* log_probs = load_floats(in.rows, in.log_probs, token, n, log_prob_buffer);
      const float* sum_p2 = load_floats(in.rows, in.sum_p2, token, n, sum_p2_buffer);
      for (int64_t i = 0; i < n; ++i) energies[i] = score_energy(exp_ten_digits(log_probs[i]), sum_p2[i]);
      if (in.is_weights.present()) {
        const float* weights = load_floats(in.rows, in.is_weights, token, n, weight_buffer);
        for (int64_t i = 0; i < n; ++i) energies[i] *= double(weights[i]) * double(weights[i]);
      }
      for (int64_t i = 0; i < n; ++i) {
        if (!on[i]) continue;
        energy += energies[i];
        Position& at = positions[in.compact ? tokens : position + i];
        at.returns += double(returns[i]) * energy;
        at.weight += energy;
        ++tokens;
      }
      position += n;
    });
    return tokens;
  }

  // Advantages of a row; positions from `alone` on have no baseline.
  void subtract(int64_t row, int64_t alone, float* advantages) const {
    int64_t tokens = 0, position = 0;
    tiles(row, [&](int64_t token, int64_t n, const uint8_t* on, const float* returns) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = in.compact ? tokens : position + i;
        tokens += on[i] != 0;
        advantages[token + i] = !on[i] ? 0.0f : at >= alone ? returns[i] : float(double(returns[i]) - positions[at].returns);
      }
      position += n;
    });
  }

  bool run(int64_t* tokens, float* advantages) const {
    bool fractional = false;
    int64_t members = 0, most = -1, second = -1, most_row = -1;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = rows[k], found = add(row, fractional);
      tokens[row] = found;
      if (in.compact && found == 0) continue;
      ++members;
      if (found > most) {
        second = most;
        most = found;
        most_row = row;
      } else {
        second = std::max(second, found);
      }
    }
    for (int64_t at = 0; at < longest; ++at) positions[at].returns /= positions[at].weight + in.eps;
    for (int64_t k = 0; k < count; ++k) {
      int64_t alone = longest;
      if (members < 2) alone = 0;
      else if (in.zero_tail && rows[k] == most_row && most > second) alone = second;
      subtract(rows[k], alone, advantages);
    }
    return fractional;
  }
};

}  // namespace

int optimal_token_baseline(const TokenBaselineInputs& in, float* advantages, int threads) {
  in.rows.validate();
  in.groups.validate();
  if (in.groups.rows != in.rows.count) throw std::invalid_argument("groups and tokens are of different numbers of rollouts");
  std::vector<int64_t> starts(in.groups.count + 1), tokens(in.rows.count);
  for (int64_t g = 0; g < in.groups.count; ++g) {
    int64_t longest = 0;
    for (int64_t k = in.groups.offsets[g]; k < in.groups.offsets[g + 1]; ++k) {
      const int64_t row = in.groups.order[k];
      longest = std::max(longest, in.rows.end(row) - in.rows.begin(row));
    }
    starts[g + 1] = starts[g] + longest;
  }
  std::vector<Position> positions(starts.back());
  std::atomic<int> faults{0};
  parallel_blocks(in.groups.count, threads, [&](int64_t g) {
    const int64_t first = in.groups.offsets[g], count = in.groups.offsets[g + 1] - first;
    const Group group{in, in.groups.order + first, count, positions.data() + starts[g], starts[g + 1] - starts[g]};
    if (group.run(tokens.data(), advantages)) faults.fetch_or(kFractionalMask, std::memory_order_relaxed);
  });
  return faults.load();
}

}  // namespace fastadv
