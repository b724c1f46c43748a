// Which chunks of a decode call the prefill kernels compute, and how many keys their rows see. Host only, no CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/config.h"
#include "cuda/host/problem_params.h"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/tma_reads.h"
#include "problem/decode.h"

namespace libflash::cuda::sm90 {

// The prefill kernel computes sequences with at least this many query rows. A work tile takes the same time for any number of
// rows, and a full tile has about twice the rate of the decode kernels: from half a tile on, prefill is not slower. For invariant
// rows a quarter of a tile suffices, because decode reads the keys again for every 16 rows of a key head.
inline int64_t fewest_prefill_rows(int64_t tile_q, ForwardInstance instance) {
    return instance == ForwardInstance::invariant ? tile_q / 4 : tile_q / 2;
}

// Whether TMA cannot load the cache as it is: threads copy or convert keys and values.
inline bool copies_cache(const KvCache& cache, DType dtype) {
    return cache.dtype != dtype || has_scales(cache) || (cache.paged() && cache.page_size % kCachedUnit != 0);
}

// Whether TMA can load the codes of the cache, which the kernel then converts.
inline bool loads_codes(const KvCache& cache, DType dtype) {
    if (cache.dtype == dtype || (cache.paged() && cache.page_size % kCachedUnit != 0)) return false;
    return tma_reads(cache.k, element_bytes(cache.dtype)) && tma_reads(cache.v, element_bytes(cache.dtype));
}

inline ForwardInstance prefill_instance(const DecodeProblem& problem) {
    if (problem.invariant_rows) return ForwardInstance::invariant;
    if (!copies_cache(problem.cache, problem.dtype)) return ForwardInstance::cache;
    return loads_codes(problem.cache, problem.dtype) ? ForwardInstance::codes : ForwardInstance::copied;
}

// Whether the call may have enough work tiles for half of the multiprocessors (invariant rows: an eighth). With fewer work tiles
// the decode kernels, which split keys, use more of the GPU. The host knows only the number of all rows, and assumes that the
// long chunks have all rows except one for each sequence.
inline bool pays_for_prefill(const KernelConfig& config, const DecodeProblem& problem, int multiprocessors) {
    const bool packed = problem.q_rows.packed();
    const ForwardInstance instance = prefill_instance(problem);
    const int64_t tile_q = forward_tile_q(config, instance), least = problem.invariant_rows ? 8 : 2;
    if (!packed && problem.seqlen_q < fewest_prefill_rows(tile_q, instance)) return false;
    const int64_t rows = problem.query_rows() - (packed ? problem.batch : 0);
    return least * rows * problem.heads_q >= tile_q * multiprocessors;
}

// An upper bound of the keys that a tile of tile_q query rows sees.
inline int64_t longest_prefill_sum(const DecodeProblem& problem, int64_t tile_q) {
    const int64_t keys = problem.cache.capacity;
    const MaskRule& rule = problem.mask_rule;
    if (rule.left >= keys || rule.right >= keys) return keys;
    return std::min(keys, rule.left + rule.right + tile_q);
}

}  // namespace libflash::cuda::sm90
