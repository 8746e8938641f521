// Launchers of the fixed-decay scan, by the widths that its heads fit into.
#include "decay_scan.cuh"

namespace megalin {

template <int KEY, int VALUE, bool OUTPUT>
cudaError_t start(const ScanShape& shape, const Scans& scans, int skipped, int blocks, cudaStream_t stream) {
  constexpr auto kernel = decay_scan<KEY, VALUE, OUTPUT>;
  constexpr int MOST = Shared<KEY, VALUE, OUTPUT, true>::BYTES, LEAST = Shared<KEY, VALUE, OUTPUT, false>::BYTES;
  int device, room;
  if (const auto code = cudaGetDevice(&device)) return code;
  if (const auto code = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return code;
  const int bytes = room >= MOST ? MOST : LEAST;
  if (const auto code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
  const int tiles = (shape.value + VALUE - 1) / VALUE;
  const dim3 grid(unsigned(shape.batch) * shape.heads * tiles * scans.count, blocks);
  kernel<<<grid, 2 * VALUE, bytes, stream>>>(shape, scans, skipped);
  return cudaGetLastError();
}

template <bool OUTPUT>
cudaError_t start(const ScanShape& shape, const Scans& scans, int skipped, int blocks, cudaStream_t stream) {
  if (shape.key > 128) return start<256, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key <= 64 && shape.value <= 64) return start<64, 64, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.key <= 64) return start<64, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
  if (shape.value <= 64) return start<128, 64, OUTPUT>(shape, scans, skipped, blocks, stream);
  return start<128, 128, OUTPUT>(shape, scans, skipped, blocks, stream);
}

}  // namespace megalin

// o of one or two scans of a shape; returns a cudaError_t.
extern "C" int megalin_decay_scan(const megalin::ScanShape* shape, const megalin::Scan* scans, int count,
                                  cudaStream_t stream) {
  megalin::Scans both{{}, count};
  for (int i = 0; i < count; ++i) both.scan[i] = scans[i];
  return megalin::start<true>(*shape, both, 0, shape->blocks, stream);
}

// The states [B H, slots, key, value] that enter blocks, from k, v and `boundary` [B H, key, value] or null, through
// `added` [B H, blocks parts, key, value]: what each of `parts` parts of a block adds. Returns a cudaError_t.
extern "C" int megalin_decay_scan_states(const megalin::ScanShape* shape, const megalin::Operand* k,
                                         const megalin::Operand* v, const float* boundary, float* added, float* states,
                                         int parts, cudaStream_t stream) {
  megalin::ScanShape cut = *shape;
  cut.blocks *= parts, cut.block_tokens /= parts;
  const megalin::Scans scans{{{{}, *k, *v, nullptr, nullptr, added, false}}, 1};
  const int skipped = shape->reverse ? parts : 0;
  if (const auto code = megalin::start<false>(cut, scans, skipped, cut.blocks - parts, stream)) return code;
  const unsigned tiles = (shape->key * shape->value + 1023) / 1024;
  megalin::fold_states<<<unsigned(shape->batch) * shape->heads * tiles, 256, 0, stream>>>(*shape, added, boundary,
                                                                                          states, parts);
  return cudaGetLastError();
}
