// CUDA's own types and their host arithmetic (dim3, float4, cudaStream_t, __nv_bfloat16), without anything to link
// with, and the words of the language as a host compiler can read them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__  // nothing: headers of the standard library have it within an attribute
#define __align__(n) __attribute__((aligned(n)))
// __shared__ stays a word for launch_syntax.py: a variable of the block has to be told to shared_memory.h.

// "name at file:line" of the place that calls a device function: what a fault report says.
#define CUDA_EMULATION_TEXT_(x) #x
#define CUDA_EMULATION_TEXT(x) CUDA_EMULATION_TEXT_(x)
#define CUDA_EMULATION_PLACE(name) name " at " __FILE__ ":" CUDA_EMULATION_TEXT(__LINE__)
