// Packing of whole documents into rows of a fixed number of tokens.
#pragma once

#include <cstdint>
#include <vector>

namespace megalin {

enum class Fit { first, best };

// Tokens [offset, offset + size] of a sequence, placed in a row; `size` + 1 tokens, because the last is only a label.
struct Piece {
    std::int32_t sequence;
    std::int32_t offset;
    std::int32_t size;
    std::int32_t row;
};

// Cuts sequences of these lengths into pieces. A sequence is one piece; one of more than `capacity` + 1 tokens is cut
// into pieces of `capacity` and a remainder. One of fewer than two tokens has no label and yields no piece. `lengths`
// may be unaligned.
std::vector<Piece> cut(const char* lengths, std::int64_t count, std::int32_t capacity);

// Assigns a row to each piece, the largest first, equal ones in their order; returns the number of rows.
std::int32_t place(std::vector<Piece>& pieces, std::int32_t capacity, Fit fit);

}  // namespace megalin
