// Whether decode uses the hint that sequences share their first keys (decode_prefix.cuh). Host only, no CUDA header.
#pragma once

#include "cuda/host/decode_splits.h"
#include "cuda/host/prefix_tiles.h"
#include "cuda/host/problem_params.h"
#include "cuda/plans.h"
#include "cuda/sm80/decode_instance.h"

namespace libflash::cuda::sm80 {

// The separate kernel is not worth its cost if groups have fewer sequences on average, if caches are shorter, or if without
// splits the call would leave most of the GPU idle.
constexpr int64_t kFewestSharers = 4, kFewestKeys = 256;
// Limits of the workspace: sums of each row, and bytes of all sums.
constexpr int64_t kMostPrefixSums = 64, kMostPrefixBytes = 256 << 20;

// Whether the problem allows it: all sequences have the same number of rows, at most kDecodeSlab per key head, the rows see the
// keys from the first one on, and there are no other options of the cache.
inline bool takes_prefixes(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    const int64_t rows = problem.seqlen_q * problem.group_size();
    const bool plain = cache.dtype == problem.dtype && !has_scales(cache) && !cache.k_rope.present && problem.shard.whole() &&
                       (!problem.out.present || problem.out.dtype == problem.dtype);
    return plain && !has_ragged_rows(problem) && rows > 0 && !decode_shares_keys(rows) && !problem.leftpad &&
           !problem.alibi_slopes.present && problem.mask_rule.left == MaskRule::kUnbounded;
}

// Bytes of the sums of all rows for one class of the keys of one split.
inline int64_t bytes_of_prefix_sums(const KernelConfig& config, const DecodeProblem& problem) {
    return problem.query_rows() * problem.heads_q * (config.head_dim_v + kPrefixStatistics) * static_cast<int64_t>(sizeof(float));
}

inline bool uses_prefixes(const DecodeSizes& sizes, const DecodeSplits& splits) {
    const DecodeProblem& problem = sizes.problem;
    const KernelConfig& config = sizes.config;
    if (!problem.shared.groups || problem.shared.count == 0 || !takes_prefixes(problem)) return false;
    if (!has_prefix_kernels(config.head_dim, static_cast<int>(element_bytes(problem.dtype)))) return false;
    const int64_t sums = splits.splits * (config.tile_k / kDecodeSlab / splits.key_heads);
    const int64_t bytes = bytes_of_prefix_sums(config, problem) * sums;
    return sums <= kMostPrefixSums && bytes <= kMostPrefixBytes && problem.batch >= kFewestSharers * problem.shared.count &&
           problem.cache.capacity >= kFewestKeys && 2 * problem.batch * problem.heads_k >= sizes.device.multiprocessors;
}

inline DecodeKind kind_after_prefix(int key_heads) {
    return key_heads == 2 ? DecodeKind::two_heads_after_prefix : DecodeKind::own_keys_after_prefix;
}

}  // namespace libflash::cuda::sm80
