// Sixteen floats in as many registers as the instruction set needs: one of AVX-512, two of AVX2, four of SSE2 or NEON.
// The number of lanes never changes, a * b + c is never contracted (-ffp-contract=off) and every sum is taken lane by
// lane and then in lane order, so results have the same bits on every instruction set. GCC and Clang vector extensions.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastadv/portability.h"

namespace fastadv {

constexpr int kLanes = 16;

namespace detail {
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kRegisters = kLanes / kWidth;
using FloatVector = float __attribute__((vector_size(kWidth * sizeof(float))));
using IntVector = int32_t __attribute__((vector_size(kWidth * sizeof(int32_t))));
using ByteVector = uint8_t __attribute__((vector_size(kWidth)));
}  // namespace detail

// All ones or all zeros in each lane: the result of a comparison.
struct LaneMask {
  detail::IntVector v[detail::kRegisters];
};

struct Lanes {
  detail::FloatVector v[detail::kRegisters];
  Lanes() = default;
  FASTADV_INLINE explicit Lanes(float x) {
    for (int k = 0; k < detail::kRegisters; ++k) v[k] = x - detail::FloatVector{};
  }
};

#define FASTADV_LANES_BINARY(op)                                                    \
  FASTADV_INLINE Lanes operator op(const Lanes& a, const Lanes& b) {                \
    Lanes c;                                                                        \
    for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = a.v[k] op b.v[k];         \
    return c;                                                                       \
  }
FASTADV_LANES_BINARY(+)
FASTADV_LANES_BINARY(-)
FASTADV_LANES_BINARY(*)
FASTADV_LANES_BINARY(/)
#undef FASTADV_LANES_BINARY

#define FASTADV_LANES_COMPARE(op)                                                             \
  FASTADV_INLINE LaneMask operator op(const Lanes& a, const Lanes& b) {                       \
    LaneMask c;                                                                               \
    for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = (detail::IntVector)(a.v[k] op b.v[k]); \
    return c;                                                                                 \
  }
FASTADV_LANES_COMPARE(<)
FASTADV_LANES_COMPARE(>)
FASTADV_LANES_COMPARE(!=)
#undef FASTADV_LANES_COMPARE

FASTADV_INLINE Lanes operator-(const Lanes& a) {
  Lanes c;
  for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = -a.v[k];
  return c;
}

FASTADV_INLINE LaneMask operator&(const LaneMask& a, const LaneMask& b) {
  LaneMask c;
  for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = a.v[k] & b.v[k];
  return c;
}

FASTADV_INLINE LaneMask operator|(const LaneMask& a, const LaneMask& b) {
  LaneMask c;
  for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = a.v[k] | b.v[k];
  return c;
}

FASTADV_INLINE LaneMask operator!(const LaneMask& a) {
  LaneMask c;
  for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = ~a.v[k];
  return c;
}

FASTADV_INLINE Lanes select(const LaneMask& m, const Lanes& yes, const Lanes& no) {
  Lanes c;
  for (int k = 0; k < detail::kRegisters; ++k) c.v[k] = m.v[k] ? yes.v[k] : no.v[k];
  return c;
}

FASTADV_INLINE Lanes clamp(const Lanes& x, const Lanes& low, const Lanes& high) {
  return select(x < low, low, select(x > high, high, x));
}

FASTADV_INLINE Lanes load(const float* p) {
  Lanes c;
  for (int k = 0; k < detail::kRegisters; ++k) std::memcpy(&c.v[k], p + k * detail::kWidth, sizeof(c.v[k]));
  return c;
}

FASTADV_INLINE void store(float* p, const Lanes& a) {
  for (int k = 0; k < detail::kRegisters; ++k) std::memcpy(p + k * detail::kWidth, &a.v[k], sizeof(a.v[k]));
}

// True where the byte is not zero.
FASTADV_INLINE LaneMask load_mask(const uint8_t* p) {
  LaneMask c;
  for (int k = 0; k < detail::kRegisters; ++k) {
    detail::ByteVector bytes;
    std::memcpy(&bytes, p + k * detail::kWidth, sizeof(bytes));
    c.v[k] = __builtin_convertvector(bytes, detail::IntVector) != 0;
  }
  return c;
}

// Whether sixteen integers are all equal to `value`.
FASTADV_INLINE bool all_equal(const int32_t* p, int32_t value) {
  using SignBytes = int8_t __attribute__((vector_size(detail::kWidth)));
  SignBytes equal[detail::kRegisters];
  for (int k = 0; k < detail::kRegisters; ++k) {
    detail::IntVector v;
    std::memcpy(&v, p + k * detail::kWidth, sizeof(v));
    equal[k] = __builtin_convertvector((v == value), SignBytes);
  }
  uint64_t words[2];
  std::memcpy(words, equal, sizeof(words));
  return (words[0] & words[1]) == ~uint64_t{0};
}

// e^x for |x| <= 80: x = n ln 2 + r with ln 2 in two parts, a polynomial of degree 7 in r (coefficients of Cephes' expf),
// then n into the exponent. Relative error below 2e-7. NaN stays NaN.
FASTADV_INLINE Lanes exp_bounded(const Lanes& x) {
  Lanes result;
  for (int k = 0; k < detail::kRegisters; ++k) {
    const float round_to_int = 12582912.0f;  // 1.5 * 2^23
    const detail::FloatVector n = (x.v[k] * 1.44269504088896341f + round_to_int) - round_to_int;
    detail::FloatVector r = x.v[k] - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    detail::FloatVector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const detail::IntVector exponent = (__builtin_convertvector(n, detail::IntVector) + 127) << 23;
    detail::FloatVector power;
    std::memcpy(&power, &exponent, sizeof(power));
    result.v[k] = p * power;
  }
  return result;
}

// A sum that is added to lane by lane; total() adds the lanes in order.
struct LaneSum {
  Lanes lanes = Lanes(0.0f);
  FASTADV_INLINE void add(const Lanes& x) { lanes = lanes + x; }
  double total() const {
    float part[kLanes];
    store(part, lanes);
    double sum = 0.0;
    for (float x : part) sum += x;
    return sum;
  }
};

// The same in float64, of the sums of tiles: float32 holds a thousand additions well, and a million badly.
struct WideSum {
  double lanes[kLanes] = {};
  void add(const LaneSum& tile) {
    float part[kLanes];
    store(part, tile.lanes);
    for (int k = 0; k < kLanes; ++k) lanes[k] += part[k];
  }
  double total() const {
    double sum = 0.0;
    for (double x : lanes) sum += x;
    return sum;
  }
};

// How often each lane of a mask was true; exact up to 2^31 times.
struct LaneCount {
  LaneMask lanes{};
  FASTADV_INLINE void add(const LaneMask& m) {
    for (int k = 0; k < detail::kRegisters; ++k) lanes.v[k] = lanes.v[k] - m.v[k];  // true is -1
  }
  double total() const {
    int32_t part[kLanes];
    std::memcpy(part, &lanes, sizeof(part));
    double sum = 0.0;
    for (int32_t x : part) sum += x;
    return sum;
  }
};

}  // namespace fastadv
