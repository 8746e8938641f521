// Launchers of the forget-gate scan's kernels for chunks with mild decays.
#include "forget_gate_reverse.cuh"

namespace megalin {

template <typename Arguments>
cudaError_t start(void (*kernel)(Arguments), const Arguments& x, unsigned blocks, int threads, int bytes,
                  cudaStream_t stream) {
  if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  kernel<<<blocks * x.batch * x.heads, threads, bytes, stream>>>(x);
  return cudaGetLastError();
}

inline unsigned chunks_of(int length) { return (length + CHUNK - 1) / CHUNK; }

}  // namespace megalin

// Computes the results of mild chunks, and the kind of all, for 64 or 128 keys; returns a cudaError_t.
extern "C" int megalin_gate_scores(const megalin::GateScores* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->key == 128) return start(gate_scores<128>, *x, chunks_of(x->length), 256, ScoresShared<128>::BYTES, stream);
  return start(gate_scores<64>, *x, chunks_of(x->length), 128, ScoresShared<64>::BYTES, stream);
}

// Computes dq, dlogit and dbound of mild chunks, for a multiple of 64 keys and 64 or 128 values; returns a cudaError_t.
extern "C" int megalin_gate_gradients(const megalin::GateGradients* x, cudaStream_t stream) {
  using namespace megalin;
  const unsigned blocks = chunks_of(x->length) * (x->key / 64);
  if (x->value == 128) return start(gate_gradients<128>, *x, blocks, 128, GateShared<128>::BYTES, stream);
  return start(gate_gradients<64>, *x, blocks, 128, GateShared<64>::BYTES, stream);
}

// Computes the updates of the state by segments and the kinds of chunks, or the updates of the state's gradient, for a
// multiple of 64 keys and 64 or 128 values; returns a cudaError_t.
extern "C" int megalin_gate_segments(const megalin::GateSegments* x, cudaStream_t stream) {
  using namespace megalin;
  const unsigned blocks = x->segments * (x->key / 64);
  if (x->value == 128) {
    if (x->reverse) return start(gate_segments<128, true>, *x, blocks, 128, SegmentShared<128, true>::BYTES, stream);
    return start(gate_segments<128, false>, *x, blocks, 128, SegmentShared<128, false>::BYTES, stream);
  }
  if (x->reverse) return start(gate_segments<64, true>, *x, blocks, 128, SegmentShared<64, true>::BYTES, stream);
  return start(gate_segments<64, false>, *x, blocks, 128, SegmentShared<64, false>::BYTES, stream);
}

// Computes the output, the final state and the states entering chunks for heads of 64 or 128 keys and as many values;
// returns a cudaError_t.
extern "C" int megalin_gate_sweep(const megalin::GateSweep* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->width == 128) return start(gate_sweep<128>, *x, x->segments, 256, SweepShared<128>::BYTES, stream);
  return start(gate_sweep<64>, *x, x->segments, 128, SweepShared<64>::BYTES, stream);
}

// Computes the gradients for heads of 64 or 128 keys and as many values; returns a cudaError_t.
extern "C" int megalin_gate_reverse(const megalin::GateReverse* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->width == 128) return start(gate_reverse<128>, *x, x->segments, 256, ReverseShared<128>::BYTES, stream);
  return start(gate_reverse<64>, *x, x->segments, 128, ReverseShared<64>::BYTES, stream);
}
