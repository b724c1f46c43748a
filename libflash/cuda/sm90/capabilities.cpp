// The options that the sm_90a kernels do not support. plan/selection.cpp checks dtype, head dims and device.
#include <algorithm>

#include "cuda/host/long_sums.h"
#include "cuda/host/problem_params.h"
#include "cuda/host/shard_options.h"
#include "cuda/host/statistics.h"
#include "cuda/host/tile_schedule.h"
#include "cuda/sm90/backward_instance.h"
#include "cuda/sm90/forward_instance.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tma_reads.h"
#include "problem/check.h"

namespace libflash::cuda::sm90 {

namespace {

// The first tensor that TMA cannot read, or nullptr. Without keys, K and V are not read.
const char* tensor_tma_cannot_read(const AttentionProblem& p) {
    if (!tma_reads(p.q)) return "q";
    if (p.k_rows.capacity > 0 && !tma_reads(p.k)) return "k";
    if (p.k_rows.capacity > 0 && !tma_reads(p.v)) return "v";
    return p.backward && !tma_reads(p.dout) ? "dout" : nullptr;
}

}  // namespace

bool tma_reads_all(const AttentionProblem& p, std::string* why) {
    const char* tensor = tensor_tma_cannot_read(p);
    if (tensor && why)
        *why = text_of(tensor, ": its address and its strides must be multiples of 16 bytes for it, and not negative");
    return !tensor;
}

namespace {

// Whether the kernel adds to dq in a fixed order under a block mask. Where the narrowest kernel for the problem does not, no
// wider sm90 kernel replaces it, because it would pad every tile.
bool has_ordered_blocks(const KernelConfig& config, const AttentionProblem& p) {
    const BackwardInstance kind = backward_instance(rare_option(p), true, true);
    KernelConfig narrowest = config;
    if (const int dim = std::max(p.head_dim, p.head_dim_v); dim > 96 && dim <= 128) narrowest.head_dim = 128;
    return has_fixed_order(config, kind) && has_fixed_order(narrowest, kind);
}

// The first requested option that backward does not support, or nullptr.
const char* option_backward_lacks(const KernelConfig& config, const AttentionProblem& p) {
    if (p.request.deterministic && p.block_mask.has_lists) return "deterministic with block_lists";
    if (p.request.deterministic && p.block_mask.present && !has_ordered_blocks(config, p))
        return "deterministic with a block mask";
    return nullptr;
}

bool supports_backward(const KernelConfig& config, const AttentionProblem& p, std::string* why) {
    if (const char* option = option_backward_lacks(config, p)) {
        if (why) *why = text_of(option, ": the kernel does not support it");
        return false;
    }
    if (!tma_reads_all(p, why)) return false;
    const bool dk = rows_fit_vectors(rows_params(p.dk), p.head_dim, 2), dv = rows_fit_vectors(rows_params(p.dv), p.head_dim_v, 2);
    if (dk && dv) return true;
    if (why) *why = text_of(dk ? "dv" : "dk", ": its address, its strides and its rows must be multiples of 16 bytes for it");
    return false;
}

// Packed queries: the workspace has an entry for each work tile, including empty ones. The general instance has the most work
// tiles.
bool supports_tile_count(const KernelConfig& config, const AttentionProblem& p, std::string* why) {
    constexpr int64_t kMostTiles = 1 << 24;
    if (!p.q_rows.packed()) return true;
    const int tile = forward_tile_q(config, ForwardInstance::general);
    const int64_t tiles = blocks_of(schedule_params(p.q_rows, p.batch, p.heads_q, tile, 1, false));
    if (tiles <= kMostTiles) return true;
    if (why) *why = text_of("cu_seqlens_q: tiles of all heads must be at most ", kMostTiles, " for it (", tiles, ")");
    return false;
}

bool supports_key_count(const KernelConfig& config, const AttentionProblem& p, std::string* why) {
    const int64_t keys = longest_sum(p, config.tile_q), most = most_keys_of_accumulators(config);
    if (forward_has_long_sums(config) || keys <= most) return true;
    if (why) *why = text_of("k: the kernel adds up at most ", most, " keys without loss of precision (", keys, ")");
    return false;
}

// The first requested option that only the general instance supports, or nullptr. The general instance computes no statistics.
const char* option_statistics_lack(const AttentionProblem& p) {
    if (const char* option = rare_option(p)) return option;
    if (!(p.softmax_scale > 0)) return "softmax_scale";
    return loads_in_vectors(p) ? nullptr : "head_dim";
}

bool supports_forward(const KernelConfig& config, const AttentionProblem& p, std::string* why) {
    const char* option = config.statistics ? option_statistics_lack(p) : nullptr;
    if (option) return reject(why, option, ": the kernel with statistics of rows does not support it");
    if (!tma_reads_all(p, why) || !supports_tile_count(config, p, why) || !supports_key_count(config, p, why)) return false;
    if (rows_fit_vectors(rows_params(p.out), p.head_dim_v, 2)) return true;
    if (why) *why = "out: its address, its strides and its rows must be multiples of 16 bytes for it";
    return false;
}

}  // namespace

bool supports(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (config.operation == Operation::forward && !agrees_on_statistics(config, problem, why)) return false;
    if (!has_no_shard_options(problem, why)) return false;
    if (config.operation == Operation::backward)
        return config.head_dim > 256 ? supports_wide_backward(config, problem, why) : supports_backward(config, problem, why);
    return config.head_dim > 256 ? supports_wide_forward(problem, why) : supports_forward(config, problem, why);
}

}  // namespace libflash::cuda::sm90
