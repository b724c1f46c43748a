// What the rows of a room do not know of all that a problem may ask for. Type, head dims and device are the registry's business.
#include <cstring>

#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/attention/forward_kind.h"
#include "cuda/kernels.h"
#include "problem/check.h"

namespace libflash::cuda {
namespace {

// The first of the options that change lengths, scores or probabilities, or nullptr: what backward of sm90 is without.
const char* rare_option(const AttentionProblem& p) {
    if (p.q_rows.packed()) return "cu_seqlens_q";
    if (p.k_rows.packed()) return "cu_seqlens_k";
    if (p.q_rows.used) return "seqused_q";
    if (p.k_rows.used) return "seqused_k";
    if (const char* option = score_option(p)) return option;
    if (p.block_mask.present) return p.block_mask.has_lists ? "block_lists" : "block_mask";
    return nullptr;
}

// Whether the copy engine can be told of the tensor: steps are multiples of 16 bytes, from 0 to 2^40.
bool copy_engine_reads(const TensorView& tensor) {
    constexpr int64_t kElement = 2, kLimit = int64_t{1} << 40;
    const RowsParams rows = rows_params(tensor);
    const auto fits = [](int64_t stride) { return stride >= 0 && stride < kLimit / kElement && stride * kElement % 16 == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && fits(rows.batch) && fits(rows.row) && fits(rows.head);
}

// Tiles of the queries that are numbered, sequences without any among them: each takes a number in the workspace. Those of the instance that has most.
int64_t numbered_tiles(const AttentionProblem& p, const KernelConfig& config) {
    const int tile = forward_tile_q(config, ForwardKind::general);
    const ScheduleParams schedule = schedule_params(p.q_rows, p.batch, p.heads_q, tile, 1, false);
    return int64_t{schedule.heads} * schedule.tiles;
}
constexpr int64_t kMostTiles = 1 << 24;

// The first tensor that the copy engine cannot be told of, or nullptr. Without keys neither K nor V is read.
const char* tensor_beyond_sm90(const AttentionProblem& p) {
    if (!copy_engine_reads(p.q)) return "q";
    if (p.k_rows.capacity > 0 && !copy_engine_reads(p.k)) return "k";
    if (p.k_rows.capacity > 0 && !copy_engine_reads(p.v)) return "v";
    return p.backward && !copy_engine_reads(p.dout) ? "dout" : nullptr;
}
bool copy_engine_reads_all(const AttentionProblem& p, std::string* why) {
    const char* tensor = tensor_beyond_sm90(p);
    if (tensor && why)
        *why = text_of(tensor, ": its address and its strides must be multiples of 16 bytes for it, and not negative");
    return !tensor;
}

// The first option that is beyond backward, whose kernel knows masks by position, shared heads, sinks and dlse.
const char* option_beyond_backward_sm90(const AttentionProblem& p) {
    return p.request.deterministic ? "deterministic" : rare_option(p);
}

bool knows_backward_options(const AttentionProblem& p, std::string* why) {
    if (const char* option = option_beyond_backward_sm90(p)) {
        if (why) *why = text_of(option, ": the kernel does not know it");
        return false;
    }
    if (!copy_engine_reads_all(p, why)) return false;
    const bool dk = in_vectors(rows_params(p.dk), p.head_dim, 2), dv = in_vectors(rows_params(p.dv), p.head_dim_v, 2);
    if (dk && dv) return true;
    if (why) *why = text_of(dk ? "dv" : "dk", ": its address, its strides and its rows must be multiples of 16 bytes for it");
    return false;
}

}  // namespace

bool knows_options(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (std::strcmp(config.room, "sm90") != 0) return true;
    if (std::strcmp(config.operation, "backward") == 0) return knows_backward_options(problem, why);
    if (!copy_engine_reads_all(problem, why)) return false;
    if (problem.q_rows.packed()) {  // else nothing has to be counted
        const int64_t tiles = numbered_tiles(problem, config);
        if (tiles > kMostTiles) {
            if (why) *why = text_of("cu_seqlens_q: tiles of all heads must be at most ", kMostTiles, " for it (", tiles, ")");
            return false;
        }
    }
    if (!in_vectors(rows_params(problem.out), problem.head_dim_v, 2)) {
        if (why) *why = "out: its address, its strides and its rows must be multiples of 16 bytes for it";
        return false;
    }
    return true;
}

}  // namespace libflash::cuda
