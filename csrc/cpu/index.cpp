// Index building for token shards (pybind11 module megalin._index).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

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

using Weights = py::array_t<double, py::array::c_style>;
using Limits = py::array_t<std::int64_t, py::array::c_style>;

// Step i takes the source that is furthest behind its share of max(i, 1) samples and not used up; the first on ties.
py::tuple build_blend(const Weights& weights, const Limits& limits, std::int64_t size) {
    const std::int64_t sources = weights.size();
    if (weights.ndim() != 1 || limits.ndim() != 1 || limits.size() != sources || sources < 1 ||
        sources > std::numeric_limits<std::int16_t>::max()) {
        throw std::invalid_argument("weights and limits must be one-dimensional, one each for 1 to 32767 sources");
    }
    const double* weight = weights.data();
    const std::int64_t* limit = limits.data();
    std::int64_t available = 0;
    for (std::int64_t source = 0; source < sources; ++source) {
        available += std::min(std::max(limit[source], std::int64_t{0}), size - available);
    }
    if (size < 0 || available < size) {
        throw std::invalid_argument(std::to_string(size) + " samples of sources that hold " +
                                    std::to_string(available));
    }
    py::array_t<std::int16_t> source_index(size);
    py::array_t<std::int64_t> sample_index(size);
    std::int16_t* source_out = source_index.mutable_data();
    std::int64_t* sample_out = sample_index.mutable_data();
    {
        py::gil_scoped_release release;
        std::vector<std::int64_t> used(static_cast<std::size_t>(sources), 0);
        for (std::int64_t step = 0; step < size; ++step) {
            const double due = static_cast<double>(std::max(step, std::int64_t{1}));
            double furthest = -std::numeric_limits<double>::infinity();
            std::int64_t chosen = 0;
            for (std::int64_t source = 0; source < sources; ++source) {
                const std::int64_t count = used[static_cast<std::size_t>(source)];
                const double behind = weight[source] * due - static_cast<double>(count);
                if (count < limit[source] && behind > furthest) {
                    furthest = behind;
                    chosen = source;
                }
            }
            source_out[step] = static_cast<std::int16_t>(chosen);
            sample_out[step] = used[static_cast<std::size_t>(chosen)]++;
        }
    }
    return py::make_tuple(source_index, sample_index);
}

}  // namespace

PYBIND11_MODULE(_index, module) {
    module.doc() = "Index building for token shards.";
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(), py::kw_only(),
               py::arg("first_token"), py::arg("stride"), py::arg("count"),
               "Rows (sequence, offset) at which samples start; see _index.pyi.");
    module.def("build_blend", &build_blend, py::arg("weights").noconvert(), py::arg("limits").noconvert(),
               py::arg("size"), "Which source gives each sample, and which of its own; see _index.pyi.");
}
