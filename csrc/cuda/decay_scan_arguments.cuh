// Arguments of the fixed-decay scan's launchers; filled by megalin/ops/scans/fixed_decay_cuda.py.
#pragma once

#include <cstdint>

namespace megalin {

// bf16 [B, T, H, width], contiguous in the last dim; addresses and strides (elements) are multiples of 16 bytes.
struct Operand {
  const void* data;
  int64_t batch, token, head;
};

// One scan(q, k, v) -> o: o [B, T, H, value] contiguous; states fp32 [key, value], or [value, key] if `transposed`.
struct Scan {
  Operand q, k, v;
  void* o;
  const float* entering;  // [B H, slots, ..], initial state of each block; null for zeros
  float* leaving;         // [B H, ..], final state after the last block; null if not needed
  bool transposed;
};

// Arguments common to the scans of one launch.
struct ScanShape {
  const float* slopes;   // [H] nats a token; null for no decay
  const int* documents;  // [B, T]; null for one document a sequence
  int batch, length, heads, key, value;
  int slots, blocks, block_tokens;  // a block: a multiple of 64 tokens
  bool reverse;
};

}  // namespace megalin
