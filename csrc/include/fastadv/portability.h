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

// a * b + c, and 1 / x for x between 1 and 2: a device has instructions that are as exact as a formula of single steps.
template <class F>
FASTADV_INLINE F multiply_add(F a, F b, F c) {
  return a * b + c;
}
template <class F>
FASTADV_INLINE F inverse(F x) {
  return F(1.0f) / x;
}
#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ float inverse(float x) { return __fdividef(1.0f, x); }
#endif

// 2^x for arguments of at most 120 either way. A float may be below that too: what is left of 2^x, or 0; of -inf 0.
FASTADV_INLINE float exp2_bounded(float x) {
#if defined(__CUDA_ARCH__)
  float power;  // one instruction, and what exp2f takes where the result is normal; no function of CUDA's is only this
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}

}  // namespace fastadv
