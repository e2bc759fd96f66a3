// The chunk-shift count sketch: an element goes to a slot, with a sign, that are a hash of its place in the whole parameter
// and of nothing else. fastadv/reference/count_sketch.py is the same in PyTorch.
//
// Neighbouring columns share a hash, a chunk of them going to as many neighbouring slots from a random one on. Two elements
// of one chunk never meet, two of different chunks meet with a chance of 1 / size, whatever their columns are: a matrix whose
// energy lies in one column is sketched as well as any other.
#pragma once

#include <cstdint>

#include "fastadv/portability.h"

namespace fastadv::sketch {

constexpr int kChunk = 32;           // columns that share a hash
constexpr float kLimit = 0x1p50f;    // quanta that a value stays below

// The state below `state` with this number: of a copy, of a row in it, of a chunk in that. An element of the splitmix64
// sequence that starts there; its finaliser passes for random where the input counts.
FASTADV_INLINE uint64_t descend(uint64_t state, int64_t number) {
  uint64_t x = state + (uint64_t(number) + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of a chunk's state, the upper word is its first slot and the lower one has a sign a column.
FASTADV_INLINE int64_t first_slot(uint64_t state, int64_t size) { return int64_t((state >> 32) * uint64_t(size) >> 32); }
FASTADV_INLINE float with_sign(float x, uint64_t state, int column) { return uint32_t(state) >> column & 1 ? -x : x; }

// False for NaN too.
FASTADV_INLINE bool in_range(float quanta) { return quanta < kLimit && quanta > -kLimit; }

// The nearest whole number, ties to even. From 2^23 on every float is one; below it, adding 2^23 leaves no bit for a fraction.
FASTADV_INLINE int64_t whole(float quanta) {
  const float magnitude = quanta < 0.0f ? -quanta : quanta;
  const float rounded = magnitude < 0x1p23f ? (magnitude + 0x1p23f) - 0x1p23f : magnitude;
  return int64_t(quanta < 0.0f ? -rounded : rounded);
}

// What a value that is not in range adds to each slot of its chunk, in place of itself. Any number of these in a chunk, below
// 2^32, leaves a slot that is 2^61 or more from 0, which nothing else does: the reader makes that NaN. All sums are modulo 2^64.
FASTADV_INLINE uint64_t poison(int column) { return uint64_t{1} << (62 - column); }

}  // namespace fastadv::sketch
