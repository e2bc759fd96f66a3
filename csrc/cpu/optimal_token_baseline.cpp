// The optimal token baseline: at each position the mean return of a group's rollouts that reached it, weighted by the energy of
// their scores so far. A group is one thread's. Reads and writes 17 bytes a token in float32, and returns and mask once more,
// which lie in the cache if a group does.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpu/eight.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace fastadv {
namespace {

// Turns numbers into the sums of all up to each, and of what came `before`; calls body(i, sums) for eight of them at a time,
// and for what is left over of `n` with zeros behind it.
template <class Body>
void running_sums(double* x, int64_t n, double& before, const Body& body) {
  for (int64_t i = 0; i < n; i += 8) {
    const Eight sums = sums_up_to(load_eight<Eight>(x + i)) + before;
    before = sums[7];
    body(i, sums);
  }
}

// Calls body(begin, end, whole) for what counts of a tile: its runs of tokens that count (whole), or, where runs are short, all
// of it at once. Turns are runs of hundreds; what lies between them is then not computed at all.
template <class Body>
void spans(const uint8_t* on, int64_t n, const Body& body) {
  int64_t changes = 0;
  for (int64_t i = 1; i < n; ++i) changes += (on[i] != 0) != (on[i - 1] != 0);
  if (changes * 16 > n) return body(0, n, false);
  for (int64_t begin = 0; begin < n;) {
    if (on[begin] == 0) {
      while (begin < n && on[begin] == 0) ++begin;
      continue;
    }
    const void* const zero = std::memchr(on + begin, 0, n - begin);
    const int64_t end = zero ? static_cast<const uint8_t*>(zero) - on : n;
    body(begin, end, true);
    begin = end;
  }
}

struct Group {
  const TokenBaselineInputs& in;
  const int64_t* rows;
  int64_t count;
  int64_t longest;  // tokens of its longest row
  double* returns;  // [longest + 1] positions: weighted, and then the baseline; one more, for what is behind the last
  double* weights;  // [longest + 1]

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
    double before = 0.0;
    int64_t tokens = 0, position = 0;
    fractional |= tiles(row, [&](int64_t token, int64_t n, const uint8_t* on, const float* g) {
      alignas(64) float log_prob_buffer[kTile], sum_p2_buffer[kTile], weight_buffer[kTile];
      const float* log_probs = load_floats(in.rows, in.log_probs, token, n, log_prob_buffer);
      const float* sum_p2 = load_floats(in.rows, in.sum_p2, token, n, sum_p2_buffer);
      const float* rho = in.is_weights.present() ? load_floats(in.rows, in.is_weights, token, n, weight_buffer) : nullptr;
      spans(on, n, [&](int64_t begin, int64_t end, bool whole) {
        const int64_t length = end - begin;
        const Span span{on + begin, g + begin, log_probs + begin, sum_p2 + begin, rho ? rho + begin : nullptr, length, whole};
        tokens += add_span(span, in.compact ? tokens : position + begin, before);
      });
      position += n;
    });
    return tokens;
  }

  struct Span {
    const uint8_t* on;
    const float *returns, *log_probs, *sum_p2, *rho;
    int64_t n;
    bool whole;  // all tokens count
  };

  // Adds tokens of a row to the positions from `at` on; returns how many count.
  int64_t add_span(const Span& span, int64_t at, double& before) const {
    alignas(64) double energies[kTile + 8], terms[kTile];
    const uint8_t* const on = span.on;
    const int64_t n = span.n, full = n / 8 * 8;
    for (int64_t i = 0; i < n; ++i) energies[i] = score_energy(exp_ten_digits(span.log_probs[i]), span.sum_p2[i]);
    if (span.rho)
      for (int64_t i = 0; i < n; ++i) energies[i] *= double(span.rho[i]) * double(span.rho[i]);
    if (!span.whole)
      for (int64_t i = 0; i < n; ++i) energies[i] = on[i] ? energies[i] : 0.0;
    std::fill_n(energies + n, 8, 0.0);
    if (span.whole) {
      double *const to_returns = returns + at, *const to_weights = weights + at;
      running_sums(energies, n, before, [&](int64_t i, const Eight& sums) {
        if (i < full) {
          const Eight g = __builtin_convertvector(load_eight<EightFloats>(span.returns + i), Eight);
          store_eight(to_returns + i, load_eight<Eight>(to_returns + i) + g * sums);
          store_eight(to_weights + i, load_eight<Eight>(to_weights + i) + sums);
        } else {
          for (int64_t k = 0; k < n - full; ++k) {
            to_returns[full + k] += double(span.returns[full + k]) * sums[k];
            to_weights[full + k] += sums[k];
          }
        }
      });
      return n;
    }
    running_sums(energies, n, before, [&](int64_t i, const Eight& sums) { store_eight(energies + i, sums); });
    for (int64_t i = 0; i < n; ++i) {
      const double term = double(span.returns[i]) * energies[i], energy = energies[i];
      terms[i] = on[i] ? term : 0.0;
      energies[i] = on[i] ? energy : 0.0;
    }
    int64_t active = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (in.compact) {
        terms[active] = terms[i];
        energies[active] = energies[i];
      }
      active += on[i] != 0;
    }
    const int64_t positions = in.compact ? active : n;
    for (int64_t i = 0; i < positions; ++i) returns[at + i] += terms[i];
    for (int64_t i = 0; i < positions; ++i) weights[at + i] += energies[i];
    return active;
  }

  void subtract(int64_t row, float* advantages) const {
    int64_t tokens = 0, position = 0;
    tiles(row, [&](int64_t token, int64_t n, const uint8_t* on, const float* g) {
      int64_t done = 0;
      spans(on, n, [&](int64_t begin, int64_t end, bool whole) {
        std::fill(advantages + token + done, advantages + token + begin, 0.0f);
        done = end;
        alignas(64) double spread_out[kTile];
        float* const __restrict to = advantages + token + begin;
        const int64_t length = end - begin, at = in.compact ? tokens : position + begin;
        if (whole) {
          for (int64_t i = 0; i < length; ++i) to[i] = float(double(g[begin + i]) - returns[at + i]);
          tokens += length;
          return;
        }
        int64_t next = at;
        for (int64_t i = 0; i < length; ++i) {
          spread_out[i] = returns[in.compact ? next : at + i];
          next += on[begin + i] != 0;
        }
        for (int64_t i = 0; i < length; ++i) {
          const float advantage = float(double(g[begin + i]) - spread_out[i]);
          to[i] = on[begin + i] ? advantage : 0.0f;
        }
        if (in.compact) tokens = next;
      });
      std::fill(advantages + token + done, advantages + token + n, 0.0f);
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
    for (int64_t at = 0; at < longest; ++at) returns[at] /= weights[at] + in.eps;
    const bool lonely = in.zero_tail && members > 1 && most > second;
    if (members < 2) std::fill(returns, returns + longest, 0.0);
    for (int64_t k = 0; k < count; ++k)
      if (!(lonely && rows[k] == most_row)) subtract(rows[k], advantages);
    if (lonely) {  // the last to be done, so that nobody else misses what it has no baseline for
      std::fill(returns + second, returns + longest, 0.0);
      subtract(most_row, advantages);
    }
    return fractional;
  }
};

}  // namespace

int optimal_token_baseline(const TokenBaselineInputs& in, float* advantages, int threads) {
  in.rows.validate();
  in.groups.validate();
  if (in.groups.rows != in.rows.count) throw std::invalid_argument("groups and tokens are of different numbers of rollouts");
  std::vector<int64_t> tokens(in.rows.count);
  std::atomic<int> faults{0};
  std::atomic<bool> no_memory{false};
  parallel_blocks(in.groups.count, threads, [&](int64_t g) {
    const int64_t* const rows = in.groups.order + in.groups.offsets[g];
    const int64_t count = in.groups.offsets[g + 1] - in.groups.offsets[g];
    int64_t longest = 0;
    for (int64_t k = 0; k < count; ++k) longest = std::max(longest, in.rows.end(rows[k]) - in.rows.begin(rows[k]));
    // A group's own memory, which the next one gets again: it stays in the cache.
    const std::unique_ptr<double[]> sums(new (std::nothrow) double[2 * (longest + 1)]());
    if (!sums) {
      no_memory = true;
      return;
    }
    const Group group{in, rows, count, longest, sums.get(), sums.get() + longest + 1};
    if (group.run(tokens.data(), advantages)) faults.fetch_or(kFractionalMask, std::memory_order_relaxed);
  });
  if (no_memory) throw std::bad_alloc();
  return faults.load();
}

}  // namespace fastadv
