// The functions of cuda_bf16.h and cuda_fp16.h that have no host version: computed in float, or in double where the
// product has to be exact before it is rounded, and rounded once as on a device.
#pragma once

#include <cmath>

#include "cuda_types.h"
#include "device_functions.h"

#define CUDA_EMULATION_LOW_PRECISION(Scalar, Pair, from_double, to_float, low, high, pair)                     \
  inline Scalar __hfma(Scalar a, Scalar b, Scalar c) {                                                         \
    return from_double(static_cast<double>(to_float(a)) * to_float(b) + to_float(c));                          \
  }                                                                                                            \
  inline Pair __hfma2(Pair a, Pair b, Pair c) {                                                                \
    return pair(__hfma(low(a), low(b), low(c)), __hfma(high(a), high(b), high(c)));                            \
  }                                                                                                            \
  inline Scalar hexp(Scalar a) { return from_double(exp(static_cast<double>(to_float(a)))); }                  \
  inline Scalar hexp2(Scalar a) { return from_double(exp2(static_cast<double>(to_float(a)))); }                \
  inline Scalar hlog(Scalar a) { return from_double(log(static_cast<double>(to_float(a)))); }                  \
  inline Scalar hlog2(Scalar a) { return from_double(log2(static_cast<double>(to_float(a)))); }                \
  inline Scalar hsqrt(Scalar a) { return from_double(sqrt(static_cast<double>(to_float(a)))); }                \
  inline Scalar hrsqrt(Scalar a) { return from_double(1.0 / sqrt(static_cast<double>(to_float(a)))); }         \
  inline Scalar hrcp(Scalar a) { return from_double(1.0 / static_cast<double>(to_float(a))); }
CUDA_EMULATION_LOW_PRECISION(__nv_bfloat16, __nv_bfloat162, __double2bfloat16, __bfloat162float, __low2bfloat16,
                             __high2bfloat16, __halves2bfloat162)
CUDA_EMULATION_LOW_PRECISION(__half, __half2, __double2half, __half2float, __low2half, __high2half, __halves2half2)
#undef CUDA_EMULATION_LOW_PRECISION

inline int __bfloat162int_rn(__nv_bfloat16 a) { return __float2int_rn(__bfloat162float(a)); }
inline int __half2int_rn(__half a) { return __float2int_rn(__half2float(a)); }
