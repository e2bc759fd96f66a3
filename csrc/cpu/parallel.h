// Work in fixed blocks on plain threads: which block exists does not depend on how many threads there are, so a kernel
// that keeps one partial result a block and adds them in block order gives the same bits for any thread count. Threads
// live for one call: nothing is left behind for a fork to trip over, and no second runtime runs beside torch's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace fastadv {

// Calls body(block) for every block in [0, blocks). `body` must not throw.
template <class Body>
void parallel_blocks(int64_t blocks, int threads, const Body& body) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, blocks));
  const auto run = [&](int64_t worker) {
    const int64_t last = blocks * (worker + 1) / workers;
    for (int64_t block = blocks * worker / workers; block < last; ++block) body(block);
  };
  std::vector<std::thread> others;
  int64_t started = 1;
  try {
    others.reserve(workers - 1);
    for (; started < workers; ++started) others.emplace_back(run, started);
  } catch (const std::system_error&) {
    // The system gives no more threads: the caller does the rest of the work below.
  }
  for (int64_t worker = started; worker < workers; ++worker) run(worker);
  run(0);
  for (std::thread& other : others) other.join();
}

}  // namespace fastadv
