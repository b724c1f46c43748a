// What backward for more than 256 channels does not support. plan/selection.cpp checks dtype, head dims and device.
#include "cuda/host/long_sums.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm80 {
namespace {

// Refuses sums of more than `most` terms: sums stay in registers, and their error grows with the number of terms.
bool adds_up(const char* argument, const char* what, int64_t terms, int64_t most, std::string* why) {
    if (terms <= most) return true;
    return reject(why, argument, ": the kernel adds up at most ", most, " ", what, " without loss of precision (", terms, ")");
}

}  // namespace

bool supports_wide_backward(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (!supports_shard_options(problem, why)) return false;
    if (element_bytes(config.dtype) > 2) return true;  // each sum of a few products is added with rounding
    // Tensor cores truncate once for every 16 terms. Here sums are rounded once for every tile of the other side, and the error
    // of a rounding is half of that of a truncation.
    const int64_t most = most_keys_of_accumulators(config) * 2 * wide_columns(config.tile_q, element_bytes(config.dtype)) / 16;
    const int64_t rows = longest_gradient_sum(problem, config.tile_k) * problem.group_size();
    return adds_up("k", "keys", longest_sum(problem, config.tile_q), most, why) &&
           adds_up("q", "rows of the heads that share a key head", rows, most, why);
}

}  // namespace libflash::cuda::sm80
