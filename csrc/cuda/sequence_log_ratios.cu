// Log-ratios of whole rollouts, in one launch. Reads 9 bytes a token in float32, 5 in bfloat16.
//
// Where rows are short a warp takes a row, else a block; where rows are few and long several blocks share one, and the last of
// all puts together what they found. Which of these it is follows from the numbers of rows and tokens, which the host knows. A
// row begins anywhere, and 16 bytes can be read from multiples of kTokens only: a thread therefore reads from the multiple
// before its row on, and selects.
#include "cuda/kernels.h"
#include "cuda/sums.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTokens = 8;  // of a thread: neighbours
constexpr int kShortRow = 1024;  // tokens of an average row below which a warp is enough
constexpr int64_t kUnknown = -(int64_t{1} << 62);  // tokens of a row with a fractional mask, or that is none: sum and minimum are NaN

// What a thread finds in its tokens of a row.
struct Found {
  CompensatedSum log_ratio;
  float minimum = 0.0f;
  int64_t tokens = 0, missing = 0;
  bool unknown = false;

  __device__ void add(uint8_t mask, float log_prob, float old_log_prob, bool skip_missing) {
    const bool on = mask != 0;
    const bool absent = on && old_log_prob != old_log_prob;
    const float x = on && !(skip_missing && absent) ? log_prob - old_log_prob : 0.0f;
    log_ratio.add(x);
    minimum = x < minimum ? x : minimum;
    tokens += on;
    missing += absent;
    unknown = unknown || mask == kFractional;
  }
  __device__ RowLogRatios result() const {
    if (unknown) return {NAN, NAN, kUnknown, missing};
    return {log_ratio.value(), double(minimum), tokens, missing};
  }
};

// What two parts of a row come to. NaN and kUnknown stay.
__device__ RowLogRatios merged(const RowLogRatios& a, const RowLogRatios& b) {
  const bool unknown = a.tokens < 0 || b.tokens < 0;
  const double smaller = a.minimum < b.minimum ? a.minimum : b.minimum;
  return {a.sum + b.sum, unknown ? NAN : smaller, unknown ? kUnknown : a.tokens + b.tokens, a.missing + b.missing};
}

// Of all lanes of a warp, in all of them.
__device__ RowLogRatios merged_in_warp(RowLogRatios x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = merged(x, {__shfl_xor_sync(kWholeWarp, x.sum, distance), __shfl_xor_sync(kWholeWarp, x.minimum, distance),
                   static_cast<int64_t>(__shfl_xor_sync(kWholeWarp, static_cast<long long>(x.tokens), distance)),
                   static_cast<int64_t>(__shfl_xor_sync(kWholeWarp, static_cast<long long>(x.missing), distance))});
  }
  return x;
}

__device__ void write(const SequenceLogRatios& out, int64_t row, const RowLogRatios& x) {
  out.sum[row] = x.sum;
  out.minimum[row] = x.minimum;
  out.tokens[row] = x.tokens;
  out.missing[row] = x.missing;
}

// Of a row, what falls to one of the threads that share it; the batch has `count` tokens.
template <class New, class Old>
__device__ Found find(const New* __restrict__ log_probs, const Old* __restrict__ old_log_probs, const uint8_t* __restrict__ mask,
                      const RowSpan& row, int64_t count, int64_t thread, int64_t threads, bool skip_missing, bool aligned) {
  Found found;
  found.unknown = !row.sound;
  for (int64_t at = row.begin / kTokens * kTokens + thread * kTokens; at < row.end; at += threads * kTokens) {
    const int64_t left = count - at;
    const bool whole = aligned && left >= kTokens;
    const auto on = whole ? load_vector<kTokens>(mask + at) : load_some<kTokens>(mask + at, left, uint8_t{0});
    const auto now = whole ? load_vector<kTokens>(log_probs + at) : load_some<kTokens>(log_probs + at, left, from_float<New>(0.0f));
    const auto old = whole ? load_vector<kTokens>(old_log_probs + at) : load_some<kTokens>(old_log_probs + at, left, from_float<Old>(0.0f));
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const bool mine = at + i >= row.begin && at + i < row.end;
      found.add(mine ? on.values[i] : uint8_t{0}, to_float(now.values[i]), to_float(old.values[i]), skip_missing);
    }
  }
  return found;
}

template <class New, class Old>
__global__ void __launch_bounds__(kThreads)
warp_rows_kernel(Rows rows, const New* log_probs, const Old* old_log_probs, const uint8_t* mask, bool skip_missing, bool aligned,
                 SequenceLogRatios out) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (row >= rows.count) return;
  const int lane = threadIdx.x % kWarp;
  const auto found = find(log_probs, old_log_probs, mask, rows.span(row), rows.tokens, lane, kWarp, skip_missing, aligned);
  const auto of_row = merged_in_warp(found.result());
  if (lane == 0) write(out, row, of_row);
}

template <class New, class Old>
__global__ void __launch_bounds__(kThreads)
block_rows_kernel(Rows rows, const New* log_probs, const Old* old_log_probs, const uint8_t* mask, bool skip_missing, bool aligned,
                  SequenceLogRatios out, RowLogRatios* partials, unsigned* counter) {
  __shared__ RowLogRatios of_warps[kWarps];
  const int64_t row = blockIdx.x, parts = gridDim.y;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto found = find(log_probs, old_log_probs, mask, rows.span(row), rows.tokens,
                          int64_t{blockIdx.y} * kThreads + threadIdx.x, parts * kThreads, skip_missing, aligned);
  const auto of_warp = merged_in_warp(found.result());
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  if (threadIdx.x == 0) {
    RowLogRatios of_block = of_warps[0];
    for (int w = 1; w < kWarps; ++w) of_block = merged(of_block, of_warps[w]);
    if (parts == 1) {
      write(out, row, of_block);
    } else {
      partials[row * parts + blockIdx.y] = of_block;
    }
  }

  if (parts == 1 || !last_block(counter)) return;
  for (int64_t r = warp; r < rows.count; r += kWarps) {
    RowLogRatios of_row{};
    for (int64_t part = lane; part < parts; part += kWarp) {
      const RowLogRatios* p = partials + r * parts + part;
      of_row = merged(of_row, {__ldcg(&p->sum), __ldcg(&p->minimum), __ldcg(reinterpret_cast<const long long*>(&p->tokens)),
                               __ldcg(reinterpret_cast<const long long*>(&p->missing))});
    }
    of_row = merged_in_warp(of_row);
    if (lane == 0) write(out, r, of_row);
  }
}

template <class New, class Old>
void launch(const Launcher& launcher, const Rows& rows, const New* log_probs, const Old* old_log_probs, const uint8_t* mask,
            bool skip_missing, unsigned parts, const SequenceLogRatios& out, RowLogRatios* partials, unsigned* counter) {
  if (rows.count == 0) return;
  const bool whole = aligned(log_probs) && aligned(old_log_probs) && aligned(mask);
  if (parts == 1 && rows.tokens / rows.count < kShortRow) {
    warp_rows_kernel<New, Old><<<launcher.blocks(rows.count, kWarps), kThreads, 0, launcher.stream()>>>(rows, log_probs, old_log_probs, mask,
                                                                                             skip_missing, whole, out);
  } else {
    const dim3 grid(launcher.blocks(rows.count, 1), parts);
    block_rows_kernel<New, Old><<<grid, kThreads, 0, launcher.stream()>>>(rows, log_probs, old_log_probs, mask, skip_missing, whole, out,
                                                                partials, counter);
  }
  launcher.launched();
}

// Calls `f` with a pointer of the dtype.
template <class F>
void with_type(DType dtype, const void* p, const F& f) {
  if (dtype == DType::kFloat32) return f(static_cast<const float*>(p));
  if (dtype == DType::kBFloat16) return f(static_cast<const __nv_bfloat16*>(p));
  f(static_cast<const __half*>(p));
}

}  // namespace

void sequence_log_ratios(const Launcher& launcher, const Rows& rows, DType dtype, const void* log_probs, DType old_dtype,
                         const void* old_log_probs, const uint8_t* mask, bool skip_missing, unsigned parts,
                         const SequenceLogRatios& out, RowLogRatios* partials, unsigned* counter) {
  with_type(dtype, log_probs, [&](const auto* now) {
    with_type(old_dtype, old_log_probs, [&](const auto* old) {
      launch(launcher, rows, now, old, mask, skip_missing, parts, out, partials, counter);
    });
  });
}

}  // namespace fastadv::cuda
