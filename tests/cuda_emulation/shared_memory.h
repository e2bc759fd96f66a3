// The shared memory of a block: `__shared__` variables and the dynamic array, each between red zones. Filled with
// 0xFF before each block: NaN as a floating point number, -1 as an integer, so what was never written shows.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "sanitizers.h"

namespace cuda_emulation {

constexpr size_t kStaticSharedLimit = 48 << 10;    // of `__shared__` variables, and of all without cudaFuncSetAttribute
constexpr size_t kDynamicSharedLimit = 227 << 10;  // of compute capability 9.0, with cudaFuncSetAttribute

class SharedMemory {
 public:
  CUDA_EMULATION_UNWATCHED SharedMemory() : memory_(kCapacity + kAlignment) {
    const auto address = reinterpret_cast<size_t>(memory_.data());
    start_ = memory_.data() + (kAlignment - address % kAlignment) % kAlignment;
    used_ = kCapacity;  // all of it has to be filled
  }
  CUDA_EMULATION_UNWATCHED ~SharedMemory() { open_memory(start_, kCapacity); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A new block: no variables yet, and at most `limit` bytes together.
  CUDA_EMULATION_UNWATCHED void clear(size_t dynamic_bytes, size_t limit) {
    open_memory(start_, used_);
    memset(start_, 0xFF, used_);
    close_memory(start_, kCapacity);
    used_ = kRedZone;
    count_ = 0;
    static_bytes_ = 0;
    dynamic_bytes_ = dynamic_bytes;
    limit_ = limit;
    dynamic_ = take(dynamic_bytes, kAlignment);
  }

  CUDA_EMULATION_UNWATCHED void* dynamic() const { return dynamic_; }

  // The variable with this key, which is made for the first thread that reaches its declaration; nullptr: there is no
  // room.
  CUDA_EMULATION_UNWATCHED void* variable(const void* key, size_t bytes, size_t alignment) {
    for (int i = 0; i < count_; ++i) {
      if (variables_[i].key == key) return variables_[i].address;
    }
    static_bytes_ += bytes;
    if (count_ == kMaxVariables || static_bytes_ > kStaticSharedLimit) return nullptr;
    if (static_bytes_ + dynamic_bytes_ > limit_) return nullptr;
    variables_[count_] = {key, take(bytes, alignment)};
    return variables_[count_++].address;
  }

 private:
  struct Variable {
    const void* key;
    char* address;
  };
  static constexpr size_t kRedZone = 64;
  static constexpr size_t kAlignment = 128;
  static constexpr int kMaxVariables = 64;
  static constexpr size_t kCapacity =
      kDynamicSharedLimit + kStaticSharedLimit + (kMaxVariables + 2) * (kRedZone + kAlignment);

  CUDA_EMULATION_UNWATCHED char* take(size_t bytes, size_t alignment) {
    if (alignment < 8) alignment = 8;  // what AddressSanitizer closes starts at a multiple of 8
    const size_t begin = (used_ + alignment - 1) / alignment * alignment;
    open_memory(start_ + begin, bytes);
    used_ = begin + bytes + kRedZone;
    return start_ + begin;
  }

  std::vector<char> memory_;
  char* start_;
  size_t used_;
  size_t static_bytes_ = 0;
  size_t dynamic_bytes_ = 0;
  size_t limit_ = 0;
  char* dynamic_ = nullptr;
  int count_ = 0;
  Variable variables_[kMaxVariables];
};

}  // namespace cuda_emulation
