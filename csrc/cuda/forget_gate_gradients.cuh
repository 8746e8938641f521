// Gradients of the forget-gate scan in one pass over the chunks with mild decays (csrc/triton/scans/vector_decay_mild.py).
//
// With u_t = log2 of the gates' product up to t, m half of the chunk's, S the state entering and D the gradient of the
// state leaving, per chunk and channel:
//
//     x_q,t = scale q_t 2^(u_t - m)    dx_q = 2^m S dO^T + x_k^T G^T    G = strict lower triangle of dO V^T
//     x_k,t = k_t 2^(m - u_t)          dx_k = 2^m D V^T + x_q^T G       (the diagonal has no decay: added to dq and dk)
//     d log f_t = 2^(2m) <S, D> + sum of x_k 2^m D V^T + sum over s >= t of (x_q dx_q - x_k dx_k)_s
//
// A block computes 64 channels of a chunk. Results have channels as rows and tokens as columns, so that a thread holds
// 16 tokens of two channels, sums over tokens stay in a warp, and x_q and x_k are left operands without a store.
#pragma once

#include "forget_gate_operands.cuh"

namespace megalin {

template <int VALUE>
struct GateShared {
  static constexpr int TILE = VALUE / 64 * PANEL_BYTES;
  static constexpr int V = 0, OUTPUT = TILE, STATE = 2 * TILE, LOADED = 3 * TILE;
  // q and the logits first, then the gradient of the state.
  static constexpr int Q = LOADED, LOGIT = LOADED + PANEL_BYTES, STATE_GRADIENT = LOADED;
  static constexpr int SCORES = LOADED + 2 * PANEL_BYTES, OWN = SCORES + PANEL_BYTES, THROUGH = OWN + CHUNK * 4;
  static constexpr int BYTES = THROUGH + VALUE / 64 * CHUNK * 4;
};

// Stores the pairs [64, 64] of a token and an earlier one, zeros elsewhere, and those of a token with itself: 16 rows a
// warp, and TILES tiles of columns a warpgroup.
template <int TILES>
__device__ void store_pairs(const float (&pairs)[TILES][4], uint32_t tile, float* own) {
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4, start = 16 * (warp % 4), column = warp / 4 * TILES;
  const uint32_t first = tile + piece_offset(start + g, column) + 4 * c;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int reader = start + g + 8 * half, writer = 8 * (column + j) + 2 * c;
      const float x = pairs[j][2 * half], y = pairs[j][2 * half + 1];
      if (writer == reader) own[reader] = x;
      if (writer + 1 == reader) own[reader] = y;
      const uint32_t pair = pack(writer < reader ? x : 0.0f, writer + 1 < reader ? y : 0.0f);
      store_word(later_piece(first, j) + 1024 * half, pair);
    }
  }
}

__device__ inline void clear(float (&x)[8][4]) {
#pragma unroll
  for (auto& tile : x) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
}

// Writes dq into this warp's channels of a tile of tokens, and x_q dx_q into dg.
__device__ inline void finish_queries(const float (&dx)[8][4], const Left (&x_q)[4], const Left (&x_k)[4],
                                      const float (&sums)[8][4], const float* own, float scale, uint32_t tile,
                                      float (&dg)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Left result;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int j = 2 * step + half / 2, r = half % 2;
      float dq[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = 2 * r + i;
        dg[j][e] = element(x_q, j, e) * dx[j][e];
        dq[i] = (dx[j][e] + own[8 * j + lane() % 4 * 2 + i] * element(x_k, j, e)) * (power_of_two(sums[j][e]) * scale);
      }
      result[half] = pack(dq[0], dq[1]);
    }
    store_matrices_transposed(tile + matrices_offset() + step * 2048, result);
  }
}

// Subtracts x_k dx_k from dg, and turns dx_k into dk.
__device__ inline void finish_keys(const Left (&x_q)[4], const Left (&x_k)[4], const float (&sums)[8][4],
                                   const float* own, float (&dx)[8][4], float (&dg)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dg[j][e] -= element(x_k, j, e) * dx[j][e];
      dx[j][e] += own[8 * j + lane() % 4 * 2 + e % 2] * element(x_q, j, e);
      dx[j][e] *= power_of_two(-sums[j][e]);
    }
  }
}

// Partial sums over 64 values of S D, one for each channel and panel.
template <int VALUE>
__device__ void multiply_states(uint32_t state, uint32_t gradient, float* sums) {
  const int row = threadIdx.x % CHUNK, panel = threadIdx.x / CHUNK;
  if (panel >= VALUE / 64) return;
  float sum = 0.0f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint32_t offset = piece_offset(row, 8 * panel + piece);
    const uint4 x = load_piece(state + offset), y = load_piece(gradient + offset);
    const uint32_t left[] = {x.x, x.y, x.z, x.w}, right[] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fmaf(low_half(left[i]), low_half(right[i]), sum);
      sum = fmaf(high_half(left[i]), high_half(right[i]), sum);
    }
  }
  sums[panel * CHUNK + row] = sum;
}

// Gradients of the logits, and the sums over tokens of those of the bounds, from those of k and of log f.
__device__ inline float2 gate_gradients_of(const Left (&logit)[4], const float (&bound)[2], const float (&dk)[8][4],
                                           const float (&dg)[8][4], int count, uint32_t tile) {
  float of_bound[2] = {0.0f, 0.0f}, of_keys[2] = {0.0f, 0.0f};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Left result;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int j = 2 * step + half / 2, r = half % 2;
      float found[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = 2 * r + i;
        const Gate gate(element(logit, j, e), bound[r]);
        const float d = 1.0f + gate.u, inverse = reciprocal(fmaxf(gate.n * d, LEAST));
        const float y = dg[j][e] - gate.n * gate.n * inverse * dk[j][e];
        // u / (N D) first: it is at most 1, where y / (N D) may overflow.
        found[i] = (1.0f - bound[r]) * gate.u * inverse * y;
        // Tokens after the last have no dk, but a dg.
        const float factor = bound[r] < LEAST ? -1.0f : gate.s * d * inverse;
        if (8 * j + lane() % 4 * 2 + i < count) of_bound[r] = fmaf(factor, y, of_bound[r]);
        of_keys[r] += dk[j][e];
      }
      result[half] = pack(found[0], found[1]);
    }
    store_matrices_transposed(tile + matrices_offset() + step * 2048, result);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) of_bound[r] -= bound[r] < LEAST ? of_keys[r] : 0.0f;
  return {sum_of_quad(of_bound[0]), sum_of_quad(of_bound[1])};
}

template <int VALUE>
__global__ void __launch_bounds__(128, 3) gate_gradients(const __grid_constant__ GateGradients x) {
  using S = GateShared<VALUE>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  float* const own = reinterpret_cast<float*>(memory + S::OWN);
  float* const through = reinterpret_cast<float*>(memory + S::THROUGH);
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4;

  const int groups = x.key / 64, chunks = (x.length + CHUNK - 1) / CHUNK;
  const int64_t at = blockIdx.x / groups;  // batch, head and chunk
  const int kind = x.kinds[at];
  if (kind == 0) return;
  const int column = blockIdx.x % groups * 64, row = int(at / chunks);
  const int batch = row / x.heads, head = row % x.heads;
  const int64_t first = at % chunks * CHUNK;
  const int count = int(x.length - first < CHUNK ? x.length - first : CHUNK);
  const auto rows_of = [&](const Operand& from, int start) {
    const auto* source = static_cast<const __nv_bfloat16*>(from.data) + batch * from.batch + head * from.head + start;
    return source + first * from.token;
  };
  const auto load_state = [&](uint32_t tile, const void* states) {
    const auto* source = static_cast<const __nv_bfloat16*>(states) + (at * x.key + column) * VALUE;
    load_tile<VALUE, 128>(tile, source, VALUE, CHUNK, VALUE);
  };
  load_tile<64, 128>(base + S::LOGIT, rows_of(x.logit, column), x.logit.token, count, 64);
  load_tile<64, 128>(base + S::Q, rows_of(x.q, column), x.q.token, count, 64);
  commit_copies();
  load_tile<VALUE, 128>(base + S::OUTPUT, rows_of(x.output, 0), x.output.token, count, VALUE);
  load_tile<VALUE, 128>(base + S::V, rows_of(x.v, 0), x.v.token, count, VALUE);
  load_state(base + S::STATE, x.states);
  commit_copies();
  const float* const bounds = x.bound + head * x.key + column + 16 * warp + g;
  const float bound[] = {bounds[0], bounds[8]};

  Left logit[4], x_q[4], x_k[4];
  wait_for_copies<1>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices_transposed(logit[step], base + S::LOGIT + matrices_offset() + step * 2048);
    load_matrices_transposed(x_q[step], base + S::Q + matrices_offset() + step * 2048);
  }
  __syncthreads();
  load_state(base + S::STATE_GRADIENT, x.state_gradients);
  commit_copies();
  if (count < CHUNK) open_after(count, logit);
  float sums[8][4];
  Ends ends;
  {
    float key[8][4];
    open_gates(logit, bound, key, sums);
    const float2 total = cumulate<false>(sums);
    ends = decay_from_middle(key, total, x.scale, kind, x_q, x_k, sums);
  }

  wait_for_copies<1>();
  publish_tiles();
  __syncthreads();
  float dx[8][4] = {};
  {
    float pairs[8][4] = {};
    hold_result(dx);
    hold_result(pairs);
    begin_products();
    multiply_tiles<VALUE>(pairs, base + S::OUTPUT, base + S::V);
    end_products();
    multiply_tiles<VALUE>(dx, base + S::STATE, base + S::OUTPUT);
    end_products();
    wait_for_products<1>(pairs);
    store_pairs(pairs, base + S::SCORES, own);
  }
  publish_tiles();
  __syncthreads();
  wait_for_products<0>(dx);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dx[j][e] *= ends.continued[e / 2];
  }
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply<Rows::N>(dx, x_k[step], base + S::SCORES, step);
  end_products();
  wait_for_products<0>(dx);

  __syncthreads();  // All warps have multiplied with dO, whose tile the results take.
  float dg[8][4];
  finish_queries(dx, x_q, x_k, sums, own, x.scale, base + S::OUTPUT, dg);
  wait_for_copies<0>();
  publish_tiles();
  __syncthreads();
  clear(dx);
  hold_result(dx);
  begin_products();
  multiply_tiles<VALUE>(dx, base + S::STATE_GRADIENT, base + S::V);
  end_products();
  const int64_t stride = int64_t(x.heads) * x.key, start = (batch * int64_t(x.length) + first) * stride + head * x.key;
  store_channels(base + S::OUTPUT, static_cast<__nv_bfloat16*>(x.dq) + start + column, stride, count);
  multiply_states<VALUE>(base + S::STATE, base + S::STATE_GRADIENT, through);
  wait_for_products<0>(dx);

  float constant[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dx[j][e] *= ends.to_end[e / 2];
      constant[e / 2] = fmaf(element(x_k, j, e), dx[j][e], constant[e / 2]);
    }
  }
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply<Rows::K>(dx, x_q[step], base + S::SCORES, step);
  end_products();
  __syncthreads();
  load_tile<64, 128>(base + S::STATE, rows_of(x.logit, column), x.logit.token, count, 64);
  commit_copies();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    constant[r] = sum_of_quad(constant[r]);
#pragma unroll
    for (int panel = 0; panel < VALUE / 64; ++panel) {
      constant[r] += through[panel * CHUNK + 16 * warp + g + 8 * r] * ends.to_end[r] * ends.continued[r];
    }
  }
  wait_for_products<0>(dx);
  finish_keys(x_q, x_k, sums, own, dx, dg);
  cumulate<true>(dg);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dg[j][e] += constant[e / 2];
  }
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices_transposed(logit[step], base + S::STATE + matrices_offset() + step * 2048);
  }
  const float2 of_bound = gate_gradients_of(logit, bound, dx, dg, count, base + S::OUTPUT);
  store_channels(base + S::OUTPUT, static_cast<__nv_bfloat16*>(x.dlogit) + start + column, stride, count);
  if (c == 0) {
    float* const target = x.dbound + at * x.key + column + 16 * warp + g;
    target[0] = of_bound.x, target[8] = of_bound.y;
  }
}

}  // namespace megalin
