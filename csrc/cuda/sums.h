// Sums over the threads of a block and over blocks, each in one fixed order: the same tokens give the same bits. For kernels
// only: nvcc compiles this.
#pragma once

#include <cuda_runtime.h>

namespace fastadv::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kWarp = 32;

// A float sum with what rounding took from it kept beside (Knuth's two-sum): a thread adds up thousands of tokens of a long
// rollout. Exact while nothing is fused, and -fmad=false sees to that.
struct CompensatedSum {
  float total = 0.0f, rest = 0.0f;

  __device__ void add(float x) {
    const float wider = total + x, part = wider - total;
    rest += (total - (wider - part)) + (x - part);
    total = wider;
  }
  __device__ double value() const { return double(total) + (rest == rest ? double(rest) : 0.0); }  // beside inf the rest is NaN
};

// The sum over the warp, in all of its lanes.
template <class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kWholeWarp, x, distance);
  return x;
}

// Whether this block is the last of the grid to come here: what the others wrote before can then be read, past the first
// cache. All threads call it. The last one leaves the counter at 0, as it was found, so launches of one stream can share it.
__device__ inline bool last_block(unsigned* counter) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned blocks = gridDim.x * gridDim.y;
    last = atomicInc(counter, blocks - 1) == blocks - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

}  // namespace fastadv::cuda
