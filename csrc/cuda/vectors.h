// Per-token arrays as the kernels read them: contiguous, float32, bfloat16 or float16, sixteen bytes at a time. For kernels
// only: nvcc compiles this.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace fastadv::cuda {

constexpr uint8_t kFractional = 0xAA;  // in a mask's bytes, beside 0 and 1: not a whole number. What it means nobody knows: NaN
constexpr int kLoadBytes = 16;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float(float x) {
  return __float2half_rn(x);
}

// N neighbours that are read or written by as few instructions as their alignment allows.
template <class T, int N>
struct alignas(sizeof(T) * N < kLoadBytes ? sizeof(T) * N : kLoadBytes) Vector {
  T values[N];
};

// `from` is a multiple of the vector's alignment.
template <int N, class T>
__device__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

// Written once, so the first to leave the cache. By intrinsics: nvcc may make an assignment four stores of 4 bytes.
template <int N, class T>
__device__ void store_vector(T* to, const Vector<T, N>& values) {
  constexpr int kBytes = sizeof(values);
  if constexpr (kBytes % sizeof(uint4) == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / int(sizeof(uint4)); ++i) {
      uint4 sixteen;
      memcpy(&sixteen, values.values + i * (sizeof(uint4) / sizeof(T)), sizeof(uint4));
      __stcs(reinterpret_cast<uint4*>(to) + i, sixteen);
    }
  } else if constexpr (kBytes == sizeof(uint2)) {
    uint2 eight;
    memcpy(&eight, values.values, sizeof(uint2));
    __stcs(reinterpret_cast<uint2*>(to), eight);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = values.values[i];
  }
}

// The first `count` of N neighbours, `other` in place of the rest.
template <int N, class T>
__device__ Vector<T, N> load_some(const T* from, int64_t count, T other) {
  Vector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.values[i] = i < count ? from[i] : other;
  return v;
}

template <int N, class T>
__device__ void store_some(T* to, int64_t count, const Vector<T, N>& values) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) to[i] = values.values[i];
  }
}

// Whether 16-byte accesses may begin at this address.
inline bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kLoadBytes == 0; }

}  // namespace fastadv::cuda
