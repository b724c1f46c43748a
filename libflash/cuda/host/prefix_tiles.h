// The tiles of query rows of the kernels for keys that sequences share (attention/shared_prefix.cuh). Host only, no CUDA header.
#pragma once

#include <algorithm>

#include "cuda/attention/decode_params.h"
#include "cuda/plans.h"
#include "problem/decode.h"

namespace libflash::cuda {

// How many sequences fit into a tile of `rows` query rows. All rows of a sequence are in one slab of kDecodeSlab rows.
inline int64_t sequences_of_prefix_tile(const DecodeProblem& problem, int64_t rows) {
    return rows / kDecodeSlab * (kDecodeSlab / (problem.seqlen_q * problem.group_size()));
}
// Upper bound of the number of tiles, for all ways to form problem.shared.count groups.
inline int64_t most_prefix_tiles(const DecodeProblem& problem, int64_t rows) {
    const int64_t groups = std::min(problem.shared.count, problem.batch / 2), of_tile = sequences_of_prefix_tile(problem, rows);
    return (problem.batch + groups * (of_tile - 1)) / of_tile;
}

// The launch for shared keys by a kernel whose tiles have `rows` query rows: a thread block for each tile, key head, split and
// class of keys. A class is the keys that one warp of the decode kernel adds up.
inline void plan_prefix_launch(DecodePlan& plan, const DecodeProblem& problem, int64_t rows, const KernelResources& resources) {
    plan.prefix_tiles = most_prefix_tiles(problem, rows);
    plan.prefix = launch_shape(plan.prefix_tiles * problem.heads_k * plan.splits * (plan.tile_k / kDecodeSlab), resources);
}

}  // namespace libflash::cuda
