// States of the forget-gate scan from chunk to chunk, in registers: updates of segments, and the forward.
//
//     S_{n+1} = d_n S_n + K_n^T V_n,    O_n = A_n V_n + Q_n S_n
//
// A_n, Q_n, K_n and d_n are formed from q and the logits of each chunk. With mild decays, x_q and x_k from and to the
// middle m take the place of Q and K: O_n = tril(x_q x_k^T) V + x_q S', S' = 2^m S, S_{n+1} = 2^m (S' + x_k^T V).
// With steep ones the scores A_n come from memory (csrc/triton/scans/vector_decay_chunk.py), and S' = S.
#pragma once

#include "forget_gate_operands.cuh"

namespace megalin {

constexpr float MILD_LIMIT = 140.0f * LOG2_E;  // as csrc/triton/scans/vector_decay_mild.py

// 2 where the chunk continues the document of the state entering it, 1 where it starts one, 0 with a start inside.
__device__ inline int document_kind(const int* documents, int64_t first, int count) {
  if (!documents) return 2;
  const int leaving = documents[first + count - 1], entering = documents[first > 0 ? first - 1 : 0];
  return documents[first] != leaving ? 0 : entering == leaving ? 2 : 1;
}

// The chunk's tokens of the document of the state that enters it, and of the one that leaves it, as bits.
struct Visible {
  uint64_t entering, leaving;
  bool through;
};

__device__ inline uint64_t tokens_of(const int* documents, int64_t first, int count, int wanted) {
  uint64_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 32 * half + lane();
    const bool same = documents[first + (token < count ? token : count - 1)] == wanted;
    bits |= uint64_t(__ballot_sync(0xffffffffu, same)) << 32 * half;
  }
  return bits;
}

__device__ inline Visible visible_tokens(const int* documents, int64_t first, int count) {
  if (!documents) return {~uint64_t(0), ~uint64_t(0), true};
  const int leaving = documents[first + count - 1], entering = documents[first > 0 ? first - 1 : 0];
  return {tokens_of(documents, first, count, entering), tokens_of(documents, first, count, leaving),
          entering == leaving};
}

// An operand times 2^sums, 0 for tokens that are not visible, as left operands.
__device__ inline void decay_rows(const float (&x)[8][4], const float (&sums)[8][4], uint64_t visible, Left (&result)[4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float found[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool seen = visible >> (8 * j + lane() % 4 * 2 + i) & 1;
        found[i] = seen ? x[j][2 * r + i] * power_of_two(sums[j][2 * r + i]) : 0.0f;
      }
      result[j / 2][j % 2 * 2 + r] = pack(found[0], found[1]);
    }
  }
}

// A tile's fragments of this warp's 16 channels.
__device__ inline void load_channels(uint32_t tile, Left (&x)[4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) load_matrices_transposed(x[step], tile + matrices_offset() + step * 2048);
}

__device__ inline void store_fragments(uint32_t tile, const Left (&x)[4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) store_matrices_transposed(tile + matrices_offset() + step * 2048, x[step]);
}

// Keys and log2 of gates of the logits in a tile with `count` tokens.
__device__ inline void load_gates(uint32_t tile, int count, const float (&bound)[2], float (&key)[8][4],
                                  float (&log_gate)[8][4]) {
  Left logit[4];
  load_channels(tile, logit);
  if (count < CHUNK) open_after(count, logit);
  open_gates(logit, bound, key, log_gate);
}

// For steep decays: scale q from the chunk's start and keys to its end, and the decay through it, from keys and gates,
// which are lost; the logits are read again, which takes fewer registers.
__device__ inline void decay_to_ends(uint32_t logits, int count, const float (&bound)[2], const Visible& visible,
                                     float scale, float (&key)[8][4], float (&sums)[8][4], Left (&q)[4], Left (&k)[4],
                                     float (&through)[2]) {
  const float2 total = cumulate<true, true>(sums);
  through[0] = visible.through ? power_of_two(total.x) : 0.0f;
  through[1] = visible.through ? power_of_two(total.y) : 0.0f;
  decay_rows(key, sums, visible.leaving, k);
  load_gates(logits, count, bound, key, sums);
  cumulate<false>(sums);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) key[j][e] = element(q, j, e) * scale;
  }
  decay_rows(key, sums, visible.entering, q);
}

// A state [K, V] in memory at `place(j, r)`, for tile j and channel g + 8 r, in registers; zeros for null.
template <int TILES, typename Place>
__device__ void read_state(float (&state)[TILES][4], const float* source, const Place& place) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 found =
          source ? *reinterpret_cast<const float2*>(source + place(j, r)) : make_float2(0.0f, 0.0f);
      state[j][2 * r] = found.x, state[j][2 * r + 1] = found.y;
    }
  }
}

template <int TILES, typename Place>
__device__ void add_state(float (&state)[TILES][4], const float* source, const Place& place) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 found = *reinterpret_cast<const float2*>(source + place(j, r));
      state[j][2 * r] += found.x, state[j][2 * r + 1] += found.y;
    }
  }
}

// Writes a warpgroup's 64 rows of a state into a tile.
template <int TILES>
__device__ void write_state(const float (&state)[TILES][4], uint32_t tile) {
  const uint32_t first = tile + piece_offset(threadIdx.x / 32 % 4 * 16 + lane() / 4, 0) + lane() % 4 * 4;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    store_word(later_piece(first, j), pack(state[j][0], state[j][1]));
    store_word(later_piece(first, j) + 1024, pack(state[j][2], state[j][3]));
  }
}

template <int TILES>
__device__ void scale_rows(float (&x)[TILES][4], float first, float second) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) x[j][0] *= first, x[j][1] *= first, x[j][2] *= second, x[j][3] *= second;
}

// Bounds of a segment's chunks.
struct Segment {
  int begin, count;
  __device__ Segment(int index, int each, int chunks) : begin(index * each), count(min(each, chunks - index * each)) {}
};

// One chunk's place in the tensors.
struct Tokens {
  int64_t first;
  int count;
  __device__ Tokens(int chunk, int length) : first(int64_t(chunk) * CHUNK), count(min(CHUNK, length - chunk * CHUNK)) {}
};

__device__ inline const __nv_bfloat16* rows_of(const Operand& x, int batch, int head, int64_t token, int column) {
  const auto* data = static_cast<const __nv_bfloat16*>(x.data);
  return data + batch * x.batch + head * x.head + token * x.token + column;
}

template <int VALUE, bool REVERSE>
struct SegmentShared {
  static constexpr int V = 0, LOGIT = VALUE / 64 * PANEL_BYTES, Q = LOGIT + PANEL_BYTES;
  static constexpr int STAGE = Q + (REVERSE ? PANEL_BYTES : 0), BYTES = 2 * STAGE;
};

// Update of the state by each segment for 64 channels, and the decay through it; REVERSE: of the state's gradient, from
// q and the output's gradient (in v). The segment that no other one needs is skipped unless `last`. The forward also
// writes the kind of all chunks: the least over the channels.
template <int VALUE, bool REVERSE>
__device__ void sum_segment(const GateSegments& x) {
  using S = SegmentShared<VALUE, REVERSE>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32, g = lane() / 4, c = lane() % 4;
  const int groups = x.width / 64, chunks = (x.length + CHUNK - 1) / CHUNK;
  const int column = blockIdx.x % groups * 64, segment = blockIdx.x / groups % x.segments;
  const int row = blockIdx.x / groups / x.segments, batch = row / x.heads, head = row % x.heads;
  const bool needed = x.last || segment != (REVERSE ? 0 : x.segments - 1);
  if (REVERSE && !needed) return;
  const Segment part(segment, x.segment_chunks, chunks);
  const int* const documents = x.documents ? x.documents + batch * int64_t(x.length) : nullptr;
  const auto chunk_at = [&](int i) { return part.begin + (REVERSE ? part.count - 1 - i : i); };
  const auto load = [&](int i) {
    if (i < part.count) {
      const Tokens tokens(chunk_at(i), x.length);
      const uint32_t stage = base + i % 2 * S::STAGE;
      load_tile<64, 128>(stage + S::LOGIT, rows_of(x.logit, batch, head, tokens.first, column), x.logit.token,
                         tokens.count, 64);
      if constexpr (REVERSE) {
        load_tile<64, 128>(stage + S::Q, rows_of(x.q, batch, head, tokens.first, column), x.q.token, tokens.count, 64);
      }
      if (needed) {
        load_tile<VALUE, 128>(stage + S::V, rows_of(x.v, batch, head, tokens.first, 0), x.v.token, tokens.count, VALUE);
      }
    }
    commit_copies();
  };
  const int channel = column + 16 * warp + g;
  const float* const bounds = x.bound + head * x.width + channel;
  const float bound[] = {bounds[0], bounds[8]};

  float update[VALUE / 8][4] = {}, decay[2] = {1.0f, 1.0f};
  load(0);
  for (int i = 0; i < part.count; ++i) {
    const Tokens tokens(chunk_at(i), x.length);
    const uint32_t stage = base + i % 2 * S::STAGE;
    wait_for_copies<0>();
    publish_tiles();
    __syncthreads();
    load(i + 1);
    Left operand[4];
    float sums[8][4], key[8][4];
    load_gates(stage + S::LOGIT, tokens.count, bound, key, sums);
    if constexpr (REVERSE) {
      load_channels(stage + S::Q, operand);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) key[j][e] = element(operand, j, e) * x.scale;
      }
    }
    const float2 total = cumulate<!REVERSE, !REVERSE>(sums);
    const Visible visible = visible_tokens(documents, tokens.first, tokens.count);
    if constexpr (!REVERSE) {
      const int kind = document_kind(documents, tokens.first, tokens.count);
      const bool mild = __syncthreads_and(fminf(total.x, total.y) >= -MILD_LIMIT);
      if (threadIdx.x == 0) atomicMin(x.kinds + int64_t(row) * chunks + chunk_at(i), mild ? kind : 0);
    }
    if (!needed) continue;
    decay_rows(key, sums, REVERSE ? visible.entering : visible.leaving, operand);
    const float through[] = {visible.through ? power_of_two(total.x) : 0.0f,
                             visible.through ? power_of_two(total.y) : 0.0f};
    decay[0] *= through[0], decay[1] *= through[1];
    scale_rows(update, through[0], through[1]);
    hold_result(update);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply<Rows::K>(update, operand[step], stage + S::V, step);
    end_products();
    wait_for_products<0>(update);
  }
  if (!needed) return;
  const int64_t at = (int64_t(row) * x.segments + segment) * x.width + channel;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (c == 0) x.decays[at + 8 * r] = decay[r];
#pragma unroll
    for (int j = 0; j < VALUE / 8; ++j) {
      *reinterpret_cast<float2*>(x.updates + (at + 8 * r) * VALUE + 8 * j + 2 * c) =
          make_float2(update[j][2 * r], update[j][2 * r + 1]);
    }
  }
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

template <int WIDTH>
struct SweepShared {
  static constexpr int TILE = WIDTH / 64 * PANEL_BYTES;
  static constexpr int Q = 0, LOGIT = TILE, V = 2 * TILE, STAGE = 3 * TILE;
  static constexpr int STATE = 2 * STAGE, SCORES = STATE + WIDTH / 64 * TILE, OUTPUT = SCORES + PANEL_BYTES;
  static constexpr int BYTES = OUTPUT + TILE;
};

// The forward of a segment: outputs, the states S' entering chunks if wanted, and the final state. A warpgroup has the
// state's rows of 64 keys, and the output's columns of 64 values.
template <int WIDTH>
__device__ void sweep_segment(const GateSweep& x) {
  using S = SweepShared<WIDTH>;
  constexpr int THREADS = 2 * WIDTH, TILES = 512 / WIDTH;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32, group = warp / 4, g = lane() / 4, c = lane() % 4;
  const int chunks = (x.length + CHUNK - 1) / CHUNK;
  const int segment = blockIdx.x % x.segments, row = blockIdx.x / x.segments, batch = row / x.heads;
  const int head = row % x.heads, channel = 16 * warp + g;
  const Segment part(segment, x.segment_chunks, chunks);
  const int* const documents = x.documents ? x.documents + batch * int64_t(x.length) : nullptr;
  const auto load = [&](int i) {
    if (i < part.count) {
      const Tokens tokens(part.begin + i, x.length);
      const uint32_t stage = base + i % 2 * S::STAGE;
      const auto load_rows = [&](uint32_t tile, const Operand& from) {
        load_tile<WIDTH, THREADS>(tile, rows_of(from, batch, head, tokens.first, 0), from.token, tokens.count, WIDTH);
      };
      load_rows(stage + S::LOGIT, x.logit), load_rows(stage + S::Q, x.q), load_rows(stage + S::V, x.v);
    }
    commit_copies();
  };
  load(0);
  const float* const bounds = x.bound + head * WIDTH + channel;
  const float bound[] = {bounds[0], bounds[8]};
  // Offset of tile j, rows g + 8 r, in a state [K, V].
  const auto place = [&](int j, int r) { return (channel + 8 * r) * WIDTH + 8 * j + 2 * c; };

  float state[WIDTH / 8][4];
  read_state(state, x.entering ? x.entering + int64_t(row) * WIDTH * WIDTH : nullptr, place);
  for (int i = 0; i < segment; ++i) {
    const int64_t at = int64_t(row) * x.segments + i;
    scale_rows(state, x.decays[at * WIDTH + channel], x.decays[at * WIDTH + channel + 8]);
    add_state(state, x.updates + at * WIDTH * WIDTH, place);
  }

  for (int i = 0; i < part.count; ++i) {
    const Tokens tokens(part.begin + i, x.length);
    const uint32_t stage = base + i % 2 * S::STAGE;
    const int64_t at = int64_t(row) * chunks + part.begin + i;
    const int kind = x.kinds[at];
    wait_for_copies<0>();
    __syncthreads();
    load(i + 1);
    Left x_k[4];
    float after[2] = {1.0f, 1.0f};  // factors of the state with the chunk's keys
    {
      Left q[4];
      load_channels(stage + S::Q, q);
      float sums[8][4], key[8][4];
      load_gates(stage + S::LOGIT, tokens.count, bound, key, sums);
      float before[2] = {1.0f, 1.0f}, through[2];
      if (kind != 0) {
        const float2 total = cumulate<false>(sums);
        const Ends ends = decay_from_middle(key, total, x.scale, kind, q, x_k, sums);
#pragma unroll
        for (int r = 0; r < 2; ++r) before[r] = ends.continued[r], after[r] = ends.to_end[r];
        store_fragments(stage + S::LOGIT, x_k);
      } else {
        load_tile<CHUNK, THREADS>(base + S::SCORES, static_cast<const __nv_bfloat16*>(x.scores) + at * CHUNK * CHUNK,
                                  CHUNK, CHUNK, CHUNK);
        commit_copies();
        const Visible visible = visible_tokens(documents, tokens.first, tokens.count);
        decay_to_ends(stage + S::LOGIT, tokens.count, bound, visible, x.scale, key, sums, q, x_k, through);
      }
      store_fragments(stage + S::Q, q);
      scale_rows(state, before[0], before[1]);
      write_state(state, base + S::STATE + group * S::TILE);
      if (kind == 0) scale_rows(state, through[0], through[1]);
    }
    if (kind == 0) wait_for_copies<0>();
    publish_tiles();
    __syncthreads();
    float output[8][4] = {}, scores[TILES][4] = {};
    hold_result(output), hold_result(scores), hold_result(state);
    begin_products();
    if (kind != 0) multiply_tiles<WIDTH>(scores, stage + S::Q, stage + S::LOGIT + group * TILES * 1024);
    end_products();
    multiply_rows<WIDTH / 16>(output, stage + S::Q, base + S::STATE + group * PANEL_BYTES, S::TILE);
    end_products();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply<Rows::K>(state, x_k[step], stage + S::V, step);
    end_products();
    if (x.states) {
      auto* const target = static_cast<__nv_bfloat16*>(x.states) + at * WIDTH * WIDTH;
#pragma unroll
      for (int half = 0; half < WIDTH / 64; ++half) {
        store_tile<WIDTH, THREADS>(base + S::STATE + half * S::TILE, target + half * 64 * WIDTH, WIDTH, 64, WIDTH);
      }
    }
    wait_for_products<2>(scores);
    if (kind != 0) write_scores(scores, base + S::SCORES);
    publish_tiles();
    __syncthreads();
    hold_result(output);
    begin_products();
    multiply_rows<4>(output, base + S::SCORES, stage + S::V + group * PANEL_BYTES, 0);
    end_products();
    wait_for_products<0>(output);
    wait_for_products<0>(state);
    scale_rows(state, after[0], after[1]);
    const int64_t stride = int64_t(x.heads) * WIDTH;
    store_rows(output, base + S::OUTPUT,
               static_cast<__nv_bfloat16*>(x.output) + (batch * int64_t(x.length) + tokens.first) * stride + head * WIDTH,
               stride, tokens.count);
  }
  if (segment == x.segments - 1) {
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<float2*>(x.final + int64_t(row) * WIDTH * WIDTH + place(j, r)) =
            make_float2(state[j][2 * r], state[j][2 * r + 1]);
      }
    }
  }
}

}  // namespace megalin
