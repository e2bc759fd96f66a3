// __syncthreads and its relatives, and fences. Stricter than a device, which lets a barrier pass without threads that
// have ended: here all threads of a block come to the same barrier, or the launch fails.
#pragma once

#include "block.h"

// Built-in variables are macros: each thread that reads one sees its own.
#define threadIdx (static_cast<const uint3&>(::cuda_emulation::current_block->running->index))
#define blockIdx (static_cast<const uint3&>(::cuda_emulation::current_block->index))
#define blockDim (static_cast<const dim3&>(::cuda_emulation::current_block->block_dim))
#define gridDim (static_cast<const dim3&>(::cuda_emulation::current_block->grid_dim))
#define warpSize 32

namespace cuda_emulation {

// Returns how many threads brought a predicate that holds.
CUDA_EMULATION_SWITCHING unsigned barrier(const char* place, bool predicate = false) {
  Block& block = *current_block;
  Thread& self = *block.running;
  const unsigned parity = block.barriers_passed % 2;
  self.place = place;
  self.state = ThreadState::kAtBarrier;
  block.votes += predicate;
  block.barrier_entered.release();
  if (++block.waiting == block.threads.size()) {
    for (Thread& other : block.threads) {
      if (other.place != place && strcmp(other.place, place)) {
        fault("divergent barrier: %s, but thread %u is in %s", place, other.number, other.place);
      }
      other.state = ThreadState::kReady;
    }
    block.result[parity] = block.votes;
    block.votes = block.waiting = 0;
    ++block.barriers_passed;
    block.barrier_entered.acquire();
    block.barrier_left[parity].release();
  }
  wait();
  block.barrier_left[parity].acquire();
  return block.result[parity];
}

// A fence orders what its thread did before with what threads do after fences of their own. All fences are taken to
// be in one order, so one that lacks its atomic operation is not found.
inline OrderPoint device_fence_point;

CUDA_EMULATION_UNWATCHED void fence(OrderPoint& point) {
  point.acquire();
  point.release();
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// A turn for the others.
CUDA_EMULATION_SWITCHING void yield() { wait(); }

}  // namespace cuda_emulation

#define __syncthreads() ((void)::cuda_emulation::barrier(CUDA_EMULATION_PLACE("__syncthreads")))
#define __syncthreads_count(predicate) \
  (static_cast<int>(::cuda_emulation::barrier(CUDA_EMULATION_PLACE("__syncthreads_count"), predicate)))
#define __syncthreads_or(predicate) \
  (static_cast<int>(::cuda_emulation::barrier(CUDA_EMULATION_PLACE("__syncthreads_or"), predicate) > 0))
#define __syncthreads_and(predicate) \
  (static_cast<int>(::cuda_emulation::barrier(CUDA_EMULATION_PLACE("__syncthreads_and"), !(predicate)) == 0))

inline void __threadfence() { ::cuda_emulation::fence(::cuda_emulation::device_fence_point); }
inline void __threadfence_system() { ::cuda_emulation::fence(::cuda_emulation::device_fence_point); }
inline void __threadfence_block() { ::cuda_emulation::fence(::cuda_emulation::current_block->fence); }

// Loops that wait for another thread of their block sleep, or they would wait for ever.
inline void __nanosleep(unsigned) { ::cuda_emulation::yield(); }
#define __trap() (::cuda_emulation::fault("%s", CUDA_EMULATION_PLACE("__trap")))
