// A group of rollouts, one a block of threads: who votes, and sums over the voters, in float64. Threads take the group's rows in
// turns, and their sums are added in a fixed order; how many threads there are follows from the sizes of the batch alone.
#pragma once

#include "cuda/kernels.h"
#include "cuda/vectors.h"

namespace fastadv::cuda {

constexpr int kFewThreads = 32, kManyThreads = 256;
constexpr int kBlocks = 1;  // that a multiprocessor must hold: asked for none, the compiler spills registers to hold more
constexpr int64_t kManyItems = 256;  // of a group, on average, from which on it gets many threads

// What `combine`, which must not care for the order of two values, makes of all threads' values. All of them get it.
template <int kThreads, class T, class Combine>
__device__ T reduced(T value, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lanes));
  if constexpr (kThreads > 32) {
    __shared__ T of_warps[kThreads / 32];
    __syncthreads();  // what was there before has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) value = combine(value, of_warps[warp]);
  }
  return value;
}

template <int kThreads, class T>
__device__ T added(T value) {
  return reduced<kThreads>(value, [](T a, T b) { return a + b; });
}

__device__ inline double row_value(const RowValues& values, int64_t row) {
  // Not a switch: its jump table would hide from the inspection of the machine code where the branch goes.
  const int dtype = values.dtype;
  if (dtype >= int(DType::kInt64)) {
    return dtype == int(DType::kInt64) ? double(static_cast<const int64_t*>(values.data)[row])
                                       : static_cast<const double*>(values.data)[row];
  }
  if (dtype >= int(DType::kUInt8)) {
    return dtype == int(DType::kUInt8) ? double(static_cast<const uint8_t*>(values.data)[row])
                                       : double(static_cast<const int32_t*>(values.data)[row]);
  }
  if (dtype == int(DType::kFloat32)) return double(static_cast<const float*>(values.data)[row]);
  return dtype == int(DType::kBFloat16) ? double(to_float(static_cast<const __nv_bfloat16*>(values.data)[row]))
                                        : double(to_float(static_cast<const __half*>(values.data)[row]));
}

// A row as its group sees it.
struct Member {
  int64_t row = 0;
  double reward = 0.0, vote = 0.0;
  bool included = false;
};

class Group {
 public:
  __device__ Group(const Voters& voters, int64_t group) : voters_(voters), group_(group) {
    const RowSpan places = Rows{voters.groups, voters.rows, 0, voters.offsets}.span(group);
    first = places.begin;
    last = places.end;
    sound_ = places.sound;
  }

  int64_t first, last;  // places in the order

  // A row of another group, one that is there twice or behind a later one, and a number that is no row's: the index
  // contradicts itself.
  __device__ bool known(int64_t place) const {
    const int64_t row = voters_.order[place];
    if (row < 0 || row >= voters_.rows || (place > first && voters_.order[place - 1] >= row)) return false;
    return !voters_.index || voters_.index[row] == group_;
  }

  __device__ Member member(int64_t place) const {
    Member m;
    m.row = voters_.order[place];
    m.included = !voters_.include || voters_.include[m.row];
    m.reward = row_value(voters_.rewards, m.row);
    m.vote = voters_.votes.data ? row_value(voters_.votes, m.row) : 1.0;
    if (voters_.survivors && !m.included) m.vote = 0.0;
    return m;
  }

  // Whether there are such places and every one holds a row of the group. Of all threads.
  template <int kThreads>
  __device__ bool consistent() const {
    bool broken = !sound_;
    for (int64_t place = first + threadIdx.x; place < last; place += kThreads) broken |= !known(place);
    return !__syncthreads_or(broken);
  }

  // Of a consistent group; without `squares` these are 0.
  template <int kThreads>
  __device__ GroupMoments moments(bool squares) const {
    double minimum = INFINITY, weight = 0.0;
    long long count = 0;
    for_voters<kThreads>([&](const Member& m) {
      minimum = smaller(minimum, m.reward);
      weight += m.vote;
      ++count;
    });
    GroupMoments out;
    out.minimum = reduced<kThreads>(minimum, [](double a, double b) { return smaller(a, b); });
    out.weight = added<kThreads>(weight);
    out.voters = added<kThreads>(count);
    if (!out.voters) out.minimum = 0.0;

    double sum = 0.0, spread = 0.0;
    for_voters<kThreads>([&](const Member& m) { sum += weighted(m.vote, m.reward, out.minimum); });
    out.sum = added<kThreads>(sum);
    if (squares) {
      const double mean = mean_of(out.sum, out.weight);
      for_voters<kThreads>([&](const Member& m) { spread += weighted_square(m.vote, m.reward, out.minimum, mean); });
      spread = added<kThreads>(spread);
    }
    out.squares = spread;
    return out;
  }

  // The rows that are left unwritten if this group is not consistent: those that name it or none, and those that name one
  // which they have no place in. (If all groups are consistent there are none, since the places are then as many as the rows.)
  template <int kThreads, class Body>
  __device__ void for_rows_in_doubt(const Body& body) const {
    for (int64_t row = threadIdx.x; row < voters_.rows; row += kThreads) {
      const int64_t named = voters_.index[row];
      if (named == group_ || named < 0 || named >= voters_.groups || !Group(voters_, named).holds(row)) body(row);
    }
  }

 private:
  template <int kThreads, class Body>
  __device__ void for_voters(const Body& body) const {
    for (int64_t place = first + threadIdx.x; place < last; place += kThreads) {
      const Member m = member(place);
      if (m.vote != 0.0) body(m);
    }
  }

  // Whether a row has a place in the group, if that is consistent.
  __device__ bool holds(int64_t row) const {
    int64_t low = first, high = last;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (voters_.order[middle] < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < last && voters_.order[low] == row;
  }

  const Voters& voters_;
  int64_t group_;
  bool sound_;
};

// Sums over the voters that reached each of `width` turns, from turn `from` on: those of turn from + i at [i].
template <int kThreads>
struct TurnSums {
  double count[kThreads], sum[kThreads];
};

// A power of two, up to the number of threads, that covers as many of `turns` as it can.
template <int kThreads>
__device__ int tile_width(int64_t turns) {
  int width = 1;
  while (width < turns && width < kThreads) width *= 2;
  return width;
}

// Of all threads. `reached(row)` is the row's number of turns. A turn has kThreads / width threads, which take the rows in
// turns, in their order, and are then added in a fixed one.
template <int kThreads, class Reached>
__device__ void sum_turns(const Group& group, double minimum, int64_t from, int width, const Reached& reached, TurnSums<kThreads>& out) {
  __shared__ double votes[kThreads], rewards[kThreads];
  __shared__ int turns[kThreads];  // that the row reached, from `from` on
  const int turn = threadIdx.x & (width - 1), parts = kThreads / width;
  double count = 0.0, sum = 0.0;
  for (int64_t tile = group.first; tile < group.last; tile += kThreads) {
    __syncthreads();
    const int rows = group.last - tile < kThreads ? int(group.last - tile) : kThreads;
    if (threadIdx.x < rows) {
      const Member m = group.member(tile + threadIdx.x);
      const int64_t left = reached(m.row) - from;
      turns[threadIdx.x] = m.vote == 0.0 || left < 0 ? 0 : left < width ? int(left) : width;
      votes[threadIdx.x] = m.vote;
      rewards[threadIdx.x] = weighted(m.vote, m.reward, minimum);
    }
    __syncthreads();
    for (int i = threadIdx.x / width; i < rows; i += parts) {
      if (turn >= turns[i]) continue;
      count += votes[i];
      sum += rewards[i];
    }
  }
  __syncthreads();  // the sums before these have been read
  out.count[threadIdx.x] = count;
  out.sum[threadIdx.x] = sum;
  for (int step = kThreads / 2; step >= width; step /= 2) {
    __syncthreads();
    if (threadIdx.x >= step) continue;
    out.count[threadIdx.x] += out.count[threadIdx.x + step];
    out.sum[threadIdx.x] += out.sum[threadIdx.x + step];
  }
  __syncthreads();
}

// Whether groups get many threads each, where they share `items` rows, or turns of rows.
inline bool many_threads(int64_t items, int64_t groups) { return items / kManyItems >= groups; }

}  // namespace fastadv::cuda
