// SRMSNorm over the rows of a matrix: y = x r with r = (mean(x^2) + eps)^(-1/2), and dx = r (dy - x r^2 mean(x dy)).
#include "rows.cuh"

namespace megalin {

template <typename L>
__global__ void __launch_bounds__(L::THREADS)
    srmsnorm_forward(const typename L::T* x, typename L::T* y, float* scales, int64_t rows, int width, float eps) {
  const int64_t row = L::row();
  L current;
  current.load(x, row, rows, width);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) squares += current.get(i, j) * current.get(i, j);
  }
  const float scale = rsqrtf(reduce<L, Sum>(squares) / width + eps);
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) current.set(i, j, current.get(i, j) * scale);
  }
  current.store(y, row, rows, width);
  if (L::lane() == 0 && row < rows) scales[row] = scale;
}

template <typename L>
__global__ void __launch_bounds__(L::THREADS)
    srmsnorm_backward(const typename L::T* dy, const typename L::T* x, const float* scales, typename L::T* dx,
                      int64_t rows, int width) {
  const int64_t row = L::row();
  L value, gradient;
  value.load(x, row, rows, width);
  gradient.load(dy, row, rows, width);
  const float scale = row < rows ? scales[row] : 0.0f;
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) product += value.get(i, j) * scale * gradient.get(i, j);
  }
  const float mean = reduce<L, Sum>(product) / width;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) {
      gradient.set(i, j, scale * (gradient.get(i, j) - value.get(i, j) * scale * mean));
    }
  }
  gradient.store(dx, row, rows, width);
}

struct ForwardLauncher {
  static constexpr int ITEMS = 4;
  const void* x;
  void* y;
  float* scales;
  int64_t rows;
  int width;
  float eps;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    using T = typename L::T;
    srmsnorm_forward<L><<<L::blocks(rows), L::THREADS, 0, stream>>>(static_cast<const T*>(x), static_cast<T*>(y),
                                                                       scales, rows, width, eps);
    return cudaGetLastError();
  }
};

struct BackwardLauncher {
  static constexpr int ITEMS = 4;
  const void *dy, *x;
  const float* scales;
  void* dx;
  int64_t rows;
  int width;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    using T = typename L::T;
    srmsnorm_backward<L><<<L::blocks(rows), L::THREADS, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(x), scales, static_cast<T*>(dx), rows, width);
    return cudaGetLastError();
  }
};

}  // namespace megalin

// x, y [rows, width] of a Dtype, scales [rows]; returns a cudaError_t.
extern "C" int megalin_srmsnorm_forward(const void* x, void* y, float* scales, int64_t rows, int width, float eps,
                                        int dtype, cudaStream_t stream) {
  const megalin::ForwardLauncher launcher{x, y, scales, rows, width, eps, stream};
  return megalin::with_dtype(launcher, dtype, width, megalin::aligned(x) && megalin::aligned(y));
}

// dy, x, dx [rows, width] of a Dtype, scales [rows] as returned by the forward; returns a cudaError_t.
extern "C" int megalin_srmsnorm_backward(const void* dy, const void* x, const float* scales, void* dx, int64_t rows,
                                         int width, int dtype, cudaStream_t stream) {
  const megalin::BackwardLauncher launcher{dy, x, scales, dx, rows, width, stream};
  const bool vectorised = megalin::aligned(dy) && megalin::aligned(x) && megalin::aligned(dx);
  return megalin::with_dtype(launcher, dtype, width, vectorised);
}
