// Kernels of the forget-gate scan and their launchers. They need wgmma, and the shared memory of compute capability 9.0.
#include "forget_gate_reverse.cuh"

namespace megalin {

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool COMPILED = false;
#else
constexpr bool COMPILED = true;
#endif

template <int VALUE, bool REVERSE>
__global__ void __launch_bounds__(128, 3) gate_segments(const __grid_constant__ GateSegments x) {
  if constexpr (COMPILED) sum_segment<VALUE, REVERSE>(x);
}

template <int WIDTH>
__global__ void __launch_bounds__(2 * WIDTH, 1) gate_sweep(const __grid_constant__ GateSweep x) {
  if constexpr (COMPILED) sweep_segment<WIDTH>(x);
}

template <int WIDTH>
__global__ void __launch_bounds__(2 * WIDTH, 1) gate_reverse(const __grid_constant__ GateReverse x) {
  if constexpr (COMPILED) reverse_segment<WIDTH>(x);
}

template <typename Arguments>
cudaError_t start(void (*kernel)(Arguments), const Arguments& x, int blocks, int threads, int bytes,
                  cudaStream_t stream) {
  if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  kernel<<<unsigned(blocks) * x.batch * x.heads, threads, bytes, stream>>>(x);
  return cudaGetLastError();
}

template <int WIDTH>
cudaError_t start_segments(const GateSegments& x, cudaStream_t stream) {
  const int blocks = x.segments * (WIDTH / 64);
  if (x.reverse) return start(gate_segments<WIDTH, true>, x, blocks, 128, SegmentShared<WIDTH, true>::BYTES, stream);
  return start(gate_segments<WIDTH, false>, x, blocks, 128, SegmentShared<WIDTH, false>::BYTES, stream);
}

}  // namespace megalin

// Each for heads of 64 or 128 keys and as many values; returns a cudaError_t.

// Computes the updates of the state by segments and the kinds of chunks, or the updates of the state's gradient.
extern "C" int megalin_gate_segments(const megalin::GateSegments* x, cudaStream_t stream) {
  return x->width == 128 ? megalin::start_segments<128>(*x, stream) : megalin::start_segments<64>(*x, stream);
}

// Computes the output, the final state and the states entering chunks.
extern "C" int megalin_gate_sweep(const megalin::GateSweep* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->width == 128) return start(gate_sweep<128>, *x, x->segments, 256, SweepShared<128>::BYTES, stream);
  return start(gate_sweep<64>, *x, x->segments, 128, SweepShared<64>::BYTES, stream);
}

// Computes the gradients.
extern "C" int megalin_gate_reverse(const megalin::GateReverse* x, cudaStream_t stream) {
  using namespace megalin;
  if (x->width == 128) return start(gate_reverse<128>, *x, x->segments, 256, ReverseShared<128>::BYTES, stream);
  return start(gate_reverse<64>, *x, x->segments, 128, ReverseShared<64>::BYTES, stream);
}
