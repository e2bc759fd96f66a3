// Baselines over a group of rollouts, in float64. The specification is fastadv/reference/{moments,group_advantages,
// turn_advantages}.py. Rewards arrive shifted by the group's smallest voting reward: a group without spread is then made
// of exact zeros, whatever its value and size. Nothing is decided by a comparison that a NaN would fail: a NaN or an infinity
// in rewards or votes comes out as NaN.
#pragma once

#include <cmath>

#include "fastadv/portability.h"

namespace fastadv {

enum class Baseline : int { kNone = 0, kMean = 1, kLeaveOneOut = 2 };
enum class Singleton : int { kZero = 0, kRaw = 1, kDrop = 2 };
enum class EpsForm : int { kAdd = 0, kFloor = 1, kPositive = 2 };

struct AdvantageRule {
  Baseline baseline = Baseline::kMean;
  Singleton singleton = Singleton::kZero;
  bool scaled = false;
  double ddof = 1.0;
  double eps = 1e-6;
  EpsForm eps_form = EpsForm::kAdd;
};

// What a group knows about its voters; `sum` is over shifted rewards, weighted by the votes.
struct GroupMoments {
  double minimum;
  double weight;
  double sum;
  double squares;  // votes * (shifted reward - mean)^2
  long long voters;
};

// The smaller of two rewards; unlike fmin it keeps a NaN.
FASTADV_INLINE double smaller(double a, double b) { return b < a || b != b ? b : a; }

// What a voter adds to the group's sum, and then to its squares.
FASTADV_INLINE double weighted(double vote, double reward, double minimum) { return vote * (reward - minimum); }
FASTADV_INLINE double weighted_square(double vote, double reward, double minimum, double mean) {
  const double centred = reward - minimum - mean;
  return vote * (centred * centred);
}

FASTADV_INLINE double mean_of(double sum, double weight) { return weight == 0.0 ? 0.0 : sum / weight; }

// Mean over the voters other than a row that has `vote` votes and the shifted reward `reward`.
FASTADV_INLINE double leave_one_out(const GroupMoments& m, double reward, double vote) {
  return mean_of(m.sum - vote * reward, m.weight - vote);
}

FASTADV_INLINE double group_baseline(Baseline kind, const GroupMoments& m, double reward, double vote) {
  return kind == Baseline::kMean ? mean_of(m.sum, m.weight) : leave_one_out(m, reward, vote);
}

// Baseline conditioned on having reached a turn (docs/theory.md, equation 13): the mean over the other voters that reached it,
// shrunk towards `target` by lam = n / (n + kappa). `count` and `sum` are over all voters that reached the turn.
FASTADV_INLINE double turn_baseline(double count, double sum, double reward, double vote, double target, double kappa) {
  const double n = count - vote;
  if (n <= 0.0) return target;
  const double lam = n / (n + kappa);
  const double bucket = (sum - vote * reward) / n;
  return target + lam * (bucket - target);
}

// Divides by the group's standard deviation. A group whose divisor is zero has no scale: the advantage is 0 if it is finite.
FASTADV_INLINE double scale_advantage(double advantage, const GroupMoments& m, double ddof, double eps, EpsForm form) {
  const double freedom = m.weight - ddof;
  const double variance = freedom <= 0.0 ? 0.0 : m.squares / freedom;
  double divisor = 1.0;
  if (form == EpsForm::kAdd) {
    divisor = sqrt(variance) + eps;
  } else if (form == EpsForm::kFloor) {
    divisor = sqrt(variance < eps ? eps : variance) + eps;
  } else if (variance != 0.0) {
    divisor = sqrt(variance) + eps;
  }
  return divisor == 0.0 ? advantage - advantage : advantage / divisor;
}

// A row beside the moments of its group: what its advantages are made of. `reward` and `left_out` are shifted by the group's
// minimum; `left_out` and `vote` are what `mean` holds for the row.
struct RowContext {
  GroupMoments mean, spread;
  double raw, reward, left_out, vote;
  bool settled;  // excluded, no voter, or a singleton: the advantage is settled_value whatever the turn
  double settled_value;
};

FASTADV_INLINE RowContext row_context(const AdvantageRule& rule, const GroupMoments& mean, const GroupMoments& spread, double reward,
                                      double left_out, double vote, bool included) {
  RowContext c{mean, spread, reward, reward - mean.minimum, vote != 0.0 ? left_out - mean.minimum : 0.0, vote, false, 0.0};
  if (!included) {
    c.settled = true;
  } else if (mean.voters <= 1 && (rule.baseline != Baseline::kNone || rule.scaled)) {  // the reward itself needs no voter
    c.settled = true;
    if (mean.voters == 1 && rule.singleton == Singleton::kRaw) c.settled_value = reward;
  }
  return c;
}

FASTADV_INLINE double scaled(const AdvantageRule& rule, const RowContext& c, double advantage) {
  return rule.scaled ? scale_advantage(advantage, c.spread, rule.ddof, rule.eps, rule.eps_form) : advantage;
}

FASTADV_INLINE double group_advantage(const AdvantageRule& rule, const RowContext& c) {
  if (c.settled) return c.settled_value;
  if (rule.baseline == Baseline::kNone) return scaled(rule, c, c.raw);
  return scaled(rule, c, c.reward - group_baseline(rule.baseline, c.mean, c.left_out, c.vote));
}

// What a row's turns are shrunk towards.
FASTADV_INLINE double turn_target(const RowContext& c, bool shrink_to_mean) {
  return shrink_to_mean ? mean_of(c.mean.sum, c.mean.weight) : leave_one_out(c.mean, c.left_out, c.vote);
}

FASTADV_INLINE double turn_advantage(const AdvantageRule& rule, const RowContext& c, double count, double sum, double target,
                                     double kappa) {
  if (c.settled) return c.settled_value;
  return scaled(rule, c, c.reward - turn_baseline(count, sum, c.left_out, c.vote, target, kappa));
}

}  // namespace fastadv
