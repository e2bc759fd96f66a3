// Inner products of all pairs of a few vectors.
#pragma once

#include "fastadv/portability.h"

namespace fastadv {

constexpr int kGramVectors = 8;  // at most, in one pass over them

FASTADV_INLINE constexpr int pair_count(int vectors) { return vectors * (vectors + 1) / 2; }

// Pairs (i, j) with j <= i are numbered row by row.
FASTADV_INLINE int pair_index(int i, int j) { return i * (i + 1) / 2 + j; }

// Writes pair (i, j) to a [vectors, vectors] array and to its mirror image.
FASTADV_INLINE void write_pair(double* gram, int vectors, int i, int j, double value) {
  gram[i * vectors + j] = value;
  gram[j * vectors + i] = value;
}

}  // namespace fastadv
