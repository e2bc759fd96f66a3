// Launchers of samples.cu. Addresses are a device's; nothing waits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace samples {

// What a kernel can be told to do wrong.
enum class Fault {
  kNone,
  kReadBeforeWrite,      // no barrier between a write to shared memory and reads by others
  kWriteBeforeRead,      // no barrier between reads and the next write
  kNoFence,              // the last block sums what others wrote without a fence
  kBlockFence,           // a fence that reaches the block only
  kSharedCounter,        // a shared histogram without atomics
  kGlobalCounter,        // blocks add to one counter without atomics
  kShuffleAsBarrier,     // a shuffle where __syncwarp is needed
  kSegmentOffByOne,      // one segment more than there is
  kDivergentBarrier,     // some threads wait in another barrier
  kBarrierNotReached,    // some threads wait in a barrier, the others end
  kDivergentShuffle,     // a full mask in a branch of half a warp
  kMisaligned,           // float4 from an address of float
  kIntOverflow,          // the offset of a row in 32 bits
  kUninitialised,        // shared counters that nobody sets to zero
  kSharedBounds,         // a write past the end of a shared array
  kDynamicSharedBounds,  // the same, of the dynamic one
};

// out[row] = log(sum(exp(logits[row, :]))); rows begin `stride` elements apart, columns are a multiple of 8.
cudaError_t row_log_sum_exp(const __nv_bfloat16* logits, float* out, int rows, int columns, int64_t stride,
                            cudaStream_t stream, Fault fault = Fault::kNone);

// out[s] = sum(values[offsets[s] : offsets[s + 1]]).
cudaError_t segment_sums(const float* values, const int64_t* offsets, float* out, int segments, cudaStream_t stream,
                         Fault fault = Fault::kNone);

// *out = sum(values); `partial` has room for a number a block, *finished_blocks is 0 and will be again.
cudaError_t total_sum(const float* values, float* partial, unsigned* finished_blocks, float* out, int count, int blocks,
                      cudaStream_t stream, Fault fault = Fault::kNone);

// counts[b] += number of bins that are b.
cudaError_t histogram(const int* bins, int* counts, int count, int number_of_bins, int blocks, cudaStream_t stream,
                      Fault fault = Fault::kNone);

// Every 32 values in reverse order, 256 a block.
cudaError_t reverse_warps(const float* values, float* out, int blocks, cudaStream_t stream, Fault fault = Fault::kNone);

// A kernel that writes one number a thread, with any configuration; `allowed` bytes of shared memory are asked for
// first.
cudaError_t launch_with(int* out, int grid, int block, int shared, int allowed, cudaStream_t stream);

}  // namespace samples
