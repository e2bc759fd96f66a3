// Per-token arrays as the caller has them (packed or padded, any stride, any of the accepted types) and tiles of them as
// the kernels want them: contiguous float32. A contiguous float32 tile is used where it lies; anything else goes through
// a buffer that stays in the first-level cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace fastadv {

constexpr int64_t kTile = 1024;          // tokens converted at a time
constexpr int64_t kBlockTokens = 16384;  // tokens in one block of parallel work

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kUInt8 = 3, kInt32 = 4, kInt64 = 5 };

struct TokenView {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;  // elements; used by padded arrays only
  int64_t stride = 0;      // elements from a token to the next
  bool given = false;      // an array without elements may lie at address 0 and is there all the same
  bool present() const { return given; }
};

// How tokens divide into rollouts: packed, row r being [cu_seqlens[r], cu_seqlens[r + 1]), or padded, `width` tokens a row.
struct Rows {
  int64_t count = 0;
  int64_t tokens = 0;
  int64_t width = 0;
  const int64_t* cu_seqlens = nullptr;

  int64_t begin(int64_t row) const { return cu_seqlens ? cu_seqlens[row] : row * width; }
  int64_t end(int64_t row) const { return begin(row + 1); }

  // Whether tokens are evenly spaced in `view` through all rows.
  bool even(const TokenView& view) const { return cu_seqlens || count <= 1 || view.row_stride == width * view.stride; }

  // Index of the element of `view` that belongs to a token, counted through all rows.
  int64_t element(const TokenView& view, int64_t token) const {
    if (even(view)) return token * view.stride;
    return token / width * view.row_stride + token % width * view.stride;
  }

  // Calls body(element, offset, n) for evenly spaced pieces of the `n` tokens from `token` on.
  template <class Body>
  void pieces(const TokenView& view, int64_t token, int64_t n, const Body& body) const {
    if (even(view)) return body(token * view.stride, int64_t{0}, n);
    for (int64_t offset = 0; offset < n;) {
      const int64_t piece = std::min(n - offset, width - (token + offset) % width);
      body(element(view, token + offset), offset, piece);
      offset += piece;
    }
  }

  int64_t row_of(int64_t token) const {
    if (!cu_seqlens) return token / width;
    return std::upper_bound(cu_seqlens, cu_seqlens + count + 1, token) - cu_seqlens - 1;
  }

  void validate() const {
    if (count < 0 || tokens < 0 || width < 0) throw std::invalid_argument("negative size");
    if (!cu_seqlens) {
      int64_t product;
      if (__builtin_mul_overflow(count, width, &product) || product != tokens)
        throw std::invalid_argument("rows * width is not the number of tokens");
      return;
    }
    if (cu_seqlens[0] != 0 || cu_seqlens[count] != tokens)
      throw std::invalid_argument("cu_seqlens must start at 0 and end at the number of tokens");
    for (int64_t row = 0; row < count; ++row)
      if (cu_seqlens[row + 1] < cu_seqlens[row]) throw std::invalid_argument("cu_seqlens decreases at row " + std::to_string(row));
  }
};

// Calls body(row, first token, last token) for the pieces of rows that lie in one block.
template <class Body>
void for_rows_in_block(const Rows& rows, int64_t block, const Body& body) {
  const int64_t first = block * kBlockTokens, last = std::min(rows.tokens, first + kBlockTokens);
  for (int64_t row = rows.row_of(first); row < rows.count && rows.begin(row) < last; ++row) {
    const int64_t from = std::max(first, rows.begin(row)), to = std::min(last, rows.end(row));
    if (from < to) body(row, from, to);
  }
}

inline int64_t block_count(const Rows& rows) { return (rows.tokens + kBlockTokens - 1) / kBlockTokens; }

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float from_bfloat16(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

inline uint16_t to_bfloat16(float x) {  // to nearest, ties to even; NaN stays NaN
  const uint32_t bits = float_to_bits(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(int32_t(bits & 0x7fffffffu) > 0x7f800000 ? (bits >> 16) | 0x0040u : rounded);
}

inline float from_float16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = uint32_t(h & 0x7fffu) << 13;
  // The exponent is rebiased by a product, which also makes float16's subnormals right; inf and NaN keep theirs.
  const float scaled = bits_to_float(magnitude) * bits_to_float(0x77800000u);  // 2^112
  const uint32_t bits = (h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : float_to_bits(scaled);
  return bits_to_float(bits | sign);
}

// To nearest, ties to even. Every case is computed and one is chosen: branches would keep the loops from being vectorised.
inline uint16_t to_float16(float x) {
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
  const int32_t magnitude = int32_t(bits & 0x7fffffffu);
  const uint32_t normal = uint32_t(magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t subnormal = float_to_bits(bits_to_float(uint32_t(magnitude)) + 0.5f) - 0x3f000000u;  // the sum is a multiple of 2^-24
  uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x47800000 ? 0x7c00u : half;  // 65536 and above; 65520 was rounded up
  half = magnitude > 0x7f800000 ? 0x7e00u : half;
  return uint16_t(sign | half);
}

// Calls body(a pointer to elements of type T, stride, offset, n) for evenly spaced pieces of the `n` tokens from `token` on.
template <class T, class Body>
void typed_pieces(const Rows& rows, const TokenView& view, int64_t token, int64_t n, const Body& body) {
  T* const data = reinterpret_cast<T*>(view.data);
  rows.pieces(view, token, n, [&](int64_t element, int64_t offset, int64_t count) { body(data + element, view.stride, offset, count); });
}

// out[i] = convert(element of token + i). `convert` is a lambda, which is inlined (a pointer to a function is called for each
// element), and the loop over neighbours is one of its own: the compiler then vectorises both.
template <class T, class Out, class Convert>
void convert_tokens(const Rows& rows, const TokenView& view, int64_t token, int64_t n, Out* out, const Convert& convert) {
  typed_pieces<const T>(rows, view, token, n, [&](const T* p, int64_t stride, int64_t offset, int64_t count) {
    Out* const __restrict to = out + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = convert(p[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = convert(p[i * stride]);
    }
  });
}

// element of token + i = convert(values[i]).
template <class T, class Convert>
void write_tokens(const Rows& rows, const TokenView& view, int64_t token, int64_t n, const float* values, const Convert& convert) {
  typed_pieces<T>(rows, view, token, n, [&](T* p, int64_t stride, int64_t offset, int64_t count) {
    const float* const __restrict from = values + offset;
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) p[i] = convert(from[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) p[i * stride] = convert(from[i]);
    }
  });
}

// The `n` tokens from `token` on as floats: where they lie if they are contiguous float32, else converted to `buffer`.
inline const float* load_floats(const Rows& rows, const TokenView& view, int64_t token, int64_t n, float* buffer) {
  switch (view.dtype) {
    case DType::kFloat32:
      if (view.stride == 1 && rows.even(view)) return reinterpret_cast<const float*>(view.data) + token;
      convert_tokens<float>(rows, view, token, n, buffer, [](float x) { return x; });
      break;
    case DType::kBFloat16:
      convert_tokens<uint16_t>(rows, view, token, n, buffer, [](uint16_t h) { return from_bfloat16(h); });
      break;
    case DType::kFloat16:
      convert_tokens<uint16_t>(rows, view, token, n, buffer, [](uint16_t h) { return from_float16(h); });
      break;
    default:
      std::fill(buffer, buffer + n, bits_to_float(0x7fc00000u));  // not a float: the callers check; NaN if they did not
  }
  return buffer;
}

// Writes `n` floats to the tokens from `token` on, in the view's type.
inline void store_floats(const Rows& rows, const TokenView& view, int64_t token, int64_t n, const float* values) {
  if (view.dtype == DType::kFloat32) {
    write_tokens<float>(rows, view, token, n, values, [](float x) { return x; });
  } else if (view.dtype == DType::kBFloat16) {
    write_tokens<uint16_t>(rows, view, token, n, values, [](float x) { return to_bfloat16(x); });
  } else {
    write_tokens<uint16_t>(rows, view, token, n, values, [](float x) { return to_float16(x); });
  }
}

// Whether all are whole numbers: adding and taking away 2^23 rounds what is below it, and from there on every finite float is
// whole. The loop counts in integers as wide as the floats, without branches, so that it is vectorised.
inline bool all_whole(const float* p, int64_t n) {
  int32_t others = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = bits_to_float(float_to_bits(p[i]) & 0x7fffffffu);
    const int32_t small = int32_t(magnitude < 8388608.0f) & int32_t((magnitude + 8388608.0f) - 8388608.0f == magnitude);
    const int32_t large = int32_t(magnitude >= 8388608.0f) & int32_t(magnitude <= std::numeric_limits<float>::max());
    others += 1 - (small | large);
  }
  return others == 0;
}

// The `n` mask values from `token` on as bytes, zero or not. A fractional or non-finite value sets `fractional`.
inline const uint8_t* load_mask_bytes(const Rows& rows, const TokenView& view, int64_t token, int64_t n, uint8_t* buffer, bool& fractional) {
  const auto non_zero = [](auto x) { return uint8_t(x != 0); };
  switch (view.dtype) {
    case DType::kUInt8:
      if (view.stride == 1 && rows.even(view)) return reinterpret_cast<const uint8_t*>(view.data) + token;
      convert_tokens<uint8_t>(rows, view, token, n, buffer, non_zero);
      break;
    case DType::kInt32:
      convert_tokens<int32_t>(rows, view, token, n, buffer, non_zero);
      break;
    case DType::kInt64:
      convert_tokens<int64_t>(rows, view, token, n, buffer, non_zero);
      break;
    default: {
      float values[kTile];
      const float* p = load_floats(rows, view, token, n, values);
      for (int64_t i = 0; i < n; ++i) buffer[i] = non_zero(p[i]);
      fractional |= !all_whole(p, n);
    }
  }
  return buffer;
}

// The `n` turn ids from `token` on; one that int32 cannot hold becomes the largest int32, which no table reaches, or -2.
inline const int32_t* load_ids(const Rows& rows, const TokenView& view, int64_t token, int64_t n, int32_t* buffer) {
  if (view.dtype == DType::kInt32) {
    if (view.stride == 1 && rows.even(view)) return reinterpret_cast<const int32_t*>(view.data) + token;
    convert_tokens<int32_t>(rows, view, token, n, buffer, [](int32_t x) { return x; });
  } else {
    convert_tokens<int64_t>(rows, view, token, n, buffer,
                            [](int64_t x) { return x > INT32_MAX ? INT32_MAX : x < -1 ? int32_t{-2} : int32_t(x); });
  }
  return buffer;
}

}  // namespace fastadv
