// Turns from the response mask, and how many each rollout has.
//
// turn_ids_from_mask: two launches. Reads the mask's byte of a token twice, the second time from the cache, and writes 4. The
// first launch counts, for each block of tokens, the runs that begin in it and in its last row; the second adds these counts up
// over the blocks before its own that hold its first row: a kilobyte of them, on average, in a row of a million tokens.
//
// turn_counts: one launch, with a memset where rows are few and long. Reads 4 bytes a token (8 of int64).
#include "cuda/row_counts.h"

namespace fastadv::cuda {

namespace {

constexpr int kCountingTokens = 16;  // of a thread: 16 bytes of the mask
constexpr int kCountingThreads = kTurnIdsBlock / kCountingTokens;
constexpr int kWritingTokens = 8;  // two writes of 16 bytes
constexpr int kWritingThreads = kTurnIdsBlock / kWritingTokens;
constexpr int kWarps = kWritingThreads / 32;
constexpr int kWritingBlocks = 1;  // that a multiprocessor must hold: asked for none, the compiler spills registers to hold more
constexpr int kUnknownTurn = -2;  // of a fraction, and of a token in no row: no op takes it for a turn

template <int kTokens, bool kAligned>
__device__ Vector<uint8_t, kTokens> load_mask(const uint8_t* mask, int64_t start, int64_t tokens) {
  if (kAligned && start + kTokens <= tokens) return load_vector<kTokens>(mask + start);
  return load_some<kTokens>(mask + start, tokens - start, uint8_t{0});
}

__device__ bool on_before(const uint8_t* mask, int64_t start, int64_t tokens) {
  return start > 0 && start <= tokens && mask[start - 1] != 0;
}

template <bool kAligned>
__global__ void __launch_bounds__(kCountingThreads)
count_runs_kernel(Rows rows, const uint8_t* __restrict__ mask, int32_t* __restrict__ runs) {
  const int64_t block = int64_t{blockIdx.x} * kTurnIdsBlock, start = block + threadIdx.x * kCountingTokens;
  const int64_t last = block + kTurnIdsBlock <= rows.tokens ? block + kTurnIdsBlock : rows.tokens;
  const int64_t begin = rows.begin(rows.row_of(last - 1));  // of the last row
  const auto read = load_mask<kCountingTokens, kAligned>(mask, start, rows.tokens);
  bool before = on_before(mask, start, rows.tokens);
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kCountingTokens; ++i) {
    const bool on = read.values[i] != 0;
    mine += start + i >= begin && on && (!before || start + i == begin);
    before = on;
  }
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, mine);
  __syncthreads();
  if (threadIdx.x == 0) runs[blockIdx.x] = total;
}

// Runs that begin in a stretch of tokens and in its last row, with kNewRow if a row begins there.
constexpr int kNewRow = 1 << 30;
__device__ int joined(int earlier, int later) { return later & kNewRow ? later : earlier + later; }

// joined(stretches of all threads before this one). Of all threads of a block.
__device__ int stretch_before(int mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const int earlier = __shfl_up_sync(~0u, mine, lanes);
    if (lane >= lanes) mine = joined(earlier, mine);
  }
  __shared__ int of_warps[kWarps];
  if (lane == 31) of_warps[warp] = mine;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warp; ++i) before = joined(before, of_warps[i]);
  const int in_warp = __shfl_up_sync(~0u, mine, 1);
  return lane ? joined(before, in_warp) : before;
}

template <bool kAligned>
__global__ void __launch_bounds__(kWritingThreads, kWritingBlocks)
turn_ids_kernel(Rows rows, const uint8_t* __restrict__ mask, const int32_t* __restrict__ runs, int32_t* __restrict__ turn_ids) {
  const int64_t block = int64_t{blockIdx.x} * kTurnIdsBlock, start = block + threadIdx.x * kWritingTokens;
  int64_t row = rows.row_of(block);

  // Runs of the block's first row in the blocks before it.
  int earlier = 0;
  const int64_t first_token = rows.begin(row) > 0 ? rows.begin(row) : 0;
  for (int64_t b = first_token / kTurnIdsBlock + threadIdx.x; b < blockIdx.x; b += kWritingThreads) earlier += runs[b];
  __shared__ int carry;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  earlier = __reduce_add_sync(~0u, earlier);
  if (threadIdx.x % 32 == 0) atomicAdd(&carry, earlier);

  const auto read = load_mask<kWritingTokens, kAligned>(mask, start, rows.tokens);
  const bool there = start < rows.tokens;
  if (there && start >= rows.end(row)) row = rows.row_of(start, row, rows.count - 1);
  RowPlace at = rows.place(row, start);
  int64_t begin = rows.begin(row);
  bool before = on_before(mask, start, rows.tokens);
  int stretch = 0;
  int seen[kWritingTokens];  // like `stretch`, up to each token
  unsigned held = 0;         // a bit a token
#pragma unroll
  for (int i = 0; i < kWritingTokens; ++i) {
    if (there && start + i >= at.until) {
      at = rows.next(at, start + i);
      begin = rows.begin(at.row);
    }
    held |= unsigned(at.held) << i;
    const bool on = read.values[i] != 0, first = there && start + i == begin;
    if (first) stretch = kNewRow;
    stretch += on && (!before || first);
    before = on;
    seen[i] = stretch;
  }
  const int previous = stretch_before(stretch);

  Vector<int32_t, kWritingTokens> out;
#pragma unroll
  for (int i = 0; i < kWritingTokens; ++i) {
    const int found = joined(previous, seen[i]);
    const int turn = found & kNewRow ? found - kNewRow - 1 : found + carry - 1;
    const bool unknown = read.values[i] == kFractional || !(held >> i & 1);
    out.values[i] = unknown ? kUnknownTurn : read.values[i] ? turn : -1;
  }
  if (kAligned && start + kWritingTokens <= rows.tokens) {
    store_vector(turn_ids + start, out);
  } else {
    store_some(turn_ids + start, rows.tokens - start, out);
  }
}

template <class Id>
struct LargestTurn {
  using Element = Id;

  __device__ static Element none() { return -1; }
  __device__ static Count unknown() { return ~Count{0}; }
  // A value below -1 gives -1, which is the largest of all as an unsigned number.
  __device__ static Count of(Element turn) { return turn < -1 ? ~Count{0} : Count(int64_t{turn}) + 1; }
  __device__ static Count merge(Count a, Count b) { return a < b ? b : a; }
  __device__ static void into(Count* count, Count value) { atomicMax(count, value); }
};

template <bool kAligned>
void launch_turn_ids(const Launcher& launcher, const Rows& rows, const uint8_t* mask, int32_t* runs, int32_t* turn_ids) {
  const unsigned blocks = launcher.blocks(rows.tokens, kTurnIdsBlock);
  if (!blocks) return;
  count_runs_kernel<kAligned><<<blocks, kCountingThreads, 0, launcher.stream()>>>(rows, mask, runs);
  turn_ids_kernel<kAligned><<<blocks, kWritingThreads, 0, launcher.stream()>>>(rows, mask, runs, turn_ids);
  launcher.launched();
}

}  // namespace

void turn_ids_from_mask(const Launcher& launcher, const Rows& rows, const uint8_t* mask, int32_t* runs, int32_t* turn_ids) {
  if (aligned(mask) && aligned(turn_ids)) {
    launch_turn_ids<true>(launcher, rows, mask, runs, turn_ids);
  } else {
    launch_turn_ids<false>(launcher, rows, mask, runs, turn_ids);
  }
}

void turn_counts(const Launcher& launcher, const Rows& rows, DType ids, const void* turn_ids, int64_t* counts) {
  if (ids == DType::kInt32) {
    row_counts<LargestTurn<int32_t>>(launcher, rows, static_cast<const int32_t*>(turn_ids), counts);
  } else {
    row_counts<LargestTurn<int64_t>>(launcher, rows, static_cast<const int64_t*>(turn_ids), counts);
  }
}

}  // namespace fastadv::cuda
