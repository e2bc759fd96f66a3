// Values of one row's segments at its tokens.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace fastadv {

// out[i] = values[ids[i]], 0 where ids[i] < 0. An id that the row does not have gives 0 and, at a token in the mask (null:
// everywhere), the fault. Turns are runs, so sixteen equal ids are the usual case.
inline void look_up_segments(const float* values, int64_t turns, const int32_t* ids, const uint8_t* mask, int64_t n, float* out,
                             int& faults) {
  const auto one = [&](int64_t i) {
    const int32_t id = ids[i];
    if (id >= turns && (!mask || mask[i])) faults |= kTurnOutOfRange;
    out[i] = id < 0 || id >= turns ? 0.0f : values[id];
  };
  int64_t i = 0;
  while (i + kLanes <= n) {
    const int32_t first = ids[i];
    if (first >= turns || !all_equal(ids + i, first)) {
      for (const int64_t end = i + kLanes; i < end; ++i) one(i);
      continue;
    }
    const Lanes value(first < 0 ? 0.0f : values[first]);
    do {
      store(out + i, value);
      i += kLanes;
    } while (i + kLanes <= n && all_equal(ids + i, first));
  }
  for (; i < n; ++i) one(i);
}

}  // namespace fastadv
