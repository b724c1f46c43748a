// The options that forward for more than 256 channels lacks; then the sm80 kernel for wide heads takes the call.
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm90/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

// The first requested option that the kernel lacks, or nullptr.
const char* option_wide_forward_lacks(const AttentionProblem& p) {
    if (p.dropout.active()) return "dropout_p";
    if (p.alibi_slopes.present) return "alibi_slopes";
    if (p.bias.present) return "bias";
    if (p.mask.present) return "mask";
    return p.block_mask.present ? "block_mask" : nullptr;
}

}  // namespace

bool supports_wide_forward(const AttentionProblem& problem, std::string* why) {
    if (const char* option = option_wide_forward_lacks(problem)) return reject(why, option, ": the kernel does not support it");
    if (!tma_reads_all(problem, why)) return false;
    if (!loads_in_vectors(problem)) return reject(why, "head_dim, head_dim_v: must be multiples of 8 for it");
    if (rows_fit_vectors(rows_params(problem.out), problem.head_dim_v, element_bytes(problem.dtype))) return true;
    return reject(why, "out: its address, its strides and its rows must be multiples of 16 bytes for it");
}

}  // namespace libflash::cuda::sm90
