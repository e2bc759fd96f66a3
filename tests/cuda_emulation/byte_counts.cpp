// Counts the bytes that kernels read and write, by the hooks that -fsanitize=kernel-address calls at each access. The
// sources stay as they are, and so do their results: nothing is checked here.
//
// Only memory that was announced counts: that of tensors. What is read again does not count again, as if every cache were
// large enough. (The compiler may leave a hook out where the same address was accessed just before.)
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

constexpr uint8_t kRead = 1, kWritten = 2;

struct Tensor {
  uintptr_t start;
  std::vector<uint8_t> seen;  // of each byte
};

std::mutex mutex;
std::vector<Tensor> tensors;

void access(uintptr_t address, size_t size, uint8_t how) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Tensor& tensor : tensors) {
    if (address < tensor.start || address + size > tensor.start + tensor.seen.size()) continue;
    for (size_t i = 0; i < size; ++i) tensor.seen[address - tensor.start + i] |= how;
    return;
  }
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void byte_counts_watch(uintptr_t start, size_t size) {
  for (Tensor& tensor : tensors) {
    if (tensor.start == start && tensor.seen.size() >= size) return;
  }
  tensors.push_back({start, std::vector<uint8_t>(size)});
}

EXPORTED void byte_counts_forget() { tensors.clear(); }

// Bytes that were read at least once, and bytes that were written at least once.
EXPORTED int64_t byte_counts_distinct() {
  int64_t count = 0;
  for (const Tensor& tensor : tensors) {
    for (uint8_t seen : tensor.seen) count += (seen & kRead ? 1 : 0) + (seen & kWritten ? 1 : 0);
  }
  return count;
}

#define HOOKS(size)                                                                        \
  void __asan_load##size##_noabort(uintptr_t address) { access(address, size, kRead); }    \
  void __asan_store##size##_noabort(uintptr_t address) { access(address, size, kWritten); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __asan_loadN_noabort(uintptr_t address, size_t size) { access(address, size, kRead); }
void __asan_storeN_noabort(uintptr_t address, size_t size) { access(address, size, kWritten); }
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}
}
