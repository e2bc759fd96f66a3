// Whitening over the tokens that count: one read for their mean and spread, one more to write. Reads and writes 14 bytes a
// token in float32: values and mask twice, the output once.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/spread.h"

namespace fastadv {
namespace {

// Calls body(first token, number of tokens) for the tiles of every block; returns the bitwise or of what the calls returned.
template <class Body>
int for_tiles(const Rows& rows, int threads, const Body& body) {
  std::atomic<int> faults{0};
  parallel_blocks(block_count(rows), threads, [&](int64_t block) {
    const int64_t last = std::min(rows.tokens, (block + 1) * kBlockTokens);
    int mine = 0;
    for (int64_t token = block * kBlockTokens; token < last; token += kTile) mine |= body(block, token, std::min(kTile, last - token));
    if (mine) faults.fetch_or(mine, std::memory_order_relaxed);
  });
  return faults.load();
}

}  // namespace

int masked_spread(const Rows& rows, const TokenView& values, const TokenView& mask, double* spread, int threads) {
  rows.validate();
  std::vector<Spread> blocks(block_count(rows));
  const int faults = for_tiles(rows, threads, [&](int64_t block, int64_t token, int64_t n) {
    alignas(64) float value_buffer[kTile];
    alignas(64) uint8_t mask_buffer[kTile];
    bool fractional = false;
    const uint8_t* on = load_mask_bytes(rows, mask, token, n, mask_buffer, fractional);
    blocks[block] = merged(blocks[block], tile_spread(load_floats(rows, values, token, n, value_buffer), on, n));
    return fractional ? kFractionalMask : 0;
  });
  Spread all;
  for (const Spread& block : blocks) all = merged(all, block);
  write(all, spread);
  return faults;
}

int standardize(const Rows& rows, const TokenView& values, const TokenView& mask, const double* mean_and_scale, float* out, int threads) {
  rows.validate();
  const double mean = mean_and_scale[0], scale = mean_and_scale[1];
  return for_tiles(rows, threads, [&](int64_t, int64_t token, int64_t n) {
    alignas(64) float value_buffer[kTile];
    alignas(64) uint8_t mask_buffer[kTile];
    bool fractional = false;
    const uint8_t* on = load_mask_bytes(rows, mask, token, n, mask_buffer, fractional);
    const float* x = load_floats(rows, values, token, n, value_buffer);
    float* const __restrict to = out + token;
    for (int64_t i = 0; i < n; ++i) {
      const float whitened = float((double(x[i]) - mean) * scale);
      to[i] = on[i] ? whitened : 0.0f;
    }
    return fractional ? kFractionalMask : 0;
  });
}

}  // namespace fastadv
