// The options of decode that the sm_90a decode kernel lacks. Where it lacks one, the sm80 kernel for wide heads takes the call.
#include "cuda/host/problem_params.h"
#include "cuda/sm90/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

// The first requested option that the kernel lacks, or nullptr.
const char* option_decode_lacks(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    if (cache.dtype != problem.dtype) return "k_cache of 8 bits";
    if (cache.k_scale.present || cache.v_scale.present) return "k_scale or v_scale";
    if (cache.k_rope.present) return "k_rope_cache";
    if (problem.tree.data) return "tree_mask";
    if (problem.positions && problem.window.bounded()) return "q_positions with a window";
    if (!problem.shard.whole()) return "shard_count";
    if (problem.out.present && problem.out.dtype != problem.dtype) return "out of float32 beside 16-bit inputs";
    if (problem.invariant_rows) return "FLASH_FLAG_INVARIANT_ROWS";
    if (problem.softcap > 0) return "softcap";
    if (problem.alibi_slopes.present) return "alibi_slopes";
    return problem.softmax_scale > 0 ? nullptr : "softmax_scale that is not positive";
}

// TMA loads boxes of 16 rows or more, which lie in one page.
bool loads_keys(const DecodeProblem& problem, std::string* why) {
    const KvCache& cache = problem.cache;
    if (cache.capacity == 0 || cache.k.shape[0] == 0) return reject(why, "k_cache: has no rows");
    if (!tma_reads(cache.k))
        return reject(why, "k_cache: address and strides must be multiples of 16 bytes for it, and not negative");
    const int64_t element = element_bytes(problem.dtype);
    if (!rows_fit_vectors(rows_params(problem.q), problem.head_dim, element) ||
        !rows_fit_vectors(rows_params(problem.out), problem.head_dim_v, element))
        return reject(why, "q, out: their rows must be multiples of 16 bytes for it");
    constexpr int64_t kUnit = 16;  // DecodeProducer::kUnit
    if (!cache.paged() || cache.page_size % kUnit == 0) return true;
    return reject(why, "k_cache: its page size must be a multiple of ", kUnit, " for it (", cache.page_size, ")");
}

}  // namespace

bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    if (problem.head_dim != config.head_dim || problem.head_dim_v != config.head_dim_v)
        return reject(why, "head_dim, head_dim_v: must be ", config.head_dim, " and ", config.head_dim_v, " for it (",
                      problem.head_dim, " and ", problem.head_dim_v, ")");
    if (!problem.cache.v_in_k) return reject(why, "v_cache: must be a view of the first channels of k_cache for it");
    if (const char* option = option_decode_lacks(problem)) return reject(why, option, ": the kernel does not know it");
    return loads_keys(problem, why);
}

}  // namespace libflash::cuda::sm90
