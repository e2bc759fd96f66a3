// Eight doubles at a time, as scans over tokens use them.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastadv/portability.h"

namespace fastadv {

using Eight = double __attribute__((vector_size(8 * sizeof(double))));
using EightIndices = int64_t __attribute__((vector_size(8 * sizeof(int64_t))));
using EightFloats = float __attribute__((vector_size(8 * sizeof(float))));

template <class Vector, class T>
FASTADV_INLINE Vector load_eight(const T* p) {
  Vector v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class T>
FASTADV_INLINE void store_eight(T* p, const Eight& v) {
  std::memcpy(p, &v, sizeof(v));
}

// Lane k + By of `v`, 0 beyond the last.
template <int By>
FASTADV_INLINE Eight later(const Eight& v) {
  return __builtin_shuffle(v, Eight{}, EightIndices{By, By + 1, By + 2, By + 3, By + 4, By + 5, By + 6, By + 7});
}

// Lane k - By of `v`, 0 before the first.
template <int By>
FASTADV_INLINE Eight earlier(const Eight& v) {
  return __builtin_shuffle(Eight{}, v, EightIndices{8 - By, 9 - By, 10 - By, 11 - By, 12 - By, 13 - By, 14 - By, 15 - By});
}

// Sums of the lanes up to each.
FASTADV_INLINE Eight sums_up_to(Eight v) {
  v += earlier<1>(v);
  v += earlier<2>(v);
  return v + earlier<4>(v);
}

}  // namespace fastadv
