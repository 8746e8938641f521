// Scores of the forget-gate scan's chunks with mild decays, and q and k decayed from the chunk's start and to its end.
#pragma once

#include "forget_gate_operands.cuh"

namespace megalin {

constexpr float MILD_LIMIT = 140.0f * LOG2_E;  // as csrc/triton/scans/vector_decay_mild.py

template <int KEY>
struct ScoresShared {
  static constexpr int TILE = KEY / 64 * PANEL_BYTES;
  static constexpr int Q = 0, LOGIT = TILE, Q_START = 2 * TILE, K_END = 3 * TILE, BYTES = 4 * TILE;
};

// 2 where the chunk continues the document of the state entering it, 1 where it starts one, 0 with a start inside.
__device__ inline int document_kind(const int* documents, int64_t first, int count) {
  if (!documents) return 2;
  const int leaving = documents[first + count - 1], entering = documents[first > 0 ? first - 1 : 0];
  return documents[first] != leaving ? 0 : entering == leaving ? 2 : 1;
}

// Writes the scores' lower triangle [64, 64] into a tile: 16 rows a warp, and TILES tiles of columns a warpgroup.
template <int TILES>
__device__ void write_scores(const float (&scores)[TILES][4], uint32_t tile) {
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4, start = 16 * (warp % 4), column = warp / 4 * TILES;
  const uint32_t first = tile + piece_offset(start + g, column) + 4 * c;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int reader = start + g + 8 * half, writer = 8 * (column + j) + 2 * c;
      const float x = writer <= reader ? scores[j][2 * half] : 0.0f;
      const float y = writer < reader ? scores[j][2 * half + 1] : 0.0f;
      store_word(later_piece(first, j) + 1024 * half, pack(x, y));
    }
  }
}

// The same into memory, through `tile`.
template <int TILES>
__device__ void store_scores(const float (&scores)[TILES][4], uint32_t tile, __nv_bfloat16* target) {
  write_scores(scores, tile);
  const int warp = threadIdx.x / 32, start = 16 * (warp % 4), column = warp / 4 * TILES;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < TILES / 2; ++i) {
    const int reader = start + (32 * i + lane()) / TILES, piece = column + lane() % TILES;
    write_piece(target + reader * CHUNK + 8 * piece, load_piece(tile + piece_offset(reader, piece)));
  }
}

template <int KEY>
__global__ void __launch_bounds__(2 * KEY, 256 / KEY) gate_scores(const __grid_constant__ GateScores x) {
  using S = ScoresShared<KEY>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4;

  const int chunks = (x.length + CHUNK - 1) / CHUNK;
  const int64_t at = blockIdx.x;  // batch, head and chunk
  const int row = int(at / chunks), batch = row / x.heads, head = row % x.heads;
  const int64_t first = at % chunks * CHUNK;
  const int count = int(x.length - first < CHUNK ? x.length - first : CHUNK);
  const auto rows_of = [&](const Operand& from) {
    const auto* source = static_cast<const __nv_bfloat16*>(from.data) + batch * from.batch + head * from.head;
    return source + first * from.token;
  };
  load_tile<KEY, 2 * KEY>(base + S::LOGIT, rows_of(x.logit), x.logit.token, count, KEY);
  load_tile<KEY, 2 * KEY>(base + S::Q, rows_of(x.q), x.q.token, count, KEY);
  commit_copies();
  const int channel = 16 * warp + g;
  const float* const bounds = x.bound + head * KEY + channel;
  const float bound[] = {bounds[0], bounds[8]};
  const int kind = document_kind(x.documents ? x.documents + batch * int64_t(x.length) : nullptr, first, count);

  Left logit[4], q[4];
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices_transposed(logit[step], base + S::LOGIT + matrices_offset() + step * 2048);
    load_matrices_transposed(q[step], base + S::Q + matrices_offset() + step * 2048);
  }
  if (count < CHUNK) open_after(count, logit);
  float key[8][4], sums[8][4];
  open_gates(logit, bound, key, sums);
  const float2 total = cumulate<false>(sums);
  const bool mild = __syncthreads_and(kind != 0 && fminf(total.x, total.y) >= -MILD_LIMIT);
  if (threadIdx.x == 0) x.kinds[at] = mild ? kind : 0;
  if (!mild) return;

  const float middle[] = {0.5f * total.x, 0.5f * total.y};
  const float to_end[] = {power_of_two(middle[0]), power_of_two(middle[1])};
  if (c == 0) {
    float* const target = x.through + at * KEY + channel;
    target[0] = kind == 2 ? to_end[0] * to_end[0] : 0.0f, target[8] = kind == 2 ? to_end[1] * to_end[1] : 0.0f;
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Left x_q, x_k, q_start, k_end;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const int j = 2 * step + half / 2, r = half % 2;
      float of_q[2], of_k[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sums[j][2 * r + i] - middle[r];
        of_q[i] = element(q, j, 2 * r + i) * (power_of_two(sum) * x.scale);
        of_k[i] = key[j][2 * r + i] * power_of_two(-sum);
      }
      const float from_start = kind == 2 ? to_end[r] : 0.0f;
      x_q[half] = pack(of_q[0], of_q[1]), x_k[half] = pack(of_k[0], of_k[1]);
      q_start[half] = pack(of_q[0] * from_start, of_q[1] * from_start);
      k_end[half] = pack(of_k[0] * to_end[r], of_k[1] * to_end[r]);
    }
    // A warp has read its channels of q and of the logits: their tiles take the operands.
    const uint32_t target = base + matrices_offset() + step * 2048;
    store_matrices_transposed(target + S::Q, x_q);
    store_matrices_transposed(target + S::LOGIT, x_k);
    store_matrices_transposed(target + S::Q_START, q_start);
    store_matrices_transposed(target + S::K_END, k_end);
  }
  publish_tiles();
  __syncthreads();
  constexpr int TILES = 512 / KEY;  // a warpgroup's tiles of columns
  float scores[TILES][4] = {};
  hold_result(scores);
  begin_products();
  multiply_tiles<KEY>(scores, base + S::Q, base + S::LOGIT + warp / 4 * TILES * 1024);
  end_products();
  const int64_t start = at * CHUNK * KEY;
  store_tile<KEY, 2 * KEY>(base + S::Q_START, static_cast<__nv_bfloat16*>(x.q_start) + start, KEY, CHUNK, KEY);
  store_tile<KEY, 2 * KEY>(base + S::K_END, static_cast<__nv_bfloat16*>(x.k_end) + start, KEY, CHUNK, KEY);
  wait_for_products<0>(scores);
  __syncthreads();
  store_scores(scores, base + S::Q, static_cast<__nv_bfloat16*>(x.scores) + at * CHUNK * CHUNK);
}

}  // namespace megalin
