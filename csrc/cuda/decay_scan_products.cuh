// Matmuls of 64-row warpgroups with tiles: wgmma on GPUs that have it, otherwise the same result with mma in each warp.
//
// wgmma is asynchronous: call `begin_products` before the first matmul of a group, `end_products` after the last, and
// `wait_for_products` before using a result. mma is synchronous, and these functions do nothing.
#pragma once

#include "decay_scan_tiles.cuh"

namespace megalin {

// Layout of the right operand [k, n] in its tile: one row for each n, or one row for each k.
enum class Rows { N, K };

// Keeps a result's values in its registers from here on: the compiler moves no write of them behind the next matmul.
template <int TILES>
__device__ void hold_result(float (&result)[TILES][4]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    asm volatile("" : "+f"(result[j][0]), "+f"(result[j][1]), "+f"(result[j][2]), "+f"(result[j][3])::"memory");
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Makes earlier ordinary writes to shared memory visible to wgmma's reads after the next barrier.
__device__ inline void publish_tiles() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until at most the `PENDING` most recent groups are unfinished; `result` belongs to an older group.
template <int PENDING, int TILES>
__device__ void wait_for_products(float (&result)[TILES][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  hold_result(result);
}

// Matrix descriptor of a tile: groups of eight rows are 1024 bytes apart, panels 8192.
__device__ inline uint64_t descriptor(uint32_t address) {
  constexpr uint64_t LAYOUT = uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(PANEL_BYTES / 16) << 16;
  return LAYOUT | (address & 0x3ffff) / 16;
}

#define MEGALIN_TILE(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define MEGALIN_4_TILES(j) MEGALIN_TILE(j), MEGALIN_TILE(j + 1), MEGALIN_TILE(j + 2), MEGALIN_TILE(j + 3)
#define MEGALIN_12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define MEGALIN_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MEGALIN_32 MEGALIN_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MEGALIN_48 MEGALIN_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MEGALIN_64                                                                                                  \
  MEGALIN_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51" \
             ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <Rows ROWS, int TILES>
__device__ void multiply_step(float (*d)[4], const Left& a, uint64_t b) {
  constexpr int BY_K = ROWS == Rows::K;
  if constexpr (TILES == 8) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MEGALIN_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
                 : MEGALIN_4_TILES(0), MEGALIN_4_TILES(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(BY_K));
  } else if constexpr (TILES == 12) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" MEGALIN_48
                 "}, {%48, %49, %50, %51}, %52, 1, 1, 1, %53;"
                 : MEGALIN_4_TILES(0), MEGALIN_4_TILES(4), MEGALIN_4_TILES(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(BY_K));
  } else {
    static_assert(TILES == 16);
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MEGALIN_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
                 : MEGALIN_4_TILES(0), MEGALIN_4_TILES(4), MEGALIN_4_TILES(8), MEGALIN_4_TILES(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(BY_K));
  }
}

// d [64, N] += a [64, 16] b [16, N], with b the k rows 16 step to 16 step + 15 of the tile.
template <Rows ROWS, int TILES>
__device__ void multiply(float (&d)[TILES][4], const Left& a, uint32_t tile, int step) {
  const uint32_t offset = ROWS == Rows::K ? step * 2048 : step / 4 * PANEL_BYTES + step % 4 * 32;
  multiply_step<ROWS, TILES < 16 ? TILES : 16>(d, a, descriptor(tile + offset));
  if constexpr (TILES > 16) multiply_step<ROWS, TILES - 16>(d + 16, a, descriptor(tile + offset + 2 * PANEL_BYTES));
}

// d [64, N] += a b^T over KEY columns; the rows of tiles a and b are the result's rows and columns.
template <int KEY, int TILES>
__device__ void multiply_tiles(float (&d)[TILES][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < KEY / 16; ++step) {
    const uint32_t offset = step / 4 * PANEL_BYTES + step % 4 * 32;
    const uint64_t left = descriptor(a + offset), right = descriptor(b + offset);
    if constexpr (TILES == 3) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {" MEGALIN_12 "}, %12, %13, 1, 1, 1, 0, 0;"
                   : MEGALIN_TILE(0), MEGALIN_TILE(1), MEGALIN_TILE(2)
                   : "l"(left), "l"(right));
    } else if constexpr (TILES == 4) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" MEGALIN_16 "}, %16, %17, 1, 1, 1, 0, 0;"
                   : MEGALIN_4_TILES(0)
                   : "l"(left), "l"(right));
    } else {
      static_assert(TILES == 8);
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MEGALIN_32 "}, %32, %33, 1, 1, 1, 0, 0;"
                   : MEGALIN_4_TILES(0), MEGALIN_4_TILES(4)
                   : "l"(left), "l"(right));
    }
  }
}

// d [64, 64] += a b over 16 STEPS columns of tile a and rows of tile b, whose tiles of 64 rows are `next` bytes apart.
template <int STEPS>
__device__ void multiply_rows(float (&d)[8][4], uint32_t a, uint32_t b, uint32_t next) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const uint64_t left = descriptor(a + step / 4 * PANEL_BYTES + step % 4 * 32);
    const uint64_t right = descriptor(b + step / 4 * next + step % 4 * 2048);
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MEGALIN_32 "}, %32, %33, 1, 1, 1, 0, 1;"
                 : MEGALIN_4_TILES(0), MEGALIN_4_TILES(4)
                 : "l"(left), "l"(right));
  }
}

#else

__device__ inline void begin_products() {}
__device__ inline void end_products() {}
__device__ inline void publish_tiles() {}

template <int PENDING, int TILES>
__device__ void wait_for_products(float (&)[TILES][4]) {}

template <Rows ROWS, int TILES>
__device__ void multiply(float (&d)[TILES][4], const Left& a, uint32_t tile, int step) {
  const int row = lane() % 8, low = lane() / 8 % 2, high = lane() / 16;
#pragma unroll
  for (int j = 0; j < TILES; j += 2) {
    Left b;
    if constexpr (ROWS == Rows::N) {
      load_matrices(b, tile + piece_offset(8 * (j + high) + row, 2 * step + low));
    } else {
      load_matrices_transposed(b, tile + piece_offset(16 * step + 8 * low + row, j + high));
    }
    multiply_fragments(d[j], a, b[0], b[1]);
    multiply_fragments(d[j + 1], a, b[2], b[3]);
  }
}

template <int KEY, int TILES>
__device__ void multiply_tiles(float (&d)[TILES][4], uint32_t a, uint32_t b) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
  for (int step = 0; step < KEY / 16; ++step) {
    Left left;
    load_matrices(left, a + piece_offset(row, 2 * step + lane() / 16));
    multiply<Rows::N>(d, left, b, step);
  }
}

template <int STEPS>
__device__ void multiply_rows(float (&d)[8][4], uint32_t a, uint32_t b, uint32_t next) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane() % 16;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Left left;
    load_matrices(left, a + piece_offset(row, 2 * step + lane() / 16));
    multiply<Rows::K>(d, left, b + step / 4 * next, step % 4);
  }
}

#endif

}  // namespace megalin
