// The options of decode that the sm_90a decode kernels do not support, and the calls for which the kernel for many rows is
// preferred. The sm80 kernels serve all other calls.
#include "cuda/host/problem_params.h"
#include "cuda/sm90/decode_rows_instance.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tma_reads.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

// The first requested option that neither kernel supports, or nullptr.
const char* option_decode_lacks(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    if (cache.dtype != problem.dtype) return "k_cache of 8 bits";
    if (cache.k_scale.present || cache.v_scale.present) return "k_scale or v_scale";
    if (cache.k_rope.present) return "k_rope_cache";
    if (problem.positions && problem.window.bounded()) return "q_positions with a window";
    if (!problem.shard.whole()) return "shard_count";
    if (problem.out.present && problem.out.dtype != problem.dtype) return "out of float32 beside 16-bit inputs";
    if (problem.invariant_rows) return "FLASH_FLAG_INVARIANT_ROWS";
    return problem.softmax_scale > 0 ? nullptr : "softmax_scale that is not positive";
}

// The first further option that the kernel for values in the keys does not support, or nullptr; below, for the kernel for many
// rows.
const char* option_of_values_in_keys_lacks(const DecodeProblem& problem) {
    if (problem.tree.data) return "tree_mask";
    if (problem.softcap > 0) return "softcap";
    return problem.alibi_slopes.present ? "alibi_slopes" : nullptr;
}
const char* option_of_many_rows_lacks(const DecodeProblem& problem) {
    return problem.positions && problem.alibi_slopes.present ? "q_positions with alibi_slopes" : nullptr;
}

// TMA loads boxes of 16 rows or more; a box must lie in one page.
bool loads_keys(const DecodeProblem& problem, std::string* why) {
    const KvCache& cache = problem.cache;
    if (cache.capacity == 0 || cache.k.shape[0] == 0) return reject(why, "k_cache: has no rows");
    if (!tma_reads(cache.k) || !tma_reads(cache.v))
        return reject(why, "k_cache, v_cache: addresses and strides must be multiples of 16 bytes for it, and not negative");
    const int64_t element = element_bytes(problem.dtype);
    if (!rows_fit_vectors(rows_params(problem.q), problem.head_dim, element) ||
        !rows_fit_vectors(rows_params(problem.out), problem.head_dim_v, element))
        return reject(why, "q, out: their rows must be multiples of 16 bytes for it");
    constexpr int64_t kUnit = 16;  // DecodePages::kUnit
    if (!cache.paged() || cache.page_size % kUnit == 0) return true;
    return reject(why, "k_cache: its page size must be a multiple of ", kUnit, " for it (", cache.page_size, ")");
}

bool has_the_values_in_the_keys(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    if (problem.head_dim != config.head_dim || problem.head_dim_v != config.head_dim_v)
        return reject(why, "head_dim, head_dim_v: must be ", config.head_dim, " and ", config.head_dim_v, " for it (",
                      problem.head_dim, " and ", problem.head_dim_v, ")");
    return problem.cache.v_in_k || reject(why, "v_cache: must be a view of the first channels of k_cache for it");
}

// Not checked if the caller has named the kernel.
bool has_many_rows(const DecodeProblem& problem, std::string* why) {
    if (problem.request.kernel || problem.request.backend) return true;
    if (problem.request.split_size > 0 && problem.q_rows.packed())
        return reject(why, "split_size: beside cu_seqlens_q the kernel must be requested, because its choice would depend on ",
                      "the rows of other sequences");
    const int64_t rows = mean_rows(problem) * problem.group_size();
    if (rows >= kFewestDecodeRows) return true;
    return reject(why, "q: must have at least ", kFewestDecodeRows, " rows for each key head, unless it is requested (", rows,
                  ")");
}

}  // namespace

bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    const bool in_keys = has_values_in_keys(config);
    if (in_keys ? !has_the_values_in_the_keys(config, problem, why) : !has_many_rows(problem, why)) return false;
    const char* option = option_decode_lacks(problem);
    if (!option) option = in_keys ? option_of_values_in_keys_lacks(problem) : option_of_many_rows_lacks(problem);
    if (option) return reject(why, option, ": the kernel does not support it");
    return loads_keys(problem, why);
}

// The plan of sm80 has already checked that the call has shared keys.
bool supports_prefix(const KernelConfig&, const DecodeProblem& problem, std::string* why) { return loads_keys(problem, why); }

}  // namespace libflash::cuda::sm90
