// The order of thread blocks, from a problem. Host only, no CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/params.h"
#include "problem/attention.h"

namespace libflash::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What the heads at work at the same time read again and again should fit the L2 cache with room to spare.
constexpr double kL2Bytes = 24e6;

// Tiles of `tile` rows of one side, `heads` heads of a sequence; a head reads `head_bytes` of the other side.
inline ScheduleParams schedule_params(const Sequences& rows, int64_t batch, int64_t heads, int64_t tile, double head_bytes,
                                      bool reversed) {
    ScheduleParams params{};
    int64_t tiles = ceil_div(rows.capacity, tile);
    if (rows.packed()) tiles = std::min(tiles + batch, batch * ceil_div(rows.max_length, tile));
    const int64_t all = rows.packed() ? heads : batch * heads;
    const int64_t group = static_cast<int64_t>(kL2Bytes / std::max(1.0, head_bytes));
    params.tiles = static_cast<int32_t>(tiles);
    params.heads = static_cast<int32_t>(all);
    params.heads_per_group = static_cast<int32_t>(std::max<int64_t>(1, std::min(all, group)));
    params.reversed = reversed;
    return params;
}

// Keys and values that a query head reads, counted once for all heads that share them.
inline double key_bytes(const AttentionProblem& problem) {
    return 2.0 * static_cast<double>(problem.k_rows.max_length) * static_cast<double>(problem.head_dim + problem.head_dim_v) /
           static_cast<double>(problem.group_size());
}

}  // namespace libflash::cuda
