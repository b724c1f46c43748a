// The options of decode that the prefill kernels of sm_90a do not support. With such an option the decode kernels compute all
// rows.
#include "cuda/attention/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/prefill_tiles.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

// The first requested option that the kernels do not support, or nullptr.
const char* option_prefill_lacks(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    if (cache.dtype != problem.dtype) return "k_cache of 8 bits";
    if (cache.k_scale.present) return "k_scale";
    if (cache.v_scale.present) return "v_scale";
    if (cache.k_rope.present) return "k_rope_cache";
    if (problem.leftpad) return "cache_leftpad";
    if (problem.tree.data) return "tree_mask";
    if (problem.positions && problem.window.bounded()) return "q_positions with a window";
    if (!problem.shard.whole()) return "shard_count";
    if (problem.out.present && problem.out.dtype != problem.dtype) return "out of float32 beside 16-bit inputs";
    if (problem.softcap > 0) return "softcap";
    if (problem.alibi_slopes.present) return "alibi_slopes";
    if (!(problem.softmax_scale > 0)) return "softmax_scale that is not positive";
    if (problem.request.split_size > 0) return "split_size";
    return problem.request.num_splits > 0 ? "num_splits" : nullptr;
}

bool loads_cache(const DecodeProblem& problem, std::string* why) {
    const KvCache& cache = problem.cache;
    if (cache.capacity == 0 || cache.k.shape[0] == 0) return reject(why, "k_cache: has no rows");
    if (!tma_reads(cache.k) || !tma_reads(cache.v) || !tma_reads(problem.q))
        return reject(why, "q, k_cache, v_cache: addresses and strides must be multiples of 16 bytes for it, and not negative");
    const int64_t element = element_bytes(problem.dtype);
    if (!rows_fit_vectors(rows_params(problem.q), problem.head_dim, element) ||
        !rows_fit_vectors(rows_params(problem.out), problem.head_dim_v, element))
        return reject(why, "q, out: their rows must be multiples of 16 bytes for it");
    constexpr int64_t kUnit = 16;  // ForwardCachedKeys::kUnit
    if (!cache.paged() || cache.page_size % kUnit == 0) return true;
    return reject(why, "k_cache: its page size must be a multiple of ", kUnit, " for it (", cache.page_size, ")");
}

bool has_enough_sums(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    if (problem.invariant_rows) return true;  // segments are short
    const int64_t keys = longest_prefill_sum(problem, config.tile_q), most = most_keys_of_accumulators(config);
    if (forward_has_long_sums(config) || keys <= most) return true;
    return reject(why, "k_cache: the kernel adds up at most ", most, " keys without loss of precision (", keys, ")");
}

}  // namespace

bool supports_prefill(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    if (const char* option = option_prefill_lacks(problem)) return reject(why, option, ": the kernel does not support it");
    if (problem.invariant_rows && !has_invariant_prefill(config))
        return reject(why, "FLASH_FLAG_INVARIANT_ROWS: with it the values may have at most 128 channels (", problem.head_dim_v,
                      ")");
    return loads_cache(problem, why) && has_enough_sums(config, problem, why);
}

}  // namespace libflash::cuda::sm90
