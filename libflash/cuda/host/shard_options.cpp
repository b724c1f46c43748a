#include "cuda/host/shard_options.h"

#include "problem/check.h"

namespace libflash::cuda {

namespace {

// The name of the first option of shard_options.h that the problem has, or nullptr. `delta_too`: delta is one of these options.
const char* shard_option(const AttentionProblem& p, bool delta_too) {
    if (p.has_positions) return "positions (FLASH_FLAG_POSITIONS)";
    if (p.continues) return "resume (FLASH_FLAG_CONTINUE)";
    if (p.adds) return "add (FLASH_FLAG_ADD)";
    if (delta_too && p.delta.present) return "delta";
    if (!p.dropout.active()) return nullptr;
    if (p.dropout_numbers.sequences) return "sequence_numbers";
    return p.dropout_numbers.heads_total != p.heads_q ? "heads_total" : nullptr;
}

// The name of the first result that is FLOAT32 while the inputs have 16 bits, or nullptr.
const char* wide_result(const AttentionProblem& p) {
    if (!p.backward) return is_wide(p, p.out) ? "out" : nullptr;
    if (is_wide(p, p.dq)) return "dq";
    if (is_wide(p, p.dk)) return "dk";
    return is_wide(p, p.dv) ? "dv" : nullptr;
}

// Kernels compute with positions in 32 bits. Positions in an array are in device memory and are not checked.
bool has_small_positions(const Positions& positions, int64_t rows, const char* name, std::string* why) {
    const int64_t last = positions.begin + (rows > 0 ? (rows - 1) * positions.step : 0);
    if (last < kUnboundedWindow && positions.step < kUnboundedWindow) return true;
    return reject(why, name, ": positions must be below 2^29 for the CUDA kernels (the last one is ", last, ")");
}

// Whether positions differ from the row numbers in the tensor by a constant. ALiBi needs this, because the kernels compute the
// distance of a row and a key from their numbers in the tensors.
bool has_shift(const Positions& positions) { return !positions.of_rows && positions.step == 1; }

PositionsParams positions_params(const Positions& positions) {
    return {positions.begins, positions.of_rows, positions.batch_stride, static_cast<int32_t>(positions.begin),
            static_cast<int32_t>(positions.step)};
}

}  // namespace

bool is_wide(const AttentionProblem& p, const TensorView& tensor) { return tensor.present && tensor.dtype != p.dtype; }

bool has_no_shard_options(const AttentionProblem& p, std::string* why, bool allows_delta) {
    if (const char* option = shard_option(p, !allows_delta)) return reject(why, option, ": the kernel does not support it");
    if (const char* result = wide_result(p)) return reject(why, result, ": the kernel writes the type of q only (", p.dtype, ")");
    return true;
}

bool supports_shard_options(const AttentionProblem& p, std::string* why) {
    if (!p.has_positions) return true;
    if (!has_small_positions(p.row_positions, p.q_rows.max_length, "row_begin", why) ||
        !has_small_positions(p.column_positions, p.k_rows.max_length, "column_begin", why))
        return false;
    if (!p.alibi_slopes.present || (has_shift(p.row_positions) && has_shift(p.column_positions))) return true;
    return reject(why,
                  "alibi_slopes: the CUDA kernels know them only with rows and keys that are neighbours (step 1, no array of "
                  "positions)");
}

ShardParams shard_params(const AttentionProblem& p) {
    const DropoutNumbers& numbers = p.dropout_numbers;
    return {positions_params(p.row_positions),        positions_params(p.column_positions),      numbers.sequences,
            static_cast<int32_t>(numbers.head_begin), static_cast<int32_t>(numbers.heads_total), p.has_positions};
}

}  // namespace libflash::cuda
