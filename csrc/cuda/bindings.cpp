// Python bindings of the CUDA launchers. Tensors are passed as addresses; megalin.ops validates shapes, dtypes and
// contiguity.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "forget_gate_arguments.cuh"

extern "C" {
int megalin_decay_scan(const megalin::ScanShape* shape, const megalin::Scan* scans, int count, cudaStream_t stream);
int megalin_decay_scan_parts(const megalin::ScanShape* shape, const megalin::Operand* k, const megalin::Operand* v,
                             float* added, int parts, bool last, cudaStream_t stream);
int megalin_decay_scan_fold(const megalin::ScanShape* shape, const float* added, const float* boundary, float* states,
                            int parts, bool whole, cudaStream_t stream);
int megalin_gate_segments(const megalin::GateSegments* x, cudaStream_t stream);
int megalin_gate_sweep(const megalin::GateSweep* x, cudaStream_t stream);
int megalin_gate_reverse(const megalin::GateReverse* x, cudaStream_t stream);
int megalin_srmsnorm_forward(const void* x, void* y, float* scales, int64_t rows, int width, float eps, int dtype,
                             cudaStream_t stream);
int megalin_srmsnorm_backward(const void* dy, const void* x, const float* scales, void* dx, int64_t rows, int width,
                              int dtype, cudaStream_t stream);
int megalin_max_norm_forward(const void* x, const float* factors, const int* positions, const void* cosines,
                             int64_t period, int head_dim, const float* scale, void* y, float* peaks, int* indices,
                             int64_t rows, int width, float eps, int dtype, cudaStream_t stream);
int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                              const void* cosines, int64_t period, int head_dim, const float* scale, const float* peaks,
                              const int* indices, void* dx, int64_t rows, int width, int dtype, cudaStream_t stream);
}

namespace {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

cudaStream_t stream_at(Address address) { return reinterpret_cast<cudaStream_t>(address); }

void check(const char* name, int code) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(static_cast<cudaError_t>(code)));
}

// Arguments of the decay scan's launchers as tuples, with the members in the order of the structs.
using OperandTuple = std::tuple<Address, int64_t, int64_t, int64_t>;
using ScanTuple = std::tuple<OperandTuple, OperandTuple, OperandTuple, Address, Address, Address, bool>;
using ShapeTuple = std::tuple<Address, Address, int, int, int, int, int, int, int, int, bool>;

megalin::Operand operand_from(const OperandTuple& tuple) {
  const auto& [data, batch, token, head] = tuple;
  return {at<void>(data), batch, token, head};
}

megalin::Scan scan_from(const ScanTuple& tuple) {
  const auto& [q, k, v, o, entering, leaving, transposed] = tuple;
  return {operand_from(q), operand_from(k), operand_from(v), at<void>(o), at<float>(entering), at<float>(leaving),
          transposed};
}

megalin::ScanShape shape_from(const ShapeTuple& tuple) {
  const auto& [slopes, documents, batch, length, heads, key, value, slots, blocks, block_tokens, reverse] = tuple;
  return {at<float>(slopes), at<int>(documents), batch, length, heads, key, value, slots,
          blocks, block_tokens, reverse};
}

// The same for the forget-gate scan.
using GateSegmentsTuple =
    std::tuple<OperandTuple, OperandTuple, OperandTuple, Address, Address, Address, Address, Address, int, int, int, int,
               int, int, float, bool, bool>;
using GateSweepTuple = std::tuple<OperandTuple, OperandTuple, OperandTuple, Address, Address, Address, Address, Address,
                                  Address, Address, Address, Address, Address, int, int, int, int, int, int, float>;
using GateReverseTuple =
    std::tuple<OperandTuple, OperandTuple, OperandTuple, OperandTuple, Address, Address, Address, Address, Address,
               Address, Address, Address, Address, Address, Address, Address, Address, Address, int, int, int, int, int,
               int, float>;

megalin::GateSegments gate_segments_from(const GateSegmentsTuple& tuple) {
  const auto& [q, logit, v, bound, documents, kinds, updates, decays, batch, length, heads, width, segments,
               segment_chunks, scale, reverse, last] = tuple;
  return {operand_from(q), operand_from(logit), operand_from(v), at<float>(bound), at<int>(documents),
          at<int>(kinds), at<float>(updates), at<float>(decays), batch, length, heads, width, segments,
          segment_chunks, scale, reverse, last};
}

megalin::GateSweep gate_sweep_from(const GateSweepTuple& tuple) {
  const auto& [q, logit, v, bound, documents, scores, kinds, updates, decays, entering, output, states, final, batch,
               length, heads, width, segments, segment_chunks, scale] = tuple;
  return {operand_from(q), operand_from(logit), operand_from(v), at<float>(bound), at<int>(documents),
          at<void>(scores), at<int>(kinds), at<float>(updates), at<float>(decays), at<float>(entering),
          at<void>(output), at<void>(states), at<float>(final), batch, length, heads, width, segments,
          segment_chunks, scale};
}

megalin::GateReverse gate_reverse_from(const GateReverseTuple& tuple) {
  const auto& [q, logit, v, d_output, bound, documents, scores, kinds, states, updates, decays, d_leaving, dq, dlogit,
               dv, dbound, d_states, d_entering, batch, length, heads, width, segments, segment_chunks, scale] = tuple;
  return {operand_from(q), operand_from(logit), operand_from(v), operand_from(d_output), at<float>(bound),
          at<int>(documents), at<void>(scores), at<int>(kinds), at<void>(states), at<float>(updates),
          at<float>(decays), at<float>(d_leaving), at<void>(dq), at<void>(dlogit), at<void>(dv), at<float>(dbound),
          at<void>(d_states), at<float>(d_entering), batch, length, heads, width, segments, segment_chunks, scale};
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("sources") = MEGALIN_SOURCES;
  module.def("srmsnorm_forward", [](Address x, Address y, Address scales, int64_t rows, int width, float eps, int dtype,
                                    Address stream) {
    check("srmsnorm_forward", megalin_srmsnorm_forward(at<void>(x), at<void>(y), at<float>(scales), rows, width, eps,
                                                       dtype, stream_at(stream)));
  });
  module.def("srmsnorm_backward", [](Address dy, Address x, Address scales, Address dx, int64_t rows, int width,
                                     int dtype, Address stream) {
    check("srmsnorm_backward", megalin_srmsnorm_backward(at<void>(dy), at<void>(x), at<float>(scales), at<void>(dx),
                                                         rows, width, dtype, stream_at(stream)));
  });
  module.def("max_norm_forward", [](Address x, Address factors, Address positions, Address cosines, int64_t period,
                                    int head_dim, Address scale, Address y, Address peaks, Address indices,
                                    int64_t rows, int width, float eps, int dtype, Address stream) {
    const int code = megalin_max_norm_forward(at<void>(x), at<float>(factors), at<int>(positions), at<void>(cosines),
                                              period, head_dim, at<float>(scale), at<void>(y), at<float>(peaks),
                                              at<int>(indices), rows, width, eps, dtype, stream_at(stream));
    check("max_norm_forward", code);
  });
  module.def("max_norm_backward", [](Address dy, Address x, Address factors, Address positions, Address cosines,
                                     int64_t period, int head_dim, Address scale, Address peaks, Address indices,
                                     Address dx, int64_t rows, int width, int dtype, Address stream) {
    const int code = megalin_max_norm_backward(at<void>(dy), at<void>(x), at<float>(factors), at<int>(positions),
                                               at<void>(cosines), period, head_dim, at<float>(scale), at<float>(peaks),
                                               at<int>(indices), at<void>(dx), rows, width, dtype, stream_at(stream));
    check("max_norm_backward", code);
  });
  module.def("decay_scan", [](const ShapeTuple& shape, const std::vector<ScanTuple>& tuples, Address stream) {
    std::vector<megalin::Scan> scans;
    for (const auto& tuple : tuples) scans.push_back(scan_from(tuple));
    const auto wanted = shape_from(shape);
    check("decay_scan", megalin_decay_scan(&wanted, scans.data(), int(scans.size()), stream_at(stream)));
  });
  module.def("decay_scan_parts", [](const ShapeTuple& shape, const OperandTuple& k, const OperandTuple& v,
                                    Address added, int parts, bool last, Address stream) {
    const auto wanted = shape_from(shape);
    const auto keys = operand_from(k), values = operand_from(v);
    check("decay_scan_parts",
          megalin_decay_scan_parts(&wanted, &keys, &values, at<float>(added), parts, last, stream_at(stream)));
  });
  module.def("decay_scan_fold", [](const ShapeTuple& shape, Address added, Address boundary, Address states, int parts,
                                   bool whole, Address stream) {
    const auto wanted = shape_from(shape);
    check("decay_scan_fold", megalin_decay_scan_fold(&wanted, at<float>(added), at<float>(boundary), at<float>(states),
                                                     parts, whole, stream_at(stream)));
  });
  module.def("gate_segments", [](const GateSegmentsTuple& tuple, Address stream) {
    const auto arguments = gate_segments_from(tuple);
    check("gate_segments", megalin_gate_segments(&arguments, stream_at(stream)));
  });
  module.def("gate_sweep", [](const GateSweepTuple& tuple, Address stream) {
    const auto arguments = gate_sweep_from(tuple);
    check("gate_sweep", megalin_gate_sweep(&arguments, stream_at(stream)));
  });
  module.def("gate_reverse", [](const GateReverseTuple& tuple, Address stream) {
    const auto arguments = gate_reverse_from(tuple);
    check("gate_reverse", megalin_gate_reverse(&arguments, stream_at(stream)));
  });
}
