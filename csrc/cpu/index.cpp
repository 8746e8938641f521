// Index building and validation for token shards (pybind11 module megalin._index).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "packing.hpp"

namespace py = pybind11;

namespace {

using Lengths = py::array_t<std::int32_t, py::array::c_style>;
using Offsets = py::array_t<std::int64_t, py::array::c_style>;

// Loads an entry of an array that may be unaligned: arrays usually start at byte 34 of a memory-mapped .idx file.
template <typename T>
T entry_at(const char* data, std::int64_t index) {
    T entry;
    std::memcpy(&entry, data + index * static_cast<std::int64_t>(sizeof(entry)), sizeof(entry));
    return entry;
}

std::int64_t length_at(const char* data, std::int64_t index) { return entry_at<std::int32_t>(data, index); }

template <typename Array>
const char* bytes_of(const Array& array) {
    return static_cast<const char*>(static_cast<const void*>(array.data()));
}

template <typename Array>
void require_vector(const Array& array, const char* name) {
    if (array.ndim() != 1 || array.size() > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument(std::string(name) + " must be one-dimensional with fewer than 2^31 entries");
    }
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

// Sequence and offset of each sample: sample j starts at token first_token + j * stride of the concatenated sequences.
// One pass over the lengths.
py::tuple build_sample_index(const Lengths& lengths, std::int64_t first_token, std::int64_t stride,
                             std::int64_t count) {
    require_vector(lengths, "lengths");
    const char* data = bytes_of(lengths);
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
        // Reached with samples left over only if the file changes between the two passes.
        if (sample != count) {
            throw std::invalid_argument("the lengths changed while the index was built");
        }
    }
    return py::make_tuple(sequences, offsets);
}

// The first sequence whose length is negative or whose pointer does not match the tokens before it, and the number of
// these tokens; if all are valid, the number of sequences and of all tokens.
py::tuple check_lengths(const Lengths& lengths, const Offsets& pointers, std::int64_t itemsize) {
    require_vector(lengths, "lengths");
    require_vector(pointers, "pointers");
    if (lengths.size() != pointers.size()) {
        throw std::invalid_argument("lengths and pointers must have as many entries");
    }
    const char* length_data = bytes_of(lengths);
    const char* pointer_data = bytes_of(pointers);
    const std::int64_t count = lengths.size();
    std::int64_t sequence = 0;
    std::int64_t tokens = 0;  // below 2^62, so their bytes are below 2^64
    {
        py::gil_scoped_release release;
        for (; sequence < count; ++sequence) {
            const std::int64_t length = length_at(length_data, sequence);
            const auto pointer = static_cast<std::uint64_t>(entry_at<std::int64_t>(pointer_data, sequence));
            if (length < 0 || pointer != static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(itemsize)) {
                break;
            }
            tokens += length;
        }
    }
    return py::make_tuple(sequence, tokens);
}

// The first entry below its predecessor (for the first entry: below 0), or the number of entries if there is none.
std::int64_t check_documents(const Offsets& documents) {
    const char* data = bytes_of(documents);
    const std::int64_t count = documents.size();
    py::gil_scoped_release release;
    std::int64_t previous = 0;
    for (std::int64_t entry = 0; entry < count; ++entry) {
        const auto value = entry_at<std::int64_t>(data, entry);
        if (value < previous) {
            return entry;
        }
        previous = value;
    }
    return count;
}

megalin::Fit fit_of(const std::string& name) {
    if (name != "first_fit" && name != "best_fit") {
        throw std::invalid_argument("fit must be first_fit or best_fit, not " + name);
    }
    return name == "first_fit" ? megalin::Fit::first : megalin::Fit::best;
}

void require_packable(const Lengths& lengths, std::int64_t capacity, std::int64_t window) {
    require_vector(lengths, "lengths");
    if (capacity < 1 || capacity > std::numeric_limits<std::int32_t>::max() || window < 1) {
        throw std::invalid_argument("capacity and window must be at least 1, and capacity below 2^31");
    }
}

// Number of packed rows for each window of sequences.
py::array_t<std::int64_t> count_rows(const Lengths& lengths, std::int64_t capacity, std::int64_t window,
                                     const std::string& fit) {
    require_packable(lengths, capacity, window);
    const megalin::Fit chosen = fit_of(fit);
    const char* data = bytes_of(lengths);
    const std::int64_t count = lengths.size();
    py::array_t<std::int64_t> rows((count + window - 1) / window);
    std::int64_t* out = rows.mutable_data();
    py::gil_scoped_release release;
    for (std::int64_t first = 0; first < count; first += window) {
        const std::int64_t size = std::min(window, count - first);
        auto pieces = megalin::cut(data + first * static_cast<std::int64_t>(sizeof(std::int32_t)), size,
                                   static_cast<std::int32_t>(capacity));
        *out++ = megalin::place(pieces, static_cast<std::int32_t>(capacity), chosen);
    }
    return rows;
}

// The pieces [n, 3] (sequence, offset, size) of one window by row, and the first piece of each row [rows + 1].
py::tuple pack_window(const Lengths& lengths, std::int64_t capacity, const std::string& fit) {
    require_packable(lengths, capacity, 1);
    const megalin::Fit chosen = fit_of(fit);
    std::vector<megalin::Piece> pieces;
    std::vector<std::int64_t> next;  // place of the next piece of each row
    {
        const char* data = bytes_of(lengths);
        const std::int64_t count = lengths.size();
        py::gil_scoped_release release;
        pieces = megalin::cut(data, count, static_cast<std::int32_t>(capacity));
        const std::int32_t rows = megalin::place(pieces, static_cast<std::int32_t>(capacity), chosen);
        next.assign(static_cast<std::size_t>(rows) + 1, 0);
        for (const megalin::Piece& piece : pieces) {
            ++next[static_cast<std::size_t>(piece.row) + 1];
        }
        std::partial_sum(next.begin(), next.end(), next.begin());
    }
    py::array_t<std::int64_t> first_pieces(static_cast<py::ssize_t>(next.size()));
    std::copy(next.begin(), next.end(), first_pieces.mutable_data());
    py::array_t<std::int32_t> by_row({static_cast<py::ssize_t>(pieces.size()), py::ssize_t{3}});
    std::int32_t* out = by_row.mutable_data();
    for (const megalin::Piece& piece : pieces) {
        std::int32_t* own = out + 3 * next[static_cast<std::size_t>(piece.row)]++;
        own[0] = piece.sequence;
        own[1] = piece.offset;
        own[2] = piece.size;
    }
    return py::make_tuple(by_row, first_pieces);
}

using Weights = py::array_t<double, py::array::c_style>;
// Source of each sample, and its index in the source. Step i takes the source that is furthest behind its weight times
// max(i, 1) samples, among those with samples left; the first one on ties.
py::tuple build_blend(const Weights& weights, const Offsets& limits, std::int64_t size) {
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
    module.doc() = "Index building and validation for token shards.";
    module.attr("sources") = MEGALIN_SOURCES;
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(), py::kw_only(),
               py::arg("first_token"), py::arg("stride"), py::arg("count"),
               "Sequence and offset of each sample's first token; see _index.pyi.");
    module.def("check_lengths", &check_lengths, py::arg("lengths").noconvert(), py::arg("pointers").noconvert(),
               py::kw_only(), py::arg("itemsize"),
               "The first invalid sequence and the tokens before it; see _index.pyi.");
    module.def("check_documents", &check_documents, py::arg("documents").noconvert(),
               "The first entry below its predecessor; see _index.pyi.");
    module.def("count_rows", &count_rows, py::arg("lengths").noconvert(), py::kw_only(), py::arg("capacity"),
               py::arg("window"), py::arg("fit"), "Number of packed samples per window of sequences; see _index.pyi.");
    module.def("pack_window", &pack_window, py::arg("lengths").noconvert(), py::kw_only(), py::arg("capacity"),
               py::arg("fit"), "The pieces of a window's packed samples; see _index.pyi.");
    module.def("build_blend", &build_blend, py::arg("weights").noconvert(), py::arg("limits").noconvert(),
               py::arg("size"), "Source of each sample and its index in that source; see _index.pyi.");
}
