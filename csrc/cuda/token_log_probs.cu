// Log-softmax of rows of logits: log-prob of the label, entropy and sum of squares. One launch: reads each logit once, 2 bytes
// of bfloat16, and writes 12 bytes a row (36 with entropy and squares; 40 of statistics). Few long rows take two launches.
//
// A block takes a row, or a part of one. Each thread has an online softmax of its own (Milakov and Gimelshein 2018, algorithm
// 3): the maximum of its logits and sums relative to it, rescaled once for the 32 logits of a step. So the loop has no
// barrier and one exp2 a logit. The threads of a warp meet at a part's end, warps at a row's end.
//
// The same bits everywhere: which logits meet in a sum, and in which order, follows from their columns alone, not from dtype,
// strides, alignment, or whether a row is split. Fused multiply-adds are written out; the compiler makes none.
#include "cuda/logit_rows.h"

namespace fastadv::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// Fewer rows than this are split: three blocks for each of the 132 processors of an H100.
constexpr int64_t kRowsToSplit = 384;
constexpr int kNumbers = 4;  // of SoftmaxSums in memory

using Sums = SoftmaxSums<double>;

int64_t parts_of(int64_t vocab) { return (vocab + kPart - 1) / kPart; }

__device__ void store_sums(double* to, const Sums& sums) {
  to[0] = sums.maximum;
  to[1] = sums.s;
  to[2] = sums.w;
  to[3] = sums.q;
}

__device__ Sums load_sums(const double* from) { return {from[0], from[1], from[2], from[3]}; }

// ---- sums of a part of a row

// m is the maximum, s = sum 2^d, w = sum 2^d d, q = sum 2^2d, where d = (z - m) log2(e) / T. s is kept by column: where p is
// nearly 1, 1 in a float32 sum swallows all other tokens.
struct ThreadSums {
  float m = -INFINITY;
  float s[kWidth] = {};
  float w = 0.0f;
  float q = 0.0f;
};

// Sum over a thread's columns, in pairs.
template <class F>
__device__ F sum_width(const F (&x)[kWidth]) {
  static_assert(kWidth == 8);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// A maximum that can be subtracted: 0 in place of -inf, that of columns without a possible token.
__device__ float finite(float m) { return m == -INFINITY ? 0.0f : m; }

// Power of 2 that takes sums relative to `m` to sums relative to `center`: 0 times it is 0.
__device__ float relative(float m, float center, float scale) { return fmaxf((m - center) * scale, kPowerFloor); }

// Adds a thread's logits of kCount tiles. NaN and +inf leave NaN in s, whatever the maximum is.
template <bool kAligned, bool kMoments, bool kCapped, int kCount, class T>
__device__ void add_tiles(ThreadSums& sums, const T* from, int left, float scale, float cap, float inverse_cap) {
  Vector<T, kWidth> tiles[kCount];
#pragma unroll
  for (int t = 0; t < kCount; ++t) tiles[t] = load_tile<kAligned>(from + t * kTile, left);

  float z[kCount][kWidth];
  float m = sums.m;
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      z[t][i] = to_float(tiles[t].values[i]);
      if constexpr (kCapped) z[t][i] = softcapped(z[t][i], cap, inverse_cap).value;
      m = fmaxf(m, z[t][i]);
    }
  }

  const float center = finite(m), shift = relative(sums.m, center, scale), rescale = exp2_bounded(shift);
  float w[kWidth], q[kWidth];
  const float before = sum_width(sums.s);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float s = 0.0f;
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const float d = (z[t][i] - center) * scale;  // the difference first: large logits keep their digits
      const float e = exp2_bounded(d);
      s = t ? s + e : e;
      if constexpr (kMoments) {
        const float cut = fmaxf(d, kPowerFloor);  // 0 times -inf is NaN
        w[i] = t ? fmaf(e, cut, w[i]) : e * cut;
        q[i] = t ? fmaf(e, e, q[i]) : e * e;
      }
    }
    sums.s[i] = fmaf(sums.s[i], rescale, s);
  }
  if constexpr (kMoments) {
    sums.w = fmaf(fmaf(before, shift, sums.w), rescale, sum_width(w));
    sums.q = fmaf(sums.q, rescale * rescale, sum_width(q));
  }
  sums.m = m;
}

template <bool kAligned, bool kMoments, bool kCapped, class T>
__device__ ThreadSums part_sums(const T* part, int columns, float scale, float cap, float inverse_cap) {
  ThreadSums sums;
  int column = threadIdx.x * kWidth;
  for (const int whole = columns / kStep * kStep; column < whole; column += kStep)
    add_tiles<kAligned, kMoments, kCapped, kTiles>(sums, part + column, kWidth, scale, cap, inverse_cap);
  for (; column < columns; column += kTile)
    add_tiles<kAligned, kMoments, kCapped, 1>(sums, part + column, columns - column, scale, cap, inverse_cap);
  return sums;
}

// Over the threads of a warp, in pairs: a + b is b + a, so all get the same.
__device__ double sum_warp(double x) {
  for (int other = 1; other < kWarp; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

__device__ float largest_in_warp(float x) {
  for (int other = 1; other < kWarp; other *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

template <bool kMoments>
__device__ Sums warp_sums(const ThreadSums& sums, float scale, double inverse_temperature) {
  const float m = largest_in_warp(sums.m), shift = relative(sums.m, finite(m), scale);
  const double e = exp2_bounded(shift);
  double columns[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) columns[i] = sums.s[i];
  const double s = sum_width(columns);
  Sums total;
  total.maximum = double(m) * inverse_temperature;
  total.s = sum_warp(e * s);
  if constexpr (kMoments) {
    total.w = sum_warp(e * (double(sums.w) + s * double(shift))) * kLn2;
    total.q = sum_warp(e * e * double(sums.q));
  }
  return total;
}

// ---- rows

struct Results {
  double* statistics;  // null: `out` is wanted
  LogProbsOutputs out;
};

__device__ void write(const Results& to, int64_t rows, int64_t row, double label_logit, const Sums& sums) {
  if (to.statistics) {
    to.statistics[row] = label_logit;
    to.statistics[rows + row] = sums.maximum;
    to.statistics[2 * rows + row] = sums.s;
    to.statistics[3 * rows + row] = sums.w;
    to.statistics[4 * rows + row] = sums.q;
    return;
  }
  const SoftmaxResult<double> result = finish(sums, label_logit);
  to.out.log_probs[row] = float(result.log_prob);
  to.out.state[row] = result.lse;
  if (to.out.entropy) {
    to.out.entropy[row] = float(result.entropy);
    to.out.sum_p2[row] = float(result.sum_p2);
    to.out.state[rows + row] = result.entropy;
    to.out.state[2 * rows + row] = result.sum_p2;
  }
}

__device__ bool is_read(const LogitsInputs& in, int64_t label, double inverse_temperature) {
  return label >= kNoLabel && label < in.logits.vocab && inverse_temperature > 0.0;
}

// A row that is not read: one that is skipped comes to 0, as one with a single possible token; any other has no meaning.
__device__ void write_unread(const LogitsInputs& in, const Results& to, int64_t row) {
  const double zero = in.labels[row] == kSkippedRow ? 0.0 : double(NAN);
  write(to, in.logits.rows, row, zero, {zero, zero + 1.0, zero, zero});
}

// A row whose warps have these sums.
template <class T>
__device__ void write_read(const LogitsInputs& in, const Results& to, int64_t row, const double* warps) {
  Sums total;
  for (int warp = 0; warp < kWarps; ++warp) total = merge(total, load_sums(warps + warp * kNumbers));
  const int64_t label = in.labels[row];
  float at = -INFINITY;
  if (label != kNoLabel) {
    at = to_float(row_of<T>(in.logits, row)[label]);
    if (in.softcap != 0.0f) at = softcapped(at, in.softcap, in.inverse_softcap).value;
  }
  write(to, in.logits.rows, row, double(at) * inverse_temperature_of(in, row), total);
}

// With scratch [rows, parts, kWarps, kNumbers] a block leaves the sums of one part there, else it takes all of the row.
template <class T, bool kAligned, bool kMoments, bool kCapped>
__global__ void __launch_bounds__(kThreads) row_sums_kernel(LogitsInputs in, Results results, double* scratch) {
  __shared__ double warps[kWarps * kNumbers];
  const int64_t row = blockIdx.x;
  const double inverse_temperature = inverse_temperature_of(in, row);
  if (!is_read(in, in.labels[row], inverse_temperature)) {
    if (!scratch && threadIdx.x == 0) write_unread(in, results, row);
    return;
  }

  const T* const logits = row_of<T>(in.logits, row);
  const float scale = float(inverse_temperature * kLog2E);
  Sums total;
  int64_t part = blockIdx.y;
  for (int64_t start = part * kPart; start < in.logits.vocab; start += int64_t{gridDim.y} * kPart) {
    const int columns = int(min(in.logits.vocab - start, int64_t{kPart}));
    const ThreadSums sums = part_sums<kAligned, kMoments, kCapped>(logits + start, columns, scale, in.softcap, in.inverse_softcap);
    total = merge(total, warp_sums<kMoments>(sums, scale, inverse_temperature));
  }

  const int warp = threadIdx.x / kWarp;
  const bool first_lane = threadIdx.x % kWarp == 0;
  if (scratch) {
    if (first_lane) store_sums(scratch + ((row * gridDim.y + part) * kWarps + warp) * kNumbers, total);
    return;
  }
  if (first_lane) store_sums(warps + warp * kNumbers, total);
  __syncthreads();
  if (threadIdx.x == 0) write_read<T>(in, results, row, warps);
}

// Merges what the parts of rows left, each warp's in order of parts, as one block for the whole row does.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_parts_kernel(LogitsInputs in, Results results, int64_t parts, const double* scratch) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.logits.rows) return;
  if (!is_read(in, in.labels[row], inverse_temperature_of(in, row))) return write_unread(in, results, row);
  double warps[kWarps * kNumbers];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    Sums total;
    for (int64_t part = 0; part < parts; ++part) total = merge(total, load_sums(scratch + ((row * parts + part) * kWarps + warp) * kNumbers));
    store_sums(warps + warp * kNumbers, total);
  }
  write_read<T>(in, results, row, warps);
}

// As csrc/cpu/token_log_probs.cpp merges parts of the vocabulary.
__global__ void __launch_bounds__(kThreads) finish_statistics_kernel(int64_t parts, int64_t rows, const double* __restrict__ statistics,
                                                                     double* __restrict__ results) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows) return;
  double label_logit = -INFINITY;
  Sums total;
  for (int64_t part = 0; part < parts; ++part) {
    const double* const s = statistics + part * 5 * rows + row;
    label_logit = s[0] <= label_logit ? label_logit : s[0];  // NaN stays
    total = merge(total, {s[rows], s[2 * rows], s[3 * rows], s[4 * rows]});
  }
  const SoftmaxResult<double> result = finish(total, label_logit);
  results[row] = result.log_prob;
  results[rows + row] = result.entropy;
  results[2 * rows + row] = result.sum_p2;
  results[3 * rows + row] = result.lse;
}

// ---- launches

template <class T, bool kAligned, bool kMoments, bool kCapped>
void launch_form(const Launcher& launcher, const LogitsInputs& in, const Results& results, double* scratch) {
  const int64_t parts = parts_of(in.logits.vocab);
  const dim3 grid(launcher.blocks(in.logits.rows, 1), scratch ? unsigned(parts) : 1);
  row_sums_kernel<T, kAligned, kMoments, kCapped><<<grid, kThreads, 0, launcher.stream()>>>(in, results, scratch);
  launcher.launched();
  if (!scratch) return;
  const unsigned blocks = launcher.blocks(in.logits.rows, kThreads);
  merge_parts_kernel<T><<<blocks, kThreads, 0, launcher.stream()>>>(in, results, parts, scratch);
  launcher.launched();
}

template <class T, bool kAligned>
void launch_aligned(const Launcher& launcher, const LogitsInputs& in, const Results& results, double* scratch) {
  if (in.softcap != 0.0f) {
    launch_form<T, kAligned, true, true>(launcher, in, results, scratch);
  } else if (results.statistics || results.out.entropy) {
    launch_form<T, kAligned, true, false>(launcher, in, results, scratch);
  } else {
    launch_form<T, kAligned, false, false>(launcher, in, results, scratch);
  }
}

void launch(const Launcher& launcher, const LogitsInputs& in, const Results& results, double* scratch) {
  if (!in.logits.rows) return;
  with_type(in.logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (aligned_rows<T>(in.logits)) {
      launch_aligned<T, true>(launcher, in, results, scratch);
    } else {
      launch_aligned<T, false>(launcher, in, results, scratch);
    }
  });
}

}  // namespace

int64_t row_sums_scratch(int64_t rows, int64_t vocab) {
  const int64_t parts = parts_of(vocab);
  return parts > 1 && rows < kRowsToSplit ? rows * parts * kWarps * kNumbers : 0;
}

void row_statistics(const Launcher& launcher, const LogitsInputs& in, double* scratch, double* statistics) {
  launch(launcher, in, {statistics, {}}, scratch);
}

void token_log_probs(const Launcher& launcher, const LogitsInputs& in, double* scratch, const LogProbsOutputs& out) {
  launch(launcher, in, {nullptr, out}, scratch);
}

void finish_statistics(const Launcher& launcher, int64_t parts, int64_t rows, const double* statistics, double* results) {
  const unsigned blocks = launcher.blocks(rows, kThreads);
  if (!blocks) return;
  finish_statistics_kernel<<<blocks, kThreads, 0, launcher.stream()>>>(parts, rows, statistics, results);
  launcher.launched();
}

}  // namespace fastadv::cuda
