// Shuffles, votes, matches and reductions over a warp. The last lane of the mask to arrive computes what each lane
// gets; a lane outside of the mask, one that has ended, and lanes that meet in different operations are faults. As on
// a device only __syncwarp orders memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "barriers.h"
#include "block.h"

namespace cuda_emulation {

struct WarpValues {
  const char* place;
  unsigned mask;
  uint64_t value[kWarpSize];
  int argument[kWarpSize];

  CUDA_EMULATION_UNWATCHED bool has(unsigned lane) const { return mask >> lane & 1; }
};

using WarpCombine = uint64_t (*)(const WarpValues&, unsigned lane);

CUDA_EMULATION_UNWATCHED uint64_t combine_nothing(const WarpValues&, unsigned) { return 0; }

// Returns what `combine` makes of the values of all lanes of the mask for this one.
CUDA_EMULATION_SWITCHING uint64_t warp_operation(const char* place, unsigned mask, WarpCombine combine,
                                                 uint64_t value = 0, int argument = 0) {
  Block& block = *current_block;
  Thread& self = *block.running;
  const unsigned lane = lane_of(self);
  const unsigned first = self.number - lane;
  const unsigned lanes = block.threads.size() - first;
  const bool orders_memory = combine == combine_nothing;
  // A full mask in the last warp of a block that does not fill it: the lanes that are missing take no part.
  if (lanes < kWarpSize && mask == ~0u) mask = (1u << lanes) - 1;
  if (!(mask >> lane & 1)) fault("%s: mask 0x%x lacks lane %u, which calls it", place, mask, lane);
  if (lanes < kWarpSize && mask >> lanes) fault("%s: mask 0x%x names lanes beyond the block's %u", place, mask, lanes);
  self.place = place;
  self.mask = mask;
  self.combine = combine;
  self.value = value;
  self.argument = argument;
  self.state = ThreadState::kAtWarp;
  if (orders_memory) self.arrived.release();

  unsigned& waiting = block.lanes_waiting[first / kWarpSize];
  if (const unsigned ended = mask & block.lanes_ended[first / kWarpSize]) {
    fault("%s: mask 0x%x names lane %d, which has ended", place, mask, __builtin_ctz(ended));
  }
  const unsigned others = mask & waiting;
  waiting |= 1u << lane;
  bool complete = (waiting & mask) == mask;
  // Lanes that wait for each other have to wait in one operation. Until all are there it is enough to ask one of them.
  Thread* const warp = &block.threads[first];
  for (unsigned asked = complete ? others : others & -others; asked; asked &= asked - 1) {
    const unsigned i = __builtin_ctz(asked);
    const Thread& other = warp[i];
    if (other.mask >> lane & 1 && (other.mask != mask || other.combine != combine)) {
      fault("%s with mask 0x%x meets lane %u in %s with mask 0x%x", place, mask, i, other.place, other.mask);
    }
    if (other.mask != mask) complete = false;
  }
  if (complete) {
    waiting &= ~mask;
    WarpValues values{place, mask, {}, {}};
    for (unsigned i = 0; i < kWarpSize; ++i) {
      if (!values.has(i)) continue;
      values.value[i] = warp[i].value;
      values.argument[i] = warp[i].argument;
    }
    uint64_t results[kWarpSize] = {};
    for (unsigned i = 0; i < kWarpSize; ++i) {
      if (!values.has(i)) continue;
      results[i] = combine(values, i);
      if (orders_memory) warp[i].arrived.acquire();
    }
    for (unsigned i = 0; i < kWarpSize; ++i) {
      if (!values.has(i)) continue;
      warp[i].value = results[i];
      warp[i].state = ThreadState::kReady;
      if (orders_memory) warp[i].resumed.release();
    }
  }
  wait();
  if (orders_memory) self.resumed.acquire();
  return self.value;
}

// Values travel as 64 bits.
template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "warp operations move at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

CUDA_EMULATION_UNWATCHED uint64_t combine_shuffle(const WarpValues& values, unsigned lane) {
  const int source = values.argument[lane];
  if (!values.has(source)) {
    fault("%s: lane %u reads lane %d, which mask 0x%x lacks", values.place, lane, source, values.mask);
  }
  return values.value[source];
}

CUDA_EMULATION_UNWATCHED uint64_t combine_ballot(const WarpValues& values, unsigned) {
  uint64_t result = 0;
  for (unsigned i = 0; i < kWarpSize; ++i) result |= static_cast<uint64_t>(values.has(i) && values.value[i]) << i;
  return result;
}

CUDA_EMULATION_UNWATCHED uint64_t combine_match(const WarpValues& values, unsigned lane) {
  uint64_t result = 0;
  for (unsigned i = 0; i < kWarpSize; ++i) {
    result |= static_cast<uint64_t>(values.has(i) && values.value[i] == values.value[lane]) << i;
  }
  return result;
}

template <class T, class Function>
CUDA_EMULATION_UNWATCHED uint64_t combine_reduce(const WarpValues& values, unsigned) {
  T result{};
  bool first = true;
  for (unsigned i = 0; i < kWarpSize; ++i) {
    if (!values.has(i)) continue;
    const auto value = static_cast<T>(values.value[i]);
    result = first ? value : Function::apply(result, value);
    first = false;
  }
  return static_cast<uint32_t>(result);
}

enum class Shuffle { kIndex, kXor, kUp, kDown };

// Which lane this one reads: within its part of `width` lanes, itself where that would lie outside.
CUDA_EMULATION_UNWATCHED int shuffle_source(Shuffle kind, int lane, int argument, int width) {
  const int begin = lane & ~(width - 1);
  const int end = begin + width;
  if (kind == Shuffle::kIndex) return begin + (argument & (width - 1));
  const int source = kind == Shuffle::kXor ? lane ^ argument : kind == Shuffle::kUp ? lane - argument : lane + argument;
  // A xor may reach the parts before its own, as on a device.
  const bool inside = source < end && (kind == Shuffle::kXor || source >= begin);
  return inside ? source : lane;
}

template <Shuffle kind, class T>
inline T shuffle(const char* place, unsigned mask, T value, int argument, int width = kWarpSize) {
  if (width < 1 || width > 32 || width & (width - 1)) fault("%s: width %d is no power of two up to 32", place, width);
  const int source = shuffle_source(kind, lane_of(*current_block->running), argument, width);
  return from_bits<T>(warp_operation(place, mask, combine_shuffle, to_bits(value), source));
}

inline void sync_warp(const char* place, unsigned mask = ~0u) { warp_operation(place, mask, combine_nothing); }

inline unsigned ballot(const char* place, unsigned mask, bool predicate) {
  return warp_operation(place, mask, combine_ballot, predicate);
}

template <class T>
inline unsigned match_any(const char* place, unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "__match_any_sync compares 4 or 8 bytes");
  return warp_operation(place, mask, combine_match, to_bits(value));
}

template <class T>
inline unsigned match_all(const char* place, unsigned mask, T value, int* predicate) {
  const unsigned equal = match_any(place, mask, value);
  // Lanes that the block does not have are no part of a full mask.
  const unsigned size = current_block->threads.size() - (current_block->running->number & ~31u);
  const unsigned taking_part = size < kWarpSize ? mask & ((1u << size) - 1) : mask;
  *predicate = equal == taking_part;
  return *predicate ? taking_part : 0;
}

template <class Function>
inline unsigned reduce(const char* place, unsigned mask, unsigned value) {
  return warp_operation(place, mask, combine_reduce<unsigned, Function>, value);
}

template <class Function>
inline int reduce(const char* place, unsigned mask, int value) {
  static_assert(Function::kOfSigned, "__reduce_and_sync, _or_ and _xor_ take unsigned values");
  return static_cast<int>(warp_operation(place, mask, combine_reduce<int, Function>, static_cast<unsigned>(value)));
}

struct Add {
  static constexpr bool kOfSigned = true;
  template <class T>
  CUDA_EMULATION_UNWATCHED static T apply(T a, T b) {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  }
};
struct Min {
  static constexpr bool kOfSigned = true;
  template <class T>
  CUDA_EMULATION_UNWATCHED static T apply(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  static constexpr bool kOfSigned = true;
  template <class T>
  CUDA_EMULATION_UNWATCHED static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct And {
  static constexpr bool kOfSigned = false;
  CUDA_EMULATION_UNWATCHED static unsigned apply(unsigned a, unsigned b) { return a & b; }
};
struct Or {
  static constexpr bool kOfSigned = false;
  CUDA_EMULATION_UNWATCHED static unsigned apply(unsigned a, unsigned b) { return a | b; }
};
struct Xor {
  static constexpr bool kOfSigned = false;
  CUDA_EMULATION_UNWATCHED static unsigned apply(unsigned a, unsigned b) { return a ^ b; }
};

}  // namespace cuda_emulation

#define __syncwarp(...) ::cuda_emulation::sync_warp(CUDA_EMULATION_PLACE("__syncwarp") __VA_OPT__(, ) __VA_ARGS__)
#define CUDA_EMULATION_SHUFFLE(kind, name, ...) \
  ::cuda_emulation::shuffle<::cuda_emulation::Shuffle::kind>(CUDA_EMULATION_PLACE(name), __VA_ARGS__)
#define __shfl_sync(...) CUDA_EMULATION_SHUFFLE(kIndex, "__shfl_sync", __VA_ARGS__)
#define __shfl_xor_sync(...) CUDA_EMULATION_SHUFFLE(kXor, "__shfl_xor_sync", __VA_ARGS__)
#define __shfl_up_sync(...) CUDA_EMULATION_SHUFFLE(kUp, "__shfl_up_sync", __VA_ARGS__)
#define __shfl_down_sync(...) CUDA_EMULATION_SHUFFLE(kDown, "__shfl_down_sync", __VA_ARGS__)
#define __ballot_sync(mask, ...) ::cuda_emulation::ballot(CUDA_EMULATION_PLACE("__ballot_sync"), mask, !!(__VA_ARGS__))
#define __any_sync(mask, ...) \
  (static_cast<int>(::cuda_emulation::ballot(CUDA_EMULATION_PLACE("__any_sync"), mask, !!(__VA_ARGS__)) != 0))
#define __all_sync(mask, ...) \
  (static_cast<int>(::cuda_emulation::ballot(CUDA_EMULATION_PLACE("__all_sync"), mask, !(__VA_ARGS__)) == 0))
#define __match_any_sync(...) ::cuda_emulation::match_any(CUDA_EMULATION_PLACE("__match_any_sync"), __VA_ARGS__)
#define __match_all_sync(...) ::cuda_emulation::match_all(CUDA_EMULATION_PLACE("__match_all_sync"), __VA_ARGS__)
#define CUDA_EMULATION_REDUCE(function, name, ...) \
  ::cuda_emulation::reduce<::cuda_emulation::function>(CUDA_EMULATION_PLACE(name), __VA_ARGS__)
#define __reduce_add_sync(...) CUDA_EMULATION_REDUCE(Add, "__reduce_add_sync", __VA_ARGS__)
#define __reduce_min_sync(...) CUDA_EMULATION_REDUCE(Min, "__reduce_min_sync", __VA_ARGS__)
#define __reduce_max_sync(...) CUDA_EMULATION_REDUCE(Max, "__reduce_max_sync", __VA_ARGS__)
#define __reduce_and_sync(...) CUDA_EMULATION_REDUCE(And, "__reduce_and_sync", __VA_ARGS__)
#define __reduce_or_sync(...) CUDA_EMULATION_REDUCE(Or, "__reduce_or_sync", __VA_ARGS__)
#define __reduce_xor_sync(...) CUDA_EMULATION_REDUCE(Xor, "__reduce_xor_sync", __VA_ARGS__)

// Which lanes are active where depends on how a compiler arranged the branches: a kernel that asks cannot be checked
// here, and one that uses the answer as a mask is wrong on a device.
__attribute__((error("__activemask says nothing that a kernel may rely on: compute the mask"))) unsigned __activemask();
