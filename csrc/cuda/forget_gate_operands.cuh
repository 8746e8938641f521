// Operands of a chunk of the forget-gate scan, decayed from and to its middle, in the layout of matmuls' results.
//
// Channels are rows and tokens columns: a warp has 16 channels, a thread 16 tokens of two of them. So sums over tokens
// stay in four lanes, and operands rounded to bf16 are left operands without a store.
#pragma once

#include "decay_scan_products.cuh"
#include "forget_gate_arguments.cuh"

namespace megalin {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LEAST = 1.1754943508222875e-38f;
constexpr uint32_t OPEN = 0x461c;  // bf16 of a logit with f = 1 and k = 0, of tokens after the last

// Sum over the four lanes that hold one channel.
__device__ inline float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Cumulative sums over the 64 tokens of both channels, in place: up to each token, or from each token on (REVERSE), with
// or without its own (EXCLUSIVE). Returns the sums over all tokens.
template <bool REVERSE, bool EXCLUSIVE = false>
__device__ float2 cumulate(float (&x)[8][4]) {
  float running[2] = {0.0f, 0.0f};
  const bool odd = (lane() & 1) != REVERSE, upper = ((lane() & 2) != 0) != REVERSE;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int j = REVERSE ? 7 - i : i;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float &first = x[j][2 * r + REVERSE], &second = x[j][2 * r + !REVERSE];
      const float own = first + second;
      const float neighbour = __shfl_xor_sync(0xffffffffu, own, 1), pair = own + neighbour;
      const float others = __shfl_xor_sync(0xffffffffu, pair, 2);
      const float before = running[r] + (odd ? neighbour : 0.0f) + (upper ? others : 0.0f);
      second = EXCLUSIVE ? before + first : before + own;
      first = EXCLUSIVE ? before : before + first;
      running[r] += pair + others;
    }
  }
  return {running[0], running[1]};
}

// The gate's parts of csrc/triton/scans/vector_decay_gates.py.
struct Gate {
  float u, n, s;
  __device__ Gate(float logit, float bound) {
    u = power_of_two(-LOG2_E * fabsf(logit));
    const bool opened = logit >= 0.0f;
    n = opened ? fmaf(bound, u, 1.0f) : bound + u;
    s = opened ? u : 1.0f;
  }
};

// Element e of tile j of a result, of a packed operand of two tiles a step.
__device__ inline float element(const Left (&x)[4], int j, int e) {
  const uint32_t pair = x[j / 2][j % 2 * 2 + e / 2];
  return e % 2 ? high_half(pair) : low_half(pair);
}

// Where this lane's row of 8 x 8 matrices of the warp's 16 channels and the first 16 tokens is in a tile of tokens.
__device__ inline uint32_t matrices_offset() {
  return piece_offset(lane() / 16 * 8 + lane() % 8, threadIdx.x / 32 * 2 + lane() / 8 % 2);
}

// Stores this warp's 16 channels of a tile of tokens, which the warp has written.
__device__ inline void store_channels(uint32_t tile, __nv_bfloat16* target, int64_t stride, int count) {
  const int warp = threadIdx.x / 32;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = 16 * i + lane() / 2, piece = 2 * warp + lane() % 2;
    const uint4 found = load_piece(tile + piece_offset(token, piece));
    if (token < count) write_piece(target + token * stride + 8 * piece, found);
  }
  __syncwarp();
}

// Factors of a chunk's two channels of a thread: 2^m, and 0 where the state entering belongs to another document.
struct Ends {
  float middle[2], to_end[2], continued[2];
};

// Keys and log2 of gates of logits.
__device__ inline void open_gates(const Left (&logit)[4], const float (&bound)[2], float (&key)[8][4],
                                  float (&log_gate)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Gate gate(element(logit, j, e), bound[e / 2]);
      const float inverse = reciprocal(1.0f + gate.u);
      key[j][e] = (1.0f - bound[e / 2]) * gate.s * inverse;
      log_gate[j][e] = fmaxf(log2_of(gate.n * inverse), -127.0f);
    }
  }
}

// Computes x_q from q, x_k from keys, and u - m from u, in place where possible.
__device__ inline Ends decay_from_middle(const float (&key)[8][4], float2 total, float scale, int kind, Left (&x_q)[4],
                                         Left (&x_k)[4], float (&sums)[8][4]) {
  Ends ends{{0.5f * total.x, 0.5f * total.y}, {}, {}};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    ends.to_end[r] = power_of_two(ends.middle[r]);
    ends.continued[r] = kind == 2 ? ends.to_end[r] : 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &first = sums[j][2 * r], &second = sums[j][2 * r + 1];
      first -= ends.middle[r], second -= ends.middle[r];
      x_q[j / 2][j % 2 * 2 + r] = pack(element(x_q, j, 2 * r) * (power_of_two(first) * scale),
                                       element(x_q, j, 2 * r + 1) * (power_of_two(second) * scale));
      x_k[j / 2][j % 2 * 2 + r] = pack(key[j][2 * r] * power_of_two(-first), key[j][2 * r + 1] * power_of_two(-second));
    }
  }
  return ends;
}

// Gives tokens from `count` on an open gate: they decay nothing and add nothing.
__device__ inline void open_after(int count, Left (&logit)[4]) {
  const int c = lane() % 4;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t& pair = logit[j / 2][j % 2 * 2 + r];
      const int token = 8 * j + 2 * c;
      if (token >= count) pair = (pair & 0xffff0000u) | OPEN;
      if (token + 1 >= count) pair = (pair & 0xffffu) | OPEN << 16;
    }
  }
}

// Stores a warpgroup's result [64 tokens, 64 columns] in its columns of rows of tokens, through its panel of `tile`.
__device__ inline void store_rows(const float (&x)[8][4], uint32_t tile, __nv_bfloat16* target, int64_t stride,
                                  int count) {
  const int warp = threadIdx.x / 32, group = warp / 4, start = 16 * (warp % 4), g = lane() / 4, c = lane() % 4;
  const uint32_t first = tile + piece_offset(start + g, 8 * group) + 4 * c;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    store_word(later_piece(first, j), pack(x[j][0], x[j][1]));
    store_word(later_piece(first, j) + 1024, pack(x[j][2], x[j][3]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = start + 4 * i + lane() / 8, piece = 8 * group + lane() % 8;
    const uint4 found = load_piece(tile + piece_offset(token, piece));
    if (token < count) write_piece(target + token * stride + 8 * piece, found);
  }
}

}  // namespace megalin
