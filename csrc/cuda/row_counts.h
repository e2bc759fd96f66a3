// One integer a rollout, from all of its tokens. Several threads share a row, how many depends on the average length, which the
// host knows; where rows are few and long, several blocks share one and merge what they found by integer atomics, whose order
// changes nothing. One launch, with a memset before it in the last case.
#pragma once

#include "cuda/kernels.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

using Count = unsigned long long;  // what integer atomics take; in two's complement it holds any int64

constexpr int kCountThreads = 256;
constexpr int kCountTokens = 16;     // of a thread at a time: neighbours
constexpr int kCountBlocks = 2048;   // more do not make a GPU faster
constexpr int kCountSteps = 4;       // of a block's threads that share a row: fewer are not worth another block

// `What` says what is counted: the type of an Element, `none` to read in place of one that is not there, `of` one element,
// how two results `merge`, also `into` memory, and what a row that is none comes to, `unknown`.
template <class What, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kCountThreads)
row_counts_kernel(Rows rows, const typename What::Element* __restrict__ tokens, Count* __restrict__ counts) {
  constexpr int kRows = kCountThreads / kLanes;
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  const RowSpan span = row < rows.count ? rows.span(row) : RowSpan{0, 0, true};
  const int64_t begin = span.begin, end = span.end;
  // From a multiple of what is read at once: the neighbours in other rows are not counted.
  const int64_t stride = int64_t{kLanes} * gridDim.y;
  const int64_t first = begin / kCountTokens + blockIdx.y * kLanes + threadIdx.x % kLanes;
  Count mine = 0;
  for (int64_t step = first; step * kCountTokens < end; step += stride) {
    const int64_t at = step * kCountTokens;
    const bool whole = kAligned && at + kCountTokens <= rows.tokens;
    const auto read = whole ? load_vector<kCountTokens>(tokens + at)
                            : load_some<kCountTokens>(tokens + at, rows.tokens - at, What::none());
    const int from = begin > at ? int(begin - at) : 0, to = end - at < kCountTokens ? int(end - at) : kCountTokens;
#pragma unroll
    for (int i = 0; i < kCountTokens; ++i) {
      if (i >= from && i < to) mine = What::merge(mine, What::of(read.values[i]));
    }
  }
  constexpr int kTogether = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int lanes = kTogether / 2; lanes; lanes /= 2) mine = What::merge(mine, __shfl_xor_sync(~0u, mine, lanes));
  if constexpr (kLanes > 32) {
    __shared__ Count of_warps[kLanes / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = of_warps[0];
    for (int warp = 1; warp < kLanes / 32; ++warp) mine = What::merge(mine, of_warps[warp]);
  }
  if (threadIdx.x % kLanes || row >= rows.count) return;
  if (!span.sound) mine = blockIdx.y == 0 ? What::unknown() : Count{0};
  if (gridDim.y == 1) {
    counts[row] = mine;
  } else {
    What::into(counts + row, mine);
  }
}

template <class What, int kLanes>
void launch_row_counts(const Launcher& launcher, const Rows& rows, const typename What::Element* tokens, int64_t* counts) {
  const unsigned across = launcher.blocks(rows.count, kCountThreads / kLanes);
  if (!across) return;
  const int64_t steps = rows.tokens / (rows.count * kLanes * kCountTokens);  // of an average row
  const int64_t parts = steps / kCountSteps < kCountBlocks / across ? steps / kCountSteps : kCountBlocks / across;
  const dim3 grid(across, parts > 1 ? unsigned(parts) : 1);
  if (grid.y > 1) launcher.check(cudaMemsetAsync(counts, 0, rows.count * sizeof(int64_t), launcher.stream()));
  auto* out = reinterpret_cast<Count*>(counts);
  if (aligned(tokens)) {
    row_counts_kernel<What, kLanes, true><<<grid, kCountThreads, 0, launcher.stream()>>>(rows, tokens, out);
  } else {
    row_counts_kernel<What, kLanes, false><<<grid, kCountThreads, 0, launcher.stream()>>>(rows, tokens, out);
  }
  launcher.launched();
}

// Writes `counts`, [rows].
template <class What>
void row_counts(const Launcher& launcher, const Rows& rows, const typename What::Element* tokens, int64_t* counts) {
  const int64_t length = rows.count ? rows.tokens / rows.count : 0;
  if (length < 8 * kCountTokens) {
    launch_row_counts<What, 8>(launcher, rows, tokens, counts);
  } else if (length < kCountThreads * kCountTokens) {
    launch_row_counts<What, 32>(launcher, rows, tokens, counts);
  } else {
    launch_row_counts<What, kCountThreads>(launcher, rows, tokens, counts);
  }
}

}  // namespace fastadv::cuda
