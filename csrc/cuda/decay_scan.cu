// Launchers of the fixed-decay scan; they select the kernel by head width.
#include <cuda.h>

#include "decay_scan.cuh"

namespace megalin {

// Tensor map of a tensor in panels of 64 tokens and 64 columns, the layout that wgmma reads.
cudaError_t describe(const Operand& x, const ScanShape& shape, int width, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return found;
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(shape.length), cuuint64_t(shape.heads),
                              cuuint64_t(shape.batch)};
  const int64_t steps[] = {x.token, x.head, x.batch};
  cuuint64_t strides[3];
  // A dimension of size one may have any stride.
  for (int i = 0; i < 3; ++i) strides[i] = 2 * (sizes[i + 1] > 1 ? steps[i] : width);
  const cuuint32_t box[] = {64, CHUNK, 1, 1}, every[] = {1, 1, 1, 1};
  const auto code = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(x.data), sizes,
      strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(code);  // the driver's and the runtime's errors have the same numbers
}

cudaError_t describe(const ScanShape& shape, bool output, Scans& scans) {
  for (int i = 0; i < scans.count; ++i) {
    const Scan& scan = scans.scan[i];
    const int64_t token = int64_t(shape.heads) * shape.value;
    const Operand o{scan.o, token * shape.length, token, shape.value};
    if (const auto code = describe(scan.k, shape, shape.key, scans.maps[i][1])) return code;
    if (const auto code = describe(scan.v, shape, shape.value, scans.maps[i][2])) return code;
    if (!output) continue;
    if (const auto code = describe(scan.q, shape, shape.key, scans.maps[i][0])) return code;
    if (const auto code = describe(o, shape, shape.value, scans.maps[i][3])) return code;
  }
  return cudaSuccess;
}

template <int KEY, int VALUE, bool OUTPUT>
cudaError_t start(const ScanShape& shape, Scans& scans, int skipped, int blocks, cudaStream_t stream) {
  constexpr auto kernel = decay_scan<KEY, VALUE, OUTPUT>;
  // Code for sm_90a runs only on compute capability 9.0; other GPUs run the code for sm_80.
  int device, major, minor;
  if (const auto code = cudaGetDevice(&device)) return code;
  if (const auto code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return code;
  if (const auto code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return code;
  const bool hopper = major == 9 && minor == 0;
  if constexpr (FOR_HOPPER<KEY, VALUE>) {
    if (!hopper && KEY == 96 && VALUE == 128) return start<128, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
    if (!hopper) return cudaErrorNotSupported;
  }
  const int bytes = hopper ? Shared<KEY, VALUE, OUTPUT, true>::BYTES : Shared<KEY, VALUE, OUTPUT, false>::BYTES;
  // In a thread's first call of CUDA this makes the device's context current, which tensor maps are encoded in.
  if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  if (hopper) {
    if (const auto code = describe(shape, OUTPUT, scans)) return code;
  }
  const int tiles = (shape.value + VALUE - 1) / VALUE;
  const dim3 grid(unsigned(shape.batch) * shape.heads * tiles * scans.count, blocks);
  kernel<<<grid, 2 * VALUE, bytes, stream>>>(shape, scans, skipped);
  return cudaGetLastError();
}

template <bool OUTPUT>
cudaError_t start(const ScanShape& shape, Scans& scans, int skipped, int blocks, cudaStream_t stream) {
  if (shape.key <= 96 && shape.value > 128 && shape.value <= 192) {
    return start<96, 192, OUTPUT>(shape, scans, skipped, blocks, stream);
  }
  if (shape.key > 192) return start<256, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key > 128) return start<192, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key <= 64 && shape.value <= 64) return start<64, 64, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key <= 64) return start<64, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.value <= 64) return start<128, 64, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key <= 96) return start<96, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  return start<128, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
}

}  // namespace megalin

// Computes o of one or two scans with the same shape; returns a cudaError_t.
extern "C" int megalin_decay_scan(const megalin::ScanShape* shape, const megalin::Scan* scans, int count,
                                  cudaStream_t stream) {
  megalin::Scans both{{}, count, {}};
  for (int i = 0; i < count; ++i) both.scan[i] = scans[i];
  return megalin::start<true>(*shape, both, 0, shape->blocks, stream);
}

// Computes `added` [B H, blocks parts, key, value]: the contribution to the state of each of the `parts` parts of a
// block. Skips the last block in the scan's direction unless `last`. Returns a cudaError_t.
extern "C" int megalin_decay_scan_parts(const megalin::ScanShape* shape, const megalin::Operand* k,
                                        const megalin::Operand* v, float* added, int parts, bool last,
                                        cudaStream_t stream) {
  megalin::ScanShape cut = *shape;
  cut.blocks *= parts, cut.block_tokens /= parts;
  megalin::Scans scans{{{{}, *k, *v, nullptr, nullptr, added, false}}, 1, {}};
  const int skipped = last || !shape->reverse ? 0 : parts;
  return megalin::start<false>(cut, scans, skipped, last ? cut.blocks : cut.blocks - parts, stream);
}

// Computes the initial states [B H, slots, key, value] of the blocks from the parts' contributions and `boundary`
// [B H, key, value] or null; if `whole`, the final state [B H, key, value] instead. Returns a cudaError_t.
extern "C" int megalin_decay_scan_fold(const megalin::ScanShape* shape, const float* added, const float* boundary,
                                       float* states, int parts, bool whole, cudaStream_t stream) {
  const unsigned tiles = (shape->key * shape->value + 1023) / 1024;
  megalin::fold_states<<<unsigned(shape->batch) * shape->heads * tiles, 256, 0, stream>>>(*shape, added, boundary,
                                                                                          states, parts, whole);
  return cudaGetLastError();
}
