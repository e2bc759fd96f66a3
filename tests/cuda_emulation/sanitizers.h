// What ThreadSanitizer and AddressSanitizer have to be told. In a build without them every function here does nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __asan_poison_memory_region(const volatile void* address, size_t size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
}
#endif

// ThreadSanitizer sees none of the accesses of such a function. The emulation itself is made of them: it hands data
// from fiber to fiber without any order that a kernel could rely on.
#define CUDA_EMULATION_UNWATCHED __attribute__((no_sanitize("thread"))) inline
// One that switches fibers. It must stay a call: ThreadSanitizer keeps a call stack for each fiber.
#define CUDA_EMULATION_SWITCHING __attribute__((noinline, no_sanitize("thread"))) inline

namespace cuda_emulation {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// A point in memory that gives order: what happened before `release` happened before what follows `acquire`. Only
// device operations that order memory use one.
class OrderPoint {
 public:
  CUDA_EMULATION_UNWATCHED void release() {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&address_);
#endif
  }
  CUDA_EMULATION_UNWATCHED void acquire() {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&address_);
#endif
  }

 private:
  [[maybe_unused]] char address_ = 0;
};

// No access to this memory is right, until it is opened again. Addresses are multiples of 8.
CUDA_EMULATION_UNWATCHED void close_memory([[maybe_unused]] const void* address, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(address, size);
#endif
}

CUDA_EMULATION_UNWATCHED void open_memory([[maybe_unused]] const void* address, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(address, size);
#endif
}

}  // namespace cuda_emulation
