// What the tangent kernels for sm_80 and later do not support. plan/selection.cpp checks dtype, head dims and device.
#include "cuda/host/long_sums.h"
#include "cuda/sm80/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm80 {
namespace {

bool adds_up(const char* argument, const char* what, int64_t terms, int64_t most, std::string* why) {
    if (terms <= most) return true;
    return reject(why, argument, ": the kernel adds up at most ", most, " ", what, " without loss of precision (", terms, ")");
}

}  // namespace

bool supports_tangent(const KernelConfig& config, const TangentProblem& problem, std::string* why) {
    const int64_t most = most_keys_of_accumulators(config);
    if (!adds_up("k", "keys", longest_sum(problem, config.tile_q), most, why)) return false;
    if (!problem.backward) return true;
    const int64_t rows = longest_gradient_sum(problem, config.tile_q) * problem.group_size();
    return adds_up("q", "rows of the heads that share a key head", rows, most, why);
}

}  // namespace libflash::cuda::sm80
