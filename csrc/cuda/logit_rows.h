// Rows of logits as the kernels of log-softmax read them. For kernels only: nvcc compiles this.
//
// A block of threads goes over a row in steps of four tiles, all of whose logits it loads at once, and leaves the rest to
// tiles of their own. A thread has the same eight columns of every tile. Rows longer than a part are summed part by part.
#pragma once

#include <stdexcept>

#include "cuda/kernels.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

constexpr int kThreads = 128;
constexpr int kWidth = 8;  // neighbouring columns: 16 bytes of bfloat16, two loads of float32
constexpr int kTile = kThreads * kWidth;
constexpr int kTiles = 4;  // 64 bytes of bfloat16 a thread are in flight
constexpr int kStep = kTiles * kTile;
constexpr int kPart = 8 * kStep;

template <class T>
__device__ T* row_of(const LogitsView& view, int64_t row) {
  const int64_t outer = row / view.inner;
  return static_cast<T*>(view.data) + outer * view.outer_stride + (row - outer * view.inner) * view.inner_stride;
}

__device__ inline double inverse_temperature_of(const LogitsInputs& in, int64_t row) {
  return in.inverse_temperatures ? in.inverse_temperatures[row] : in.inverse_temperature;
}

// A thread's logits of a tile of which `left` columns exist from its first on, -inf in place of the rest.
template <bool kAligned, class T>
__device__ Vector<T, kWidth> load_tile(const T* from, int left) {
  return kAligned && left >= kWidth ? load_vector<kWidth>(from) : load_some<kWidth>(from, left, from_float<T>(-INFINITY));
}

// Whether every row of it begins at a multiple of 16 bytes.
template <class T>
bool aligned_rows(const LogitsView& view) {
  return aligned(view.data) && (view.outer_stride * sizeof(T)) % kLoadBytes == 0 && (view.inner_stride * sizeof(T)) % kLoadBytes == 0;
}

// Calls `body` with a 0 of the type of logits.
template <class Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kBFloat16) return body(__nv_bfloat16{});
  if (dtype == DType::kFloat16) return body(__half{});
  throw std::invalid_argument("logits are float32, bfloat16 or float16");
}

}  // namespace fastadv::cuda
