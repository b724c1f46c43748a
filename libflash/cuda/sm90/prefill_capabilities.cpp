// The options of decode that the prefill kernels of sm_90a do not support. With such an option the decode kernels compute all
// rows.
#include <cstdint>

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
    if (cache.k_scale.groups > 1) return "k_scale of groups of channels";
    if (cache.v_scale.groups > 1) return "v_scale of groups of channels";
    // Products of probabilities and scales might leave the range of float16.
    if (cache.v_scale.of_rows && problem.dtype == DType::f16) return "v_scale of rows with float16";
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

// A cache with scales must do what one with codes in its place would do, so that both have the same kernel and the same bits.
bool has_vectors(const DecodeProblem& problem, std::string* why) {
    const KvCache& cache = problem.cache;
    const int64_t element = element_bytes(problem.dtype), stored = has_scales(cache) ? 1 : element_bytes(cache.dtype);
    const auto fits = [](const TensorView& tensor, int64_t dim, int64_t bytes) {
        return rows_fit_vectors(rows_params(tensor), dim, bytes);
    };
    if (!fits(problem.q, problem.head_dim, element) || !fits(problem.out, problem.head_dim_v, element))
        return reject(why, "q, out: their rows must be multiples of 16 bytes for it");
    if (!fits(cache.k, problem.head_dim, stored) || !fits(cache.v, problem.head_dim_v, stored))
        return reject(why,
                      "k_cache, v_cache: their addresses, strides and rows must be multiples of 16 bytes for it, with scales of ",
                      "16 elements");
    return true;
}

// Whether the threads that copy find every row by a distance of 32 bits in units of 16 bytes (forward_copy_warpgroup.cuh).
bool has_short_distances(const TensorView& cache, int64_t element) {
    double last = 0;  // the distance of the last row, in bytes
    for (int i = 0; i < 3; ++i) {
        if (cache.shape[i] > 1 && cache.stride[i] < 0) return false;
        last += static_cast<double>(cache.shape[i] - 1) * static_cast<double>(cache.stride[i] * element);
    }
    return last / 16 < UINT32_MAX;
}

bool loads_cache(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    const KvCache& cache = problem.cache;
    if (cache.capacity == 0 || cache.k.shape[0] == 0) return reject(why, "k_cache: has no rows");
    const bool copies = copies_cache(cache, problem.dtype);
    if (!tma_reads(problem.q) || (!copies && (!tma_reads(cache.k) || !tma_reads(cache.v))))
        return reject(why, "q, k_cache, v_cache: addresses and strides must be multiples of 16 bytes for it, and not negative");
    if (!has_vectors(problem, why)) return false;
    if (!copies) return true;
    const int64_t stored = element_bytes(cache.dtype);
    if (!has_short_distances(cache.k, stored) || !has_short_distances(cache.v, stored))
        return reject(why, "k_cache, v_cache: strides must not be negative for it, and the rows must lie within 64 GiB");
    if (!problem.invariant_rows && has_copied_prefill(config)) return true;
    return reject(why, "k_cache: ", problem.invariant_rows ? "with FLASH_FLAG_INVARIANT_ROWS" : "for this kernel",
                  " it must have the type of q (it has ", cache.dtype, "), no scales, and pages whose size is a multiple of ",
                  kCachedUnit, " (", cache.page_size, ")");
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
    return loads_cache(config, problem, why) && has_enough_sums(config, problem, why);
}

}  // namespace libflash::cuda::sm90
