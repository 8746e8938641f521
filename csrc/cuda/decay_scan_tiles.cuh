// Tiles of 64 tokens in shared memory and their tensor-core primitives: bf16 operands, fp32 accumulation.
//
// A tile consists of panels of 64 columns: rows of 128 bytes whose 16-byte pieces are permuted depending on the row.
// This is wgmma's 128-byte swizzle, and ldmatrix reads it without bank conflicts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace megalin {

constexpr int CHUNK = 64;
constexpr int PANEL_BYTES = CHUNK * 128;

// Left operand of one warp. Fragments, with g = lane / 4 and c = lane % 4:
//   result of a matmul [16, N]: element e of tile j is at row g + 8 (e / 2), column 8 j + 2 c + e % 2;
//   left operand [16, 16]: register i holds columns 2 c + 8 (i / 2) and the next one of row g + 8 (i % 2).
// So two tiles of a result, rounded to bf16, form a left operand.
using Left = uint32_t[4];

__device__ inline int lane() { return threadIdx.x % 32; }

// Byte offset in a tile of a 16-byte piece (8 columns) of a row.
__device__ inline uint32_t piece_offset(int row, int piece) {
  return piece / 8 * PANEL_BYTES + row * 128 + ((piece ^ row) % 8) * 16;
}

// The same of later pieces: `first` is the address of a row's first piece, or of a place in it.
__device__ inline uint32_t later_piece(uint32_t first, int piece) {
  return (first ^ piece % 8 * 16) + piece / 8 * PANEL_BYTES;
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline uint32_t shared_address(const void* pointer) { return __cvta_generic_to_shared(pointer); }

// Asynchronous copy of 16 bytes; writes zeros unless `valid`.
__device__ inline void copy_piece(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void copy_word(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `PENDING` most recently committed groups are unfinished.
template <int PENDING>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void store_word(uint32_t target, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(value) : "memory");
}

__device__ inline uint32_t load_word(uint32_t source) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(source));
  return x;
}

__device__ inline uint4 load_piece(uint32_t source) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(source));
  return x;
}

__device__ inline void write_piece(void* target, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// The 16-byte pieces of a tile that a thread copies: one column of pieces, with rows a multiple of eight apart, so that
// the swizzle is the same for all.
template <int WIDTH, int THREADS>
struct Pieces {
  static constexpr int PIECES = WIDTH / 8, ROWS = THREADS / PIECES, COUNT = CHUNK / ROWS;
  static_assert(ROWS % 8 == 0);
  static __device__ int column() { return threadIdx.x % PIECES * 8; }
  static __device__ int row() { return threadIdx.x / PIECES; }
  static __device__ uint32_t offset() { return piece_offset(row(), threadIdx.x % PIECES); }
};

// Copies a chunk with `count` valid tokens and `columns` valid columns; the rest is filled with zeros.
template <int WIDTH, int THREADS>
__device__ void load_tile(uint32_t tile, const __nv_bfloat16* source, int64_t stride, int count, int columns) {
  using P = Pieces<WIDTH, THREADS>;
  tile += P::offset();
  source += P::row() * stride + P::column();
  const int rows = P::column() < columns ? count - P::row() : 0;
#pragma unroll
  for (int i = 0; i < P::COUNT; ++i) {
    copy_piece(tile + i * P::ROWS * 128, source, i * P::ROWS < rows);
    source += P::ROWS * stride;
  }
}

template <int WIDTH, int THREADS>
__device__ void store_tile(uint32_t tile, __nv_bfloat16* target, int64_t stride, int count, int columns) {
  using P = Pieces<WIDTH, THREADS>;
  tile += P::offset();
  target += P::row() * stride + P::column();
  const int rows = P::column() < columns ? count - P::row() : 0;
#pragma unroll
  for (int i = 0; i < P::COUNT; ++i) {
    const uint4 x = load_piece(tile + i * P::ROWS * 128);
    if (i * P::ROWS < rows) write_piece(target, x);
    target += P::ROWS * stride;
  }
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tensor map of the copy engine (TMA), which moves panels of tensors [B, H, T, width]. A barrier in shared memory
// counts the bytes that arrive. Outside of the tensor, reads give zeros and writes are dropped.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

__device__ inline void start_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity has completed.
__device__ inline void wait_for_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline void copy_panel(uint32_t target, const TensorMap& map, int column, int token, int head, int batch,
                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(target), "l"(&map), "r"(column), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

__device__ inline void write_panel(uint32_t source, const TensorMap& map, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(column), "r"(token), "r"(head), "r"(batch), "r"(source)
               : "memory");
}

__device__ inline void commit_writes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the `PENDING` most recently committed groups have yet to be read from shared memory.
template <int PENDING>
__device__ void wait_for_writes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 x 8 matrices; lane l provides the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(Left& x, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

__device__ inline void load_matrices_transposed(Left& x, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// The inverse of `load_matrices_transposed`.
__device__ inline void store_matrices_transposed(uint32_t row, const Left& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x[i]));
    store_word(__shfl_sync(0xffffffffu, row, 8 * i + lane() / 4) + lane() % 4 * 4, transposed);
  }
#endif
}

__device__ inline void multiply_fragments(float (&d)[4], const Left& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace megalin
