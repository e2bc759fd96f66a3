// Segments: the (rollout, turn) pairs of a batch. How many turns each row has, and values of a segment table at tokens.
#include "cpu/kernels.h"
#include "cpu/row_ranges.h"
#include "cpu/segment_lookup.h"

namespace fastadv {

int turn_counts(const Rows& rows, const TokenView& turn_ids, int64_t* counts, int threads) {
  rows.validate();
  return for_row_ranges(rows, threads, [&](int64_t row) {
    int32_t buffer[kTile];
    int32_t largest = -1, smallest = -1;
    for (int64_t token = rows.begin(row); token < rows.end(row); token += kTile) {
      const int64_t n = std::min(kTile, rows.end(row) - token);
      const int32_t* ids = load_ids(rows, turn_ids, token, n, buffer);
      for (int64_t i = 0; i < n; ++i) {
        largest = std::max(largest, ids[i]);
        smallest = std::min(smallest, ids[i]);
      }
    }
    counts[row] = int64_t{largest} + 1;
    return smallest < -1 ? kTurnOutOfRange : 0;
  });
}

template <class T>
int segment_tokens(const Rows& rows, const T* table, const int64_t* offsets, const TokenView& turn_ids, const TokenView& mask,
                   T* tokens, int threads) {
  rows.validate();
  std::atomic<int> faults{0};
  parallel_blocks(block_count(rows), threads, [&](int64_t block) {
    int32_t id_buffer[kTile];
    uint8_t mask_buffer[kTile];
    bool fractional = false;
    int mine = 0;
    for_rows_in_block(rows, block, [&](int64_t row, int64_t from, int64_t to) {
      for (int64_t token = from; token < to; token += kTile) {
        const int64_t n = std::min(kTile, to - token);
        const int32_t* ids = load_ids(rows, turn_ids, token, n, id_buffer);
        const uint8_t* bytes = nullptr;
        if (mask.present()) bytes = load_mask_bytes(rows, mask, token, n, mask_buffer, fractional);
        T* out = tokens + token;
        look_up_segments(table + offsets[row], offsets[row + 1] - offsets[row], ids, bytes, n, out, mine);
        if (!bytes) continue;
        for (int64_t i = 0; i < n; ++i) out[i] = bytes[i] ? out[i] : T(0);
      }
    });
    if (fractional) mine |= kFractionalMask;
    if (mine) faults.fetch_or(mine, std::memory_order_relaxed);
  });
  return faults.load();
}

template int segment_tokens(const Rows&, const float*, const int64_t*, const TokenView&, const TokenView&, float*, int);
template int segment_tokens(const Rows&, const double*, const int64_t*, const TokenView&, const TokenView&, double*, int);

}  // namespace fastadv
