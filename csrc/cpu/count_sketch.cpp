// The count sketch of a piece of a parameter. Each thread takes tiles as it gets to them and adds to a table of its own, the first
// to the sketch itself; the sums are integers, so whose table a tile went to changes nothing.
#include <array>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "fastadv/count_sketch.h"

namespace fastadv {

namespace {

using sketch::kChunk;
static_assert(kTile % kChunk == 0);

constexpr int64_t kTiles = 64;           // of a block of work
constexpr int64_t kMergedSlots = 16384;  // likewise

// A chunk's fixed-point numbers. A loop of one length without branches: the compiler makes vectors of it.
using Values = std::array<uint64_t, kChunk>;
inline Values fixed_point(const float* quanta, uint64_t state) {
  Values values;
  for (int i = 0; i < kChunk; ++i) values[i] = uint64_t(sketch::whole(sketch::with_sign(quanta[i], state, i)));
  return values;
}

// The same where some may be out of range.
Values poisoned(const float* quanta, uint64_t state) {
  float clean[kChunk];
  uint64_t bad = 0;
  for (int i = 0; i < kChunk; ++i) {
    const bool good = sketch::in_range(quanta[i]);
    clean[i] = good ? quanta[i] : 0.0f;
    bad += !good;
  }
  Values values = fixed_point(clean, state);
  for (int i = 0; i < kChunk; ++i) values[i] += bad * sketch::poison(i);
  return values;
}

class Adder {
 public:
  Adder(const SketchInputs& in, uint64_t* table) : in_(in), table_(table), copies_(in.copies), rows_(in.copies) {
    for (int64_t copy = 0; copy < in.copies; ++copy) copies_[copy] = sketch::descend(in.key, copy);
  }

  // A tile is kTile columns of the parameter from a multiple of kChunk on, or what the piece has of them.
  static int64_t tiles_of_row(const SketchInputs& in) { return (in.column_offset % kChunk + in.rows.width + kTile - 1) / kTile; }

  void add_tile(int64_t row, int64_t tile) {
    const int64_t start = in_.column_offset / kChunk * kChunk + tile * kTile;  // columns of the parameter
    const int64_t from = std::max(start, in_.column_offset), to = std::min(start + kTile, in_.column_offset + in_.rows.width);
    const int64_t before = from - start, n = to - from, chunks = (before + n + kChunk - 1) / kChunk;
    float buffer[kTile], quanta[kTile];  // the latter 0 for columns that the piece does not have
    const float* const p = load_floats(in_.rows, in_.values, row * in_.rows.width + from - in_.column_offset, n, buffer);
    std::fill_n(quanta, before, 0.0f);
    for (int64_t i = 0; i < n; ++i) quanta[before + i] = p[i] * in_.scale;
    std::fill(quanta + before + n, quanta + chunks * kChunk, 0.0f);
    int bad = 0;
    for (int64_t i = 0; i < chunks * kChunk; ++i) bad += sketch::in_range(quanta[i]) ? 0 : 1;

    enter(row);
    for (int64_t copy = 0; copy < in_.copies; ++copy) {
      uint64_t* const slots = table_ + copy * in_.size;
      uint64_t states[kTile / kChunk];
      for (int64_t k = 0; k < chunks; ++k) {  // what the slots hold is fetched for all chunks before it is needed
        states[k] = sketch::descend(rows_[copy], start / kChunk + k);
        const uint64_t* const first = slots + sketch::first_slot(states[k], in_.size);
        for (int slot = 0; slot < kChunk; slot += 8) __builtin_prefetch(first + slot, 1);
      }
      for (int64_t k = 0; k < chunks; ++k) {
        const float* const chunk = quanta + k * kChunk;
        add_chunk(bad ? poisoned(chunk, states[k]) : fixed_point(chunk, states[k]), sketch::first_slot(states[k], in_.size), slots);
      }
    }
  }

 private:
  void enter(int64_t row) {
    if (row == row_) return;
    row_ = row;
    for (int64_t copy = 0; copy < in_.copies; ++copy) rows_[copy] = sketch::descend(copies_[copy], in_.row_offset + row);
  }

  void add_chunk(const Values& values, int64_t first, uint64_t* slots) {
    if (first + kChunk <= in_.size) {
      for (int i = 0; i < kChunk; ++i) slots[first + i] += values[i];
    } else {
      for (int i = 0; i < kChunk; ++i) slots[(first + i) % in_.size] += values[i];
    }
  }

  const SketchInputs& in_;
  uint64_t* table_;
  std::vector<uint64_t> copies_, rows_;  // states of the copies, and of the row in each
  int64_t row_ = -1;
};

}  // namespace

void count_sketch(const SketchInputs& in, int64_t* out, int threads) {
  in.rows.validate();
  if (in.size < kChunk || in.copies < 0) throw std::invalid_argument("count_sketch: too few slots");
  auto* const sums = reinterpret_cast<uint64_t*>(out);
  const int64_t slots = in.copies * in.size, tiles = Adder::tiles_of_row(in);
  const int64_t all_tiles = in.rows.tokens ? in.rows.count * tiles : 0, blocks = (all_tiles + kTiles - 1) / kTiles;
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, blocks)));
  std::vector<uint64_t> tables((threads - 1) * slots);
  std::vector<Adder> adders;
  for (int thread = 0; thread < threads; ++thread) adders.emplace_back(in, thread ? tables.data() + (thread - 1) * slots : sums);

  std::atomic<int64_t> next{0};
  parallel_blocks(threads, threads, [&](int64_t thread) {
    for (int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
      const int64_t last = std::min((block + 1) * kTiles, all_tiles);
      for (int64_t tile = block * kTiles; tile < last; ++tile) adders[thread].add_tile(tile / tiles, tile % tiles);
    }
  });
  if (threads == 1) return;
  parallel_blocks((slots + kMergedSlots - 1) / kMergedSlots, threads, [&](int64_t block) {
    const int64_t last = std::min((block + 1) * kMergedSlots, slots);
    for (int thread = 1; thread < threads; ++thread) {
      const uint64_t* const table = tables.data() + (thread - 1) * slots;
      for (int64_t slot = block * kMergedSlots; slot < last; ++slot) sums[slot] += table[slot];
    }
  });
}

}  // namespace fastadv
