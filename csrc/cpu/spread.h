// Mean and spread of the numbers of a tile that count.
#pragma once

#include "cpu/lanes.h"
#include "fastadv/returns.h"

namespace fastadv {

inline void write(const Spread& spread, double* to) {
  to[0] = spread.count;
  to[1] = spread.mean;
  to[2] = spread.squares;
}

namespace detail {
using HalfVector32 = float __attribute__((vector_size(kWidth * sizeof(float) / 2)));
using DoubleVector = double __attribute__((vector_size(kWidth * sizeof(double) / 2)));
}  // namespace detail

// Sixteen doubles: sums of numbers and of their squares, both of distances from one of the numbers.
struct DistanceSums {
  detail::DoubleVector sums[2 * detail::kRegisters] = {}, squares[2 * detail::kRegisters] = {};

  FASTADV_INLINE void add(const float* x, double pivot) {
    for (int k = 0; k < 2 * detail::kRegisters; ++k) {
      detail::HalfVector32 part;
      std::memcpy(&part, x + k * detail::kWidth / 2, sizeof(part));
      const detail::DoubleVector distance = __builtin_convertvector(part, detail::DoubleVector) - pivot;
      sums[k] += distance;
      squares[k] += distance * distance;
    }
  }
};

inline double total(const detail::DoubleVector* lanes) {
  double part[kLanes], sum = 0.0;
  std::memcpy(part, lanes, sizeof(part));
  for (double x : part) sum += x;
  return sum;
}

// Once through a tile, in sixteen float64 lanes. Distances are from the first number that counts: the squares of n numbers
// about one of them are at most n times those about their mean, so a tile of 1024 loses ten bits of 53 at most.
inline Spread tile_spread(const float* x, const uint8_t* on, int64_t n) {
  int64_t first = 0;
  while (first < n && !on[first]) ++first;
  if (first == n) return {};
  const Lanes pivot(x[first]);
  DistanceSums distances;
  LaneCount counts;
  alignas(64) float part[kLanes];
  const auto sixteen = [&](const float* p, const uint8_t* m) {
    const LaneMask mask = load_mask(m);
    store(part, select(mask, load(p), pivot));
    distances.add(part, x[first]);
    counts.add(mask);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sixteen(x + i, on + i);
  if (i < n) {
    float rest[kLanes] = {};
    uint8_t rest_on[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    std::memcpy(rest_on, on + i, n - i);
    sixteen(rest, rest_on);
  }
  const double count = counts.total(), shift = total(distances.sums) / count;
  const double squares = total(distances.squares) - count * shift * shift;
  return {count, x[first] + shift, squares < 0.0 ? 0.0 : squares};  // by rounding only; a NaN stays
}

}  // namespace fastadv
