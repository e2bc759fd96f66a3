// How kernels are started: on a stream that the caller gives, without waiting, allocating or synchronising; what CUDA refuses
// becomes an exception that names the op.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastadv::cuda {

// Where an op runs. Its device is current while this lives.
class Launcher {
 public:
  Launcher(const char* op, int device, uintptr_t stream) : op_(op), stream_(reinterpret_cast<cudaStream_t>(stream)) {
    check(cudaGetDevice(&before_));
    if (device != before_) check(cudaSetDevice(device));
    changed_ = device != before_;
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher() {
    if (changed_) cudaSetDevice(before_);  // it was current before, so it can be again
  }

  const char* op() const { return op_; }
  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t status) const {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // else the next launch, which may be another op's, would find the error and report it again
    throw std::runtime_error(std::string(op_) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
  }

  // After a launch: an error that it met, or one that an earlier launch of anyone left behind.
  void launched() const { check(cudaGetLastError()); }

  // Blocks of a grid's first dimension.
  unsigned blocks(int64_t items, int64_t per_block) const {
    const int64_t count = (items + per_block - 1) / per_block;
    if (count > INT32_MAX) throw std::invalid_argument(std::string(op_) + ": too many blocks for a grid");
    return unsigned(count);
  }

 private:
  const char* op_;
  cudaStream_t stream_;
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace fastadv::cuda
