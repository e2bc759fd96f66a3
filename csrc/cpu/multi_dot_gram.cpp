// Inner products of all pairs of a few vectors, each of which is read once.
//
// Tiles of all vectors stay in the first-level cache while their pairs are multiplied, a group of vectors with a group at a
// time: as many sums as there are registers for. What the groups are changes no bit, since every pair has lanes of its own.
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "fastadv/gram.h"

namespace fastadv {

namespace {

// Elements of a tile, summed in float32 by kLanes lanes. Squares of 16-bit floats are not spread evenly over the steps of float32:
// sums eight times as long round them one way more often than the other, which is 2.5e-7 of a squared length however long it is.
constexpr int64_t kSpan = 512;
constexpr int64_t kBlock = 65536;  // elements of one block of parallel work
constexpr int kGroup = detail::kRegisters == 1 ? 4 : 2;
static_assert(kBlock % kSpan == 0 && kSpan % kLanes == 0);

struct Tile {
  const float* vectors[kGramVectors];
  float buffers[kGramVectors][kSpan];
};

// Adds the products of kRows vectors from `row` on with kColumns from `column` on to the sums of their pairs.
template <int kRows, int kColumns>
void add_products(const Tile& tile, int row, int column, int64_t n, WideSum* sums) {
  LaneSum of_tile[kRows][kColumns];
  for (int64_t at = 0; at < n; at += kLanes) {
    Lanes left[kRows], right[kColumns];
    for (int r = 0; r < kRows; ++r) left[r] = load(tile.vectors[row + r] + at);
    for (int c = 0; c < kColumns; ++c) right[c] = load(tile.vectors[column + c] + at);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) of_tile[r][c].add(left[r] * right[c]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) sums[pair_index(row + r, column + c)].add(of_tile[r][c]);
}

// The same of a group with itself: the pairs on the diagonal and below.
template <int kRows>
void add_own_products(const Tile& tile, int row, int64_t n, WideSum* sums) {
  LaneSum of_tile[kRows][kRows];
  for (int64_t at = 0; at < n; at += kLanes) {
    Lanes x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = load(tile.vectors[row + r] + at);
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c <= r; ++c) of_tile[r][c].add(x[r] * x[c]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c <= r; ++c) sums[pair_index(row + r, row + c)].add(of_tile[r][c]);
}

template <int kRows>
void add_group(const Tile& tile, int row, int64_t n, WideSum* sums) {
  for (int column = 0; column < row; column += kGroup) add_products<kRows, kGroup>(tile, row, column, n, sums);
  add_own_products<kRows>(tile, row, n, sums);
}

void add_tile(const Tile& tile, int vectors, int64_t n, WideSum* sums) {
  for (int row = 0; row < vectors; row += kGroup) {
    switch (std::min(kGroup, vectors - row)) {
      case 1: add_group<1>(tile, row, n, sums); break;
      case 2: add_group<2>(tile, row, n, sums); break;
      case 3: add_group<std::min(3, kGroup)>(tile, row, n, sums); break;
      default: add_group<kGroup>(tile, row, n, sums);
    }
  }
}

// The `n` elements of each vector from `element` on, filled up with zeros to whole lanes. Returns how many that makes.
int64_t load_tile(const GramInputs& in, int64_t element, int64_t n, Tile& tile) {
  const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int v = 0; v < in.count; ++v) {
    float* const buffer = tile.buffers[v];
    tile.vectors[v] = load_floats(in.rows, in.vectors[v], element, n, buffer);
    if (whole == n) continue;
    if (tile.vectors[v] != buffer) std::copy_n(tile.vectors[v], n, buffer);
    std::fill(buffer + n, buffer + whole, 0.0f);
    tile.vectors[v] = buffer;
  }
  return whole;
}

// Writes the sums of all pairs over one block.
void add_block(const GramInputs& in, int64_t block, double* totals) {
  const int64_t first = block * kBlock, last = std::min(first + kBlock, in.rows.tokens);
  WideSum sums[pair_count(kGramVectors)];
  Tile tile;
  for (int64_t element = first; element < last; element += kSpan)
    add_tile(tile, in.count, load_tile(in, element, std::min(kSpan, last - element), tile), sums);
  for (int pair = 0; pair < pair_count(in.count); ++pair) totals[pair] = sums[pair].total();
}

}  // namespace

void multi_dot_gram(const GramInputs& in, double* gram, int threads) {
  in.rows.validate();
  if (in.count < 1 || in.count > kGramVectors) throw std::invalid_argument("multi_dot_gram: too many vectors for one pass");
  const int64_t blocks = (in.rows.tokens + kBlock - 1) / kBlock, pairs = pair_count(in.count);
  std::vector<double> sums(blocks * pairs);
  parallel_blocks(blocks, threads, [&](int64_t block) { add_block(in, block, sums.data() + block * pairs); });
  for (int i = 0; i < in.count; ++i) {
    for (int j = 0; j <= i; ++j) {
      double total = 0.0;
      for (int64_t block = 0; block < blocks; ++block) total += sums[block * pairs + pair_index(i, j)];
      write_pair(gram, in.count, i, j, total);
    }
  }
}

}  // namespace fastadv
