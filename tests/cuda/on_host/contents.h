// Contents of cu_seqlens that nothing has checked, for programs that compare the sequences of a call with calls for each alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/attention/params.h"
#include "numbers.h"
#include "problem/attention.h"

namespace libflash::cuda {

// One side: prefix sums, and the rows of its tensor.
struct Entries {
    std::vector<int32_t> cu;
    int rows;

    int batch() const { return static_cast<int>(cu.size()) - 1; }
    int begin(int b) const { return std::min(std::max(cu[b], 0), rows); }
    int end(int b) const { return std::min(std::max(cu[b + 1], begin(b)), rows); }
    int length(int b) const { return end(b) - begin(b); }
    int longest() const {
        int most = 0;
        for (int b = 0; b < batch(); ++b) most = std::max(most, length(b));
        return most;
    }
    // Whether results are defined: the sequences have no more rows together than the tensor.
    bool fit() const {
        int64_t all = 0;
        for (int b = 0; b < batch(); ++b) all += length(b);
        return all <= rows;
    }
    bool stands_alone(int b) const {
        for (int other = 0; other < batch(); ++other)
            if (other != b && std::max(begin(b), begin(other)) < std::min(end(b), end(other))) return false;
        return true;
    }
    bool owns(int row) const {
        for (int b = 0; b < batch(); ++b)
            if (row >= begin(b) && row < end(b)) return true;
        return false;
    }
    Sequences packed() const {
        Sequences side;
        side.capacity = side.max_length = rows, side.cu = cu.data();
        return side;
    }
};
inline Sequences one_sequence_of(int rows) {
    Sequences side;
    side.capacity = side.max_length = rows;
    return side;
}

struct Contents {
    const char* name;
    Entries queries, keys;

    // Whether the results of a sequence must be right. Only forward has results of sequences that share keys.
    bool is_defined(int b, bool may_share_keys = false) const {
        return queries.fit() && queries.stands_alone(b) && (may_share_keys || (keys.fit() && keys.stands_alone(b)));
    }
};

inline std::vector<Contents> all_contents() {
    const Entries q = {{0, 60, 60, 190, 320, 330}, 335}, k = {{0, 150, 150, 150, 290, 333}, 340};
    // Each sequence with rows begins before the one before it; entries above the rows and below 0.
    const Entries q_descend = {{260, 700, 100, 260, -9, 100}, 505}, k_descend = {{210, 1 << 30, 80, 210, INT32_MIN, 80}, 515};
    // The third sequence has rows of the first one.
    const Entries q_overlap = {{0, 140, 90, 140, 300, 310}, 370}, k_overlap = {{0, 200, 130, 200, 400, 410}, 480};
    // More rows than the tensor has: there are work tiles for the first tiles of the third sequence only.
    const Entries q_many = {{0, 400, 0, 400, 0, 400}, 400}, k_many = {{0, 600, 0, 600, 0, 600}, 600};
#ifdef FEW_CONTENTS  // the kernels take long on the host
    return {{"queries descend", q_descend, k}, {"both overlap", q_overlap, k_overlap}, {"too many of both", q_many, k_many}};
#endif
    return {{"in order", q, k},
            {"queries descend", q_descend, k},
            {"keys descend", q, k_descend},
            {"both descend", q_descend, k_descend},
            {"queries overlap", q_overlap, k},
            {"keys overlap", q, k_overlap},
            {"both overlap", q_overlap, k_overlap},
            {"too many queries", q_many, k},
            {"too many keys", q, k_many},
            {"too many of both", q_many, k_many}};
}

// Sequences of a call: those of the prefix sums or, without them, one.
struct Sides {
    Sequences queries, keys;
    int batch, first_row, first_key;
};
inline LengthsParams lengths_of(const Sequences& side) {
    return LengthsParams{side.cu, nullptr, static_cast<int>(side.capacity)};
}

// Calls run(sides) for each sequence whose results must be right alone, and then, after between(), for all together. Returns
// whether all calls returned true, which means that the memory after the workspace is unchanged.
template <class Run, class Between>
bool run_alone_and_together(const Contents& contents, bool may_share_keys, const Run& run, const Between& between) {
    const Entries &queries = contents.queries, &keys = contents.keys;
    bool kept = true;
    for (int b = 0; b < queries.batch(); ++b)
        if (contents.is_defined(b, may_share_keys) && (may_share_keys || queries.length(b) > 0 || keys.length(b) > 0))
            kept &= run(
                Sides{one_sequence_of(queries.length(b)), one_sequence_of(keys.length(b)), 1, queries.begin(b), keys.begin(b)});
    between();
    kept &= run(Sides{queries.packed(), keys.packed(), queries.batch(), 0, 0});
    if (!kept) std::printf("WRONG %s: memory after the workspace\n", contents.name);
    return kept;
}

// Memory of the workspace, with numbers after it that must not change.
template <class Number>
struct GuardedMemory {
    static constexpr size_t kGuard = 4096;
    std::vector<Number> x;
    Number filled;

    GuardedMemory(size_t count, Number with) : x(count + kGuard, with), filled(with) {}
    bool is_kept() const {
        for (size_t i = x.size() - kGuard; i < x.size(); ++i)
            if (std::memcmp(&x[i], &filled, sizeof(Number)) != 0) return false;
        return true;
    }
};

// Compares the rows of a tensor [row][width] with those of calls for each sequence alone. Rows of no sequence must be NaN.
template <class Number>
bool same_rows(const char* name, const Contents& contents, const Entries& side, const std::vector<Number>& got,
               const std::vector<Number>& alone, double limit, bool may_share_keys = false) {
    const size_t width = got.size() / side.rows;
    double worst = 0;
    for (int b = 0; b < side.batch(); ++b) {
        RelativeError error;
        const size_t end = contents.is_defined(b, may_share_keys) ? side.end(b) * width : 0;
        for (size_t i = side.begin(b) * width; i < end; ++i) error.add(wide(got[i]), wide(alone[i]));
        worst = larger_error(worst, error.value());
    }
    bool untouched = true;
    for (int row = 0; row < side.rows; ++row) {
        if (side.owns(row)) continue;
        for (size_t i = 0; i < width; ++i) untouched &= wide(got[row * width + i]) != wide(got[row * width + i]);
    }
    const bool good = worst <= limit && untouched;
    std::printf("%s %s, %s: %.1e%s\n", good ? "ok" : "WRONG", contents.name, name, worst, untouched ? "" : ", other rows");
    return good;
}

}  // namespace libflash::cuda
