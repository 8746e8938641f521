// Whole documents packed into rows of a fixed number of tokens.
#pragma once

#include <cstdint>
#include <vector>

namespace megalin {

enum class Fit { first, best };

// Tokens [offset, offset + size] of a sequence (one more than `size`: the last is a label only), placed in a row.
struct Piece {
    std::int32_t sequence;
    std::int32_t offset;
    std::int32_t size;
    std::int32_t row;
};

// The pieces of sequences of these lengths: each is one piece, or, where it has more than `capacity` + 1 tokens, pieces
// of `capacity` and a rest. A sequence of fewer than two tokens predicts nothing and gives none. `lengths` may be
// unaligned.
std::vector<Piece> cut(const char* lengths, std::int64_t count, std::int32_t capacity);

// Gives each piece its row, the largest first and in their order where equal; returns the number of rows.
std::int32_t place(std::vector<Piece>& pieces, std::int32_t capacity, Fit fit);

}  // namespace megalin
