// Gradients of the forget-gate scan from chunk to chunk in reverse, with the gradient of the state in registers.
//
// With D the gradient of the state leaving a chunk, S' = 2^m S of forget_gate_sweep.cuh and D' = 2^m D, for mild decays:
//
//     dx_q = S' dO^T + x_k^T G^T     G = strict lower triangle of dO V^T
//     dx_k = D' V^T + x_q^T G        (the diagonal has no decay: added to dq and dk)
//     dV   = x_k D' + tril(x_q x_k^T)^T dO
//     d log f_t = <S', D'> + sum of x_k D' V^T + sum over s >= t of (x_q dx_q - x_k dx_k)_s
//     D_{n-1}   = 2^m (D' + x_q^T dO)
//
// With steep decays D' = D, which is stored for the kernels of csrc/triton/scans/vector_decay_chunk.py: they compute all
// but dV.
#pragma once

#include "forget_gate_sweep.cuh"

namespace megalin {

template <int WIDTH>
struct ReverseShared {
  static constexpr int TILE = WIDTH / 64 * PANEL_BYTES, STATES = WIDTH / 64 * TILE;
  static constexpr int Q = 0, LOGIT = TILE, V = 2 * TILE, OUTPUT = 3 * TILE, STAGE = 4 * TILE;
  static constexpr int STATE = 2 * STAGE, GRADIENT = STATE + STATES, KEY = GRADIENT + STATES, SCORES = KEY + TILE;
  static constexpr int PAIRS = SCORES + PANEL_BYTES, OWN = PAIRS + PANEL_BYTES, BYTES = OWN + CHUNK * 4;
};

// Writes the transposed scores [64 writers, 64 readers], zero where the reader precedes the writer, into a tile.
template <int TILES>
__device__ void write_transposed_scores(const float (&scores)[TILES][4], uint32_t tile) {
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4, start = 16 * (warp % 4), column = warp / 4 * TILES;
  const uint32_t first = tile + piece_offset(start + g, column) + 4 * c;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int writer = start + g + 8 * half, reader = 8 * (column + j) + 2 * c;
      const float x = writer <= reader ? scores[j][2 * half] : 0.0f;
      const float y = writer <= reader + 1 ? scores[j][2 * half + 1] : 0.0f;
      store_word(later_piece(first, j) + 1024 * half, pack(x, y));
    }
  }
}

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

// Transposes a tile [64, 64] into another one.
__device__ inline void transpose_tile(uint32_t from, uint32_t to, int warps) {
  for (int block = threadIdx.x / 32; block < 16; block += warps) {
    Left x;
    const int row = block / 4, column = block % 4;
    load_matrices(x, from + piece_offset(16 * row + lane() % 16, 2 * column + lane() / 16));
    // Matrices of x: rows 0 and 8 of the first eight columns, then of the last.
    store_matrices_transposed(to + piece_offset(16 * column + lane() / 16 * 8 + lane() % 8, 2 * row + lane() / 8 % 2), x);
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

// <S', D'> of both channels: S' from its tile, D' in registers.
template <int TILES>
__device__ float2 multiply_states(uint32_t tile, const float (&gradient)[TILES][4]) {
  const uint32_t first = tile + piece_offset(threadIdx.x / 32 % 4 * 16 + lane() / 4, 0) + lane() % 4 * 4;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t pair = load_word(later_piece(first, j) + 1024 * r);
      sums[r] = fmaf(low_half(pair), gradient[j][2 * r], sums[r]);
      sums[r] = fmaf(high_half(pair), gradient[j][2 * r + 1], sums[r]);
    }
  }
  return {sums[0], sums[1]};
}

template <int WIDTH>
__device__ void reverse_segment(const GateReverse& x) {
  using S = ReverseShared<WIDTH>;
  constexpr int THREADS = 2 * WIDTH, TILES = 512 / WIDTH;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  float* const own = reinterpret_cast<float*>(memory + S::OWN);
  const int warp = threadIdx.x / 32, group = warp / 4, g = lane() / 4, c = lane() % 4;
  const int chunks = (x.length + CHUNK - 1) / CHUNK;
  const int segment = blockIdx.x % x.segments, row = blockIdx.x / x.segments, batch = row / x.heads;
  const int head = row % x.heads, channel = 16 * warp + g;
  const Segment part(segment, x.segment_chunks, chunks);
  const int* const documents = x.documents ? x.documents + batch * int64_t(x.length) : nullptr;
  const auto load = [&](int i) {
    if (i < 0) return;
    const Tokens tokens(part.begin + i, x.length);
    const uint32_t stage = base + i % 2 * S::STAGE;
    const auto load_rows = [&](uint32_t tile, const Operand& from) {
      load_tile<WIDTH, THREADS>(tile, rows_of(from, batch, head, tokens.first, 0), from.token, tokens.count, WIDTH);
    };
    load_rows(stage + S::LOGIT, x.logit), load_rows(stage + S::Q, x.q);
    load_rows(stage + S::V, x.v), load_rows(stage + S::OUTPUT, x.d_output);
  };
  const auto load_state = [&](int i) {
    if (i < 0) return;
    const int64_t at = int64_t(row) * chunks + part.begin + i;
    const auto* source = static_cast<const __nv_bfloat16*>(x.states) + at * WIDTH * WIDTH;
#pragma unroll
    for (int half = 0; half < WIDTH / 64; ++half) {
      load_tile<WIDTH, THREADS>(base + S::STATE + half * S::TILE, source + half * 64 * WIDTH, WIDTH, 64, WIDTH);
    }
  };
  load(part.count - 1), load_state(part.count - 1), commit_copies();
  const float* const bounds = x.bound + head * WIDTH + channel;
  const float bound[] = {bounds[0], bounds[8]};
  const auto place = [&](int j, int r) { return (channel + 8 * r) * WIDTH + 8 * j + 2 * c; };

  float state[WIDTH / 8][4];  // D
  read_state(state, x.d_leaving ? x.d_leaving + int64_t(row) * WIDTH * WIDTH : nullptr, place);
  for (int i = x.segments - 1; i > segment; --i) {
    const int64_t at = int64_t(row) * x.segments + i;
    scale_rows(state, x.decays[at * WIDTH + channel], x.decays[at * WIDTH + channel + 8]);
    add_state(state, x.updates + at * WIDTH * WIDTH, place);
  }

  for (int i = part.count - 1; i >= 0; --i) {
    const Tokens tokens(part.begin + i, x.length);
    const uint32_t stage = base + i % 2 * S::STAGE;
    const int64_t at = int64_t(row) * chunks + part.begin + i;
    const int64_t stride = int64_t(x.heads) * WIDTH;
    const int64_t start = (batch * int64_t(x.length) + tokens.first) * stride + head * WIDTH;
    const int kind = x.kinds[at];
    wait_for_copies<0>();
    __syncthreads();
    load(i - 1), commit_copies();
    Left x_q[4], x_k[4];
    float sums[8][4], before[2] = {1.0f, 1.0f}, after[2] = {1.0f, 1.0f}, through[2];
    {
      load_channels(stage + S::Q, x_q);
      float key[8][4];
      load_gates(stage + S::LOGIT, tokens.count, bound, key, sums);
      if (kind != 0) {
        const Ends ends = decay_from_middle(key, cumulate<false>(sums), x.scale, kind, x_q, x_k, sums);
#pragma unroll
        for (int r = 0; r < 2; ++r) before[r] = ends.to_end[r], after[r] = ends.continued[r];
      } else {
        load_tile<CHUNK, THREADS>(base + S::PAIRS, static_cast<const __nv_bfloat16*>(x.scores) + at * CHUNK * CHUNK,
                                  CHUNK, CHUNK, CHUNK);
        commit_copies();
        const Visible visible = visible_tokens(documents, tokens.first, tokens.count);
        decay_to_ends(stage + S::LOGIT, tokens.count, bound, visible, x.scale, key, sums, x_q, x_k, through);
      }
      store_fragments(stage + S::Q, x_q);
      store_fragments(base + S::KEY, x_k);
    }
    scale_rows(state, before[0], before[1]);
    write_state(state, base + S::GRADIENT + group * S::TILE);
    if (kind == 0) wait_for_copies<0>();
    publish_tiles();
    __syncthreads();

    float2 constant = {0.0f, 0.0f};
    if (kind != 0) {
      constant = multiply_states(base + S::STATE + group * S::TILE, state);
      float scores[TILES][4] = {}, pairs[TILES][4] = {};
      hold_result(scores), hold_result(pairs);
      begin_products();
      multiply_tiles<WIDTH>(scores, base + S::KEY, stage + S::Q + group * TILES * 1024);
      multiply_tiles<WIDTH>(pairs, stage + S::OUTPUT, stage + S::V + group * TILES * 1024);
      end_products();
      wait_for_products<0>(scores);
      wait_for_products<0>(pairs);
      write_transposed_scores(scores, base + S::SCORES);
      store_pairs(pairs, base + S::PAIRS, own);
    } else {
      auto* const target = static_cast<__nv_bfloat16*>(x.d_states) + at * WIDTH * WIDTH;
#pragma unroll
      for (int half = 0; half < WIDTH / 64; ++half) {
        store_tile<WIDTH, THREADS>(base + S::GRADIENT + half * S::TILE, target + half * 64 * WIDTH, WIDTH, 64, WIDTH);
      }
      transpose_tile(base + S::PAIRS, base + S::SCORES, THREADS / 32);
      scale_rows(state, through[0], through[1]);
    }
    publish_tiles();
    __syncthreads();

    hold_result(state);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply<Rows::K>(state, x_q[step], stage + S::OUTPUT, step);
    end_products();
    float dg[8][4], dk[8][4];
    if (kind != 0) {
      float dx[8][4] = {};
      hold_result(dx);
      begin_products();
      multiply_tiles<WIDTH>(dx, base + S::STATE + group * S::TILE, stage + S::OUTPUT);
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply<Rows::N>(dx, x_k[step], base + S::PAIRS, step);
      end_products();
      clear(dk), hold_result(dk);
      begin_products();
      multiply_tiles<WIDTH>(dk, base + S::GRADIENT + group * S::TILE, stage + S::V);
      end_products();
      wait_for_products<1>(dx);
      // The tile of x_q, which all warps have read, takes dq.
      finish_queries(dx, x_q, x_k, sums, own, x.scale, stage + S::Q, dg);
      store_channels(stage + S::Q, static_cast<__nv_bfloat16*>(x.dq) + start, stride, tokens.count);
      wait_for_products<0>(dk);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& sum = r ? constant.y : constant.x;
          sum = fmaf(element(x_k, j, 2 * r), dk[j][2 * r], sum);
          sum = fmaf(element(x_k, j, 2 * r + 1), dk[j][2 * r + 1], sum);
        }
      }
      hold_result(dk);
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply<Rows::K>(dk, x_q[step], base + S::PAIRS, step);
      end_products();
      wait_for_products<0>(dk);
      finish_keys(x_q, x_k, sums, own, dk, dg);
    }
    wait_for_products<0>(state);
    scale_rows(state, after[0], after[1]);
    __syncthreads();  // The tiles of v and of the state are read.
    load_state(i - 1), commit_copies();

    float dv[8][4] = {};
    hold_result(dv);
    begin_products();
    multiply_rows<WIDTH / 16>(dv, base + S::KEY, base + S::GRADIENT + group * PANEL_BYTES, S::TILE);
    multiply_rows<4>(dv, base + S::SCORES, stage + S::OUTPUT + group * PANEL_BYTES, 0);
    end_products();
    if (kind != 0) {
      cumulate<true>(dg);
      constant.x = sum_of_quad(constant.x), constant.y = sum_of_quad(constant.y);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        dg[j][0] += constant.x, dg[j][1] += constant.x, dg[j][2] += constant.y, dg[j][3] += constant.y;
      }
      Left logit[4];
      load_channels(stage + S::LOGIT, logit);
      const float2 of_bound = gate_gradients_of(logit, bound, dk, dg, tokens.count, stage + S::LOGIT);
      store_channels(stage + S::LOGIT, static_cast<__nv_bfloat16*>(x.dlogit) + start, stride, tokens.count);
      if (c == 0) {
        float* const target = x.dbound + at * WIDTH + channel;
        target[0] = of_bound.x, target[8] = of_bound.y;
      }
    }
    wait_for_products<0>(dv);
    store_rows(dv, stage + S::V, static_cast<__nv_bfloat16*>(x.dv) + start, stride, tokens.count);
  }
  if (segment == 0) {
    float* const target = x.d_entering + int64_t(row) * WIDTH * WIDTH;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<float2*>(target + place(j, r)) = make_float2(state[j][2 * r], state[j][2 * r + 1]);
      }
    }
  }
}

}  // namespace megalin
