// Arguments of the forget-gate scan's launchers; filled by megalin/ops/gates/forget_gate_cuda.py.
#pragma once

#include <cstdint>

#include "decay_scan_arguments.cuh"

namespace megalin {

// Updates of the state by segments of chunks; in reverse, of its gradient from q and the output's gradient (in v).
struct GateSegments {
  Operand q, logit, v;
  const float* bound;
  const int* documents;
  int* kinds;       // [B, H, N], not in reverse; at least 2 before
  float* updates;   // [B, H, segments, K, V]
  float* decays;    // [B, H, segments, K]
  int batch, length, heads, width, segments, segment_chunks;
  float scale;
  bool reverse, last;
};

// The forward from chunk to chunk.
struct GateSweep {
  Operand q, logit, v;
  const float* bound;
  const int* documents;
  const void* scores;     // bf16 [B, H, 64 N, 64], of steep chunks
  const int* kinds;       // [B, H, N]
  const float *updates, *decays;  // as in GateSegments
  const float* entering;  // [B, H, K, V]; null for zeros
  void* output;           // bf16 [B, T, H, V]
  void* states;           // bf16 [B, H, N, K, V]: S' entering chunks; null if not wanted
  float* final;           // [B, H, K, V]
  int batch, length, heads, width, segments, segment_chunks;
  float scale;
};

// All gradients from chunk to chunk in reverse; of q, logits and bounds only of mild chunks.
struct GateReverse {
  Operand q, logit, v, d_output;
  const float* bound;
  const int* documents;
  const void* scores;     // bf16 [B, H, 64 N, 64], of steep chunks
  const int* kinds;       // [B, H, N]
  const void* states;     // bf16 [B, H, N, K, V]: S' entering chunks
  const float *updates, *decays;  // as in GateSegments, in reverse
  const float* d_leaving; // [B, H, K, V]; null for zeros
  void *dq, *dlogit, *dv; // bf16 [B, T, H, K or V]
  float* dbound;          // [B, H, N, K]: one summand a chunk
  void* d_states;         // bf16 [B, H, N, K, V]: gradients of the states that leave steep chunks
  float* d_entering;      // [B, H, K, V]
  int batch, length, heads, width, segments, segment_chunks;
  float scale;
};

}  // namespace megalin
