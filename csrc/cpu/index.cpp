// Index building for token shards (pybind11 module megalin._index).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace {

using Lengths = py::array_t<std::int32_t, py::array::c_style>;

// Lengths usually lie in a mapped .idx file at byte 34, so they are not aligned for an int32 load.
std::int64_t length_at(const char* data, std::int64_t index) {
    std::int32_t length;
    std::memcpy(&length, data + index * static_cast<std::int64_t>(sizeof(length)), sizeof(length));
    return length;
}

std::int64_t sum_of(const char* data, std::int64_t count) {
    std::int64_t total = 0;  // count and every length are below 2^31, so the sum is below 2^62
    for (std::int64_t index = 0; index < count; ++index) {
        const std::int64_t length = length_at(data, index);
        if (length < 0) {
            throw std::invalid_argument("sequence " + std::to_string(index) + " has the negative length " +
                                        std::to_string(length));
        }
        total += length;
    }
    return total;
}

void check_range(std::int64_t first_token, std::int64_t stride, std::int64_t count, std::int64_t total) {
    const bool inside = first_token >= 0 && stride >= 1 && count >= 0 &&
                        (count == 0 || (first_token < total && count - 1 <= (total - 1 - first_token) / stride));
    if (!inside) {
        throw std::invalid_argument(std::to_string(count) + " samples from token " + std::to_string(first_token) +
                                    " with stride " + std::to_string(stride) + " do not lie inside " +
                                    std::to_string(total) + " tokens");
    }
}

// Sample j starts at token first_token + j * stride of the sequences laid end to end. One pass over the lengths.
py::tuple build_sample_index(const Lengths& lengths, std::int64_t first_token, std::int64_t stride,
                             std::int64_t count) {
    if (lengths.ndim() != 1 || lengths.size() > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument("lengths must be one-dimensional with fewer than 2^31 entries");
    }
    const char* data = static_cast<const char*>(static_cast<const void*>(lengths.data()));
    const std::int64_t num_sequences = lengths.size();
    {
        py::gil_scoped_release release;
        check_range(first_token, stride, count, sum_of(data, num_sequences));
    }
    py::array_t<std::int32_t> sequences(count);
    py::array_t<std::int32_t> offsets(count);
    std::int32_t* sequence_out = sequences.mutable_data();
    std::int32_t* offset_out = offsets.mutable_data();
    {
        py::gil_scoped_release release;
        std::int64_t sample = 0;
        std::int64_t begin = 0;
        for (std::int64_t sequence = 0; sequence < num_sequences && sample < count; ++sequence) {
            const std::int64_t end = begin + length_at(data, sequence);
            for (std::int64_t token = first_token + sample * stride; sample < count && token < end; token += stride) {
                sequence_out[sample] = static_cast<std::int32_t>(sequence);
                offset_out[sample] = static_cast<std::int32_t>(token - begin);
                ++sample;
            }
            begin = end;
        }
        // Only a file that changes between the two passes gets here with rows left over.
        if (sample != count) {
            throw std::invalid_argument("the lengths changed while the index was built");
        }
    }
    return py::make_tuple(sequences, offsets);
}

}  // namespace

PYBIND11_MODULE(_index, module) {
    module.doc() = "Index building for token shards.";
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(), py::kw_only(),
               py::arg("first_token"), py::arg("stride"), py::arg("count"),
               "Rows (sequence, offset) at which samples start; see _index.pyi.");
}
