// Atomic operations: relaxed, as on a device. They order nothing but themselves.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_types.h"

namespace cuda_emulation {

template <size_t size>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint64_t;
};

// The type of an argument that the address decides, so that atomicAdd(&counter, 1) means what nvcc makes of it.
template <class T>
struct SameTypeOf {
  using Type = T;
};
template <class T>
using SameType = typename SameTypeOf<T>::Type;

template <class T, class... Allowed>
constexpr bool is_any_of = (std::is_same_v<T, Allowed> || ...);
template <class T>
constexpr bool is_atomic_integer = is_any_of<T, int, unsigned, unsigned long long>;

// *address = update(*address); returns what was there.
template <class T, class Update>
inline T update_atomically(T* address, Update update) {
  using Word = typename WordOf<sizeof(T)>::Type;
  Word* const word = reinterpret_cast<Word*>(address);
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T before;
    memcpy(static_cast<void*>(&before), &seen, sizeof(T));
    const T after = update(before);
    Word wanted;
    memcpy(&wanted, &after, sizeof(T));
    if (__atomic_compare_exchange_n(word, &seen, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return before;
  }
}

// Integers wrap around on a device.
template <class T>
inline T add_wrapping(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

}  // namespace cuda_emulation

template <class T>
inline T atomicAdd(T* address, ::cuda_emulation::SameType<T> value) {
  static_assert(::cuda_emulation::is_atomic_integer<T> ||
                    ::cuda_emulation::is_any_of<T, float, double, __half, __half2, __nv_bfloat16, __nv_bfloat162>,
                "atomicAdd takes int, unsigned, unsigned long long, float, double, half and bfloat16");
  return ::cuda_emulation::update_atomically(
      address, [=](T old) { return ::cuda_emulation::add_wrapping(old, value); });
}

template <class T>
inline T atomicSub(T* address, ::cuda_emulation::SameType<T> value) {
  static_assert(::cuda_emulation::is_any_of<T, int, unsigned>, "atomicSub takes int and unsigned");
  return ::cuda_emulation::update_atomically(address, [=](T old) {
    return static_cast<T>(static_cast<unsigned>(old) - static_cast<unsigned>(value));
  });
}

#define CUDA_EMULATION_ATOMIC(name, allowed, result)                                                          \
  template <class T>                                                                                          \
  inline T name(T* address, ::cuda_emulation::SameType<T> value) {                                            \
    static_assert(allowed, #name " of a type for which a device has none");                                   \
    return ::cuda_emulation::update_atomically(address, [=]([[maybe_unused]] T old) -> T { return result; }); \
  }
#define CUDA_EMULATION_INTEGERS (::cuda_emulation::is_atomic_integer<T> || std::is_same_v<T, long long>)
CUDA_EMULATION_ATOMIC(atomicMin, CUDA_EMULATION_INTEGERS, value < old ? value : old)
CUDA_EMULATION_ATOMIC(atomicMax, CUDA_EMULATION_INTEGERS, value > old ? value : old)
CUDA_EMULATION_ATOMIC(atomicAnd, ::cuda_emulation::is_atomic_integer<T>, old & value)
CUDA_EMULATION_ATOMIC(atomicOr, ::cuda_emulation::is_atomic_integer<T>, old | value)
CUDA_EMULATION_ATOMIC(atomicXor, ::cuda_emulation::is_atomic_integer<T>, old ^ value)
CUDA_EMULATION_ATOMIC(atomicExch, (::cuda_emulation::is_atomic_integer<T> || std::is_same_v<T, float>), value)
CUDA_EMULATION_ATOMIC(atomicInc, (std::is_same_v<T, unsigned>), old >= value ? 0 : old + 1)
CUDA_EMULATION_ATOMIC(atomicDec, (std::is_same_v<T, unsigned>), old == 0 || old > value ? value : old - 1)
#undef CUDA_EMULATION_INTEGERS
#undef CUDA_EMULATION_ATOMIC

template <class T>
inline T atomicCAS(T* address, ::cuda_emulation::SameType<T> compare, ::cuda_emulation::SameType<T> value) {
  static_assert(::cuda_emulation::is_atomic_integer<T> || std::is_same_v<T, unsigned short>,
                "atomicCAS takes int, unsigned, unsigned long long and unsigned short");
  return ::cuda_emulation::update_atomically(address, [=](T old) { return old == compare ? value : old; });
}
