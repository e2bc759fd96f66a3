// The part of CUDA's runtime API that a launcher uses, for one device whose memory is the host's. Streams run in
// order and at once: whatever was launched is done.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "runtime_state.h"

extern "C" {

inline cudaError_t cudaPeekAtLastError() { return ::cuda_emulation::last_error; }

inline cudaError_t cudaGetLastError() { return std::exchange(::cuda_emulation::last_error, cudaSuccess); }

#define CUDA_EMULATION_ERRORS(_)                                                                   \
  _(cudaSuccess, "no error")                                                                       \
  _(cudaErrorInvalidValue, "invalid argument")                                                     \
  _(cudaErrorMemoryAllocation, "out of memory")                                                    \
  _(cudaErrorInitializationError, "initialization error")                                          \
  _(cudaErrorInvalidConfiguration, "invalid configuration argument")                               \
  _(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")   \
  _(cudaErrorInvalidDeviceFunction, "invalid device function")                                     \
  _(cudaErrorNoDevice, "no CUDA-capable device is detected")                                       \
  _(cudaErrorInvalidDevice, "invalid device ordinal")                                              \
  _(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")   \
  _(cudaErrorInvalidResourceHandle, "invalid resource handle")                                     \
  _(cudaErrorIllegalAddress, "an illegal memory access was encountered")                           \
  _(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                      \
  _(cudaErrorMisalignedAddress, "misaligned address")                                              \
  _(cudaErrorLaunchFailure, "unspecified launch failure")                                          \
  _(cudaErrorNotSupported, "operation not supported")                                              \
  _(cudaErrorUnknown, "unknown error")

inline const char* cudaGetErrorName(cudaError_t error) {
#define CUDA_EMULATION_NAME(code, text) \
  if (error == code) return #code;
  CUDA_EMULATION_ERRORS(CUDA_EMULATION_NAME)
#undef CUDA_EMULATION_NAME
  return "unrecognized error code";
}

inline const char* cudaGetErrorString(cudaError_t error) {
#define CUDA_EMULATION_STRING(code, text) \
  if (error == code) return text;
  CUDA_EMULATION_ERRORS(CUDA_EMULATION_STRING)
#undef CUDA_EMULATION_STRING
  return "unrecognized error code";
}
#undef CUDA_EMULATION_ERRORS

inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  ++::cuda_emulation::operations;
  if (bytes) memset(address, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return ::cuda_emulation::remember(cudaErrorInvalidMemcpyDirection);
  }
  ++::cuda_emulation::operations;
  if (bytes) memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  return ::cuda_emulation::remember(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

// Of compute capability 9.0, but for the number of multiprocessors: with 4 of them a grid that fills the device goes
// over a test's small tensors more than once.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  using ::cuda_emulation::remember;
  if (device != 0) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrWarpSize: *value = 32; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; return cudaSuccess;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; return cudaSuccess;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; return cudaSuccess;
    case cudaDevAttrMaxGridDimY: *value = 65535; return cudaSuccess;
    case cudaDevAttrMaxGridDimZ: *value = 65535; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; return cudaSuccess;
    default: return remember(cudaErrorInvalidValue);
  }
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->type = cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  using namespace ::cuda_emulation;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return remember(cudaErrorInvalidValue);
  if (value < 0 || static_cast<size_t>(value) > kDynamicSharedLimit) return remember(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> lock(allowed_shared_mutex);
  allowed_shared[kernel] = value;
  return cudaSuccess;
}

}  // extern "C"

template <class Result, class... Parameters>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Result (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}

template <class Result, class... Parameters>
inline cudaError_t cudaFuncSetAttribute(Result (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
