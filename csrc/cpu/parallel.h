// Work in fixed blocks on plain threads: which block exists does not depend on how many threads there are, so a kernel
// that keeps one partial result a block and adds them in block order gives the same bits for any thread count. Threads
// live for one call: nothing is left behind for a fork to trip over, and no second runtime runs beside torch's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace fastadv {

// Calls body(block) for every block in [0, blocks). `body` must not throw.
//
// A thread takes the next block when it is done with one. Torch's own workers spin for milliseconds after its last
// operation, so a thread of ours may get half a core or less: the others then do its share.
template <class Body>
void parallel_blocks(int64_t blocks, int threads, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) body(block);
  };
  std::vector<std::thread> others;
  try {
    const int64_t wanted = std::min<int64_t>(threads, blocks) - 1;
    if (wanted > 0) others.reserve(wanted);  // a vector that grew could throw while threads run, which ends the process
    for (int64_t worker = 0; worker < wanted; ++worker) others.emplace_back(run);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that there are do the work.
  } catch (const std::bad_alloc&) {
    // Or no more memory.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace fastadv
