// First-fit and best-fit packing of whole documents into rows of a fixed number of tokens.
#include "packing.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace megalin {

namespace {

// First fit: a binary tree of maxima over the free space of the rows (its leaves) finds the first row with enough
// space.
class FirstFit {
   public:
    FirstFit(std::size_t most_rows, std::int32_t capacity) {
        while (leaves_ < most_rows) {
            leaves_ *= 2;
        }
        room_.assign(2 * leaves_, capacity);
    }

    std::int32_t take(std::int32_t size) {
        std::size_t node = 1;
        while (node < leaves_) {
            node *= 2;
            if (room_[node] < size) {
                ++node;
            }
        }
        const auto row = static_cast<std::int32_t>(node - leaves_);
        room_[node] -= size;
        while (node > 1) {
            node /= 2;
            room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
        }
        rows_ = std::max(rows_, row + 1);
        return row;
    }

    std::int32_t rows() const { return rows_; }

   private:
    std::int32_t rows_ = 0;
    std::size_t leaves_ = 1;
    std::vector<std::int32_t> room_;
};

// Best fit: the rows that are not full, ordered by free space, then by number.
class BestFit {
   public:
    explicit BestFit(std::int32_t capacity) : capacity_(capacity) {}

    std::int32_t take(std::int32_t size) {
        const auto found = open_.lower_bound({size, 0});
        std::pair<std::int32_t, std::int32_t> row{capacity_, rows_};
        if (found != open_.end()) {
            row = *found;
            open_.erase(found);
        } else {
            ++rows_;
        }
        if (row.first > size) {
            open_.insert({row.first - size, row.second});
        }
        return row.second;
    }

    std::int32_t rows() const { return rows_; }

   private:
    std::int32_t capacity_;
    std::int32_t rows_ = 0;
    std::set<std::pair<std::int32_t, std::int32_t>> open_;
};

template <typename Rows>
std::int32_t place_by_size(std::vector<Piece>& pieces, Rows rows) {
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.size > b.size; });
    for (Piece& piece : pieces) {
        piece.row = rows.take(piece.size);
    }
    return rows.rows();
}

}  // namespace

std::vector<Piece> cut(const char* lengths, std::int64_t count, std::int32_t capacity) {
    std::vector<Piece> pieces;
    pieces.reserve(static_cast<std::size_t>(count));
    for (std::int64_t sequence = 0; sequence < count; ++sequence) {
        std::int32_t length;
        std::memcpy(&length, lengths + sequence * static_cast<std::int64_t>(sizeof(length)), sizeof(length));
        std::int32_t offset = 0;
        for (std::int32_t left = length - 1; left > 0; left -= capacity) {
            const std::int32_t size = std::min(left, capacity);
            pieces.push_back({static_cast<std::int32_t>(sequence), offset, size, 0});
            offset += size;
        }
    }
    return pieces;
}

std::int32_t place(std::vector<Piece>& pieces, std::int32_t capacity, Fit fit) {
    return fit == Fit::first ? place_by_size(pieces, FirstFit(pieces.size(), capacity))
                             : place_by_size(pieces, BestFit(capacity));
}

}  // namespace megalin
