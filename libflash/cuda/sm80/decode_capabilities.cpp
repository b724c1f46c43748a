// The options of decode that the sm_80 kernels lack. plan/selection.cpp checks dtype, head dims and device.
#include "cuda/host/problem_params.h"
#include "cuda/sm80/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm80 {
namespace {

// The first requested option that decode lacks, or nullptr.
const char* option_decode_lacks(const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    // append_codes.cuh has rows of equal numbers, at the positions of their keys.
    if (is_ragged(problem) && (cache.dtype != problem.dtype || cache.k_scale.present || cache.v_scale.present))
        return "k_cache of 8 bits or scales together with packed rows, q_positions or tree_mask";
    const bool codes = cache.dtype != problem.dtype;
    if (codes && problem.dtype == DType::f32) return "k_cache of 8 bits with float32 q";
    if (!codes && cache.k_scale.present) return "k_scale of a k_cache that has not 8 bits";
    if (!codes && cache.v_scale.present) return "v_scale of a v_cache that has not 8 bits";
    if (cache.k_scale.groups > 1) return "k_scale of groups of channels";
    if (cache.v_scale.groups > 1) return "v_scale of groups of channels";
    if (cache.k_rope.present) return "k_rope_cache";
    if (problem.k_new.present && cache.v_in_k) return "v_cache as a view of k_cache";
    if (!problem.shard.whole()) return "shard_count";
    if (problem.out.present && problem.out.dtype != problem.dtype) return "out of float32 beside 16-bit inputs";
    if (problem.shared.groups) return "shared_groups";
    if (problem.invariant_rows) return "FLASH_FLAG_INVARIANT_ROWS";
    return nullptr;
}

}  // namespace

bool supports_decode(const KernelConfig&, const DecodeProblem& problem, std::string* why) {
    const char* option = option_decode_lacks(problem);
    if (option && why) *why = text_of(option, ": the kernel does not know it");
    return !option;
}

}  // namespace libflash::cuda::sm80
