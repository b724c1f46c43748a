// The options of decode that the sm80 kernels do not support. plan/selection.cpp checks dtype, head dims and device.
#include "cuda/attention/decode_params.h"
#include "cuda/sm80/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm80 {
namespace {

// Scales of groups of channels are applied between products of 16 channels.
bool has_groups_of_16(const CacheScale& scale, int64_t channels) {
    return scale.groups == 1 || channels / scale.groups % 16 == 0;
}

// The first requested option that the kernels do not support, or nullptr.
const char* option_decode_lacks(const KernelConfig& config, const DecodeProblem& problem) {
    const KvCache& cache = problem.cache;
    const int64_t rope = cache.rope_dim(), of_k = problem.head_dim - rope;
    const bool codes = cache.dtype != problem.dtype;
    if (codes && problem.dtype == DType::f32) return "k_cache of 8 bits with float32 q";
    if (!has_groups_of_16(cache.k_scale, of_k)) return "k_scale of groups of channels that are not multiples of 16";
    if (!has_groups_of_16(cache.v_scale, problem.head_dim_v)) return "v_scale of groups of channels that are not multiples of 16";
    if (rope > 0 && of_k % 16 != 0) return "k_rope_cache beside a k_cache whose channels are not a multiple of 16";
    if (codes && rope > most_rope_channels(config.head_dim))
        return "k_rope_cache with so many channels beside a k_cache of 8 bits";
    return nullptr;
}

}  // namespace

bool supports_decode(const KernelConfig& config, const DecodeProblem& problem, std::string* why) {
    const char* option = option_decode_lacks(config, problem);
    if (option && why) *why = text_of(option, ": the kernel does not support it");
    return !option;
}

}  // namespace libflash::cuda::sm80
