// The options that the tangent kernels of sm_90a do not support. plan/selection.cpp checks dtype, head dims and device.
#include <initializer_list>
#include <utility>

#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tma_reads.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {
namespace {

using NamedTensors = std::initializer_list<std::pair<const char*, const TensorView*>>;
constexpr const char* kAlignment = "its address and its strides must be multiples of 16 bytes for it";

bool knows_options(const TangentProblem& p, std::string* why) {
    const char* option = p.block_mask.present ? "block_mask" : rare_option(p);
    if (option) return reject(why, option, ": the kernel does not support it");
    if (p.tangents.dbias.present) return reject(why, "tangents.dbias: the kernel does not support it");
    return p.backward || p.softmax_scale > 0 || reject(why, "softmax_scale: must be positive for it");
}

// Without keys, K and V are not read. The tangent of forward reads dout without TMA.
bool tma_reads_all(const TangentProblem& p, std::string* why) {
    const Tangents& t = p.tangents;
    const NamedTensors queries = {{"q", &p.q}, {"tangents.q", &t.q}}, outputs = {{"dout", &p.dout}, {"tangents.dout", &t.dout}},
                       keys = {{"k", &p.k}, {"tangents.k", &t.k}, {"v", &p.v}, {"tangents.v", &t.v}};
    for (const NamedTensors* tensors : {&queries, &outputs, &keys})
        for (const auto& [name, tensor] : *tensors) {
            if (tensors == &keys && p.k_rows.capacity == 0) continue;
            if (tensors == &outputs && !p.backward) continue;
            if (tensor->present && !tma_reads(*tensor)) return reject(why, name, ": ", kAlignment, ", and not negative");
        }
    return true;
}

bool writes_in_vectors(const TangentProblem& p, std::string* why) {
    const auto fits = [&](const char* name, const TensorView& x, int64_t channels) {
        if (!x.present || rows_fit_vectors(rows_params(x), channels, 2)) return true;
        return reject(why, name, ": ", kAlignment, ", and its rows too");
    };
    const Tangents& t = p.tangents;
    if (p.backward)
        return fits("tangents.dq", t.dq, p.head_dim) && fits("tangents.dk", t.dk, p.head_dim) &&
               fits("tangents.dv", t.dv, p.head_dim_v);
    return (p.from_lse || fits("out", p.out, p.head_dim_v)) && fits("tangents.out", t.out, p.head_dim_v);
}

bool adds_up(const char* argument, const char* what, int64_t terms, int64_t most, std::string* why) {
    if (terms <= most) return true;
    return reject(why, argument, ": the kernel adds up at most ", most, " ", what, " without loss of precision (", terms, ")");
}

}  // namespace

bool supports_tangent(const KernelConfig& config, const TangentProblem& problem, std::string* why) {
    if (!has_no_shard_options(problem, why, true) || !knows_options(problem, why)) return false;
    if (!tma_reads_all(problem, why) || !writes_in_vectors(problem, why)) return false;
    const int64_t most = most_keys_of_accumulators(config);
    if (!adds_up("k", "keys", longest_sum(problem, config.tile_q), most, why)) return false;
    const int64_t rows = problem.backward ? longest_gradient_sum(problem, config.tile_q) * problem.group_size() : 0;
    return adds_up("q", "rows of the heads that share a key head", rows, most, why);
}

}  // namespace libflash::cuda::sm90
