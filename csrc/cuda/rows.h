// Which rollout a token belongs to.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastadv::cuda {

// How tokens divide into rollouts: packed, row r being [cu_seqlens[r], cu_seqlens[r + 1]), or padded, `width` tokens a row.
struct Rows {
  int64_t count;
  int64_t tokens;
  int64_t width;
  const int64_t* cu_seqlens;  // [count + 1], null where padded

  __device__ int64_t begin(int64_t row) const { return cu_seqlens ? cu_seqlens[row] : row * width; }
  __device__ int64_t end(int64_t row) const { return begin(row + 1); }

  // The row that holds a token: the last that begins at or before it. Among `first`, ..., `last` if the caller knows more.
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

}  // namespace fastadv::cuda
