// The count sketch of a piece of a parameter, in one launch: reads 4 bytes an element in float32, and adds 8 a copy to slots that
// lie in the cache where the sketch is no larger. Sums are integers, so the order of atomics changes nothing.
//
// A lane has a column: what a warp reads at once is a chunk, and so is what it adds, to neighbouring slots. Reads of 16 bytes a
// lane would spread each addition over four times as many sectors of the cache, and additions are what takes the time.
#include "cuda/kernels.h"
#include "cuda/sums.h"
#include "cuda/vectors.h"
#include "fastadv/count_sketch.h"

namespace fastadv::cuda {

namespace {

using sketch::kChunk;
static_assert(kChunk == kWarp);

using Slot = unsigned long long;  // what integer atomics take; in two's complement it holds any int64

constexpr int kThreads = 256;
constexpr int kChunks = 16;  // of a warp: each is looked up, and hashed, by one lane

// Where a chunk's first column would lie among the values, and which of its columns the piece has: [low, high).
struct Chunk {
  int64_t row = 0, number = 0;
  long long begin = 0;
  int low = 0, high = 0;
};

__device__ Chunk find(const SketchPiece& piece, int64_t index) {
  const int64_t first = piece.column_offset / kChunk;
  const int64_t in_row = (piece.column_offset + piece.columns + kChunk - 1) / kChunk - first;
  if (index >= piece.rows * in_row) return {};
  const int64_t row = index / in_row, number = index - row * in_row;
  const int64_t column = number * kChunk - piece.column_offset % kChunk, left = piece.columns - column;
  return {piece.row_offset + row, first + number, row * piece.columns + column, column < 0 ? int(-column) : 0,
          left < kChunk ? int(left) : kChunk};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
count_sketch_kernel(SketchPiece piece, const T* __restrict__ values, uint64_t key, float scale, int64_t copies, int64_t size,
                    Slot* __restrict__ out) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const Chunk mine = find(piece, warp * kChunks + lane % kChunks);
  float quanta[kChunks];  // of this lane's column, in each chunk; 0 where the piece has none
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int64_t begin = __shfl_sync(kWholeWarp, mine.begin, k);
    const int low = __shfl_sync(kWholeWarp, mine.low, k), high = __shfl_sync(kWholeWarp, mine.high, k);
    quanta[k] = lane >= low && lane < high ? to_float(values[begin + lane]) * scale : 0.0f;
  }
  for (int64_t copy = 0; copy < copies; ++copy, out += size) {
    const unsigned long long my_state = sketch::descend(sketch::descend(sketch::descend(key, copy), mine.row), mine.number);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const uint64_t state = __shfl_sync(kWholeWarp, my_state, k);
      const bool good = sketch::in_range(quanta[k]);
      const int bad = __popc(__ballot_sync(kWholeWarp, !good));
      Slot x = Slot(sketch::whole(sketch::with_sign(good ? quanta[k] : 0.0f, state, lane)));
      if (bad) x += bad * sketch::poison(lane);
      if (x == 0) continue;
      const int64_t slot = sketch::first_slot(state, size) + lane;
      atomicAdd(out + (slot < size ? slot : slot - size), x);
    }
  }
}

template <class T>
void launch(const Launcher& launcher, const SketchPiece& piece, const void* values, uint64_t key, float scale, int64_t copies, int64_t size,
            int64_t* out) {
  const int64_t in_row = (piece.column_offset + piece.columns + kChunk - 1) / kChunk - piece.column_offset / kChunk;
  const unsigned blocks = piece.columns ? launcher.blocks(piece.rows * in_row, kThreads / kWarp * kChunks) : 0;
  if (!blocks) return;
  count_sketch_kernel<T><<<blocks, kThreads, 0, launcher.stream()>>>(piece, static_cast<const T*>(values), key, scale, copies, size,
                                                                     reinterpret_cast<Slot*>(out));
  launcher.launched();
}

}  // namespace

void count_sketch(const Launcher& launcher, const SketchPiece& piece, DType dtype, const void* values, uint64_t key, float scale,
                  int64_t copies, int64_t size, int64_t* out) {
  switch (dtype) {
    case DType::kFloat32: return launch<float>(launcher, piece, values, key, scale, copies, size, out);
    case DType::kBFloat16: return launch<__nv_bfloat16>(launcher, piece, values, key, scale, copies, size, out);
    default: launch<__half>(launcher, piece, values, key, scale, copies, size, out);
  }
}

}  // namespace fastadv::cuda
