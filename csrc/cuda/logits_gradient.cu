// Gradient of log-prob, entropy and sum of squares by the logits. One launch: reads each logit once and writes its gradient
// once, 4 bytes of bfloat16; a row to which nothing flows back is only written.
//
// It is elementwise: a block takes a part of a row, and threads never wait for each other. A logit's gradient is the same to
// the bit whatever its place, strides and alignment.
#include "cuda/logit_rows.h"

namespace fastadv::cuda {

namespace {

// A row's numbers.
struct RowGradient {
  double inverse_temperature, lse, entropy, sum_p2;
  double g_log_prob, g_entropy, g_sum_p2;  // upstream
};

template <class T>
__device__ double number(const T* numbers, int64_t row) {
  return numbers ? double(numbers[row]) : 0.0;
}

// What the gradient by a logit that is not the label's is computed from. (z - center) / T is log p + H, where the center is a
// float and a rest: so of equal logits, it is 0 but for a rounding of the rest.
struct Factors {
  float center, scale, p_scale, power_rest, g_log_prob, g_entropy, twice_g_sum_p2, sum_p2;
};

__device__ Factors factors_of(const RowGradient& g) {
  const double mean = g.lse - g.entropy;  // of z / T
  const float center = __fdividef(float(mean), float(g.inverse_temperature));
  const double rest = mean - double(center) * g.inverse_temperature;  // what the division left too
  return {center,
          float(g.inverse_temperature * kLog2E),
          float(exp(-g.entropy - rest)),
          float(-rest * kLog2E),
          float(g.g_log_prob * g.inverse_temperature),
          float(g.g_entropy * g.inverse_temperature * kLn2),
          float(2.0 * g.g_sum_p2 * g.inverse_temperature),
          float(g.sum_p2)};
}

// 0 where p is, whatever flows back.
template <bool kMoments, bool kCapped>
__device__ float gradient_by(float z, const Factors& f, float cap, float inverse_cap) {
  Capped<float> at{z, 1.0f};
  if constexpr (kCapped) at = softcapped(z, cap, inverse_cap);
  const float d = (at.value - f.center) * f.scale, p = exp2_bounded(d) * f.p_scale;
  float gradient = -p * f.g_log_prob;
  if constexpr (kMoments) gradient = logit_gradient(p, d + f.power_rest, f.g_log_prob, f.g_entropy, f.twice_g_sum_p2, f.sum_p2);
  if constexpr (kCapped) gradient *= at.slope;
  return select(above_floor(d), gradient, 0.0f);
}

// By the label's logit, in float64: 1 - p has as many digits as lse leaves it.
__device__ float gradient_by_label(const Capped<float>& at, const RowGradient& g) {
  const double log_prob = double(at.value) * g.inverse_temperature - g.lse;
  const double by = label_gradient(log_prob > 0.0 ? 0.0 : log_prob, g.entropy, g.g_log_prob, g.g_entropy, g.g_sum_p2, g.sum_p2);
  return float(by * g.inverse_temperature * double(at.slope));
}

template <bool kAligned, class T>
__device__ void store_tile(T* to, int left, const Vector<T, kWidth>& values) {
  if (kAligned && left >= kWidth) {
    store_vector(to, values);
  } else {
    store_some(to, left, values);
  }
}

// A thread's columns of kCount tiles; all are read before one is written, or they could not be in flight together.
template <bool kAligned, bool kMoments, bool kCapped, int kCount, class T, class Out>
__device__ void write_tiles(const T* from, Out* to, int left, const Factors& factors, float cap, float inverse_cap) {
  Vector<T, kWidth> tiles[kCount];
#pragma unroll
  for (int t = 0; t < kCount; ++t) tiles[t] = load_tile<kAligned>(from + t * kTile, left);
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
    Vector<Out, kWidth> out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z = to_float(tiles[t].values[i]);
      out.values[i] = from_float<Out>(gradient_by<kMoments, kCapped>(z, factors, cap, inverse_cap));
    }
    store_tile<kAligned>(to + t * kTile, left, out);
  }
}

// `logits` and `gradient` may be the same memory.
template <class T, class Out, bool kAligned, bool kMoments, bool kCapped>
__global__ void __launch_bounds__(kThreads)
logits_gradient_kernel(LogitsInputs in, LogProbsState state, LogProbsGradients upstream, LogitsView gradient) {
  const int64_t row = blockIdx.x, start = int64_t{blockIdx.y} * kPart;
  const int columns = int(min(in.logits.vocab - start, int64_t{kPart}));
  const T* const from = row_of<T>(in.logits, row) + start;
  Out* const to = row_of<Out>(gradient, row) + start;
  int column = threadIdx.x * kWidth;

  const double g_log_prob = number(upstream.log_probs, row), g_entropy = number(upstream.entropy, row);
  const double g_sum_p2 = number(upstream.sum_p2, row);
  const int64_t label = in.labels[row];
  if (label == kSkippedRow || (g_log_prob == 0.0 && g_entropy == 0.0 && g_sum_p2 == 0.0)) {
    Vector<Out, kWidth> zeros;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) zeros.values[i] = from_float<Out>(0.0f);
    for (; column < columns; column += kTile) store_tile<kAligned>(to + column, columns - column, zeros);
    return;
  }

  // One thread computes the row's numbers in float64. In place, it reads the label's logit before any thread writes.
  __shared__ Factors shared_factors;
  __shared__ float by_label;
  __shared__ int label_column;  // in this part; -1: none. A logit of -inf is none: its gradient is 0
  if (threadIdx.x == 0) {
    const RowGradient g{inverse_temperature_of(in, row),
                        state.lse[row],
                        upstream.entropy ? state.entropy[row] : 0.0,
                        upstream.sum_p2 ? state.sum_p2[row] : 0.0,
                        g_log_prob,
                        g_entropy,
                        g_sum_p2};
    shared_factors = factors_of(g);
    label_column = -1;
    if (label >= start && label < start + columns) {
      Capped<float> at{to_float(from[label - start]), 1.0f};
      if constexpr (kCapped) at = softcapped(at.value, in.softcap, in.inverse_softcap);
      by_label = gradient_by_label(at, g);
      if (at.value != -INFINITY) label_column = int(label - start);
    }
  }
  __syncthreads();
  const Factors factors = shared_factors;
  // A softcap takes registers, and more time than memory does.
  constexpr int kAtOnce = !kCapped ? kTiles : kAligned ? 2 : 1;
  for (const int whole = columns / (kAtOnce * kTile) * (kAtOnce * kTile); column < whole; column += kAtOnce * kTile)
    write_tiles<kAligned, kMoments, kCapped, kAtOnce>(from + column, to + column, kWidth, factors, in.softcap, in.inverse_softcap);
  for (; column < columns; column += kTile)
    write_tiles<kAligned, kMoments, kCapped, 1>(from + column, to + column, columns - column, factors, in.softcap, in.inverse_softcap);
  // The thread that wrote the label's column writes it again.
  if (label_column >= 0 && label_column % kTile / kWidth == int(threadIdx.x)) to[label_column] = from_float<Out>(by_label);
}

// ---- launches

template <class T, class Out, bool kAligned>
void launch_aligned(const Launcher& launcher, const LogitsInputs& in, const LogProbsState& state, const LogProbsGradients& upstream,
                    const LogitsView& gradient) {
  const dim3 grid(launcher.blocks(in.logits.rows, 1), launcher.blocks(in.logits.vocab, kPart));
  if (in.softcap != 0.0f) {
    logits_gradient_kernel<T, Out, kAligned, true, true><<<grid, kThreads, 0, launcher.stream()>>>(in, state, upstream, gradient);
  } else if (upstream.entropy || upstream.sum_p2) {
    logits_gradient_kernel<T, Out, kAligned, true, false><<<grid, kThreads, 0, launcher.stream()>>>(in, state, upstream, gradient);
  } else {
    logits_gradient_kernel<T, Out, kAligned, false, false><<<grid, kThreads, 0, launcher.stream()>>>(in, state, upstream, gradient);
  }
  launcher.launched();
}

template <class T, class Out>
void launch(const Launcher& launcher, const LogitsInputs& in, const LogProbsState& state, const LogProbsGradients& upstream,
            const LogitsView& gradient) {
  if (!in.logits.rows || !in.logits.vocab) return;
  if (aligned_rows<T>(in.logits) && aligned_rows<Out>(gradient)) {
    launch_aligned<T, Out, true>(launcher, in, state, upstream, gradient);
  } else {
    launch_aligned<T, Out, false>(launcher, in, state, upstream, gradient);
  }
}

}  // namespace

void logits_gradient(const Launcher& launcher, const LogitsInputs& in, const LogProbsState& state, const LogProbsGradients& upstream,
                     const LogitsView& gradient) {
  if (in.logits.dtype == DType::kFloat32 && gradient.dtype == DType::kBFloat16)
    return launch<float, __nv_bfloat16>(launcher, in, state, upstream, gradient);
  if (gradient.dtype != in.logits.dtype) throw std::invalid_argument("the gradient has another type than the logits");
  with_type(in.logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch<T, T>(launcher, in, state, upstream, gradient);
  });
}

}  // namespace fastadv::cuda
