// Inner products of all pairs of a few vectors, in two launches. The first reads each vector once, 4 bytes an element in float32,
// and leaves a float64 a pair and block of 16384 elements; the second adds these up. A thread sums 64 elements in float32, a
// warp 2048, in one order; all beyond is float64.
#include "cuda/kernels.h"
#include "cuda/sums.h"
#include "cuda/vectors.h"
#include "fastadv/gram.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <class T>
struct Vectors {
  const T* data[kGramVectors];
};

template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
block_products_kernel(Vectors<T> vectors, int64_t n, bool aligned, double* __restrict__ partials) {
  constexpr int kElements = kLoadBytes / sizeof(T);  // of a thread at a time: neighbours
  constexpr int kPairs = pair_count(kCount);
  constexpr int kTogether = kCount <= 2 ? 4 : 1;     // steps whose reads are under way at once: enough without, of more vectors
  float sums[kPairs] = {};
  const int64_t first = int64_t{blockIdx.x} * kGramBlock + threadIdx.x * kElements;
#pragma unroll kTogether
  for (int step = 0; step < kGramBlock / (kThreads * kElements); ++step) {
    const int64_t at = first + step * (kThreads * kElements), left = n - at;
    const bool whole = aligned && left >= kElements;
    Vector<T, kElements> read[kCount];
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      read[v] = whole ? load_vector<kElements>(vectors.data[v] + at) : load_some<kElements>(vectors.data[v] + at, left, from_float<T>(0.0f));
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float x = to_float(read[i].values[e]);
#pragma unroll
        for (int j = 0; j <= i; ++j) sums[pair_index(i, j)] = multiply_add(x, to_float(read[j].values[e]), sums[pair_index(i, j)]);
      }
    }
  }

  __shared__ double of_warps[kWarps][kPairs];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const float of_warp = warp_sum(sums[pair]);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp][pair] = of_warp;
  }
  __syncthreads();
  if (threadIdx.x >= kPairs) return;
  double of_block = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) of_block += of_warps[warp][threadIdx.x];
  partials[int64_t{blockIdx.x} * kPairs + threadIdx.x] = of_block;
}

// A block adds up a pair.
__global__ void __launch_bounds__(kThreads)
add_products_kernel(const double* __restrict__ partials, int64_t blocks, int count, double* __restrict__ gram) {
  const int pair = blockIdx.x, pairs = gridDim.x;
  double mine = 0.0;
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) mine += partials[block * pairs + pair];
  mine = warp_sum(mine);
  __shared__ double of_warps[kWarps];
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
  int i = 0;
  while (pair_index(i + 1, 0) <= pair) ++i;
  write_pair(gram, count, i, pair - pair_index(i, 0), total);
}

template <class T, int kCount>
void launch(const Launcher& launcher, const void* const* vectors, int64_t n, double* partials, double* gram) {
  Vectors<T> typed{};
  bool all_aligned = true;
  for (int v = 0; v < kCount; ++v) {
    typed.data[v] = static_cast<const T*>(vectors[v]);
    all_aligned = all_aligned && aligned(vectors[v]);
  }
  const unsigned blocks = launcher.blocks(n, kGramBlock);
  if (blocks) block_products_kernel<T, kCount><<<blocks, kThreads, 0, launcher.stream()>>>(typed, n, all_aligned, partials);
  launcher.launched();
  add_products_kernel<<<pair_count(kCount), kThreads, 0, launcher.stream()>>>(partials, blocks, kCount, gram);
  launcher.launched();
}

template <class T>
void launch_count(const Launcher& launcher, int count, const void* const* vectors, int64_t n, double* partials, double* gram) {
  switch (count) {
    case 1: return launch<T, 1>(launcher, vectors, n, partials, gram);
    case 2: return launch<T, 2>(launcher, vectors, n, partials, gram);
    case 3: return launch<T, 3>(launcher, vectors, n, partials, gram);
    case 4: return launch<T, 4>(launcher, vectors, n, partials, gram);
    case 5: return launch<T, 5>(launcher, vectors, n, partials, gram);
    case 6: return launch<T, 6>(launcher, vectors, n, partials, gram);
    case 7: return launch<T, 7>(launcher, vectors, n, partials, gram);
    case 8: return launch<T, 8>(launcher, vectors, n, partials, gram);
    default: throw std::invalid_argument("multi_dot_gram: too many vectors for one pass");
  }
}

}  // namespace

void multi_dot_gram(const Launcher& launcher, DType dtype, int count, const void* const* vectors, int64_t n, double* partials,
                    double* gram) {
  switch (dtype) {
    case DType::kFloat32: return launch_count<float>(launcher, count, vectors, n, partials, gram);
    case DType::kBFloat16: return launch_count<__nv_bfloat16>(launcher, count, vectors, n, partials, gram);
    default: launch_count<__half>(launcher, count, vectors, n, partials, gram);
  }
}

}  // namespace fastadv::cuda
