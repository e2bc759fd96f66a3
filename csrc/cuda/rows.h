// Which rollout a token belongs to.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastadv::cuda {

// A row's tokens, [begin, end), and whether that is what its offsets say.
struct RowSpan {
  int64_t begin = 0, end = 0;
  bool sound = false;
};

// A token's row, whether the row holds it, and the first token behind it of which that may not be so.
struct RowPlace {
  int64_t row, until;
  bool held;
};

// How tokens divide into rollouts: packed, row r being [cu_seqlens[r], cu_seqlens[r + 1]), or padded, `width` tokens a row.
struct Rows {
  int64_t count;
  int64_t tokens;
  int64_t width;
  const int64_t* cu_seqlens;  // [count + 1], null where padded

  __device__ int64_t begin(int64_t row) const { return cu_seqlens ? cu_seqlens[row] : row * width; }
  __device__ int64_t end(int64_t row) const { return begin(row + 1); }

  // A row's tokens. None where the offsets are false about it, which nobody may have checked: it is not among the tokens, ends
  // before it begins, or leaves out the first or the last token.
  __device__ RowSpan span(int64_t row) const {
    const int64_t from = begin(row), to = end(row);
    const bool sound = from >= 0 && from <= to && to <= tokens && (row > 0 || from == 0) && (row + 1 < count || to == tokens);
    return sound ? RowSpan{from, to, true} : RowSpan{};
  }

  // Where a token is, given the last row that begins at or before it. A row that does not hold the token, or is not among the
  // tokens, says nothing of the next token.
  __device__ RowPlace place(int64_t row, int64_t token) const {
    const int64_t from = begin(row), to = end(row);
    const bool held = from >= 0 && from <= token && token < to && to <= tokens;
    return {row, held ? to : token + 1, held};
  }
  // The same, given the place of an earlier token.
  __device__ RowPlace next(const RowPlace& earlier, int64_t token) const {
    int64_t row = earlier.row;
    while (token >= end(row) && row + 1 < count) ++row;
    return place(row, token);
  }

  // The row that holds a token: the last that begins at or before it. Among `first`, ..., `last` if the caller knows more.
  // One of them whatever the offsets are.
  __device__ int64_t row_of(int64_t token, int64_t first, int64_t last) const {
    if (!cu_seqlens) return token / width;
    while (first < last) {
      const int64_t middle = first + (last - first + 1) / 2;
      if (cu_seqlens[middle] <= token) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
  __device__ int64_t row_of(int64_t token) const { return row_of(token, 0, count - 1); }
};

// A row's segments in a table: none, if any is beyond it.
struct Segments {
  int64_t first = 0, count = 0;
  bool inside = false;
};
__device__ inline Segments row_segments(const int64_t* offsets, int64_t row, int64_t size) {
  const int64_t first = offsets[row], end = offsets[row + 1];
  return first >= 0 && first <= end && end <= size ? Segments{first, end - first, true} : Segments{};
}

}  // namespace fastadv::cuda
