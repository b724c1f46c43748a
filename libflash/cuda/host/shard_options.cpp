#include "cuda/host/shard_options.h"

#include "problem/check.h"

namespace libflash::cuda {

namespace {

const char* shard_option(const AttentionProblem& p) {
    if (p.has_positions) return "positions (FLASH_FLAG_POSITIONS)";
    if (p.continues) return "resume (FLASH_FLAG_CONTINUE)";
    if (p.adds) return "add (FLASH_FLAG_ADD)";
    if (p.delta.present) return "delta";
    if (p.max_logit.present) return "max_logit";
    if (p.entropy.present) return "entropy";
    if (!p.dropout.active()) return nullptr;
    if (p.dropout_numbers.sequences) return "sequence_numbers";
    return p.dropout_numbers.heads_total != p.heads_q ? "heads_total" : nullptr;
}

// The first result that is FLOAT32 beside 16-bit inputs, or nullptr.
const char* wide_result(const AttentionProblem& p) {
    const auto wide = [&](const TensorView& tensor) { return tensor.present && tensor.dtype != p.dtype; };
    if (!p.backward) return wide(p.out) ? "out" : nullptr;
    if (wide(p.dq)) return "dq";
    if (wide(p.dk)) return "dk";
    return wide(p.dv) ? "dv" : nullptr;
}

}  // namespace

bool has_no_shard_options(const AttentionProblem& p, std::string* why) {
    if (const char* option = shard_option(p)) return reject(why, option, ": no CUDA kernel knows it yet");
    if (const char* result = wide_result(p))
        return reject(why, result, ": the CUDA kernels write the type of q only (", p.dtype, ")");
    return true;
}

}  // namespace libflash::cuda
