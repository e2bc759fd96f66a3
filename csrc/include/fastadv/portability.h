// What the shared formulas need from the compiler, on the host and on the device.
#pragma once

#if defined(__CUDACC__)
#define FASTADV_INLINE __host__ __device__ __forceinline__
#else
#define FASTADV_INLINE inline __attribute__((always_inline))
#endif

#include <cmath>

namespace fastadv {

// The formulas are templates over the number they compute with: `float` or `double` on the device,
// `Lanes` (sixteen floats) on the CPU. These are the scalar forms of the operations that `Lanes` overloads.
template <class F>
FASTADV_INLINE F select(bool condition, F yes, F no) {
  return condition ? yes : no;
}

// A comparison with NaN is false, so a NaN passes through clamp unchanged and stays visible.
template <class F>
FASTADV_INLINE F clamp(F x, F low, F high) {
  return select(x < low, low, select(x > high, high, x));
}

// exp for arguments that were cut to a bound of at most 80 first.
FASTADV_INLINE float exp_bounded(float x) { return expf(x); }

// 1 / x for x between 2^-120 and 2^120.
FASTADV_INLINE float reciprocal(float x) { return 1.0f / x; }

// 2^x for arguments of at most 120 either way.
FASTADV_INLINE float exp2_bounded(float x) { return exp2f(x); }

}  // namespace fastadv
