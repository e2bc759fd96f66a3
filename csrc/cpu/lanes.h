// Sixteen floats in as many registers as the instruction set needs: one of AVX-512, two of AVX2, four of SSE2 or NEON.
// The number of lanes never changes, a * b + c is never contracted (-ffp-contract=off) and every sum is taken lane by
// lane and then in lane order, so results have the same bits on every instruction set. GCC and Clang vector extensions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// True where the byte is not zero. GCC takes sixteen bytes apart one by one where it is not told how to widen them: that
// would be half of a loss's instructions.
FASTADV_INLINE LaneMask load_mask(const uint8_t* p) {
  LaneMask c;
  for (int k = 0; k < detail::kRegisters; ++k) {
    detail::ByteVector bytes;
    std::memcpy(&bytes, p + k * detail::kWidth, sizeof(bytes));
#if defined(__AVX512F__)
    c.v[k] = (detail::IntVector)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)bytes) != 0;
#elif defined(__AVX2__)
    c.v[k] = (detail::IntVector)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)) != 0;
#else
    c.v[k] = __builtin_convertvector(bytes, detail::IntVector) != 0;
#endif
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
    const detail::FloatVector r2 = r * r;  // in pairs, so that few operations wait for each other
    const detail::FloatVector high = r * 1.9875691500e-4f + 1.3981999507e-3f;
    const detail::FloatVector middle = r * 8.3334519073e-3f + 4.1665795894e-2f;
    const detail::FloatVector low = r * 1.6666665459e-1f + 5.0000001201e-1f;
    const detail::FloatVector p = (low + (middle + high * r2) * r2) * r2 + r + 1.0f;
    const detail::IntVector exponent = (__builtin_convertvector(n, detail::IntVector) + 127) << 23;
    detail::FloatVector power;
    std::memcpy(&power, &exponent, sizeof(power));
    result.v[k] = p * power;
  }
  return result;
}

// 1 / x for x between 2^-120 and 2^120, in ten operations where the processor's division takes as long as thirty: the bits
// of x subtracted from a constant are within 5 % of the quotient, and each of Newton's steps squares the error. 2e-7.
FASTADV_INLINE Lanes reciprocal(const Lanes& x) {
  Lanes result;
  for (int k = 0; k < detail::kRegisters; ++k) {
    detail::IntVector bits;
    std::memcpy(&bits, &x.v[k], sizeof(bits));
    bits = 0x7ef127ea - bits;
    detail::FloatVector y;
    std::memcpy(&y, &bits, sizeof(y));
    for (int step = 0; step < 3; ++step) y = y * (2.0f - x.v[k] * y);
    result.v[k] = y;
  }
  return result;
}

// 2^x for |x| <= 120: x = n + f with n whole, a polynomial of degree 6 in f (least largest relative error on [-0.5, 0.5],
// constant term exactly 1), then n into the exponent. Relative error below 1e-7. NaN stays NaN.
FASTADV_INLINE Lanes exp2_bounded(const Lanes& x) {
  Lanes result;
  for (int k = 0; k < detail::kRegisters; ++k) {
    const float round_to_int = 12582912.0f;  // leaves n in the low bits of the sum
    const detail::FloatVector sum = x.v[k] + round_to_int;
    const detail::FloatVector f = x.v[k] - (sum - round_to_int);
    // In pairs, so that few operations wait for each other.
    const detail::FloatVector f2 = f * f;
    const detail::FloatVector low = f * 0x1.62e43p-1f + 1.0f + (f * 0x1.c6aee8p-5f + 0x1.ebfbdcp-3f) * f2;
    const detail::FloatVector high = f * 0x1.5f3e54p-10f + 0x1.3b2d4cp-7f + f2 * 0x1.41fbbcp-13f;
    const detail::FloatVector p = low + high * (f2 * f2);
    detail::IntVector exponent;
    std::memcpy(&exponent, &sum, sizeof(exponent));
    exponent = (exponent + 127) << 23;  // what else is in `sum` is shifted out
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
