// One block: its threads, the loop that runs them in turn, and how a launch ends when a thread does what a device
// forbids.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_types.h"
#include "fiber.h"
#include "shared_memory.h"

namespace cuda_emulation {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;  // of a block

// A kernel did what deadlocks or is undefined on a device. The launch throws it; the message has the place in the
// source.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In which order the threads of a block get their turns. No kernel may rely on one.
struct Order {
  enum Kind { kForward, kBackward, kRandom } kind;
  unsigned seed;

  // CUDA_EMULATION_ORDER: "forward" (default), "backward", or a number that random orders start from.
  static Order from_environment() {
    const char* text = getenv("CUDA_EMULATION_ORDER");
    if (!text || !strcmp(text, "forward")) return {kForward, 0};
    if (!strcmp(text, "backward")) return {kBackward, 0};
    char* end;
    const unsigned long seed = strtoul(text, &end, 10);
    if (end == text || *end) throw Fault("CUDA_EMULATION_ORDER is forward, backward or a number");
    return {kRandom, static_cast<unsigned>(seed)};
  }
};

// What the blocks of one launch share.
struct Launch {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared;
  size_t shared_limit;
  Order order;
  std::function<void()> body;  // the kernel with its arguments, as one thread runs it
  std::atomic<bool> failed{false};
  char message[2000];
  OrderPoint finished;  // the end of the kernel, for whoever waits for it
};

enum class ThreadState { kReady, kAtBarrier, kAtWarp, kDone };

struct WarpValues;  // in warp_operations.h

struct Thread {
  Fiber fiber;
  uint3 index;
  unsigned number;  // in the block, as warps count
  ThreadState state = ThreadState::kReady;
  const char* place = "its start";  // of the barrier or warp operation that it reached last
  // Of the warp operation that it waits in.
  unsigned mask = 0;
  uint64_t (*combine)(const WarpValues&, unsigned lane) = nullptr;
  uint64_t value = 0;
  int argument = 0;
  OrderPoint arrived;
  OrderPoint resumed;
};

struct Block {
  Launch* launch;
  uint3 index;
  dim3 block_dim;
  dim3 grid_dim;
  Fiber os_thread;
  std::vector<Thread> threads;
  Thread* running = nullptr;  // nullptr: the loop itself
  unsigned alive = 0;
  bool stopped = false;  // after a fault no thread runs again
  // Of each warp: a bit for each lane that waits in a warp operation, and for each that has ended.
  unsigned lanes_waiting[kMaxThreads / kWarpSize];
  unsigned lanes_ended[kMaxThreads / kWarpSize];
  SharedMemory shared;
  // Of the block barrier; results are kept by parity, for threads that leave one barrier when others are at the next.
  unsigned waiting = 0;
  unsigned barriers_passed = 0;
  unsigned votes = 0;
  unsigned result[2] = {0, 0};
  OrderPoint barrier_entered;
  OrderPoint barrier_left[2];
  OrderPoint fence;
};

inline thread_local Block* current_block = nullptr;

CUDA_EMULATION_UNWATCHED unsigned lane_of(const Thread& thread) { return thread.number % kWarpSize; }

// Back to the loop over threads, until the state of this one is kReady again.
CUDA_EMULATION_SWITCHING void wait() {
  Block& block = *current_block;
  Thread& self = *block.running;
  switch_fiber(self.fiber, block.os_thread, self.state == ThreadState::kDone);
  while (block.stopped) {
    block.launch->finished.release();
    switch_fiber(self.fiber, block.os_thread);
  }
}

// Keeps the first message of a launch and stops this block.
CUDA_EMULATION_UNWATCHED void report_fault(const char* what) {
  Block& block = *current_block;
  Launch& launch = *block.launch;
  block.stopped = true;
  if (launch.failed.exchange(true)) return;
  const uint3 b = block.index;
  char thread[64] = "";
  if (block.running) {
    const uint3 t = block.running->index;
    snprintf(thread, sizeof(thread), " thread (%u, %u, %u)", t.x, t.y, t.z);
  }
  const char* format = "CUDA emulation: block (%u, %u, %u)%s: %s";
  snprintf(launch.message, sizeof(launch.message), format, b.x, b.y, b.z, thread, what);
  launch.finished.release();
}

// Called by a thread of the kernel: it never goes on, its block stops, and the launch throws.
[[noreturn]] __attribute__((format(printf, 1, 2))) CUDA_EMULATION_SWITCHING void fault(const char* format, ...) {
  char what[1500];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  report_fault(what);
  current_block->running->state = ThreadState::kAtBarrier;
  for (;;) wait();
}

// Nobody can go on: says where everybody is.
CUDA_EMULATION_UNWATCHED void report_deadlock(const Block& block) {
  struct Group {
    const char* place;
    unsigned count;
  };
  std::vector<Group> groups;
  for (const Thread& thread : block.threads) {
    const char* place = thread.state == ThreadState::kDone ? nullptr : thread.place;
    bool found = false;
    for (Group& group : groups) {
      if (group.place != place && (!group.place || !place || strcmp(group.place, place))) continue;
      ++group.count;
      found = true;
      break;
    }
    if (!found) groups.push_back({place, 1});
  }
  std::string text = "deadlock:";
  for (const Group& group : groups) {
    text += " " + std::to_string(group.count) + (group.place ? " threads wait in " : " threads have ended");
    text += (group.place ? group.place : std::string()) + ";";
  }
  text.pop_back();
  report_fault(text.c_str());
}

// A fiber starts here.
CUDA_EMULATION_SWITCHING void thread_entry() {
  Block& block = *current_block;
  first_step(block.os_thread);
  if (!block.stopped) block.launch->body();
  block.launch->finished.release();
  Thread& self = *block.running;
  self.state = ThreadState::kDone;
  block.lanes_ended[self.number / kWarpSize] |= 1u << lane_of(self);
  --block.alive;
  wait();
}

// The stacks of a block's threads. Pages that nobody touches cost nothing.
class Stacks {
 public:
  explicit Stacks(unsigned count) : size_(count * kStackSize) {
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    open_memory(memory_, size_);  // stacks of a launch that failed may have lain here
  }
  ~Stacks() { munmap(memory_, size_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* of(unsigned thread) const { return memory_ + thread * kStackSize; }

  static constexpr size_t kStackSize = 256 << 10;

 private:
  size_t size_;
  char* memory_;
};

// Not before the launch has ended, but for a block that comes after: ThreadSanitizer can tell where a thread was that
// it still knows.
CUDA_EMULATION_SWITCHING void release_threads(Block& block) {
  for (Thread& thread : block.threads) release_fiber(thread.fiber);
  block.threads.clear();
}

// Runs all threads of the block to their end, or to a fault.
CUDA_EMULATION_SWITCHING void run_block(Block& block, uint3 index, const Stacks& stacks) {
  const Launch& launch = *block.launch;
  const dim3 size = launch.block;
  release_threads(block);
  block.index = index;
  block.threads.assign(size.x * size.y * size.z, Thread());
  block.alive = block.threads.size();
  block.waiting = block.barriers_passed = block.votes = 0;
  for (unsigned warp = 0; warp < kMaxThreads / kWarpSize; ++warp) block.lanes_waiting[warp] = block.lanes_ended[warp] = 0;
  block.shared.clear(launch.dynamic_shared, launch.shared_limit);
  std::vector<unsigned> turns(block.threads.size());
  for (unsigned i = 0; i < block.threads.size(); ++i) {
    Thread& thread = block.threads[i];
    thread.number = i;
    thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    prepare_fiber(thread.fiber, stacks.of(i), Stacks::kStackSize, thread_entry);
    turns[i] = launch.order.kind == Order::kBackward ? block.threads.size() - 1 - i : i;
  }
  unsigned random = launch.order.seed * 2654435761u + index.x + 1;
  while (block.alive && !block.stopped) {
    if (launch.order.kind == Order::kRandom) {
      for (unsigned i = turns.size() - 1; i > 0; --i) {
        random = random * 1664525u + 1013904223u;
        std::swap(turns[i], turns[(random >> 8) % (i + 1)]);
      }
    }
    bool moved = false;
    for (unsigned turn : turns) {
      Thread& thread = block.threads[turn];
      if (thread.state != ThreadState::kReady || block.stopped) continue;
      moved = true;
      block.running = &thread;
      switch_fiber(block.os_thread, thread.fiber);
    }
    block.running = nullptr;
    if (!moved && block.alive && !block.stopped) report_deadlock(block);
  }
  if (!block.stopped) return;
  // After a fault each thread says once that it does no more: what it used may be freed.
  for (Thread& thread : block.threads) {
    if (thread.state == ThreadState::kDone) continue;
    block.running = &thread;
    switch_fiber(block.os_thread, thread.fiber);
  }
}

}  // namespace cuda_emulation
