// Every device function and runtime function of the emulation against what CUDA's documentation says of it. Prints a
// line for each that differs.
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "samples.h"

#define EXPECT(condition)                                                \
  do {                                                                   \
    if (!(condition)) printf("line %d: %s\n", __LINE__, #condition);     \
  } while (0)

namespace {

constexpr unsigned kFull = 0xffffffffu;

__global__ void shuffles() {
  const int lane = threadIdx.x;
  EXPECT(__shfl_sync(kFull, lane, 5) == 5);
  EXPECT(__shfl_sync(kFull, lane, 37) == 5);
  EXPECT(__shfl_sync(kFull, lane, 2, 8) == lane / 8 * 8 + 2);
  EXPECT(__shfl_xor_sync(kFull, lane, 3) == (lane ^ 3));
  EXPECT(__shfl_xor_sync(kFull, lane, 16, 16) == (lane < 16 ? lane : lane - 16));
  EXPECT(__shfl_up_sync(kFull, lane, 4) == (lane < 4 ? lane : lane - 4));
  EXPECT(__shfl_up_sync(kFull, lane, 1, 8) == (lane % 8 == 0 ? lane : lane - 1));
  EXPECT(__shfl_down_sync(kFull, lane, 4) == (lane > 27 ? lane : lane + 4));
  EXPECT(__shfl_down_sync(kFull, lane, 1, 8) == (lane % 8 == 7 ? lane : lane + 1));
  EXPECT(__shfl_xor_sync(kFull, lane + 0.25, 1) == (lane ^ 1) + 0.25);
  EXPECT(__shfl_sync(kFull, 0x100000000ll * lane, 9) == 0x900000000ll);
  EXPECT(__shfl_down_sync(kFull, lane + 0.5f, 31) == (lane == 0 ? 31.5f : lane + 0.5f));
  EXPECT(__bfloat162float(__shfl_sync(kFull, __float2bfloat16_rn(lane), 12)) == 12.0f);
  if (lane % 2) {
    EXPECT(__shfl_sync(0xaaaaaaaau, lane, 7) == 7);  // the odd lanes alone
  }
}

__global__ void votes() {
  const int lane = threadIdx.x;
  EXPECT(__ballot_sync(kFull, lane < 3) == 7u);
  EXPECT(__any_sync(kFull, lane == 31) && !__any_sync(kFull, lane == 32));
  EXPECT(__all_sync(kFull, lane < 32) && !__all_sync(kFull, lane < 31));
  EXPECT(__match_any_sync(kFull, lane % 2) == (lane % 2 ? 0xaaaaaaaau : 0x55555555u));
  int equal = 7;
  EXPECT(__match_all_sync(kFull, 3ll, &equal) == kFull && equal == 1);
  EXPECT(__match_all_sync(kFull, lane, &equal) == 0 && equal == 0);
  EXPECT(__reduce_add_sync(kFull, lane - 16) == -16);
  EXPECT(__reduce_add_sync(kFull, 0x80000000u + lane) == 496u);  // wraps around
  EXPECT(__reduce_min_sync(kFull, lane - 16) == -16 && __reduce_min_sync(kFull, lane + 1u) == 1u);
  EXPECT(__reduce_max_sync(kFull, lane - 40) == -9 && __reduce_max_sync(kFull, 0u - lane) == 0xffffffffu);
  EXPECT(__reduce_and_sync(kFull, 0xf0u | lane) == 0xe0u + 0x10u);
  EXPECT(__reduce_or_sync(kFull, 1u << lane) == kFull);
  EXPECT(__reduce_xor_sync(kFull, 1u << lane / 2 * 2) == 0u);
}

// A block of 40: the second warp has 8 lanes.
__global__ void barriers() {
  const int thread = threadIdx.x;
  EXPECT(__syncthreads_count(thread < 7) == 7);
  EXPECT(__syncthreads_or(thread == 39) && !__syncthreads_or(thread == 40));
  EXPECT(__syncthreads_and(thread < 40) && !__syncthreads_and(thread < 39));
  EXPECT(__ballot_sync(kFull, 1) == (thread < 32 ? kFull : 0xffu));
  int equal = 0;
  EXPECT(__match_all_sync(kFull, 3, &equal) == (thread < 32 ? kFull : 0xffu) && equal);
  __shared__ volatile bool ready;
  if (thread == 0) {
    ready = false;
    __syncwarp(1u);
  }
  __syncthreads();
  if (thread == 39) ready = true;
  while (!ready) __nanosleep(10);
}

__global__ void shared_variables() {
  __shared__ __align__(16) float2 pairs[3][4], other;
  __shared__ double number;
  EXPECT(sizeof(pairs) == 96 && reinterpret_cast<size_t>(pairs) % 16 == 0);
  EXPECT(__double_as_longlong(number) == -1 && __float_as_int(pairs[2][3].y) == -1 && isnan(other.x));
}

struct Cells {
  int i;
  unsigned u;
  unsigned long long l;
  float f;
  double d;
  __nv_bfloat162 b;
  __half h;
  int lowest, highest;
  unsigned all, any, odd, exchanged, turns, down;
  int claimed, winners;
};

__global__ void atomics(Cells* cells) {
  const int thread = threadIdx.x;
  atomicAdd(&cells->i, -1);
  atomicAdd(&cells->u, 1);
  atomicSub(&cells->u, 2);
  atomicAdd(&cells->l, 1ull << 32);
  atomicAdd(&cells->f, 0.5f);
  atomicAdd(&cells->d, 0.25);
  atomicAdd(&cells->b, __floats2bfloat162_rn(1.0f, 2.0f));
  atomicAdd(&cells->h, __float2half_rn(0.5f));
  atomicMin(&cells->lowest, -thread);
  atomicMax(&cells->highest, thread);
  atomicAnd(&cells->all, ~(1u << thread % 4));
  atomicOr(&cells->any, 1u << thread % 4);
  atomicXor(&cells->odd, 1u);
  if (thread == 3 && blockIdx.x == 0) EXPECT(atomicExch(&cells->exchanged, 8) == 4);
  EXPECT(atomicInc(&cells->turns, 9) <= 9);
  EXPECT(atomicDec(&cells->down, 9) <= 9);
  if (atomicCAS(&cells->claimed, 0, thread + 1) == 0) atomicAdd(&cells->winners, 1);
}

void check_atomics() {
  Cells cells{};
  cells.all = 0xff;
  cells.exchanged = 4;
  atomics<<<2, 32>>>(&cells);
  // 64 threads.
  EXPECT(cells.i == -64 && cells.u == 0u - 64u && cells.l == 64ull << 32 && cells.f == 32.0f && cells.d == 16.0);
  EXPECT(__low2float(cells.b) == 64.0f && __high2float(cells.b) == 128.0f && __half2float(cells.h) == 32.0f);
  EXPECT(cells.lowest == -31 && cells.highest == 31 && cells.all == 0xf0 && cells.any == 0xf && cells.odd == 0);
  EXPECT(cells.exchanged == 8 && cells.turns == 4 && cells.down == 6 && cells.claimed > 0 && cells.winners == 1);
}

__global__ void numbers(const float* in, float* out) {
  EXPECT(__ldg(in) == 1.5f && __ldcs(in) == 1.5f && __ldcg(in) == 1.5f && __ldca(in) == 1.5f && __ldlu(in) == 1.5f);
  __stcs(out, 2.5f);
  __stcg(out + 1, 3.5f);
  __stwb(out + 2, 4.5f);
  const float tiny = 1.0f + 0x1p-23f;
  EXPECT(__fmaf_rn(tiny, tiny, -1.0f) == 0x1p-22f + 0x1p-46f);                        // one rounding
  EXPECT(__fadd_rn(__fmul_rn(tiny, tiny), -1.0f) == 0x1p-22f);                        // two
  EXPECT(__fma_rn(3.0, 4.0, 5.0) == 17.0 && __dadd_rn(1.0, 2.0) == 3.0 && __dmul_rn(2.0, 3.0) == 6.0);
  EXPECT(__fsub_rn(1.0f, 3.0f) == -2.0f && __fdiv_rn(1.0f, 4.0f) == 0.25f && __fsqrt_rn(9.0f) == 3.0f);
  EXPECT(rsqrtf(4.0f) == 0.5f && rsqrt(16.0) == 0.25 && __frcp_rn(8.0f) == 0.125f && exp2f(3.0f) == 8.0f);
  EXPECT(fabsf(__expf(1.0f) - 2.7182817f) < 1e-6f && __log2f(8.0f) == 3.0f && __saturatef(NAN) == 0.0f);
  EXPECT(__float2int_rn(2.5f) == 2 && __float2int_rz(-2.5f) == -2 && __float2int_ru(2.5f) == 3);
  EXPECT(__float2int_rn(1e10f) == INT_MAX && __float2int_rn(-1e10f) == INT_MIN && __float2int_rn(NAN) == 0);
  EXPECT(__float2uint_rn(-3.0f) == 0u && __float2uint_rn(1e10f) == UINT_MAX);
  EXPECT(__float2ll_rn(1e30f) == LLONG_MAX && __double2ll_rn(-1e30) == LLONG_MIN && __double2ll_rn(3.5) == 4);
  EXPECT(__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0x3f800000u) == 1.0f && __int_as_float(0) == 0.0f);
  EXPECT(__longlong_as_double(__double_as_longlong(0.1)) == 0.1);
  EXPECT(__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64 && __ffs(0) == 0 && __ffs(8) == 4 && __ffsll(1ll << 40) == 41);
  EXPECT(__clz(0) == 32 && __clz(1) == 31 && __clz(-1) == 0 && __clzll(1) == 63 && __clzll(0) == 64);
  EXPECT(__brev(1u) == 0x80000000u && __umulhi(0x80000000u, 6u) == 3u);
  EXPECT(min(2, 1) == 1 && max(2u, 3u) == 3u && max(-1ll, 1ll) == 1ll);
  EXPECT(max(NAN, 1.0f) == 1.0f && min(2.0, 1.0) == 1.0);
  const __nv_bfloat16 third = __float2bfloat16_rn(1.0f / 3.0f);
  EXPECT(__bfloat162float(third) == 0x1.56p-2f);
  EXPECT(__bfloat162float(__float2bfloat16_rn(1.0f + 0x1p-8f)) == 1.0f);              // a tie: to even
  EXPECT(__bfloat162float(__hfma(third, third, third)) == __bfloat162float(__double2bfloat16(0x1.c8e4p-2)));
  const __nv_bfloat162 pair = __floats2bfloat162_rn(1, 2);
  EXPECT(__high2float(__hfma2(pair, __floats2bfloat162_rn(3, 4), __floats2bfloat162_rn(5, 6))) == 14.0f);
  EXPECT(__bfloat162float(hexp2(__float2bfloat16_rn(5.0f))) == 32.0f);
  EXPECT(__half2float(hsqrt(__float2half_rn(9.0f))) == 3.0f);
  EXPECT(__bfloat162int_rn(__float2bfloat16_rn(2.5f)) == 2 && __half2int_rn(__float2half_rn(3.5f)) == 4);
}

void check_numbers() {
  const float in = 1.5f;
  float out[3];
  numbers<<<1, 1>>>(&in, out);
  EXPECT(out[0] == 2.5f && out[1] == 3.5f && out[2] == 4.5f);
}

__global__ void places(int* out) {
  EXPECT(gridDim.x == 3 && gridDim.y == 2 && gridDim.z == 2 && blockDim.x == 4 && blockDim.y == 3 && blockDim.z == 2);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  EXPECT(__shfl_sync(kFull, thread, 0) == 0);  // one warp of 24 lanes, in the order of x, y, z
  atomicAdd(out + block * 24 + thread, 1);
}

void check_places() {
  int out[12 * 24] = {};
  places<<<dim3(3, 2, 2), dim3(4, 3, 2)>>>(out);
  for (int count : out) EXPECT(count == 1);
}

void check_runtime() {
  int value = -1;
  EXPECT(cudaGetDeviceCount(&value) == cudaSuccess && value == 1);
  EXPECT(cudaGetDevice(&value) == cudaSuccess && value == 0 && cudaSetDevice(0) == cudaSuccess);
  EXPECT(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaPeekAtLastError() == cudaErrorInvalidDevice);
  EXPECT(cudaGetLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaSuccess);
  EXPECT(!strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue"));
  EXPECT(!strcmp(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument"));
  EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess && value == 232448);
  EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 1) == cudaErrorInvalidDevice);
  int from[2] = {1, 2}, to[2] = {};
  EXPECT(cudaMemcpyAsync(to, from, sizeof(to), cudaMemcpyDeviceToDevice, nullptr) == cudaSuccess && to[1] == 2);
  EXPECT(cudaMemsetAsync(to, 0xff, sizeof(int), nullptr) == cudaSuccess && to[0] == -1 && to[1] == 2);
  cudaStreamCaptureStatus status;
  EXPECT(cudaStreamIsCapturing(nullptr, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
  cudaPointerAttributes attributes;
  EXPECT(cudaPointerGetAttributes(&attributes, from) == cudaSuccess && attributes.type == cudaMemoryTypeDevice);
  EXPECT(attributes.device == 0 && attributes.devicePointer == from);
}

template <class T, int count>
__global__ void typed(T* out) {
  for (int i = 0; i < count; ++i) out[i] = static_cast<T>(i);
}

__constant__ float scales[2] = {2.0f, 3.0f};

struct Scaling {
  float* out;
  int which;
};

__device__ __noinline__ float scaled(float value, int which) { return value * scales[which]; }

template <int threads>
__global__ void __launch_bounds__(threads, 2) scale(const __grid_constant__ Scaling scaling) {
  extern __shared__ __align__(16) unsigned char bytes[];
  float* const values = reinterpret_cast<float*>(bytes);
  values[threadIdx.x] = scaling.out[threadIdx.x];
  __syncthreads();
  scaling.out[threads - 1 - threadIdx.x] = scaled(values[threadIdx.x], scaling.which);
}

#define WITH_CONSTANT(name, ...) \
  [&] {                          \
    constexpr int name = 2;      \
    __VA_ARGS__();               \
  }()

// Forms of launches that have to be read right.
void check_launches() {
  float out[3] = {};
  typed<float, (2 > 1 ? 3 : 2)>
      <<<dim3(1), dim3(max(1, 1), 1)>>>(
          // a comment, with a comma and a <<<
          out);
  EXPECT(out[2] == 2.0f);
  void (*const kernel)(float*) = typed<float, 2>;
  out[1] = 0.0f;
  if (out[2] > 1.0f) kernel<<<1, 1, sizeof(float) * 2, cudaStream_t(nullptr)>>>(out);
  EXPECT(out[1] == 1.0f);
  out[0] = 5.0f;
  WITH_CONSTANT(kThreads, [&] {
    scale<kThreads><<<dim3(1, 1, INT_MAX / INT_MAX), 1 << 1, kThreads * sizeof(float)>>>(Scaling{out, 1});
  });
  EXPECT(out[0] == 3.0f && out[1] == 15.0f);
  EXPECT(!strcmp("k<<<1, 1>>>(x) __shared__ int a;", "k<<<1, 1>>>(x) __shared__" " int a;"));
}

// What no device allows, by number.
__global__ void misuse(int kind) {
  const int lane = threadIdx.x;
  if (kind == 0) __shfl_sync(1u, lane, 0);
  if (kind == 1) __shfl_sync(kFull, lane, 0, 5);
  if (kind == 2 && lane < 2) __shfl_sync(3u, lane, 5);
  if (kind == 3 && lane < 4) __shfl_sync(0xffu, lane, 0);
  if (kind == 3 && lane >= 4) __ballot_sync(0xffu, true);
  if (kind == 4) __ballot_sync(0xfffu, true);
  if (kind == 5 && lane == 7) __trap();
  if (kind == 6) shuffles<<<1, 32>>>();
  if (kind == 7) {
    __shared__ float half[6 << 10], more[6 << 10], one;
    half[0] = more[0] = one = 0.0f;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    try {
      misuse<<<1, 8>>>(atoi(argv[1]));
    } catch (const std::exception& error) {
      puts(error.what());
    }
    return 0;
  }
  shuffles<<<1, 32>>>();
  votes<<<1, 32>>>();
  barriers<<<2, 40>>>();
  shared_variables<<<3, 33>>>();
  check_atomics();
  check_numbers();
  check_places();
  check_runtime();
  check_launches();
}
