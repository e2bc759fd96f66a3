// Fibers: functions that stop in the middle and go on later, each on a stack of its own.
#pragma once

#include <cstring>

#include "sanitizers.h"

#if !defined(__x86_64__)
#error "the switch of stacks is written for x86-64"
#endif

// void switch_stack(void** save, void* load): puts the registers that a call preserves on this stack, says where in
// *save, and goes on where `load` was saved. The symbol is local to the object file.
asm(".text\n"
    ".p2align 4\n"
    "cuda_emulation_switch_stack_:\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");

namespace cuda_emulation {

__attribute__((visibility("hidden"))) void switch_stack(void** save, void* load) asm("cuda_emulation_switch_stack_");

// Something that runs: a fiber, or the OS thread that it shares with others.
struct Fiber {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;      // AddressSanitizer's
  void* thread_sanitizer = nullptr;
};

// The fiber that an OS thread is before it switches to another. Its stack gets known in `first_step`.
CUDA_EMULATION_SWITCHING void adopt_os_thread([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_THREAD__)
  fiber.thread_sanitizer = __tsan_get_current_fiber();
#endif
}

// Will start with `entry`, which never returns.
CUDA_EMULATION_SWITCHING void prepare_fiber(Fiber& fiber, char* stack, size_t size, void (*entry)()) {
  constexpr int kRegisters = 6;
  fiber.stack = stack;
  fiber.stack_size = size;
  // What switch_stack expects: six registers and an address to return to, then an odd multiple of 8, as after a call.
  void** top = reinterpret_cast<void**>(stack + size) - 2;
  top[1] = nullptr;
  top[0] = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= kRegisters; ++i) top[-i] = nullptr;
  fiber.stack_pointer = top - kRegisters;
#if defined(__SANITIZE_THREAD__)
  fiber.thread_sanitizer = __tsan_create_fiber(0);
#endif
}

CUDA_EMULATION_SWITCHING void release_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(fiber.thread_sanitizer);
#endif
}

// Stops here, goes on there. `last`: nobody will come back to `from`.
CUDA_EMULATION_SWITCHING void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
  constexpr unsigned kSwitchGivesNoOrder = 1;
  __tsan_switch_to_fiber(to.thread_sanitizer, kSwitchGivesNoOrder);
#endif
  switch_stack(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// What an entry does first; `from` is the fiber that started it.
CUDA_EMULATION_SWITCHING void first_step([[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &from.stack, &from.stack_size);
#endif
}

}  // namespace cuda_emulation
