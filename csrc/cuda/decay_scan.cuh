// Linear attention with a fixed scalar decay per head, or none: one kernel computes o, dq, dk and dv.
//
//   o_t = sum_{j <= t} e^{-s (t - j)} (q_t . k_j) v_j + e^{-s (t + 1)} S_0^T q_t
//
//   dq = scan(do, v, k) with transposed states;    dk = scan(v, do, q), dv = scan(k, q, do), both in reverse order
//
// A sequence is cut into as many blocks as fill the GPU. A thread block iterates over the chunks of 64 tokens of one
// block, with S^T [value, key] in registers: each warp holds 16 of its rows. With P = (q k^T) * decay, [64, 64], a
// chunk computes
//
//   o^T = (S^T q^T) * from_start + v^T P^T,    S^T = through S^T + (to_end * v)^T k
//
// The blocks' initial states are computed first: each part of a block gives its contribution, by the second equation
// alone; then the contributions are combined in order. A reverse scan swaps two decays of every token: from the start
// of the chunk, e^{-s (i + 1)}, and to its end, e^{-s (n - 1 - i)}. Both are zero across the start of a document.
#pragma once

#include "decay_scan_arguments.cuh"
#include "decay_scan_products.cuh"

namespace megalin {

constexpr float LOG2_E = 1.4426950408889634f;

__device__ inline float slope_of(const ScanShape& shape, int head) {
  return shape.slopes ? shape.slopes[head] * LOG2_E : 0.0f;  // base-2 exponent
}

__device__ inline const int* documents_of(const ScanShape& shape, int batch) {
  return shape.documents ? shape.documents + int64_t(batch) * shape.length : nullptr;
}

// Scans of one launch, at most two; they read the same tensors at the same time.
struct Scans {
  Scan scan[2];
  int count;
  // Tensor maps of q, k, v and o of each scan, in panels, on GPUs with a copy engine (TMA).
  TensorMap maps[2][4];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool ON_HOPPER = true;
#else
constexpr bool ON_HOPPER = false;
#endif

// Shared memory of a thread block: tiles in pipeline stages, P, and the tokens' documents and factors. With AHEAD, P
// and the factors of a chunk are computed while the previous chunk is processed.
template <int KEY, int VALUE, bool OUTPUT, bool HOPPER>
struct Shared {
  static constexpr bool AHEAD = !OUTPUT || KEY <= 192;
  static constexpr bool ENGINE = HOPPER;  // tiles are copied by TMA
  static constexpr int STAGES = !OUTPUT ? 3 : !AHEAD ? 2 : HOPPER && KEY <= 128 && VALUE <= 128 ? 4 : 3;
  static constexpr int BUFFERS = AHEAD ? 2 : 1;
  // Number of chunks by which q and k are prefetched. o overwrites v in its tile, and the copy engine reads this tile
  // for the duration of a chunk: so v is prefetched one chunk less, or, if there is no spare stage, o has its own tile.
  static constexpr int DISTANCE = STAGES - 1;
  static constexpr bool OWN_TILE = ENGINE && !AHEAD;
  static constexpr int VALUES_DISTANCE = OUTPUT && ENGINE && !OWN_TILE ? DISTANCE - 1 : DISTANCE;
  static constexpr int PANELS = (KEY + 63) / 64;  // of q and k
  static constexpr int KEY_BYTES = PANELS * PANEL_BYTES, VALUE_BYTES = VALUE / 64 * PANEL_BYTES;
  static constexpr int K = OUTPUT ? KEY_BYTES : 0, V = K + KEY_BYTES, STAGE = V + VALUE_BYTES;
  static constexpr int SCORES = STAGES * STAGE, O = SCORES + (OUTPUT ? BUFFERS * PANEL_BYTES : 0);
  static constexpr int SMALL = O + (OWN_TILE ? VALUE_BYTES : 0);

  struct Small {
    uint64_t keys_arrived[STAGES], values_arrived[STAGES];
    int documents[STAGES][CHUNK + 1];  // of the token before the chunk, then of the chunk's tokens
    float decay[2 * CHUNK];            // index: query - key + 64; zero where the query precedes the key
    float2 read[BUFFERS][CHUNK / 2];   // factors on each token's read from the state
    float2 write[BUFFERS][CHUNK / 2];  // factors on each token's write to the state
  };
  static constexpr int BYTES = SMALL + sizeof(Small);
};

// Address of an operand at this thread block's batch, head and column.
__device__ inline const __nv_bfloat16* start_of(const Operand& x, int batch, int head, int column = 0) {
  return static_cast<const __nv_bfloat16*>(x.data) + batch * x.batch + head * x.head + column;
}

// OUTPUT: computes o of a block for each scan, and the final state after the last block. Otherwise: computes the parts'
// contributions to the state from k and v alone, from part `skipped` on, into `leaving` [B H, blocks, key, value].
template <int KEY, int VALUE, bool OUTPUT>
__device__ __forceinline__ void scan_block(const ScanShape& shape, const Scans& scans, int skipped) {
  using S = Shared<KEY, VALUE, OUTPUT, ON_HOPPER>;
  // Columns of P per warpgroup, in tiles of 8; of three groups, the last one drops the columns past CHUNK.
  constexpr int THREADS = 2 * VALUE, GROUPS = VALUE / 64, SEEN = (CHUNK / GROUPS + 7) / 8 * 8;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto& small = *reinterpret_cast<typename S::Small*>(memory + S::SMALL);
  const int warp = threadIdx.x / 32, group = warp / 4, g = lane() / 4, c = lane() % 4;

  const Scan& scan = scans.scan[blockIdx.x % scans.count];
  const int tiles = (shape.value + VALUE - 1) / VALUE, program = blockIdx.x / scans.count;
  const int row = program / tiles, column = program % tiles * VALUE;
  const int batch = row / shape.heads, head = row % shape.heads, block = blockIdx.y + skipped;
  const int columns = shape.value - column;
  const float slope = slope_of(shape, head);
  const int* documents = documents_of(shape, batch);
  const __nv_bfloat16 *q = nullptr, *k = start_of(scan.k, batch, head), *v = start_of(scan.v, batch, head, column);
  if constexpr (OUTPUT) q = start_of(scan.q, batch, head);
  const int64_t o_stride = int64_t(shape.heads) * shape.value;
  auto* const o_start =
      static_cast<__nv_bfloat16*>(scan.o) + int64_t(batch) * shape.length * o_stride + head * shape.value + column;

  const int first = block * shape.block_tokens, tokens = max(0, min(shape.block_tokens, shape.length - first));
  const int chunks = (tokens + CHUNK - 1) / CHUNK;
  const auto start_at = [&](int i) { return first + (shape.reverse ? chunks - 1 - i : i) * CHUNK; };
  const auto stage_at = [&](int i) { return base + i % S::STAGES * S::STAGE; };
  const auto count_at = [&](int i) { return min(shape.length - start_at(i), CHUNK); };
  const auto keys_barrier = [&](int i) { return shared_address(&small.keys_arrived[i % S::STAGES]); };
  const auto values_barrier = [&](int i) { return shared_address(&small.values_arrived[i % S::STAGES]); };
  const TensorMap* const maps = scans.maps[blockIdx.x % scans.count];
  const auto load_keys = [&](int i) {
    const int start = start_at(i), count = count_at(i);
    const uint32_t stage = stage_at(i);
    if constexpr (S::ENGINE) {
      if (threadIdx.x == 0) {
        expect_bytes(keys_barrier(i), S::V);
#pragma unroll
        for (int panel = 0; panel < S::PANELS; ++panel) {
          const uint32_t target = stage + panel * PANEL_BYTES;
          if constexpr (OUTPUT) copy_panel(target, maps[0], panel * 64, start, head, batch, keys_barrier(i));
          copy_panel(target + S::K, maps[1], panel * 64, start, head, batch, keys_barrier(i));
        }
      }
    } else {
      constexpr int WIDTH = 64 * S::PANELS;
      if constexpr (OUTPUT) load_tile<WIDTH, THREADS>(stage, q + start * scan.q.token, scan.q.token, count, shape.key);
      load_tile<WIDTH, THREADS>(stage + S::K, k + start * scan.k.token, scan.k.token, count, shape.key);
    }
    if (documents && threadIdx.x <= CHUNK) {
      const int token = min(max(start - 1 + int(threadIdx.x), 0), start + count - 1);
      copy_word(shared_address(&small.documents[i % S::STAGES][threadIdx.x]), documents + token);
    }
  };
  const auto load_values = [&](int i) {
    const int start = start_at(i);
    const uint32_t target = stage_at(i) + S::V;
    if constexpr (S::ENGINE) {
      if (threadIdx.x > 0) return;
      expect_bytes(values_barrier(i), S::VALUE_BYTES);
#pragma unroll
      for (int panel = 0; panel < VALUE / 64; ++panel) {
        copy_panel(target + panel * PANEL_BYTES, maps[2], column + panel * 64, start, head, batch, values_barrier(i));
      }
    } else {
      load_tile<VALUE, THREADS>(target, v + start * scan.v.token, scan.v.token, count_at(i), columns);
    }
  };
  const auto o_at = [&](int i) { return S::OWN_TILE ? base + S::O : stage_at(i) + S::V; };
  const auto store = [&](int i) {
    if constexpr (S::ENGINE) {
      if (threadIdx.x > 0) return;
#pragma unroll
      for (int panel = 0; panel < VALUE / 64; ++panel) {
        const uint32_t source = o_at(i) + panel * PANEL_BYTES;
        write_panel(source, maps[3], column + panel * 64, start_at(i), head, batch);
      }
      commit_writes();
      return;
    }
    store_tile<VALUE, THREADS>(o_at(i), o_start + start_at(i) * o_stride, o_stride, count_at(i), columns);
  };
  // Bounds check and offset in the stored state of element e of tile j of S^T.
  const auto inside = [&](int j, int e) {
    return column + 16 * warp + g + 8 * (e / 2) < shape.value && 8 * j + 2 * c + e % 2 < shape.key;
  };
  const auto place = [&](int j, int e) {
    const int value = column + 16 * warp + g + 8 * (e / 2), key = 8 * j + 2 * c + e % 2;
    return scan.transposed ? value * shape.key + key : key * shape.value + value;
  };
  const int64_t size = int64_t(shape.key) * shape.value;

  if constexpr (S::ENGINE) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::STAGES; ++i) start_barrier(keys_barrier(i)), start_barrier(values_barrier(i));
      publish_tiles();
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < S::DISTANCE; ++i) {
    if (i < chunks) load_keys(i);
    if (i < chunks && i < S::VALUES_DISTANCE) load_values(i);
    commit_copies();
  }
  float state[KEY / 8][4] = {};
  if constexpr (OUTPUT) {
    if (scan.entering) {
      const float* entering = scan.entering + (int64_t(row) * shape.slots + block) * size;
#pragma unroll
      for (int j = 0; j < KEY / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[j][e] = inside(j, e) ? entering[place(j, e)] : 0.0f;
      }
    }
  }
  for (int i = threadIdx.x; OUTPUT && i < 2 * CHUNK; i += THREADS) {
    const int distance = shape.reverse ? CHUNK - i : i - CHUNK;
    small.decay[i] = distance < 0 ? 0.0f : power_of_two(-slope * distance);
  }

  const auto make_factors = [&](int i) {
    const int index = threadIdx.x, count = count_at(i);
    if (index >= CHUNK) return;
    float from_start = power_of_two(-slope * (index + 1)), to_end = power_of_two(-slope * max(count - 1 - index, 0));
    if (documents) {
      const int* document = small.documents[i % S::STAGES];
      if (document[index + 1] != document[0]) from_start = 0.0f;
      if (document[index + 1] != document[count]) to_end = 0.0f;
    }
    reinterpret_cast<float*>(small.read[i % S::BUFFERS])[index] = shape.reverse ? to_end : from_start;
    reinterpret_cast<float*>(small.write[i % S::BUFFERS])[index] = shape.reverse ? from_start : to_end;
  };
  // q k^T for this warp's 16 rows and the SEEN columns of its warpgroup.
  float scores[SEEN / 8][4];
  const auto begin_scores = [&](int i) {
#pragma unroll
    for (auto& tile : scores) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    begin_products();
    multiply_tiles<KEY>(scores, stage_at(i), stage_at(i) + S::K + group * SEEN * 128);
    end_products();
  };
  const auto scores_at = [&](int i) { return base + S::SCORES + i % S::BUFFERS * PANEL_BYTES; };
  const auto store_scores = [&](int i) {
    const int reader = warp % 4 * 16 + g;
    const float* decay = small.decay + CHUNK + reader - (group * SEEN + 2 * c);
    const int* document = small.documents[i % S::STAGES] + 1;
#pragma unroll
    for (int j = 0; j < SEEN / 8; ++j) {
      const int writer = group * SEEN + 8 * j + 2 * c;
      if (GROUPS * SEEN > CHUNK && writer >= CHUNK) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = scores[j][2 * half] * decay[8 * half - 8 * j];
        float y = scores[j][2 * half + 1] * decay[8 * half - 8 * j - 1];
        if (documents) {
          const int own = document[reader + 8 * half];
          if (document[writer] != own) x = 0.0f;
          if (document[writer + 1] != own) y = 0.0f;
        }
        store_word(scores_at(i) + piece_offset(reader + 8 * half, writer / 8) + 4 * c, pack(x, y));
      }
    }
    publish_tiles();
  };

  // Stores the previous chunk's o, whose tile the next copies overwrite, then starts these copies.
  const auto move_tiles = [&](int i) {
    if (OUTPUT && i > 0) store(i - 1);
    if (i + S::DISTANCE < chunks) load_keys(i + S::DISTANCE);
    if constexpr (S::VALUES_DISTANCE < S::DISTANCE) wait_for_writes<1>();
    if (i + S::VALUES_DISTANCE < chunks) load_values(i + S::VALUES_DISTANCE);
    commit_copies();
  };
  const auto wait_for_keys = [&](int i) {
    if constexpr (S::ENGINE) {
      if (i < chunks) wait_for_barrier(keys_barrier(i), i / S::STAGES % 2);
    }
  };
  const auto wait_for_values = [&](int i) {
    if constexpr (S::ENGINE) wait_for_barrier(values_barrier(i), i / S::STAGES % 2);
  };

  if constexpr (S::AHEAD) {
    wait_for_copies<S::DISTANCE - 1>();
    if constexpr (OUTPUT) wait_for_keys(0);
    publish_tiles();
    __syncthreads();
    if (chunks > 0) make_factors(0);
    if constexpr (OUTPUT) {
      begin_scores(0);
      wait_for_products<0>(scores);
      store_scores(0);
    }
  }

  for (int i = 0; i < chunks; ++i) {
    wait_for_copies<S::DISTANCE - (S::AHEAD ? 2 : 1)>();
    wait_for_keys(OUTPUT && S::AHEAD ? i + 1 : i);
    if constexpr (!OUTPUT) wait_for_values(i);
    publish_tiles();
    __syncthreads();
    const uint32_t stage = stage_at(i);
    float o[OUTPUT ? CHUNK / 8 : 1][4] = {};
    if constexpr (!S::AHEAD) move_tiles(i);
    if constexpr (OUTPUT) {
      if constexpr (!S::AHEAD) begin_scores(i);
      // Converts to bf16 as much of S^T at a time as the remaining registers can hold.
      constexpr int STEPS = KEY < 128 ? KEY / 16 : KEY > 128 ? 4 : 8;
#pragma unroll
      for (int first_step = 0; first_step < KEY / 16; first_step += STEPS) {
        if (first_step > 0) wait_for_products<0>(o);
        Left rounded[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const auto& tile = state[2 * (first_step + step) + r / 2];
            rounded[step][r] = pack(tile[2 * (r % 2)], tile[2 * (r % 2) + 1]);
          }
        }
        begin_products();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) multiply<Rows::N>(o, rounded[step], stage, first_step + step);
        end_products();
      }
      // Also after the last chunk, on tiles whose result is not used: a branch here would delay the matmuls.
      if constexpr (S::AHEAD) begin_scores(i + 1);
    }
    if constexpr (S::AHEAD) move_tiles(i);
    if (!S::AHEAD || i + 1 < chunks) make_factors(S::AHEAD ? i + 1 : i);

    // This warp's 16 columns of v, transposed. No other warp reads them; o overwrites them.
    const int v_piece = 2 * warp;
    if constexpr (OUTPUT) wait_for_values(i);
    Left values[CHUNK / 16];
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) {
      const int token = 16 * step + lane() / 16 * 8 + lane() % 8;
      load_matrices_transposed(values[step], stage + S::V + piece_offset(token, v_piece + lane() / 8 % 2));
    }
    if constexpr (OUTPUT && !S::AHEAD) {
      wait_for_products<0>(scores);
      store_scores(i);
    }
    if constexpr (OUTPUT) wait_for_products<S::AHEAD ? 1 : 0>(o);
    if constexpr (S::OWN_TILE) wait_for_writes<0>();
    if constexpr (!S::AHEAD) __syncthreads();

    const auto& read_factors = small.read[i % S::BUFFERS];
    const auto& write_factors = small.write[i % S::BUFFERS];
    if constexpr (OUTPUT) {
#pragma unroll
      for (int j = 0; j < CHUNK / 8; ++j) {
        const float2 read = read_factors[4 * j + c];
        o[j][0] *= read.x, o[j][1] *= read.y, o[j][2] *= read.x, o[j][3] *= read.y;
      }
      begin_products();
#pragma unroll
      for (int step = 0; step < CHUNK / 16; ++step) multiply<Rows::N>(o, values[step], scores_at(i), step);
      end_products();
    }
    Left weighted[CHUNK / 16];
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 write = write_factors[8 * step + 4 * (r / 2) + c];
        weighted[step][r] = pack(low_half(values[step][r]) * write.x, high_half(values[step][r]) * write.y);
      }
    }
    const int count = count_at(i);
    const int* document = small.documents[i % S::STAGES];
    const float through = documents && document[0] != document[count] ? 0.0f : power_of_two(-slope * count);
#pragma unroll
    for (auto& tile : state) tile[0] *= through, tile[1] *= through, tile[2] *= through, tile[3] *= through;
    begin_products();
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) multiply<Rows::K>(state, weighted[step], stage + S::K, step);
    end_products();
    if constexpr (OUTPUT) {
      if constexpr (S::AHEAD) {
        wait_for_products<2>(scores);
        if (i + 1 < chunks) store_scores(i + 1);
      }
      wait_for_products<1>(o);
#pragma unroll
      for (int j = 0; j < CHUNK / 8; j += 2) {
        const Left rounded = {pack(o[j][0], o[j][1]), pack(o[j + 1][0], o[j + 1][1]), pack(o[j][2], o[j][3]),
                              pack(o[j + 1][2], o[j + 1][3])};
        store_matrices_transposed(o_at(i) + piece_offset(8 * j + lane() % 16, v_piece + lane() / 16), rounded);
      }
    }
    wait_for_products<0>(state);
  }

  if constexpr (OUTPUT) {
    publish_tiles();
    __syncthreads();
    if (chunks > 0) store(chunks - 1);
    if constexpr (S::ENGINE) wait_for_writes<0>();
  }
  const bool last = block == (shape.reverse ? 0 : shape.blocks - 1);
  if (OUTPUT ? scan.leaving && last : true) {
    float* leaving = scan.leaving + (OUTPUT ? int64_t(row) : int64_t(row) * shape.blocks + block) * size;
#pragma unroll
    for (int j = 0; j < KEY / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (inside(j, e)) leaving[place(j, e)] = state[j][e];
      }
    }
  }
}

// Tiles that only a Hopper GPU has shared memory and registers for, or that were tested on one alone; other code leaves
// their kernels empty.
template <int KEY, int VALUE>
constexpr bool FOR_HOPPER = KEY > 128 || VALUE > 128 || KEY == 96;

template <int KEY, int VALUE, bool OUTPUT>
__global__ void __launch_bounds__(2 * VALUE, OUTPUT || KEY > 128 || VALUE > 128 ? 1 : 2)
    decay_scan(const __grid_constant__ ScanShape shape, const __grid_constant__ Scans scans, int skipped) {
  if constexpr (ON_HOPPER || !FOR_HOPPER<KEY, VALUE>) scan_block<KEY, VALUE, OUTPUT>(shape, scans, skipped);
}

// Combines the parts' contributions [B H, blocks parts, size] into the blocks' initial states [B H, slots, size], or,
// if `whole`, into the final state [B H, size]. `boundary` [B H, size] is the initial state of the first block, in a
// reverse scan of the last one.
__global__ void __launch_bounds__(256)
    fold_states(const __grid_constant__ ScanShape shape, const float* added, const float* boundary, float* states,
                int parts, bool whole) {
  const int size = shape.key * shape.value, tiles = (size + 1023) / 1024;
  const int row = blockIdx.x / tiles, element = blockIdx.x % tiles * 1024 + threadIdx.x * 4;
  if (element >= size) return;
  const int total = shape.blocks * parts, part_tokens = shape.block_tokens / parts;
  const float slope = slope_of(shape, row % shape.heads);
  const int* documents = documents_of(shape, row / shape.heads);
  added += int64_t(row) * total * size + element;
  states += int64_t(row) * (whole ? 1 : shape.slots) * size + element;
  float4 state = {};
  if (boundary) state = *reinterpret_cast<const float4*>(boundary + int64_t(row) * size + element);
  for (int i = 0; i < total; ++i) {
    const int part = shape.reverse ? total - 1 - i : i;
    if (!whole) {
      if (i % parts == 0) *reinterpret_cast<float4*>(states + int64_t(part / parts) * size) = state;
      if (i >= total - parts) break;
    }
    const float4 more = *reinterpret_cast<const float4*>(added + int64_t(part) * size);
    const int start = min(part * part_tokens, shape.length), end = min(start + part_tokens, shape.length);
    float through = power_of_two(-slope * (end - start));
    if (documents && documents[max(start - 1, 0)] != documents[end - 1]) through = 0.0f;
    state.x = state.x * through + more.x, state.y = state.y * through + more.y;
    state.z = state.z * through + more.z, state.w = state.w * through + more.w;
  }
  if (whole) *reinterpret_cast<float4*>(states) = state;
}

}  // namespace megalin
