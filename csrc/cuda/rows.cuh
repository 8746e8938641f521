// Rows of a matrix in registers: a group of LANES threads processes one row and reads it once, 16 bytes a load.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace megalin {

enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline void narrow(float x, float& y) { y = x; }
__device__ inline void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half& y) { y = __float2half_rn(x); }

// Distribution of a row of `width` elements over a group of threads: N elements a load, ITEMS loads a thread, LANES
// threads. Load i of lane l holds the N elements from (i * LANES + l) * N on.
template <typename T_, int N_, int LANES_, int ITEMS_>
struct Layout {
  using T = T_;
  static constexpr int N = N_, LANES = LANES_, ITEMS = ITEMS_;
  static constexpr int THREADS = LANES > 128 ? LANES : 128;
  static constexpr int ROWS = THREADS / LANES;

  struct alignas(sizeof(T) * N) Vector {
    T data[N];
  };

  Vector vectors[ITEMS];

  static __device__ int lane() { return threadIdx.x % LANES; }
  static __device__ int64_t row() { return int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES; }
  static int64_t blocks(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

  // Loads zeros beyond the end of the row, and for rows beyond the matrix.
  __device__ void load(const T* matrix, int64_t row, int64_t rows, int width) {
    const Vector* source = reinterpret_cast<const Vector*>(matrix + row * width);
    const int count = row < rows ? width / N : 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int index = i * LANES + lane();
      if (index < count) {
        vectors[i] = source[index];
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) narrow(0.0f, vectors[i].data[j]);
      }
    }
  }

  __device__ void store(T* matrix, int64_t row, int64_t rows, int width) const {
    Vector* target = reinterpret_cast<Vector*>(matrix + row * width);
    const int count = row < rows ? width / N : 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int index = i * LANES + lane();
      if (index < count) target[index] = vectors[i];
    }
  }

  __device__ static int column(int i, int j) { return (i * LANES + lane()) * N + j; }
  __device__ float get(int i, int j) const { return widen(vectors[i].data[j]); }
  __device__ void set(int i, int j, float value) { narrow(value, vectors[i].data[j]); }
};

struct Sum {
  static __device__ float join(float a, float b) { return a + b; }
};

// Reduction over the group, with the result on each of its threads, always in the same order. Every thread of the block
// must call it, and only once in a kernel.
template <typename L, typename Join, typename V>
__device__ V reduce(V value) {
#pragma unroll
  for (int offset = (L::LANES < 32 ? L::LANES : 32) / 2; offset > 0; offset /= 2) {
    value = Join::join(value, V(__shfl_xor_sync(0xffffffffu, value, offset)));
  }
  if constexpr (L::LANES > 32) {
    __shared__ V parts[L::THREADS / 32];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    constexpr int WARPS = L::LANES / 32;
    const int first = threadIdx.x / L::LANES * WARPS;
    value = parts[first];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) value = Join::join(value, parts[first + i]);
  }
  return value;
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Calls `launcher.run<Layout>()` with the layout for rows of `width` elements; wide rows use Launcher::ITEMS loads a
// thread. `vectorised`: all rows start at a multiple of 16 bytes.
template <typename T, typename Launcher>
cudaError_t with_layout(const Launcher& launcher, int width, bool vectorised) {
  constexpr int N = 16 / sizeof(T), ITEMS = Launcher::ITEMS;
  if (vectorised && width % N == 0) {
    const int vectors = width / N;
    if (vectors <= 8) return launcher.template run<Layout<T, N, 8, 1>>();
    if (vectors <= 32) return launcher.template run<Layout<T, N, 32, 1>>();
    if (vectors <= 32 * ITEMS) return launcher.template run<Layout<T, N, 32, ITEMS>>();
    if (vectors <= 64 * ITEMS) return launcher.template run<Layout<T, N, 64, ITEMS>>();
    if (vectors <= 128 * ITEMS) return launcher.template run<Layout<T, N, 128, ITEMS>>();
    if (vectors <= 192 * ITEMS) return launcher.template run<Layout<T, N, 192, ITEMS>>();
    if (vectors <= 256 * ITEMS) return launcher.template run<Layout<T, N, 256, ITEMS>>();
    if (vectors <= 384 * ITEMS) return launcher.template run<Layout<T, N, 384, ITEMS>>();
    if (vectors <= 512 * ITEMS) return launcher.template run<Layout<T, N, 512, ITEMS>>();
    if constexpr (512 * ITEMS * N < 16384) {
      if (vectors <= 768 * ITEMS) return launcher.template run<Layout<T, N, 768, ITEMS>>();
      if (vectors <= 1024 * ITEMS) return launcher.template run<Layout<T, N, 1024, ITEMS>>();
    }
    if constexpr (1024 * ITEMS * N < 16384) {
      if (vectors * N <= 16384) return launcher.template run<Layout<T, N, 1024, 2 * ITEMS>>();
    }
    return cudaErrorInvalidValue;
  }
  if (width <= 256) return launcher.template run<Layout<T, 1, 32, 8>>();
  if (width <= 2048) return launcher.template run<Layout<T, 1, 256, 8>>();
  if (width <= 16384) return launcher.template run<Layout<T, 1, 1024, 16>>();
  return cudaErrorInvalidValue;
}

template <typename Launcher>
cudaError_t with_dtype(const Launcher& launcher, int dtype, int width, bool vectorised) {
  switch (dtype) {
    case kFloat32:
      return with_layout<float>(launcher, width, vectorised);
    case kBFloat16:
      return with_layout<__nv_bfloat16>(launcher, width, vectorised);
    case kFloat16:
      return with_layout<__half>(launcher, width, vectorised);
  }
  return cudaErrorInvalidValue;
}

}  // namespace megalin
