// The lanes of a query tile: up to 64 query rows, one in each vector lane, with their visible keys. A lane never depends on its
// neighbours, so the bits of a row do not depend on the tile it is in.
#pragma once

#include "cpu/engine/arena.h"
#include "cpu/engine/pack.h"

namespace libflash::cpu {
namespace LIBFLASH_ISA {

constexpr int64_t kQueryTileRows = 64;  // rows of a full query tile: four AVX-512 vectors of floats

// Keys [first, last).
struct KeyRange {
    int64_t first = 0, last = 0;
    bool empty() const { return first >= last; }
    int64_t count() const { return empty() ? 0 : last - first; }
};

template <class A>
struct Lanes {
    int64_t rows = 0;   // lanes in use
    int64_t width = 0;  // rounded up to whole vectors
    int64_t row0 = 0;   // row of lane 0 in its sequence

    // Lane i sees keys [first_key[i], last_key[i]). seen_by_any is the range of all these keys, seen_by_all their intersection.
    Integer<A>*first_key = nullptr, *last_key = nullptr;
    KeyRange seen_by_any, seen_by_all;

    A* alibi_position = nullptr;  // position of the row, as ALiBi counts it: a key at this position has distance 0
    A* alibi_slope = nullptr;

    void lay_out(Arena& arena) {
        first_key = arena.allocate<Integer<A>>(kQueryTileRows);
        last_key = arena.allocate<Integer<A>>(kQueryTileRows);
        alibi_position = arena.allocate<A>(kQueryTileRows);
        alibi_slope = arena.allocate<A>(kQueryTileRows);
    }

    void resize(int64_t used) {
        rows = used;
        width = round_up(used, kLanes<A>);
    }

    // Called after first_key and last_key of the used lanes are set. Unused lanes get the keys that all lanes see, so that they
    // never make an edge tile.
    void set_ranges() {
        seen_by_any = {INT64_MAX, 0}, seen_by_all = {0, INT64_MAX};
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t first = first_key[i], last = last_key[i];
            if (first < last) {
                if (first < seen_by_any.first) seen_by_any.first = first;
                if (last > seen_by_any.last) seen_by_any.last = last;
            }
            if (first > seen_by_all.first) seen_by_all.first = first;
            if (last < seen_by_all.last) seen_by_all.last = last;
        }
        if (seen_by_any.empty()) seen_by_any = {0, 0};
        for (int64_t i = rows; i < width; ++i) {
            first_key[i] = static_cast<Integer<A>>(seen_by_all.first), last_key[i] = static_cast<Integer<A>>(seen_by_all.last);
            alibi_position[i] = alibi_slope[i] = 0;
        }
    }
};

}  // namespace LIBFLASH_ISA
}  // namespace libflash::cpu
