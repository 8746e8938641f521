// MaxNorm over the rows of a matrix: y = f c s x / M with M = max |s x| + eps; f is one factor a row and
// c = cos(p theta) of Cosine RelPE, both or neither. With g = f c s dy: dx = g / M, and
// dx_j -= sign(x_j) sum(g s x) / M^2 at the first j of the largest magnitude.
#include "rows.cuh"

namespace megalin {

// Magnitude in the high bits, inverted column in the low bits: the largest key is the first of the largest magnitudes.
using Key = unsigned long long;

struct Largest {
  static __device__ Key join(Key a, Key b) { return a > b ? a : b; }
};

__device__ inline Key key_of(float x, int column) {
  return Key(__float_as_uint(fabsf(x))) << 32 | (0xffffffffu - unsigned(column));
}

// Factor of each row, and its position, positions[row % period]. The cosines [head_dim] of the position repeat along
// the row; they are fp32 for fp32 rows, otherwise fp16.
struct Encoding {
  const float* factors;
  const int* positions;
  const void* cosines;
  int64_t period;
  int head_dim;
};

template <typename T>
struct Table {
  using Cosine = __half;
};

template <>
struct Table<float> {
  using Cosine = float;
};

// f c of this thread's elements of a row; 1 without an encoding. Loaded before the row is reduced.
template <typename L, bool ENCODED>
struct Gains {
  using Cosine = typename Table<typename L::T>::Cosine;

  struct alignas(sizeof(Cosine) * L::N) Vector {
    Cosine data[L::N];
  };

  Vector cosines[ENCODED ? L::ITEMS : 1];
  float factor = 0.0f;

  __device__ Gains(const Encoding& encoding, int64_t row, int64_t rows, int width) {
    if constexpr (ENCODED) {
      if (row >= rows) return;
      factor = encoding.factors[row];
      const int64_t place = encoding.positions[row % encoding.period];
      const Cosine* source = static_cast<const Cosine*>(encoding.cosines) + place * encoding.head_dim;
      const bool vectorised = encoding.head_dim % L::N == 0;
#pragma unroll
      for (int i = 0; i < L::ITEMS; ++i) {
        const int column = L::column(i, 0);
        const bool inside = column < width;
        if (inside && vectorised) {
          cosines[i] = *reinterpret_cast<const Vector*>(source + column % encoding.head_dim);
        } else {
#pragma unroll
          for (int j = 0; j < L::N; ++j) {
            cosines[i].data[j] = inside ? source[(column + j) % encoding.head_dim] : Cosine(0.0f);
          }
        }
      }
    }
  }

  // f c x, also for the zeros beyond the end of the row; exactly zero if the factor is zero, for any x.
  __device__ float apply(float x, int i, int j) const {
    if constexpr (ENCODED) return factor == 0.0f ? 0.0f : x * (factor * widen(cosines[i].data[j]));
    return x;
  }
};

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_forward(const typename L::T* x, Encoding encoding, const float* scale, typename L::T* y, float* peaks,
                     int* indices, int64_t rows, int width, float eps) {
  const int64_t row = L::row();
  const Gains<L, ENCODED> gains(encoding, row, rows, width);
  L current;
  current.load(x, row, rows, width);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) largest = fmaxf(largest, fabsf(current.get(i, j)));
  }
  // This thread's first column with its largest magnitude.
  int column = 0;
#pragma unroll
  for (int i = L::ITEMS - 1; i >= 0; --i) {
#pragma unroll
    for (int j = L::N - 1; j >= 0; --j) {
      if (fabsf(current.get(i, j)) == largest) column = L::column(i, j);
    }
  }
  const Key key = reduce<L, Largest>(key_of(largest, column));
  const float s = scale ? *scale : 1.0f;
  const float peak = s * __uint_as_float(unsigned(key >> 32)) + eps, inverse = s / peak;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) current.set(i, j, gains.apply(current.get(i, j) * inverse, i, j));
  }
  current.store(y, row, rows, width);
  if (L::lane() == 0 && row < rows) {
    peaks[row] = peak;
    indices[row] = int(0xffffffffu - unsigned(key));
  }
}

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_backward(const typename L::T* dy, const typename L::T* x, Encoding encoding, const float* scale,
                      const float* peaks, const int* indices, typename L::T* dx, int64_t rows, int width) {
  const int64_t row = L::row();
  const Gains<L, ENCODED> gains(encoding, row, rows, width);
  L value, gradient;
  value.load(x, row, rows, width);
  gradient.load(dy, row, rows, width);
  const float inverse = row < rows ? (scale ? *scale : 1.0f) / peaks[row] : 0.0f;
  // f c dy stays in fp32; in the dtype of dy it would be rounded twice.
  float scaled[L::ITEMS][L::N];
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) {
      scaled[i][j] = gains.apply(gradient.get(i, j), i, j) * inverse;
      product = fmaf(scaled[i][j], value.get(i, j), product);
    }
  }
  const float pull = reduce<L, Sum>(product) * inverse;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < L::N; ++j) gradient.set(i, j, scaled[i][j]);
  }
  const int index = row < rows ? indices[row] : -1;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
    // One vector of the row contains the largest element, the only one with the second term of dx.
    if (unsigned(index - L::column(i, 0)) < unsigned(L::N)) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) {
        const float x_j = value.get(i, j), sign = float(x_j > 0.0f) - float(x_j < 0.0f);
        if (L::column(i, j) == index) gradient.set(i, j, scaled[i][j] - sign * pull);
      }
    }
  }
  gradient.store(dx, row, rows, width);
}

struct MaxNormForward {
  static constexpr int ITEMS = 2;
  const void* x;
  Encoding encoding;
  const float* scale;
  void* y;
  float* peaks;
  int* indices;
  int64_t rows;
  int width;
  float eps;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.cosines ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const int64_t blocks = L::blocks(rows);
    max_norm_forward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(
        static_cast<const T*>(x), encoding, scale, static_cast<T*>(y), peaks, indices, rows, width, eps);
    return cudaGetLastError();
  }
};

struct MaxNormBackward {
  static constexpr int ITEMS = 2;
  const void *dy, *x;
  Encoding encoding;
  const float *scale, *peaks;
  const int* indices;
  void* dx;
  int64_t rows;
  int width;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.cosines ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const int64_t blocks = L::blocks(rows);
    max_norm_backward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(static_cast<const T*>(dy),
                                                                     static_cast<const T*>(x), encoding, scale, peaks,
                                                                     indices, static_cast<T*>(dx), rows, width);
    return cudaGetLastError();
  }
};

}  // namespace megalin

// x, y [rows, width] of a Dtype; factors [rows], positions [period] and cosines [places, head_dim] as in Encoding, or
// all three null; scale [], null for 1; peaks, indices [rows]; returns a cudaError_t.
extern "C" int megalin_max_norm_forward(const void* x, const float* factors, const int* positions, const void* cosines,
                                        int64_t period, int head_dim, const float* scale, void* y, float* peaks,
                                        int* indices, int64_t rows, int width, float eps, int dtype,
                                        cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, cosines, period, head_dim};
  const megalin::MaxNormForward launcher{x, encoding, scale, y, peaks, indices, rows, width, eps, stream};
  return megalin::with_dtype(launcher, dtype, width, megalin::aligned(x) && megalin::aligned(y));
}

// dy, x, dx [rows, width] of a Dtype, the rest as passed to or returned by the forward; returns a cudaError_t.
extern "C" int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                                         const void* cosines, int64_t period, int head_dim, const float* scale,
                                         const float* peaks, const int* indices, void* dx, int64_t rows, int width,
                                         int dtype, cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, cosines, period, head_dim};
  const megalin::MaxNormBackward launcher{dy, x, encoding, scale, peaks, indices, dx, rows, width, stream};
  const bool vectorised = megalin::aligned(dy) && megalin::aligned(x) && megalin::aligned(dx);
  return megalin::with_dtype(launcher, dtype, width, vectorised);
}
