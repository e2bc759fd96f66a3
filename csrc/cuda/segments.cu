// Values of a segment table at each token. One launch: reads 4 bytes of turn ids a token (8 of int64), 1 of the mask if there
// is one, and writes 4 (8 of float64); the table stays in the cache.
#include "cuda/kernels.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;  // of a thread: neighbours
constexpr int kBlock = kThreads * kTokens;

template <class T, class Id, bool kAligned>
__global__ void __launch_bounds__(kThreads)
segment_tokens_kernel(Rows rows, const T* __restrict__ table, int64_t size, const int64_t* __restrict__ offsets,
                      const Id* __restrict__ turn_ids, const uint8_t* __restrict__ mask, T* __restrict__ tokens) {
  const int64_t block = int64_t{blockIdx.x} * kBlock;
  const int64_t start = block + threadIdx.x * kTokens;
  if (start >= rows.tokens) return;
  const int64_t left = rows.tokens - start;
  const bool whole = kAligned && left >= kTokens;
  const auto turns = whole ? load_vector<kTokens>(turn_ids + start) : load_some<kTokens>(turn_ids + start, left, Id(-1));
  Vector<uint8_t, kTokens> on;
  if (mask) {
    on = whole ? load_vector<kTokens>(mask + start) : load_some<kTokens>(mask + start, left, uint8_t{0});
  } else {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) on.values[i] = 1;
  }

  // All threads search for the row of the block's first token, which the cache then holds; most blocks lie in one row.
  int64_t row = rows.row_of(block);
  if (start >= rows.end(row)) row = rows.row_of(start, row, rows.count - 1);
  RowPlace at = rows.place(row, start);
  int64_t first, turn_count;
  const auto enter = [&] {
    const Segments of_row = at.held ? row_segments(offsets, at.row, size) : Segments{};
    first = of_row.first;
    turn_count = of_row.count;
  };
  enter();
  Vector<T, kTokens> out;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (start + i >= at.until) {
      at = rows.next(at, start + i);
      enter();
    }
    const Id turn = turns.values[i];
    const bool in_turn = on.values[i] && turn != -1, known = turn >= 0 && turn < turn_count;
    // A turn that the table lacks, and a fraction in the mask, give NaN.
    const bool bad = on.values[i] == kFractional || (in_turn && !known);
    out.values[i] = bad ? T(NAN) : in_turn ? table[first + turn] : T(0);
  }
  if (whole) {
    store_vector(tokens + start, out);
  } else {
    store_some(tokens + start, left, out);
  }
}

template <class T, class Id>
void launch(const Launcher& launcher, const Rows& rows, const T* table, int64_t size, const int64_t* offsets, const Id* turn_ids,
            const uint8_t* mask, T* tokens) {
  const unsigned blocks = launcher.blocks(rows.tokens, kBlock);
  if (!blocks) return;
  if (aligned(turn_ids) && aligned(mask) && aligned(tokens)) {
    segment_tokens_kernel<T, Id, true><<<blocks, kThreads, 0, launcher.stream()>>>(rows, table, size, offsets, turn_ids, mask, tokens);
  } else {
    segment_tokens_kernel<T, Id, false><<<blocks, kThreads, 0, launcher.stream()>>>(rows, table, size, offsets, turn_ids, mask, tokens);
  }
  launcher.launched();
}

}  // namespace

template <class T>
void segment_tokens(const Launcher& launcher, const Rows& rows, const T* table, int64_t size, const int64_t* offsets, DType ids,
                    const void* turn_ids, const uint8_t* mask, T* tokens) {
  if (ids == DType::kInt32) {
    launch(launcher, rows, table, size, offsets, static_cast<const int32_t*>(turn_ids), mask, tokens);
  } else {
    launch(launcher, rows, table, size, offsets, static_cast<const int64_t*>(turn_ids), mask, tokens);
  }
}

template void segment_tokens(const Launcher&, const Rows&, const float*, int64_t, const int64_t*, DType, const void*, const uint8_t*, float*);
template void segment_tokens(const Launcher&, const Rows&, const double*, int64_t, const int64_t*, DType, const void*, const uint8_t*, double*);

}  // namespace fastadv::cuda
