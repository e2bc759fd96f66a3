// Mean and spread of the numbers of a tile that count.
#pragma once

#include <algorithm>

#include "cpu/lanes.h"
#include "fastadv/returns.h"

namespace fastadv {

inline void write(const Spread& spread, double* to) {
  to[0] = spread.count;
  to[1] = spread.mean;
  to[2] = spread.squares;
}

// Twice through a tile that is in the first-level cache: the mean first, then distances from it. Sixteen float64 lanes.
inline Spread tile_spread(const float* x, const uint8_t* on, int64_t n) {
  double sums[kLanes] = {}, squares[kLanes] = {};
  LaneCount counts;
  float rest[kLanes] = {};
  uint8_t rest_on[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  std::copy(x + whole, x + n, rest);
  std::copy(on + whole, on + n, rest_on);
  const auto sixteen = [&](const float* p, const uint8_t* m) {
    const LaneMask mask = load_mask(m);
    float part[kLanes];
    store(part, select(mask, load(p), Lanes(0.0f)));
    for (int k = 0; k < kLanes; ++k) sums[k] += double(part[k]);
    counts.add(mask);
  };
  for (int64_t i = 0; i < whole; i += kLanes) sixteen(x + i, on + i);
  sixteen(rest, rest_on);
  Spread spread;
  spread.count = counts.total();
  if (spread.count == 0.0) return spread;
  for (double sum : sums) spread.mean += sum;
  const double mean = spread.mean /= spread.count;
  const auto distances = [&](const float* p, const uint8_t* m) {
    for (int k = 0; k < kLanes; ++k) {
      const double distance = double(p[k]) - mean, counted = m[k] ? distance : 0.0;
      squares[k] += counted * counted;
    }
  };
  for (int64_t i = 0; i < whole; i += kLanes) distances(x + i, on + i);
  distances(rest, rest_on);
  for (double square : squares) spread.squares += square;
  return spread;
}

}  // namespace fastadv
