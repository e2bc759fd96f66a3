// Turn ids from the runs of the response mask: tokens of a row's k-th run get k, all others -1.
#include "cpu/kernels.h"
#include "cpu/row_ranges.h"

namespace fastadv {
namespace {

// Whether eight mask bytes are all non-zero (`on` 1) or all zero (`on` 0). Bytes other than 0 and 1 take the slow way.
bool eight_like(const uint8_t* bytes, uint8_t on) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word == (on ? 0x0101010101010101u : 0u);
}

}  // namespace

int turn_ids_from_mask(const Rows& rows, const TokenView& mask, int32_t* turn_ids, int threads) {
  rows.validate();
  return for_row_ranges(rows, threads, [&](int64_t row) {
    uint8_t buffer[kTile];
    bool fractional = false;
    int32_t turn = -1;
    uint8_t before = 0;
    for (int64_t token = rows.begin(row); token < rows.end(row); token += kTile) {
      const int64_t n = std::min(kTile, rows.end(row) - token);
      const uint8_t* bytes = load_mask_bytes(rows, mask, token, n, buffer, fractional);
      for (int64_t i = 0; i < n;) {
        // Runs are long: eight bytes at a time that go on as before.
        for (; i + 8 <= n && eight_like(bytes + i, before); i += 8) std::fill(turn_ids + token + i, turn_ids + token + i + 8, before ? turn : -1);
        for (const int64_t end = std::min(n, i + 8); i < end; ++i) {
          const uint8_t now = bytes[i] != 0;
          turn += now & ~before;
          turn_ids[token + i] = now ? turn : -1;
          before = now;
        }
      }
    }
    return fractional ? kFractionalMask : 0;
  });
}

}  // namespace fastadv
