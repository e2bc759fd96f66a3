// Tokens that count, by row. One launch, with a memset where rows are few and long; reads 1 byte a token.
#include "cuda/row_counts.h"

namespace fastadv::cuda {

namespace {

struct Tokens {
  using Element = uint8_t;
  // What a fraction counts: beside 2^32 tokens one is enough for a negative sum, and 2^31 of them do not wrap around.
  static constexpr Count kFraction = Count(-(int64_t{1} << 32));

  __device__ static Element none() { return 0; }
  __device__ static Count unknown() { return Count(-(int64_t{1} << 62)); }  // UNKNOWN of fastadv/rows.py
  __device__ static Count of(Element mask) { return mask == kFractional ? kFraction : Count(mask != 0); }
  __device__ static Count merge(Count a, Count b) { return a + b; }
  __device__ static void into(Count* count, Count value) { atomicAdd(count, value); }
};

}  // namespace

void token_counts(const Launcher& launcher, const Rows& rows, const uint8_t* mask, int64_t* counts) {
  row_counts<Tokens>(launcher, rows, mask, counts);
}

}  // namespace fastadv::cuda
