// Values of one row's segments at its tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace fastadv {

// out[i] = values[ids[i]], 0 where ids[i] < 0. An id that the row does not have gives 0 and, at a token in the mask (null:
// everywhere), the fault. Turns are runs, so sixteen equal ids are the usual case.
template <class T>
inline void look_up_segments(const T* values, int64_t turns, const int32_t* ids, const uint8_t* mask, int64_t n, T* out, int& faults) {
  const auto one = [&](int64_t i) {
    const int32_t id = ids[i];
    if (id >= turns && (!mask || mask[i])) faults |= kTurnOutOfRange;
    out[i] = id < 0 || id >= turns ? T(0) : values[id];
  };
  int64_t i = 0;
  while (i + kLanes <= n) {
    const int32_t first = ids[i];
    if (first >= turns || !all_equal(ids + i, first)) {
      for (const int64_t end = i + kLanes; i < end; ++i) one(i);
      continue;
    }
    const T value = first < 0 ? T(0) : values[first];
    do {
      std::fill_n(out + i, kLanes, value);
      i += kLanes;
    } while (i + kLanes <= n && all_equal(ids + i, first));
  }
  for (; i < n; ++i) one(i);
}

}  // namespace fastadv
