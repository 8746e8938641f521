// Launchers of the forget-gate scan's kernels for chunks with mild decays.
#include "forget_gate_gradients.cuh"
#include "forget_gate_scores.cuh"

namespace megalin {

template <typename Arguments>
cudaError_t start(void (*kernel)(Arguments), const Arguments& x, int groups, int threads, int bytes,
                  cudaStream_t stream) {
  if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  const unsigned chunks = (x.length + CHUNK - 1) / CHUNK;
  kernel<<<unsigned(x.batch) * x.heads * chunks * groups, threads, bytes, stream>>>(x);
  return cudaGetLastError();
}

}  // namespace megalin

// Computes the results of mild chunks, and the kind of all, for 64 or 128 keys; returns a cudaError_t.
extern "C" int megalin_gate_scores(const megalin::GateScores* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->key == 128) return start(gate_scores<128>, *x, 1, 256, ScoresShared<128>::BYTES, stream);
  return start(gate_scores<64>, *x, 1, 128, ScoresShared<64>::BYTES, stream);
}

// Computes dq, dlogit and dbound of mild chunks, for a multiple of 64 keys and 64 or 128 values; returns a cudaError_t.
extern "C" int megalin_gate_gradients(const megalin::GateGradients* x, cudaStream_t stream) {
  using namespace megalin;
  const int groups = x->key / 64;
  if (x->value == 128) return start(gate_gradients<128>, *x, groups, 128, GateShared<128>::BYTES, stream);
  return start(gate_gradients<64>, *x, groups, 128, GateShared<64>::BYTES, stream);
}
