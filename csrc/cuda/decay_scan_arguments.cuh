// What the fixed-decay scan's launchers take; megalin/ops/decay_scan_cuda.py fills it.
#pragma once

#include <cstdint>

namespace megalin {

// bf16 [B, T, H, width], channels side by side; addresses and strides (elements) are multiples of 16 bytes.
struct Operand {
  const void* data;
  int64_t batch, token, head;
};

// One scan(q, k, v) -> o: o [B, T, H, value] contiguous; states fp32 [key, value], or [value, key] where `transposed`.
struct Scan {
  Operand q, k, v;
  void* o;
  const float* entering;  // [B H, slots, ..], by block; null for zeros
  float* leaving;         // [B H, ..], after the last block; null where nobody asks
  bool transposed;
};

// What the scans of one launch share.
struct ScanShape {
  const float* slopes;   // [H] nats a token, null for no decay
  const int* documents;  // [B, T], null for one document a row
  int batch, length, heads, key, value;
  int slots, blocks, block_tokens;  // a block: a multiple of 64 tokens
  bool reverse;
};

}  // namespace megalin
