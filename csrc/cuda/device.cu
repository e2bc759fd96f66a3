// Whether this build has code for a device: what other kernels would find out at their first launch.
#include "cuda/kernels.h"

namespace fastadv::cuda {

namespace {

__global__ void __launch_bounds__(32) nothing_kernel() {}

}  // namespace

void check_device(const Launcher& launcher) {
  cudaFuncAttributes attributes;
  launcher.check(cudaFuncGetAttributes(&attributes, nothing_kernel));
}

}  // namespace fastadv::cuda
