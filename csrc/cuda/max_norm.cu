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

// Factor and position of each row, and the frequency of each column in turns a position: the nearest number and what
// it lacks, [2, width].
struct Encoding {
  const float* factors;
  const int* positions;
  const float* table;
};

// cos(2 pi p (turns + rest)), the angle reduced in turns: exact to 4e-7 for p < 2^24.
__device__ inline float cosine(float position, float turns, float rest) {
  const float angle = position * turns;
  const float error = fmaf(position, turns, -angle) + position * rest;
  const float fraction = angle - rintf(angle) + error;
  const float z = fraction * fraction;
  float y = fmaf(6.528658390045166f, z, -25.967599868774414f);
  y = fmaf(y, z, 60.16762924194336f);
  y = fmaf(y, z, -85.45014190673828f);
  y = fmaf(y, z, 64.93911743164062f);
  y = fmaf(y, z, -19.73920440673828f);
  return fmaf(y, z, 1.0f);
}

// Calls visit(i, j, f c) for the elements of a row that this thread holds.
template <typename L, bool ENCODED, typename Visit>
__device__ void each(const Encoding& encoding, int64_t row, int64_t rows, int width, Visit visit) {
  struct alignas(L::N % 4 == 0 ? 16 : 4) Frequencies {
    float data[L::N];
  };
  const bool there = row < rows;
  const float factor = ENCODED && there ? encoding.factors[row] : 1.0f;
  const float position = ENCODED && there ? float(encoding.positions[row]) : 0.0f;
#pragma unroll
  for (int i = 0; i < L::ITEMS; ++i) {
    const int column = L::column(i, 0);
    if (column >= width) continue;
    if constexpr (ENCODED) {
      const Frequencies turns = *reinterpret_cast<const Frequencies*>(encoding.table + column);
      const Frequencies rest = *reinterpret_cast<const Frequencies*>(encoding.table + width + column);
#pragma unroll
      for (int j = 0; j < L::N; ++j) visit(i, j, factor * cosine(position, turns.data[j], rest.data[j]));
    } else {
#pragma unroll
      for (int j = 0; j < L::N; ++j) visit(i, j, 1.0f);
    }
  }
}

template <typename L, bool ENCODED>
__global__ void __launch_bounds__(L::THREADS)
    max_norm_forward(const typename L::T* x, Encoding encoding, typename L::T* y, float* peaks, int* indices,
                     int64_t rows, int width, float eps) {
  int phase = 0;
  L current, next;
  if constexpr (L::AHEAD) next.load(x, L::first_row(), rows, width);
  // Every thread of a block takes the same turns, for the barrier.
  for (int64_t row = L::first_row(); row - threadIdx.x / L::LANES < rows; row += L::stride(), phase ^= 1) {
    current.advance(next, x, row, rows, width);
    Key key = 0;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) {
        key = Largest::join(key, key_of(current.get(i, j), L::column(i, j)));
      }
    }
    key = reduce<L, Largest>(key, phase);
    const float peak = __uint_as_float(unsigned(key >> 32)) + eps, inverse = 1.0f / peak;
    // Zero exactly where the factor is, whatever the row holds.
    const bool blank = ENCODED && row < rows && encoding.factors[row] == 0.0f;
    each<L, ENCODED>(encoding, row, rows, width, [&](int i, int j, float gain) {
      current.set(i, j, blank ? 0.0f : current.get(i, j) * inverse * gain);
    });
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
  int phase = 0;
  L value, gradient, next_value, next_gradient;
  if constexpr (L::AHEAD) {
    next_value.load(x, L::first_row(), rows, width);
    next_gradient.load(dy, L::first_row(), rows, width);
  }
  for (int64_t row = L::first_row(); row - threadIdx.x / L::LANES < rows; row += L::stride(), phase ^= 1) {
    value.advance(next_value, x, row, rows, width);
    gradient.advance(next_gradient, dy, row, rows, width);
    const bool there = row < rows;
    const float inverse = there ? 1.0f / peaks[row] : 0.0f;
    const int index = there ? indices[row] : 0;
    const bool blank = ENCODED && there && encoding.factors[row] == 0.0f;
    // f c dy / M in fp32: in the dtype of dy it would be rounded twice.
    float scaled[L::ITEMS][L::N] = {};
    float product = 0.0f;
    each<L, ENCODED>(encoding, row, rows, width, [&](int i, int j, float gain) {
      scaled[i][j] = blank ? 0.0f : gradient.get(i, j) * gain * inverse;
      product = fmaf(scaled[i][j], blank ? 0.0f : value.get(i, j), product);
    });
    const float pull = reduce<L, Sum>(product, phase) * inverse;
#pragma unroll
    for (int i = 0; i < L::ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < L::N; ++j) {
        const float x_j = value.get(i, j), sign = float(x_j > 0.0f) - float(x_j < 0.0f);
        gradient.set(i, j, L::column(i, j) == index ? scaled[i][j] - sign * pull : scaled[i][j]);
      }
    }
    gradient.store(dx, row, rows, width);
  }
}

struct MaxNormForward {
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
    return encoding.table ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    int blocks = 0;
    if (cudaError_t error = resident_blocks<L>(max_norm_forward<L, ENCODED>, rows, &blocks)) return error;
    max_norm_forward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(
        static_cast<const T*>(x), encoding, static_cast<T*>(y), peaks, indices, rows, width, eps);
    return cudaGetLastError();
  }
};

struct MaxNormBackward {
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
    return encoding.table ? start<L, true>() : start<L, false>();
  }

  template <typename L, bool ENCODED>
  cudaError_t start() const {
    using T = typename L::T;
    int blocks = 0;
    if (cudaError_t error = resident_blocks<L>(max_norm_backward<L, ENCODED>, rows, &blocks)) return error;
    max_norm_backward<L, ENCODED><<<blocks, L::THREADS, 0, stream>>>(static_cast<const T*>(dy),
                                                                     static_cast<const T*>(x), encoding, peaks, indices,
                                                                     static_cast<T*>(dx), rows, width);
    return cudaGetLastError();
  }
};

}  // namespace megalin

// x, y [rows, width] of a Dtype; factors, positions [rows] and table [2, width], or all null; peaks, indices [rows];
// returns a cudaError_t.
extern "C" int megalin_max_norm_forward(const void* x, const float* factors, const int* positions, const float* table,
                                        void* y, float* peaks, int* indices, int64_t rows, int width, float eps,
                                        int dtype, cudaStream_t stream) {
  using megalin::aligned;
  const megalin::MaxNormForward launcher{x,    {factors, positions, table}, y, peaks, indices, rows, width, eps,
                                         stream};
  return megalin::with_dtype(launcher, dtype, width, aligned(x) && aligned(y) && aligned(table));
}

// dy, x, dx [rows, width] of a Dtype, the rest as the forward took and gave it; returns a cudaError_t.
extern "C" int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                                         const float* table, const float* peaks, const int* indices, void* dx,
                                         int64_t rows, int width, int dtype, cudaStream_t stream) {
  using megalin::aligned;
  const megalin::MaxNormBackward launcher{dy, x, {factors, positions, table}, peaks, indices, dx, rows, width, stream};
  return megalin::with_dtype(launcher, dtype, width, aligned(dy) && aligned(x) && aligned(dx) && aligned(table));
}
