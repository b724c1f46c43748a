// The options that forward and backward with more than 256 channels do not support. With such an option the sm80 kernels for wide
// heads run.
#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm90/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

// The first requested option that the kernels do not support, or nullptr.
const char* option_wide_heads_lack(const AttentionProblem& p) {
    if (p.dropout.active()) return "dropout_p";
    if (p.alibi_slopes.present) return "alibi_slopes";
    if (p.bias.present) return "bias";
    if (p.mask.present) return "mask";
    return p.block_mask.present ? "block_mask" : nullptr;
}

// The checks that forward and backward have in common.
bool supports_wide_heads(const AttentionProblem& problem, std::string* why) {
    if (const char* option = option_wide_heads_lack(problem)) return reject(why, option, ": the kernel does not support it");
    if (!tma_reads_all(problem, why)) return false;
    return loads_in_vectors(problem) || reject(why, "head_dim, head_dim_v: must be multiples of 8 for it");
}

bool writes_vectors(const char* name, const AttentionProblem& problem, const TensorView& tensor, int64_t channels,
                    std::string* why) {
    if (rows_fit_vectors(rows_params(tensor), channels, element_bytes(problem.dtype))) return true;
    return reject(why, name, ": its address, its strides and its rows must be multiples of 16 bytes for it");
}

}  // namespace

bool supports_wide_forward(const AttentionProblem& problem, std::string* why) {
    return supports_wide_heads(problem, why) && writes_vectors("out", problem, problem.out, problem.head_dim_v, why);
}

bool supports_wide_backward(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (!supports_wide_heads(problem, why) || !writes_vectors("dq", problem, problem.dq, problem.head_dim, why) ||
        !writes_vectors("dk", problem, problem.dk, problem.head_dim, why) ||
        !writes_vectors("dv", problem, problem.dv, problem.head_dim_v, why))
        return false;
    // Only keys are limited: for long sums over query rows, dk and dv have several launches.
    const int64_t keys = longest_sum(problem, config.tile_q), most = most_keys_of_accumulators(config);
    if (keys <= most) return true;
    return reject(why, "k: the kernel adds up at most ", most, " keys without loss of precision (", keys, ")");
}

}  // namespace libflash::cuda::sm90
