// Kernels of the forms that CUDA code is made of: what the emulation is tested with. Their last argument plants a
// fault.
#include "samples.h"

namespace samples {
namespace {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kMaxWarps = 32;

template <int threads>
__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = threads / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset, threads);
  return value;
}

// The sum over the block for all its threads; `buffer` has a number a warp.
__device__ __forceinline__ float block_sum(float value, float* buffer, Fault fault) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  value = warp_sum<32>(value);
  if (fault != Fault::kWriteBeforeRead) __syncthreads();  // the previous call may still be reading
  if (lane == 0) buffer[warp] = value;
  if (lane == 0 && fault == Fault::kSharedBounds) buffer[warp + kMaxWarps] = value;
  if (fault != Fault::kReadBeforeWrite) __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < warps; ++i) sum += buffer[i];
  return sum;
}

// One block a row, 16 bytes at a time, with a running maximum.
__global__ void __launch_bounds__(256)
    row_log_sum_exp_kernel(const __nv_bfloat16* __restrict__ logits, float* __restrict__ out, int columns,
                           int64_t stride, Fault fault) {
  __shared__ float buffer[kMaxWarps], warp_maximum[8];
  int64_t begin = blockIdx.x * stride;
  if (fault == Fault::kIntOverflow) begin = static_cast<int>(blockIdx.x) * static_cast<int>(stride);
  const uint4* row = reinterpret_cast<const uint4*>(logits + begin);
  float maximum = -INFINITY, sum = 0.0f;
  for (int i = threadIdx.x; i < columns / 8; i += blockDim.x) {
    const uint4 eight = __ldcs(row + i);
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&eight);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 x = __bfloat1622float2(pairs[k]);
      const float larger = fmaxf(maximum, fmaxf(x.x, x.y));
      sum = sum * __expf(maximum - larger) + __expf(x.x - larger) + __expf(x.y - larger);
      maximum = larger;
    }
  }
  float of_warp = maximum;
  for (int offset = 16; offset > 0; offset /= 2) of_warp = fmaxf(of_warp, __shfl_xor_sync(kFullMask, of_warp, offset));
  if (threadIdx.x % 32 == 0) warp_maximum[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float of_block = warp_maximum[0];
  for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) of_block = fmaxf(of_block, warp_maximum[i]);
  sum *= maximum == -INFINITY ? 0.0f : __expf(maximum - of_block);
  const float total = block_sum(sum, buffer, fault);
  const float threads = block_sum(1.0f, buffer, fault);  // a second call, for the barrier between the two
  if (threadIdx.x == 0) out[blockIdx.x] = threads == blockDim.x ? of_block + logf(total) : NAN;
}

// One warp a segment, 16 bytes at a time between a head and a tail.
__global__ void segment_sums_kernel(const float* __restrict__ values, const int64_t* __restrict__ offsets,
                                    float* __restrict__ out, int segments, Fault fault) {
  const int segment = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (segment >= segments + (fault == Fault::kSegmentOffByOne)) return;
  const int64_t begin = offsets[segment], end = offsets[segment + 1];
  const int64_t aligned = fault == Fault::kMisaligned ? begin : (begin + 3) / 4 * 4;
  const int64_t head_end = min(aligned, end);
  const int64_t body_end = head_end + (end - head_end) / 4 * 4;
  float sum = begin + lane < head_end ? values[begin + lane] : 0.0f;
  for (int64_t i = head_end + 4 * lane; i < body_end; i += 4 * 32) {
    const float4 x = *reinterpret_cast<const float4*>(values + i);
    sum += x.x + x.y + x.z + x.w;
  }
  if (body_end + lane < end) sum += values[body_end + lane];
  sum = warp_sum<32>(sum);
  if (lane == 0) out[segment] = sum;
}

// The block that finishes last adds up what all of them left.
__global__ void total_sum_kernel(const float* __restrict__ values, float* partial, unsigned* finished_blocks,
                                 float* out, int count, Fault fault) {
  __shared__ float buffer[kMaxWarps];
  __shared__ bool is_last;
  float sum = 0.0f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += values[i];
  sum = block_sum(sum, buffer, fault);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    if (fault == Fault::kBlockFence) __threadfence_block();
    if (fault != Fault::kNoFence && fault != Fault::kBlockFence) __threadfence();
    is_last = atomicInc(finished_blocks, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  if (fault != Fault::kNoFence) __threadfence();
  sum = 0.0f;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += blockDim.x) sum += partial[i];
  sum = block_sum(sum, buffer, fault);
  if (threadIdx.x == 0) *out = sum;
}

// Counts in shared memory first, then adds those to global memory.
__global__ void histogram_kernel(const int* __restrict__ bins, int* __restrict__ counts, int count, int number_of_bins,
                                 Fault fault) {
  extern __shared__ __align__(16) int of_block[];
  const int end = number_of_bins + (fault == Fault::kDynamicSharedBounds);
  for (int i = threadIdx.x; i < end; i += blockDim.x) {
    if (fault != Fault::kUninitialised) of_block[i] = 0;
  }
  if (fault == Fault::kDivergentBarrier && threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    if (fault == Fault::kSharedCounter) {
      ++of_block[bins[i]];
    } else {
      atomicAdd(&of_block[bins[i]], 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < number_of_bins; i += blockDim.x) {
    if (fault == Fault::kGlobalCounter) {
      counts[i] += of_block[i];
    } else {
      atomicAdd(&counts[i], of_block[i]);
    }
  }
  if (threadIdx.x >= 16) return;
  if (fault == Fault::kBarrierNotReached) __syncthreads();
  if (fault == Fault::kDivergentShuffle && __shfl_xor_sync(kFullMask, count, 1) < 0) counts[0] = 0;
}

// An exchange through shared memory within each warp: no barrier of the block.
__global__ void reverse_warps_kernel(const float* values, float* out, Fault fault) {
  __shared__ float tile[256];
  const int thread = threadIdx.x, lane = thread % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  tile[thread] = values[first + thread];
  float nothing = 0.0f;
  if (fault == Fault::kShuffleAsBarrier) {
    nothing = __shfl_xor_sync(kFullMask, 0.0f, 1);
  } else {
    __syncwarp();
  }
  out[first + thread] = tile[thread - lane + 31 - lane] + nothing;
}

__global__ void number_kernel(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x; }

}  // namespace

cudaError_t row_log_sum_exp(const __nv_bfloat16* logits, float* out, int rows, int columns, int64_t stride,
                            cudaStream_t stream, Fault fault) {
  row_log_sum_exp_kernel<<<rows, 256, 0, stream>>>(logits, out, columns, stride, fault);
  return cudaGetLastError();
}

cudaError_t segment_sums(const float* values, const int64_t* offsets, float* out, int segments, cudaStream_t stream,
                         Fault fault) {
  segment_sums_kernel<<<dim3((segments + 7) / 8), dim3(256), 0, stream>>>(values, offsets, out, segments, fault);
  return cudaGetLastError();
}

cudaError_t total_sum(const float* values, float* partial, unsigned* finished_blocks, float* out, int count, int blocks,
                      cudaStream_t stream, Fault fault) {
  total_sum_kernel<<<blocks, 128, 0, stream>>>(values, partial, finished_blocks, out, count, fault);
  return cudaGetLastError();
}

cudaError_t histogram(const int* bins, int* counts, int count, int number_of_bins, int blocks, cudaStream_t stream,
                      Fault fault) {
  histogram_kernel<<<blocks, 96, number_of_bins * sizeof(int), stream>>>(bins, counts, count, number_of_bins, fault);
  return cudaGetLastError();
}

cudaError_t reverse_warps(const float* values, float* out, int blocks, cudaStream_t stream, Fault fault) {
  reverse_warps_kernel<<<blocks, 256, 0, stream>>>(values, out, fault);
  return cudaGetLastError();
}

cudaError_t launch_with(int* out, int grid, int block, int shared, int allowed, cudaStream_t stream) {
  if (allowed > 0) {
    cudaFuncSetAttribute(number_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed);
    const cudaError_t error = cudaGetLastError();  // taken, or the next launch would find it
    if (error != cudaSuccess) return error;
  }
  number_kernel<<<grid, block, shared, stream>>>(out);
  return cudaGetLastError();
}

}  // namespace samples
