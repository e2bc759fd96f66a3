// Runs a sample kernel, small, with a fault: `fault_program total_sum kNoFence`, or all of them without one. Compares
// with sums in double and says "right", "wrong result", or what stopped it. A program of its own because sanitizers
// want to be there before anything else.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "samples.cu"

namespace {

using samples::Fault;

std::mt19937 generator(1);
std::normal_distribution<float> normal;

std::vector<float> normals(size_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

bool close(double got, double wanted) { return std::abs(got - wanted) <= 1e-4 * (1.0 + std::abs(wanted)); }

bool row_log_sum_exp_is_right(Fault fault) {
  // Rows 2^30 elements apart: pages that nobody touches take no memory.
  constexpr int kRows = 3, kColumns = 1024;
  constexpr int64_t kStride = int64_t{1} << 30;
  constexpr size_t kBytes = ((kRows - 1) * kStride + kColumns) * sizeof(__nv_bfloat16);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* logits = static_cast<__nv_bfloat16*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
  std::vector<float> out(kRows);
  std::vector<double> wanted(kRows);
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kColumns; ++i) {
      const __nv_bfloat16 logit = __float2bfloat16(3.0f * normal(generator));
      logits[row * kStride + i] = logit;
      wanted[row] += std::exp(static_cast<double>(__bfloat162float(logit)));
    }
  }
  bool right = samples::row_log_sum_exp(logits, out.data(), kRows, kColumns, kStride, nullptr, fault) == cudaSuccess;
  for (int row = 0; row < kRows; ++row) right &= close(out[row], std::log(wanted[row]));
  munmap(logits, kBytes);
  return right;
}

bool segment_sums_is_right(Fault fault) {
  constexpr int kSegments = 21;
  std::vector<int64_t> offsets(kSegments + 1);
  for (int i = 0; i < kSegments; ++i) offsets[i + 1] = offsets[i] + generator() % 300;
  const std::vector<float> values = normals(offsets.back());
  std::vector<float> out(kSegments);
  bool right =
      samples::segment_sums(values.data(), offsets.data(), out.data(), kSegments, nullptr, fault) == cudaSuccess;
  for (int s = 0; s < kSegments; ++s) {
    double wanted = 0.0;
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) wanted += values[i];
    right &= close(out[s], wanted);
  }
  return right;
}

bool total_sum_is_right(Fault fault) {
  constexpr int kBlocks = 5;
  const std::vector<float> values = normals(2000);
  std::vector<float> partial(kBlocks);
  unsigned finished_blocks = 0;
  double wanted = 0.0;
  for (float value : values) wanted += value;
  bool right = true;
  for (int call = 0; call < 2; ++call) {
    float out = NAN;
    right &= samples::total_sum(values.data(), partial.data(), &finished_blocks, &out, values.size(), kBlocks,
                                nullptr, fault) == cudaSuccess;
    right &= close(out, wanted);
  }
  return right;
}

bool histogram_is_right(Fault fault) {
  constexpr int kBins = 100;
  std::vector<int> bins(2000), counts(kBins), wanted(kBins);
  for (int& bin : bins) ++wanted[bin = generator() % kBins];
  return samples::histogram(bins.data(), counts.data(), bins.size(), kBins, 3, nullptr, fault) == cudaSuccess &&
         counts == wanted;
}

bool reverse_warps_is_right(Fault fault) {
  const std::vector<float> values = normals(2 * 256);
  std::vector<float> out(values.size());
  bool right = samples::reverse_warps(values.data(), out.data(), 2, nullptr, fault) == cudaSuccess;
  for (size_t i = 0; i < values.size(); ++i) right &= out[i] == values[i / 32 * 32 + 31 - i % 32];
  return right;
}

#define FAULT(name) \
  { #name, Fault::name }
const struct {
  const char* name;
  Fault fault;
} faults[] = {
    FAULT(kNone),
    FAULT(kReadBeforeWrite),
    FAULT(kWriteBeforeRead),
    FAULT(kNoFence),
    FAULT(kBlockFence),
    FAULT(kSharedCounter),
    FAULT(kGlobalCounter),
    FAULT(kShuffleAsBarrier),
    FAULT(kSegmentOffByOne),
    FAULT(kDivergentBarrier),
    FAULT(kBarrierNotReached),
    FAULT(kDivergentShuffle),
    FAULT(kMisaligned),
    FAULT(kIntOverflow),
    FAULT(kUninitialised),
    FAULT(kSharedBounds),
    FAULT(kDynamicSharedBounds),
};
#undef FAULT

const struct {
  const char* name;
  bool (*is_right)(Fault);
} kernels[] = {
    {"row_log_sum_exp", row_log_sum_exp_is_right},
    {"segment_sums", segment_sums_is_right},
    {"total_sum", total_sum_is_right},
    {"histogram", histogram_is_right},
    {"reverse_warps", reverse_warps_is_right},
};

}  // namespace

int main(int argc, char** argv) {
  const char* const only = argc > 1 ? argv[1] : nullptr;
  const char* const planted = argc > 2 ? argv[2] : "kNone";
  const auto is_planted = [&](const auto& known) { return !strcmp(planted, known.name); };
  const auto* const fault = std::find_if(std::begin(faults), std::end(faults), is_planted);
  if (fault == std::end(faults)) {
    printf("no such fault: %s\n", planted);
    return 2;
  }
  int ran = 0;
  bool right = true;
  for (const auto& kernel : kernels) {
    if (only && strcmp(only, kernel.name)) continue;
    ++ran;
    try {
      right &= kernel.is_right(fault->fault);
    } catch (const std::exception& error) {
      puts(error.what());
      return 1;
    }
  }
  puts(!ran ? "no such kernel" : right ? "right" : "wrong result");
  return !ran || !right;
}
