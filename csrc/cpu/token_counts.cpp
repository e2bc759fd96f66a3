// Tokens that count, by row: the denominators of the losses come from these.
#include "cpu/kernels.h"
#include "cpu/row_ranges.h"

namespace fastadv {

int token_counts(const Rows& rows, const TokenView& mask, int64_t* counts, int threads) {
  rows.validate();
  return for_row_ranges(rows, threads, [&](int64_t row) {
    uint8_t buffer[kTile];
    bool fractional = false;
    int64_t count = 0;
    for (int64_t token = rows.begin(row); token < rows.end(row); token += kTile) {
      const int64_t n = std::min(kTile, rows.end(row) - token);
      const uint8_t* bytes = load_mask_bytes(rows, mask, token, n, buffer, fractional);
      int32_t tile = 0;
      for (int64_t i = 0; i < n; ++i) tile += bytes[i] != 0;
      count += tile;
    }
    counts[row] = count;
    return fractional ? kFractionalMask : 0;
  });
}

}  // namespace fastadv
