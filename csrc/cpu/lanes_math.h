// Sixteen floats from and to the number types that tensors have, and what log-softmax needs of them.
#pragma once

#include "cpu/lanes.h"
#include "cpu/token_view.h"

namespace fastadv {

// The larger of two; a NaN in `a` is dropped.
FASTADV_INLINE Lanes larger(const Lanes& a, const Lanes& b) { return select(a > b, a, b); }

inline float largest_lane(const Lanes& a) {
  float part[kLanes], top;
  store(part, a);
  top = part[0];
  for (float x : part) top = x > top ? x : top;
  return top;
}

namespace detail {
using HalfVector = uint16_t __attribute__((vector_size(kWidth * sizeof(uint16_t))));
using UnsignedVector = uint32_t __attribute__((vector_size(kWidth * sizeof(uint32_t))));

FASTADV_INLINE FloatVector as_floats(const UnsignedVector& bits) {
  FloatVector x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

FASTADV_INLINE UnsignedVector as_bits(const FloatVector& x) {
  UnsignedVector bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FASTADV_INLINE UnsignedVector load_halves(const uint16_t* p) {
  HalfVector halves;
  std::memcpy(&halves, p, sizeof(halves));
  return __builtin_convertvector(halves, UnsignedVector);
}

FASTADV_INLINE void store_halves(uint16_t* p, const UnsignedVector& bits) {
  const HalfVector halves = __builtin_convertvector(bits, HalfVector);
  std::memcpy(p, &halves, sizeof(halves));
}
}  // namespace detail

// Number types as tensors hold them. `load` and `store` are the functions of token_view.h, sixteen at a time.
struct Float32 {
  using Storage = float;
  static float one(float x) { return x; }
  static float to(float x) { return x; }
  static FASTADV_INLINE Lanes load(const float* p) { return fastadv::load(p); }
  static FASTADV_INLINE void store(float* p, const Lanes& x) { fastadv::store(p, x); }
};

struct BFloat16 {
  using Storage = uint16_t;
  static float one(uint16_t x) { return from_bfloat16(x); }
  static uint16_t to(float x) { return to_bfloat16(x); }
  static FASTADV_INLINE Lanes load(const uint16_t* p) {
    Lanes c;
    for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = detail::as_floats(detail::load_halves(p + k * detail::kWidth) << 16);
    return c;
  }
  static FASTADV_INLINE void store(uint16_t* p, const Lanes& x) {
    for (int k = 0; k < detail::kRegisters; ++k) {
      const detail::UnsignedVector bits = detail::as_bits(x.v[k]);
      const detail::UnsignedVector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const detail::UnsignedVector nan = (bits >> 16) | 0x40u;
      detail::store_halves(p + k * detail::kWidth, (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
  }
};

struct Float16 {
  using Storage = uint16_t;
  static float one(uint16_t x) { return from_float16(x); }
  static uint16_t to(float x) { return to_float16(x); }
  static FASTADV_INLINE Lanes load(const uint16_t* p) {
    Lanes c;
    for (int k = 0; k < detail::kRegisters; ++k) {
      const detail::UnsignedVector h = detail::load_halves(p + k * detail::kWidth);
      const detail::UnsignedVector sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
      const detail::UnsignedVector scaled = detail::as_bits(detail::as_floats(magnitude) * 0x1p112f);
      c.v[k] = detail::as_floats(((h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : scaled) | sign);
    }
    return c;
  }
  static FASTADV_INLINE void store(uint16_t* p, const Lanes& x) {
    for (int k = 0; k < detail::kRegisters; ++k) {
      const detail::UnsignedVector bits = detail::as_bits(x.v[k]), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
      detail::UnsignedVector half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
      half = magnitude < 0x38800000u ? detail::as_bits(detail::as_floats(magnitude) + 0.5f) - 0x3f000000u : half;
      half = magnitude >= 0x47800000u ? (half & 0u) | 0x7c00u : half;
      half = magnitude > 0x7f800000u ? (half & 0u) | 0x7e00u : half;
      detail::store_halves(p + k * detail::kWidth, sign | half);
    }
  }
};

// Sixteen numbers `stride` apart, the first `left` of them real, the others -inf.
template <class Number>
FASTADV_INLINE Lanes load_columns(const typename Number::Storage* p, int64_t stride, int64_t left) {
  if (stride == 1 && left >= kLanes) return Number::load(p);
  float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = i < left ? Number::one(p[i * stride]) : bits_to_float(0xff800000u);
  return load(values);
}

template <class Number>
FASTADV_INLINE void store_columns(typename Number::Storage* p, int64_t stride, int64_t left, const Lanes& x) {
  if (stride == 1 && left >= kLanes) return Number::store(p, x);
  float values[kLanes];
  store(values, x);
  for (int64_t i = 0; i < kLanes && i < left; ++i) p[i * stride] = Number::to(values[i]);
}

}  // namespace fastadv
