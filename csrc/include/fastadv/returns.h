// Returns token by token, what whitening needs of them, and the weights of the optimal token baseline, in float64. The
// specification is fastadv/reference/{token_returns,whiten,optimal_token_baseline}.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastadv/portability.h"

namespace fastadv {

// How many numbers, their mean, and the sum of their squared distances from it.
struct Spread {
  double count = 0.0;
  double mean = 0.0;
  double squares = 0.0;
};

// Chan's merge: nothing is subtracted that was squared before. Numbers without spread keep their mean to the bit.
FASTADV_INLINE Spread merged(const Spread& a, const Spread& b) {
  const double count = a.count + b.count;
  if (count == 0.0) return {};
  const double apart = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * (a.count * share)};
}

struct ReturnRule {
  double gamma = 1.0;
  double lam = 1.0;            // of GAE; read where there are values
  bool discount_gaps = false;  // gamma also counts the tokens between two that count
};

// A return is what a token adds plus `kept` times what follows it. Tokens outside of the mask add nothing.
FASTADV_INLINE double kept(const ReturnRule& rule, bool values) { return values ? rule.gamma * rule.lam : rule.gamma; }
FASTADV_INLINE double kept_in_gaps(const ReturnRule& rule, bool values) { return rule.discount_gaps ? kept(rule, values) : 1.0; }

// What a token adds to GAE beside its reward; `next` is the value of the next token that counts, 0 after the last.
FASTADV_INLINE double value_error(const ReturnRule& rule, double value, double next) { return rule.gamma * next - value; }

// Squared length of the score of a softmax at its logits, for a token of probability p.
FASTADV_INLINE double score_energy(double p, double sum_p2) { return 1.0 - 2.0 * p + sum_p2; }

// e^x to ten digits, x cut to [-700, 80]: n ln 2 + r with ln 2 in two parts, Taylor's polynomial of degree 9 in r, then n
// into the exponent. No branch and no call, so that loops over it are vectorised. NaN stays NaN.
FASTADV_INLINE double exp_ten_digits(double x) {
  x = x < -700.0 ? -700.0 : x > 80.0 ? 80.0 : x;
  const double round_to_int = 6755399441055744.0;  // 1.5 * 2^52 leaves n in the low bits of the sum
  const double sum = x * 1.4426950408889634 + round_to_int, n = sum - round_to_int;
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t exponent;
  std::memcpy(&exponent, &sum, sizeof(exponent));
  exponent = (exponent + 1023) << 52;  // what else is in `sum` is shifted out
  double power;
  std::memcpy(&power, &exponent, sizeof(power));
  return p * power;
}

}  // namespace fastadv
