// Device functions that a host has no version of: cached loads and stores, arithmetic with a stated rounding, fast
// mathematics (here exact: compare with a tolerance), bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_types.h"

// ---- loads and stores with a hint for the cache ----
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldca(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline T __ldlu(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stwb(T* address, T value) {
  *address = value;
}

// ---- arithmetic, rounded to nearest even; -ffp-contract=off keeps each operation apart ----
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __expf(float a) { return expf(a); }
inline float __exp10f(float a) { return powf(10.0f, a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __log10f(float a) { return log10f(a); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline float __tanhf(float a) { return tanhf(a); }

// ---- conversions; a device saturates, and makes 0 of NaN ----
namespace cuda_emulation {
template <class Integer>
inline Integer to_integer(double value) {
  constexpr bool kSigned = static_cast<Integer>(-1) < static_cast<Integer>(0);
  const double above = ldexp(1.0, 8 * static_cast<int>(sizeof(Integer)) - kSigned);
  const Integer most = static_cast<Integer>(~static_cast<uint64_t>(0) >> (64 - 8 * sizeof(Integer) + kSigned));
  if (std::isnan(value)) return 0;
  if (value >= above) return most;
  if (value < (kSigned ? -above : 0.0)) return kSigned ? static_cast<Integer>(-most - 1) : 0;
  return static_cast<Integer>(value);
}
}  // namespace cuda_emulation
inline int __float2int_rn(float a) { return ::cuda_emulation::to_integer<int>(nearbyintf(a)); }
inline int __float2int_rz(float a) { return ::cuda_emulation::to_integer<int>(truncf(a)); }
inline int __float2int_rd(float a) { return ::cuda_emulation::to_integer<int>(floorf(a)); }
inline int __float2int_ru(float a) { return ::cuda_emulation::to_integer<int>(ceilf(a)); }
inline unsigned __float2uint_rn(float a) { return ::cuda_emulation::to_integer<unsigned>(nearbyintf(a)); }
inline long long __float2ll_rn(float a) { return ::cuda_emulation::to_integer<long long>(nearbyintf(a)); }
inline long long __double2ll_rn(double a) { return ::cuda_emulation::to_integer<long long>(nearbyint(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __ll2float_rn(long long a) { return static_cast<float>(a); }
inline double __ll2double_rn(long long a) { return static_cast<double>(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }

// ---- bits ----
#define CUDA_EMULATION_REINTERPRET(name, From, To)               \
  inline To name(From from) {                                    \
    static_assert(sizeof(From) == sizeof(To), "same size");      \
    To to;                                                       \
    memcpy(&to, &from, sizeof(to));                              \
    return to;                                                   \
  }
CUDA_EMULATION_REINTERPRET(__float_as_int, float, int)
CUDA_EMULATION_REINTERPRET(__float_as_uint, float, unsigned)
CUDA_EMULATION_REINTERPRET(__int_as_float, int, float)
CUDA_EMULATION_REINTERPRET(__uint_as_float, unsigned, float)
CUDA_EMULATION_REINTERPRET(__double_as_longlong, double, long long)
CUDA_EMULATION_REINTERPRET(__longlong_as_double, long long, double)
#undef CUDA_EMULATION_REINTERPRET

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline int __clz(int a) { return a ? __builtin_clz(static_cast<unsigned>(a)) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll(static_cast<unsigned long long>(a)) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline unsigned __brev(unsigned a) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}

// ---- minimum and maximum, which CUDA has without std:: ----
#define CUDA_EMULATION_EXTREMES(T)                       \
  inline T min(T a, T b) { return b < a ? b : a; }       \
  inline T max(T a, T b) { return a < b ? b : a; }
CUDA_EMULATION_EXTREMES(int)
CUDA_EMULATION_EXTREMES(unsigned)
CUDA_EMULATION_EXTREMES(long)
CUDA_EMULATION_EXTREMES(unsigned long)
CUDA_EMULATION_EXTREMES(long long)
CUDA_EMULATION_EXTREMES(unsigned long long)
#undef CUDA_EMULATION_EXTREMES
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
