// The options that the tangent kernels of sm_90a lack. plan/selection.cpp checks dtype, head dims and device.
#include <initializer_list>
#include <utility>

#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm90/plan.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

using NamedTensors = std::initializer_list<std::pair<const char*, const TensorView*>>;
constexpr const char* kAlignment = "its address and its strides must be multiples of 16 bytes for it";

bool knows_options(const TangentProblem& p, std::string* why) {
    const char* option = p.block_mask.present ? "block_mask" : rare_option(p);
    if (option) return reject(why, option, ": the kernel does not know it");
    return p.softmax_scale > 0 || reject(why, "softmax_scale: must be positive for it");
}

// Without keys, K and V are not read.
bool tma_reads_all(const TangentProblem& p, std::string* why) {
    const Tangents& t = p.tangents;
    const NamedTensors queries = {{"q", &p.q}, {"tangents.q", &t.q}},
                       keys = {{"k", &p.k}, {"tangents.k", &t.k}, {"v", &p.v}, {"tangents.v", &t.v}};
    for (const NamedTensors* tensors : {&queries, &keys})
        for (const auto& [name, tensor] : *tensors) {
            if (tensors == &keys && p.k_rows.capacity == 0) continue;
            if (tensor->present && !tma_reads(*tensor)) return reject(why, name, ": ", kAlignment, ", and not negative");
        }
    return true;
}

bool writes_in_vectors(const TangentProblem& p, std::string* why) {
    const auto fits = [&](const TensorView& x) { return !x.present || rows_fit_vectors(rows_params(x), p.head_dim_v, 2); };
    if (!p.from_lse && !fits(p.out)) return reject(why, "out: ", kAlignment, ", and its rows too");
    return fits(p.tangents.out) || reject(why, "tangents.out: ", kAlignment, ", and its rows too");
}

}  // namespace

bool supports_tangent(const KernelConfig& config, const TangentProblem& problem, std::string* why) {
    if (!has_no_shard_options(problem, why) || !knows_options(problem, why)) return false;
    if (!tma_reads_all(problem, why) || !writes_in_vectors(problem, why)) return false;
    const int64_t keys = longest_sum(problem, config.tile_q), most = most_keys_of_accumulators(config);
    return keys <= most || reject(why, "k: the kernel adds up at most ", most, " keys without loss of precision (", keys, ")");
}

}  // namespace libflash::cuda::sm90
