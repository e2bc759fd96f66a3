// Launches: what `kernel<<<grid, block, shared, stream>>>(arguments)` becomes. A launch is over when it returns; a
// fault is thrown, an invalid configuration is left in cudaGetLastError as on a device.
#pragma once

#include <algorithm>
#include <memory>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "block.h"
#include "runtime_state.h"

namespace cuda_emulation {

// How many blocks are in flight. Under ThreadSanitizer all of them, so that no block is ordered before another by the
// OS thread that they share; as many as its bookkeeping has room for. CUDA_EMULATION_THREADS sets another number.
inline unsigned os_threads(uint64_t blocks, unsigned threads_per_block) {
  constexpr unsigned kFibersOfThreadSanitizer = 4096;
  const char* text = getenv("CUDA_EMULATION_THREADS");
  uint64_t count = kThreadSanitizer ? std::max(2u, kFibersOfThreadSanitizer / threads_per_block) : 2;
  if (text) count = std::max(1, atoi(text));
  return static_cast<unsigned>(std::min(count, blocks));
}

// What an OS thread does: runs every `step`-th block from `first` on, one after the other in `block`.
CUDA_EMULATION_SWITCHING void run_blocks(Block& block, uint64_t first, uint64_t step) {
  Launch& launch = *block.launch;
  const dim3 grid = launch.grid;
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  const Stacks stacks(launch.block.x * launch.block.y * launch.block.z);
  current_block = &block;
  adopt_os_thread(block.os_thread);
  for (uint64_t turn = first; turn < blocks && !launch.failed; turn += step) {
    const uint64_t i = launch.order.kind == Order::kBackward ? blocks - 1 - turn : turn;
    const auto x = static_cast<unsigned>(i % grid.x);
    const auto y = static_cast<unsigned>(i / grid.x % grid.y);
    const auto z = static_cast<unsigned>(i / grid.x / grid.y);
    run_block(block, {x, y, z}, stacks);
    launch.finished.acquire();  // the next block uses the same stacks and shared memory
  }
  current_block = nullptr;
}

inline cudaError_t check_configuration(dim3 grid, dim3 block, size_t shared, const size_t* allowed) {
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  const bool block_fits = block.x <= kMaxThreads && block.y <= kMaxThreads && block.z <= 64 && threads <= kMaxThreads;
  const bool grid_fits = grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
  const bool empty = !threads || !grid.x || !grid.y || !grid.z;
  if (!block_fits || !grid_fits || empty) return cudaErrorInvalidConfiguration;
  return shared > (allowed ? *allowed : kStaticSharedLimit) ? cudaErrorInvalidValue : cudaSuccess;
}

template <class... Parameters, class... Arguments>
inline void launch(dim3 grid, dim3 block, size_t shared, cudaStream_t, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  if (current_block) fault("a kernel launches a kernel");
  if (planted_error != cudaSuccess) {
    last_error = std::exchange(planted_error, cudaSuccess);
    return;
  }
  const size_t* allowed = find_allowed_shared(reinterpret_cast<const void*>(kernel));
  if (remember(check_configuration(grid, block, shared, allowed)) != cudaSuccess) return;
  ++operations;
#if defined(CUDA_EMULATION_EMPTY_LAUNCHES)
  return;  // for measurements of what the host does before a launch
#endif

  const std::tuple<std::decay_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  Launch state;
  state.grid = grid;
  state.block = block;
  state.dynamic_shared = shared;
  state.shared_limit = allowed ? kDynamicSharedLimit : kStaticSharedLimit;
  state.order = Order::from_environment();
  state.body = [&] { std::apply(kernel, parameters); };
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  const unsigned count = os_threads(blocks, block.x * block.y * block.z);
  std::vector<std::unique_ptr<Block>> in_flight;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) {
    in_flight.push_back(std::make_unique<Block>());
    Block& mine = *in_flight.back();
    mine.launch = &state;
    mine.block_dim = block;
    mine.grid_dim = grid;
    threads.emplace_back([&mine, i, count] { run_blocks(mine, i, count); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& finished : in_flight) release_threads(*finished);
  state.finished.acquire();
  if (state.failed) throw Fault(state.message);
}

// A `__shared__` variable. Each declaration brings a tag of its own, and with it a key.
template <class T, size_t alignment, class Tag>
inline T& shared_variable(const char* name, Tag) {
  static const char key = 0;
  if (!current_block) throw Fault(std::string("__shared__ ") + name + " outside of a kernel");
  void* address = current_block->shared.variable(&key, sizeof(T), std::max(alignment, alignof(T)));
  if (!address) {
    fault("no room for __shared__ %s of %zu bytes: 48 KiB at most, and with the dynamic array what the kernel may have",
          name, sizeof(T));
  }
  return *static_cast<T*>(address);
}

// The dynamic array, which every `extern __shared__` names.
template <class T>
inline T* dynamic_shared() {
  return static_cast<T*>(current_block->shared.dynamic());
}

}  // namespace cuda_emulation
