// MaxNorm, y = f c x / M with M = max |x| + eps, f one factor a row and c = cos(p theta) of Cosine RelPE, both or
// neither, over rows of a matrix. With g = f c dy: dx = g / M, and dx_j -= sign(x_j) sum(g x) / M^2 at the first j of
// the largest magnitude.
#include "rows.cuh"

namespace megalin {

// Magnitude above the inverted column: the largest key is the first of the largest magnitudes.
using Key = unsigned long long;

struct Largest {
  static __device__ Key join(Key a, Key b) { return a > b ? a : b; }
};

__device__ inline Key key_of(float x, int column) {
  return Key(__float_as_uint(fabsf(x))) << 32 | (0xffffffffu - unsigned(column));
}

// Factor of each row, position of each of `period`, and frequency of each column in 2^-32 turns a position.
struct Encoding {
  const float* factors;
  const int* positions;
  const unsigned* frequencies;
};

// Matrices that a block takes one after the other, with the same cosines.
constexpr int TURNS = 16;

// -cos(2 pi p F / 2^32): the product wraps, which leaves the fraction of a turn. Its upper 23 bits as the mantissa of a
// number in [1, 2), less 1.5, lie half a turn away.
__device__ inline float cosine(unsigned position, unsigned frequency) {
  const float turn = __uint_as_float(position * frequency >> 9 | 0x3f800000u) - 1.5f;
  const float z = turn * turn;
  float y = fmaf(6.528658390045166f, z, -25.967599868774414f);
  y = fmaf(y, z, 60.16762924194336f);
  y = fmaf(y, z, -85.45014190673828f);
  y = fmaf(y, z, 64.93911743164062f);
  y = fmaf(y, z, -19.73920440673828f);
  return fmaf(y, z, 1.0f);
}

// -c of the elements that this thread holds of a row, -1 without an encoding.
template <typename L, bool ENCODED>
struct Cosines {
  float values[ENCODED ? L::ITEMS : 1][ENCODED ? L::N : 1];

  __device__ Cosines(const Encoding& encoding, int64_t row, bool there, int width) {
    if constexpr (ENCODED) {
      const unsigned position = there ? encoding.positions[row] : 0;
#pragma unroll
      for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < L::N; ++j) {
          const int column = L::column(i, j);
          values[i][j] = cosine(position, column < width ? encoding.frequencies[column] : 0);
        }
      }
    }
  }

  __device__ float get(int i, int j) const {
    if constexpr (ENCODED) return values[i][j];
    return -1.0f;
  }
};

// Rows b period + t of `batch` matrices of `period` rows: a group takes a t, for TURNS of the b.
template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_forward(const typename L::T* x, Encoding encoding, typename L::T* y, float* peaks, int* indices,
                     int64_t period, int batch, int width, float eps) {
  const bool there = L::row() < period;
  const Cosines<L, ENCODED> cosines(encoding, L::row(), there, width);
  const int first = blockIdx.y * TURNS, end = min(first + TURNS, batch);
  for (int b = first; b < end; ++b) {
    const int64_t row = b * period + L::row();
    L current;
    current.load(x, row, there, width);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) largest = fmaxf(largest, fabsf(current.get(i, j)));
    }
    // The thread's first column that holds its largest magnitude.
    int column = 0;
#pragma unroll
    for (int i = L::ITEMS - 1; i >= 0; --i) {
#pragma unroll
      for (int j = L::N - 1; j >= 0; --j) {
        if (fabsf(current.get(i, j)) == largest) column = L::column(i, j);
      }
    }
    const Key key = reduce<L, Largest>(key_of(largest, column), b);
    const float peak = __uint_as_float(unsigned(key >> 32)) + eps;
    const float scale = (ENCODED && there ? encoding.factors[row] : 1.0f) / -peak;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) current.set(i, j, current.get(i, j) * cosines.get(i, j) * scale);
    }
    current.store(y, row, there, width);
    if (L::lane() == 0 && there) {
      peaks[row] = peak;
      indices[row] = int(0xffffffffu - unsigned(key));
    }
  }
}

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_backward(const typename L::T* dy, const typename L::T* x, Encoding encoding, const float* peaks,
                      const int* indices, typename L::T* dx, int64_t period, int batch, int width) {
  const bool there = L::row() < period;
  const Cosines<L, ENCODED> cosines(encoding, L::row(), there, width);
  const int first = blockIdx.y * TURNS, end = min(first + TURNS, batch);
  for (int b = first; b < end; ++b) {
    const int64_t row = b * period + L::row();
    L value, gradient;
    value.load(x, row, there, width);
    gradient.load(dy, row, there, width);
    const float peak = there ? peaks[row] : 1.0f;
    const float scale = (ENCODED && there ? encoding.factors[row] : 1.0f) / -peak;
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) {
        product = fmaf(gradient.get(i, j) * cosines.get(i, j), value.get(i, j), product);
      }
    }
    const float pull = reduce<L, Sum>(product, b) * scale / peak;
    const int index = there ? indices[row] : -1;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) {
        // The largest element carries the row's pull.
        const float x_j = value.get(i, j), sign = float(x_j > 0.0f) - float(x_j < 0.0f);
        const float own = L::column(i, j) == index ? sign * pull : 0.0f;
        gradient.set(i, j, gradient.get(i, j) * cosines.get(i, j) * scale - own);
      }
    }
    gradient.store(dx, row, there, width);
  }
}

struct MaxNormForward {
  static constexpr int ITEMS = 2;
  const void* x;
  Encoding encoding;
  void* y;
  float* peaks;
  int* indices;
  int64_t period;
  int batch, width;
  float eps;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.frequencies ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const dim3 blocks(L::blocks(period), (batch + TURNS - 1) / TURNS);
    max_norm_forward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(
        static_cast<const T*>(x), encoding, static_cast<T*>(y), peaks, indices, period, batch, width, eps);
    return cudaGetLastError();
  }
};

struct MaxNormBackward {
  static constexpr int ITEMS = 2;
  const void *dy, *x;
  Encoding encoding;
  const float* peaks;
  const int* indices;
  void* dx;
  int64_t period;
  int batch, width;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.frequencies ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const dim3 blocks(L::blocks(period), (batch + TURNS - 1) / TURNS);
    max_norm_backward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(static_cast<const T*>(dy),
                                                                     static_cast<const T*>(x), encoding, peaks, indices,
                                                                     static_cast<T*>(dx), period, batch, width);
    return cudaGetLastError();
  }
};

}  // namespace megalin

// x, y [batch, period, width] of a Dtype; factors [batch, period], positions [period] and frequencies [width], or all
// null; peaks, indices [batch, period]; returns a cudaError_t.
extern "C" int megalin_max_norm_forward(const void* x, const float* factors, const int* positions,
                                        const unsigned* frequencies, void* y, float* peaks, int* indices,
                                        int64_t period, int batch, int width, float eps, int dtype,
                                        cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, frequencies};
  const megalin::MaxNormForward launcher{x, encoding, y, peaks, indices, period, batch, width, eps, stream};
  return megalin::with_dtype(launcher, dtype, width, megalin::aligned(x) && megalin::aligned(y));
}

// dy, x, dx [batch, period, width] of a Dtype, the rest as the forward took and gave it; returns a cudaError_t.
extern "C" int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                                         const unsigned* frequencies, const float* peaks, const int* indices, void* dx,
                                         int64_t period, int batch, int width, int dtype, cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, frequencies};
  const megalin::MaxNormBackward launcher{dy, x, encoding, peaks, indices, dx, period, batch, width, stream};
  const bool vectorised = megalin::aligned(dy) && megalin::aligned(x) && megalin::aligned(dx);
  return megalin::with_dtype(launcher, dtype, width, vectorised);
}
