// What is done with the policy loss's gradient afterwards, a launch each.
//
// A gradient that rollouts share: a block a row, 16 bytes at a time, reads 4 bytes of the gradient and 1 of the mask a token,
// and 1 of the mask again, and writes 4; 4 more of a penalty's gradient, and of each of two reads of token weights, where there are any.
// A gradient that is scaled: nothing where the factor is 1, else it is read and written.
#include "cuda/kernels.h"
#include "cuda/sums.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSharingBlocks = 4;  // that a multiprocessor must hold: asked for none, the compiler spills registers to hold more
constexpr int kSharedTokens = 4;  // of a thread at once: 16 bytes of the gradient
constexpr unsigned kScalingBlocks = 1024;  // as many as run at once on a large GPU; each goes over the rest

// What is shared, null standing for absence. `shared` may be `gradient`.
struct SharedGradients {
  Rows rows;
  const uint8_t* mask;
  const float* token_weights;
  const float* shared;  // policy gradients before
  float* gradient;      // what each token gets
  bool add;             // beside what is there
  bool aligned;
};

// A row's tokens at a multiple of kSharedTokens: whether each is the row's and counts. Neighbours that are another row's are
// left alone, since its block may be writing them.
struct Counted {
  bool all;  // are the row's, and can be moved at once
  bool row[kSharedTokens], on[kSharedTokens];

  __device__ Counted(const SharedGradients& a, int64_t begin, int64_t end, int64_t at)
      : all(a.aligned && at >= begin && at + kSharedTokens <= end) {
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i) row[i] = at + i >= begin && at + i < end;
    const auto mask = load(a.mask, at, uint8_t{0});
    Vector<float, kSharedTokens> weights;
    if (a.token_weights) weights = load(a.token_weights, at, 0.0f);
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i)
      on[i] = mask.values[i] != 0 && (!a.token_weights || weights.values[i] != 0.0f);
  }
  template <class X>
  __device__ Vector<X, kSharedTokens> load(const X* from, int64_t at, X other) const {
    if (all) return load_vector<kSharedTokens>(from + at);
    Vector<X, kSharedTokens> v;
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i) v.values[i] = row[i] ? from[at + i] : other;
    return v;
  }
};

__global__ void __launch_bounds__(kThreads, kSharingBlocks) share_gradients_kernel(const SharedGradients a) {
  __shared__ double of_warps[kWarps][2];
  // Of a row that is none: what there is of it among the tokens, whose share is NaN.
  const bool sound = a.rows.span(blockIdx.x).sound;
  const int64_t from = a.rows.begin(blockIdx.x), to = a.rows.end(blockIdx.x);
  const int64_t begin = from > 0 ? from : 0, end = to < a.rows.tokens ? to : a.rows.tokens;
  const int64_t first = begin / kSharedTokens * kSharedTokens + threadIdx.x * kSharedTokens;  // a row begins anywhere
  CompensatedSum sum;
  int64_t tokens = 0;
  for (int64_t at = first; at < end; at += kThreads * kSharedTokens) {
    const Counted counted(a, begin, end, at);
    const auto shared = counted.load(a.shared, at, 0.0f);
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i) {
      sum.add(counted.on[i] ? shared.values[i] : 0.0f);
      tokens += counted.on[i];
    }
  }
  const double of_warp = warp_sum(sum.value()), tokens_of_warp = warp_sum(double(tokens));
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp][0] = of_warp;
    of_warps[threadIdx.x / kWarp][1] = tokens_of_warp;
  }
  __syncthreads();
  double of_row = 0.0, tokens_of_row = 0.0;
  for (const auto& warp : of_warps) {
    of_row += warp[0];
    tokens_of_row += warp[1];
  }
  const float share = sound ? float(of_row / (tokens_of_row > 1.0 ? tokens_of_row : 1.0)) : NAN;
  for (int64_t at = first; at < end; at += kThreads * kSharedTokens) {
    const Counted counted(a, begin, end, at);
    Vector<float, kSharedTokens> gradient{};
    if (a.add) gradient = counted.load(a.gradient, at, 0.0f);
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i) gradient.values[i] += counted.on[i] ? share : 0.0f;
    if (counted.all) {
      store_vector(a.gradient + at, gradient);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kSharedTokens; ++i) {
      if (counted.row[i]) a.gradient[at + i] = gradient.values[i];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) scale_gradient_kernel(int64_t count, T* gradient, const float* factor, bool aligned) {
  constexpr int kTokens = kLoadBytes / sizeof(T);
  const float by = *factor;
  if (by == 1.0f) return;  // to multiply by 1 would cost as much as the loss
  const int64_t stride = int64_t{gridDim.x} * kThreads * kTokens;
  for (int64_t start = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kTokens; start < count; start += stride) {
    const int64_t left = count - start;
    const bool whole = aligned && left >= kTokens;
    auto v = whole ? load_vector<kTokens>(gradient + start) : load_some<kTokens>(gradient + start, left, from_float<T>(0.0f));
#pragma unroll
    for (int i = 0; i < kTokens; ++i) v.values[i] = from_float<T>(to_float(v.values[i]) * by);
    if (whole) {
      store_vector(gradient + start, v);
    } else {
      store_some(gradient + start, left, v);
    }
  }
}

template <class T>
void launch_scale(const Launcher& launcher, int64_t count, void* gradient, const float* factor) {
  const unsigned blocks = launcher.blocks(count, kThreads * (kLoadBytes / int(sizeof(T))));
  scale_gradient_kernel<T><<<blocks < kScalingBlocks ? blocks : kScalingBlocks, kThreads, 0, launcher.stream()>>>(
      count, static_cast<T*>(gradient), factor, aligned(gradient));
  launcher.launched();
}

}  // namespace

void share_gradients(const Launcher& launcher, const Rows& rows, const uint8_t* mask, const float* token_weights,
                     const float* shared, bool add, float* gradient) {
  if (rows.count == 0) return;
  const SharedGradients a{rows, mask, token_weights, shared, gradient, add,
                          aligned(mask) && aligned(token_weights) && aligned(shared) && aligned(gradient)};
  share_gradients_kernel<<<launcher.blocks(rows.count, 1), kThreads, 0, launcher.stream()>>>(a);
  launcher.launched();
}

void scale_gradient(const Launcher& launcher, int64_t count, DType dtype, void* gradient, const float* factor) {
  if (count == 0) return;
  switch (dtype) {
    case DType::kFloat32: return launch_scale<float>(launcher, count, gradient, factor);
    case DType::kBFloat16: return launch_scale<__nv_bfloat16>(launcher, count, gradient, factor);
    default: return launch_scale<__half>(launcher, count, gradient, factor);
  }
}

}  // namespace fastadv::cuda
