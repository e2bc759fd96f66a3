// What the CUDA runtime remembers for a host thread and for a kernel, without a runtime.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include "cuda_types.h"
#include "shared_memory.h"

namespace cuda_emulation {

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local cudaError_t planted_error = cudaSuccess;

// Kernels that were started, and memsets and copies.
inline std::atomic<long long> operations{0};

// Of a runtime function that returns it.
inline cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The next launch of this host thread does not run and leaves this error behind.
inline void fail_next_launch(cudaError_t error) { planted_error = error; }

// Dynamic shared memory that cudaFuncSetAttribute allowed, by kernel.
inline std::mutex allowed_shared_mutex;
inline std::map<const void*, size_t> allowed_shared;

inline const size_t* find_allowed_shared(const void* kernel) {
  const std::lock_guard<std::mutex> lock(allowed_shared_mutex);
  const auto found = allowed_shared.find(kernel);
  return found == allowed_shared.end() ? nullptr : &found->second;
}

}  // namespace cuda_emulation

// For tests, from Python by ctypes.
extern "C" __attribute__((visibility("default"), used)) inline void cuda_emulation_fail_next_launch(int error) {
  ::cuda_emulation::fail_next_launch(static_cast<cudaError_t>(error));
}
extern "C" __attribute__((visibility("default"), used)) inline long long cuda_emulation_operations() {
  return ::cuda_emulation::operations;
}
