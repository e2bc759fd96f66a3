// Runs CUDA C++ kernels on the CPU, for tests only. build.py includes this file before every source, and
// launch_syntax.py rewrites what no compiler but nvcc reads. C++17, GCC, x86-64.
//
// Each block in flight runs on an OS thread of its own, each CUDA thread on a fiber of that OS thread. A fiber runs
// on until a barrier or a warp operation stops it, so the threads of a block drift as far apart as the program
// allows. Barriers and warp operations check who takes part; sanitizers see memory as a device would share it.
//
// Neither __CUDACC__ nor __CUDA_ARCH__ is defined. Not covered: inline PTX, cp.async, TMA, mbarrier, wgmma, clusters,
// named barriers, cooperative groups, textures. Such code stands behind `#ifdef __CUDA_ARCH__` with a plain form beside
// it, and only the plain form runs here.
#pragma once

#include "atomics.h"
#include "barriers.h"
#include "cuda_types.h"
#include "device_functions.h"
#include "launch.h"
#include "low_precision.h"
#include "runtime_api.h"
#include "shared_memory.h"
#include "warp_operations.h"
