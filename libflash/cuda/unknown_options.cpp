// What the rows of a room do not know of all that a problem may ask for. Type, head dims and device are the registry's business.
#include <cstring>

#include "cuda/attention/fill_params.h"
#include "cuda/attention/fill_schedule.h"
#include "cuda/kernels.h"
#include "problem/check.h"

namespace libflash::cuda {
namespace {

// The first of the options that have been tried on the host alone, or nullptr. Until evidence has them a call must ask for the kernel.
const char* option_not_in_evidence(const AttentionProblem& p) {
    if (p.request.kernel || p.request.backend) return nullptr;
    if (p.q_rows.packed()) return "cu_seqlens_q";
    if (p.k_rows.packed()) return "cu_seqlens_k";
    if (p.q_rows.used) return "seqused_q";
    if (p.k_rows.used) return "seqused_k";
    if (p.softcap > 0) return "softcap";
    if (p.dropout.active()) return "dropout_p";
    if (p.alibi_slopes.present) return "alibi_slopes";
    if (p.bias.present) return "bias";
    if (p.mask.present) return "mask";
    return p.softmax_scale > 0 ? nullptr : "softmax_scale";
}

// Whether the copy engine can be told of the tensor: steps are multiples of 16 bytes, from 0 to 2^40.
bool copy_engine_reads(const TensorView& tensor) {
    constexpr int64_t kElement = 2, kLimit = int64_t{1} << 40;
    const RowsParams rows = rows_params(tensor);
    const auto fits = [](int64_t stride) { return stride >= 0 && stride < kLimit / kElement && stride * kElement % 16 == 0; };
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && fits(rows.batch) && fits(rows.row) && fits(rows.head);
}

// Where lengths of K and V are known on the device alone, one map goes through all batch entries: from one to the next it is so many rows, or -1.
int64_t rows_of_batch(const TensorView& tensor, int64_t batch) {
    const RowsParams rows = rows_params(tensor);
    if (rows.row == 0 || rows.batch % rows.row != 0) return -1;
    const int64_t count = rows.batch / rows.row;
    return count < INT32_MAX / (batch + 1) ? count : -1;
}
const char* steps_beyond_sm90(const AttentionProblem& p) {
    if (!p.k_rows.used || p.k_rows.packed() || p.batch < 2 || p.k_rows.capacity == 0) return nullptr;
    const int64_t count = rows_of_batch(p.k, p.batch);
    if (count < 0) return "k";
    return rows_of_batch(p.v, p.batch) == count ? nullptr : "v";
}

// Tiles of the queries that are numbered, sequences without any among them: each takes a number in the workspace.
int64_t numbered_tiles(const AttentionProblem& p, const KernelConfig& config) {
    const ScheduleParams schedule = schedule_params(p.q_rows, p.batch, p.heads_q, config.tile_q, 1, false);
    return int64_t{schedule.heads} * schedule.tiles;
}
constexpr int64_t kMostTiles = 1 << 24;

const char* tensor_beyond_sm90(const AttentionProblem& p) {
    if (!copy_engine_reads(p.q)) return "q";
    if (p.k_rows.capacity == 0) return nullptr;  // then neither is read
    if (!copy_engine_reads(p.k)) return "k";
    return copy_engine_reads(p.v) ? nullptr : "v";
}

}  // namespace

bool knows_options(const KernelConfig& config, const AttentionProblem& problem, std::string* why) {
    if (std::strcmp(config.room, "sm90") != 0) return true;
    if (const char* option = option_not_in_evidence(problem)) {
        if (why) *why = text_of(option, ": the kernel knows it, but is taken for it only when it is asked for");
        return false;
    }
    if (const char* tensor = tensor_beyond_sm90(problem)) {
        if (why) *why = text_of(tensor, ": its address and its strides must be multiples of 16 bytes for it, and not negative");
        return false;
    }
    if (const char* tensor = steps_beyond_sm90(problem)) {
        if (why)
            *why = text_of(
                tensor,
                ": with seqused_k its batch stride must be a multiple of its row stride for it, the same one for k and v");
        return false;
    }
    if (const int64_t tiles = numbered_tiles(problem, config); problem.q_rows.packed() && tiles > kMostTiles) {
        if (why) *why = text_of("cu_seqlens_q: tiles of all heads must be at most ", kMostTiles, " for it (", tiles, ")");
        return false;
    }
    if (!in_vectors(rows_params(problem.out), problem.head_dim_v, 2)) {
        if (why) *why = "out: its address, its strides and its rows must be multiples of 16 bytes for it";
        return false;
    }
    return true;
}

}  // namespace libflash::cuda
