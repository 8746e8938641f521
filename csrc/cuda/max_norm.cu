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

// Factor and position of each row, and the frequency of each column in 2^-32 turns a position.
struct Encoding {
  const float* factors;
  const int* positions;
  const unsigned* frequencies;
};

// Rows that a group takes one after the other, where they share frequencies.
constexpr int ENCODED_TURNS = 8;

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

// f c of the elements that this thread holds of a row, one without an encoding.
template <typename L, bool ENCODED>
struct Gains {
  unsigned frequencies[ENCODED ? L::ITEMS : 1][ENCODED ? L::N : 1];
  float factor = 1.0f;
  unsigned position = 0;

  __device__ Gains(const Encoding& encoding, int width) {
    if constexpr (ENCODED) {
#pragma unroll
      for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < L::N; ++j) {
          const int column = L::column(i, j);
          frequencies[i][j] = column < width ? encoding.frequencies[column] : 0;
        }
      }
    }
  }

  __device__ void take(const Encoding& encoding, int64_t row, int64_t rows) {
    if constexpr (ENCODED) {
      factor = row < rows ? encoding.factors[row] : 0.0f;
      position = row < rows ? encoding.positions[row] : 0;
    }
  }

  // f c x; zero exactly where the factor is, whatever x.
  __device__ float apply(float x, int i, int j) const {
    if constexpr (ENCODED) return factor == 0.0f ? 0.0f : x * (-factor * cosine(position, frequencies[i][j]));
    return x;
  }
};

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_forward(const typename L::T* x, Encoding encoding, typename L::T* y, float* peaks, int* indices,
                     int64_t rows, int width, float eps) {
  constexpr int TURNS = ENCODED ? ENCODED_TURNS : 1;
  Gains<L, ENCODED> gains(encoding, width);
  for (int turn = 0; turn < TURNS; ++turn) {
    const int64_t row = L::row(TURNS, turn);
    L current;
    current.load(x, row, rows, width);
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
    const Key key = reduce<L, Largest>(key_of(largest, column), turn);
    const float peak = __uint_as_float(unsigned(key >> 32)) + eps, inverse = 1.0f / peak;
    gains.take(encoding, row, rows);
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
}

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_backward(const typename L::T* dy, const typename L::T* x, Encoding encoding, const float* peaks,
                      const int* indices, typename L::T* dx, int64_t rows, int width) {
  constexpr int TURNS = ENCODED ? ENCODED_TURNS : 1;
  Gains<L, ENCODED> gains(encoding, width);
  for (int turn = 0; turn < TURNS; ++turn) {
    const int64_t row = L::row(TURNS, turn);
    L value, gradient;
    value.load(x, row, rows, width);
    gradient.load(dy, row, rows, width);
    const float inverse = row < rows ? 1.0f / peaks[row] : 0.0f;
    gains.take(encoding, row, rows);
    // f c dy stays in fp32: in the dtype of dy it would be rounded twice.
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
    const float pull = reduce<L, Sum>(product, turn) * inverse;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) gradient.set(i, j, scaled[i][j]);
    }
    const int index = row < rows ? indices[row] : -1;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
      // One vector of the whole row holds the largest element, which carries the row's pull.
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
}

struct MaxNormForward {
  static constexpr int ITEMS = 2;
  const void* x;
  Encoding encoding;
  void* y;
  float* peaks;
  int* indices;
  int64_t rows;
  int width;
  float eps;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.frequencies ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const int64_t blocks = L::blocks(rows, ENCODED ? ENCODED_TURNS : 1);
    max_norm_forward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(
        static_cast<const T*>(x), encoding, static_cast<T*>(y), peaks, indices, rows, width, eps);
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
  int64_t rows;
  int width;
  cudaStream_t stream;

  template <typename L>
  cudaError_t run() const {
    return encoding.frequencies ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    const int64_t blocks = L::blocks(rows, ENCODED ? ENCODED_TURNS : 1);
    max_norm_backward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(static_cast<const T*>(dy),
                                                                     static_cast<const T*>(x), encoding, peaks, indices,
                                                                     static_cast<T*>(dx), rows, width);
    return cudaGetLastError();
  }
};

}  // namespace megalin

// x, y [rows, width] of a Dtype; factors, positions [rows] and frequencies [width], or all null; peaks, indices [rows];
// returns a cudaError_t.
extern "C" int megalin_max_norm_forward(const void* x, const float* factors, const int* positions,
                                        const unsigned* frequencies, void* y, float* peaks, int* indices, int64_t rows,
                                        int width, float eps, int dtype, cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, frequencies};
  const megalin::MaxNormForward launcher{x, encoding, y, peaks, indices, rows, width, eps, stream};
  return megalin::with_dtype(launcher, dtype, width, megalin::aligned(x) && megalin::aligned(y));
}

// dy, x, dx [rows, width] of a Dtype, the rest as the forward took and gave it; returns a cudaError_t.
extern "C" int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                                         const unsigned* frequencies, const float* peaks, const int* indices, void* dx,
                                         int64_t rows, int width, int dtype, cudaStream_t stream) {
  const megalin::Encoding encoding{factors, positions, frequencies};
  const megalin::MaxNormBackward launcher{dy, x, encoding, peaks, indices, dx, rows, width, stream};
  const bool vectorised = megalin::aligned(dy) && megalin::aligned(x) && megalin::aligned(dx);
  return megalin::with_dtype(launcher, dtype, width, vectorised);
}
