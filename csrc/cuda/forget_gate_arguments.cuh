// Arguments of the forget-gate scan's launchers; filled by megalin/ops/gates/forget_gate_cuda.py.
#pragma once

#include <cstdint>

#include "decay_scan_arguments.cuh"

namespace megalin {

// Results of chunks with mild decays, as of `Chunks` in csrc/triton/scans/vector_decay.py; N chunks of 64 tokens.
struct GateScores {
  Operand q, logit;
  const float* bound;            // [H, K]
  const int* documents;          // [B, T]; null for one document a sequence
  void *q_start, *k_end;         // bf16 [B, H, 64 N, K]
  void* scores;                  // bf16 [B, H, 64 N, 64]
  float* through;                // [B, H, N, K]
  int* kinds;                    // [B, H, N]: 0 steep, 1 mild and the first of a document, 2 mild
  int batch, length, heads, key;
  float scale;
};

// Gradients of chunks with mild decays. States are those entering chunks, and their gradients
// those of the states leaving them.
struct GateGradients {
  Operand q, logit, v, output;  // `output`: the gradient of the output
  const float* bound;           // [H, K]
  const void *states, *state_gradients;  // bf16 [B, H, N, K, V]
  const int* kinds;             // [B, H, N]
  void *dq, *dlogit;            // bf16 [B, T, H, K]
  float* dbound;                // [B, H, N, K]: one summand a chunk
  int batch, length, heads, key, value;
  float scale;
};

}  // namespace megalin
