// samples.cu for Python, in the way of the library's own bindings: addresses and streams are integers.
#include <pybind11/pybind11.h>

#include "samples.h"

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

PYBIND11_MODULE(emulated_samples, m) {
  m.def("row_log_sum_exp", [](uintptr_t logits, uintptr_t out, int rows, int columns, int64_t stride,
                              uintptr_t stream) {
    check(samples::row_log_sum_exp(pointer<const __nv_bfloat16>(logits), pointer<float>(out), rows, columns, stride,
                                   stream_of(stream)));
  });
  m.def("segment_sums", [](uintptr_t values, uintptr_t offsets, uintptr_t out, int segments, uintptr_t stream) {
    check(samples::segment_sums(pointer<const float>(values), pointer<const int64_t>(offsets), pointer<float>(out),
                                segments, stream_of(stream)));
  });
  m.def("total_sum", [](uintptr_t values, uintptr_t partial, uintptr_t finished, uintptr_t out, int count, int blocks,
                        uintptr_t stream) {
    check(samples::total_sum(pointer<const float>(values), pointer<float>(partial), pointer<unsigned>(finished),
                             pointer<float>(out), count, blocks, stream_of(stream)));
  });
  m.def("histogram", [](uintptr_t bins, uintptr_t counts, int count, int number_of_bins, int blocks, uintptr_t stream) {
    check(samples::histogram(pointer<const int>(bins), pointer<int>(counts), count, number_of_bins, blocks,
                             stream_of(stream)));
  });
  m.def("reverse_warps", [](uintptr_t values, uintptr_t out, int blocks, uintptr_t stream) {
    check(samples::reverse_warps(pointer<const float>(values), pointer<float>(out), blocks, stream_of(stream)));
  });
  m.def("launch_with", [](uintptr_t out, int grid, int block, int shared, int allowed, uintptr_t stream) {
    check(samples::launch_with(pointer<int>(out), grid, block, shared, allowed, stream_of(stream)));
  });
}
