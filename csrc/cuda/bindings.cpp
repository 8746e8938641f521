// The CUDA launchers as Python functions on addresses: shapes, dtypes and contiguity are megalin.ops' to check.
#include <pybind11/pybind11.h>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

extern "C" {
int megalin_srmsnorm_forward(const void* x, void* y, float* scales, int64_t rows, int width, float eps, int dtype,
                             cudaStream_t stream);
int megalin_srmsnorm_backward(const void* dy, const void* x, const float* scales, void* dx, int64_t rows, int width,
                              int dtype, cudaStream_t stream);
int megalin_max_norm_forward(const void* x, const float* factors, const int* positions, const unsigned* frequencies,
                             void* y, float* peaks, int* indices, int64_t rows, int width, float eps, int dtype,
                             cudaStream_t stream);
int megalin_max_norm_backward(const void* dy, const void* x, const float* factors, const int* positions,
                              const unsigned* frequencies, const float* peaks, const int* indices, void* dx,
                              int64_t rows, int width, int dtype, cudaStream_t stream);
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

}  // namespace

PYBIND11_MODULE(_C, module) {
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
  module.def("max_norm_forward", [](Address x, Address factors, Address positions, Address frequencies, Address y,
                                    Address peaks, Address indices, int64_t rows, int width, float eps, int dtype,
                                    Address stream) {
    const int code = megalin_max_norm_forward(at<void>(x), at<float>(factors), at<int>(positions),
                                              at<unsigned>(frequencies), at<void>(y), at<float>(peaks),
                                              at<int>(indices), rows, width, eps, dtype, stream_at(stream));
    check("max_norm_forward", code);
  });
  module.def("max_norm_backward", [](Address dy, Address x, Address factors, Address positions, Address frequencies,
                                     Address peaks, Address indices, Address dx, int64_t rows, int width, int dtype,
                                     Address stream) {
    const int code = megalin_max_norm_backward(at<void>(dy), at<void>(x), at<float>(factors), at<int>(positions),
                                               at<unsigned>(frequencies), at<float>(peaks), at<int>(indices),
                                               at<void>(dx), rows, width, dtype, stream_at(stream));
    check("max_norm_backward", code);
  });
}
