#include "problem/shard.h"

#include "problem/lengths.h"

namespace libflash {

namespace {

// The names of the fields of one side, for error texts.
struct PositionNames {
    const char *begin, *step, *begins, *positions;
};
constexpr PositionNames kRowNames = {"row_begin", "row_step", "row_begins", "row_positions"};
constexpr PositionNames kColumnNames = {"column_begin", "column_step", "column_begins", "column_positions"};

void check_unused(int64_t begin, int64_t step, const PositionNames& names) {
    if (begin != 0) invalid(names.begin, "needs FLASH_FLAG_POSITIONS", begin);
    if (step != 0 && step != 1) invalid(names.step, "needs FLASH_FLAG_POSITIONS", step);
}

Positions read_positions(int64_t begin, int64_t step, const PositionNames& names) {
    if (begin < 0 || begin >= kPositionLimit) invalid(names.begin, "must be at least 0 and below 2^40", begin);
    if (step < 0 || step >= kPositionLimit) invalid(names.step, "must be at least 0 (0 counts as 1) and below 2^40", step);
    Positions positions;
    positions.begin = begin;
    positions.step = step == 0 ? 1 : step;
    return positions;
}

void read_dropout_numbers(DropoutNumbers& numbers, const flash_attention_options_t& options) {
    if (options.head_begin < 0) invalid("head_begin", "must not be negative", options.head_begin);
    if (options.heads_total < 0) invalid("heads_total", "must be positive, or 0 if the call has all heads", options.heads_total);
    if (options.heads_total >= kPositionLimit) invalid("heads_total", "must be below 2^40", options.heads_total);
    if (options.head_begin >= kPositionLimit) invalid("head_begin", "must be below 2^40", options.head_begin);
    if (options.head_begin != 0 && options.heads_total == 0) invalid("head_begin", "needs heads_total", options.head_begin);
    numbers.head_begin = options.head_begin;
    numbers.heads_total = options.heads_total;
}

}  // namespace

void read_shard_options(AttentionProblem& p, const flash_attention_options_t& options) {
    p.has_positions = (options.flags & FLASH_FLAG_POSITIONS) != 0;
    p.continues = (options.flags & FLASH_FLAG_CONTINUE) != 0;
    p.adds = (options.flags & FLASH_FLAG_ADD) != 0;
    if (p.has_positions) {
        if (p.mask_rule.top_left) invalid("flags", "FLASH_FLAG_TOP_LEFT has no meaning with FLASH_FLAG_POSITIONS", options.flags);
        p.row_positions = read_positions(options.row_begin, options.row_step, kRowNames);
        p.column_positions = read_positions(options.column_begin, options.column_step, kColumnNames);
    } else {
        check_unused(options.row_begin, options.row_step, kRowNames);
        check_unused(options.column_begin, options.column_step, kColumnNames);
        if (options.row_begins) invalid("row_begins", "needs FLASH_FLAG_POSITIONS", "given");
        if (options.column_begins) invalid("column_begins", "needs FLASH_FLAG_POSITIONS", "given");
        if (options.row_positions) invalid("row_positions", "needs FLASH_FLAG_POSITIONS", "given");
        if (options.column_positions) invalid("column_positions", "needs FLASH_FLAG_POSITIONS", "given");
    }
    read_dropout_numbers(p.dropout_numbers, options);
    if (options.sm_margin < 0) invalid("sm_margin", "must not be negative", options.sm_margin);
    p.request.sm_margin = options.sm_margin;
}

ShardTensors read_shard_tensors(Reader& reader, const flash_attention_options_t& options) {
    ShardTensors tensors;
    tensors.row_begins = reader.optional(options.row_begins, "row_begins");
    tensors.column_begins = reader.optional(options.column_begins, "column_begins");
    tensors.row_positions = reader.optional(options.row_positions, "row_positions");
    tensors.column_positions = reader.optional(options.column_positions, "column_positions");
    tensors.sequence_numbers = reader.optional(options.sequence_numbers, "sequence_numbers");
    return tensors;
}

namespace {

void build_positions(Positions& positions, const TensorView& begins, const TensorView& of_rows, const PositionNames& names,
                     const Sequences& sequences, const Device& device) {
    if (positions.step > kPositionLimit / (sequences.capacity + 1)) {
        invalid(names.step, "positions must be below 2^40", positions.step, " for ", sequences.capacity, " rows");
    }
    if (begins.present) {
        if (positions.begin != 0) invalid(names.begins, "replaces the single number, which must be 0", positions.begin);
        positions.begins = read_int32_vector(begins, names.begins, sequences.batch, device, "(batch,)");
    }
    if (!of_rows.present) return;
    if (begins.present) invalid(names.positions, "cannot be given together with row_begins or column_begins", "both are");
    if (positions.begin != 0) invalid(names.positions, "replaces begin, which must be 0", positions.begin);
    if (positions.step != 1) invalid(names.positions, "replaces step, which must be 0 or 1", positions.step);
    check_device(of_rows, names.positions, device);
    check_dtype(of_rows, names.positions, DType::i32);
    if (sequences.packed()) {
        check_shape(of_rows, names.positions, {sequences.capacity}, "(total,)");
    } else {
        check_shape(of_rows, names.positions, {sequences.batch, sequences.capacity}, "(batch, seqlen)");
        positions.batch_stride = sequences.capacity;
    }
    check_contiguous(of_rows, names.positions);
    positions.of_rows = static_cast<const int32_t*>(of_rows.data);
}

void build_dropout_numbers(AttentionProblem& p, const TensorView& sequence_numbers) {
    DropoutNumbers& numbers = p.dropout_numbers;
    if (numbers.heads_total == 0) numbers.heads_total = p.heads_q;
    if (numbers.head_begin + p.heads_q > numbers.heads_total) {
        invalid("heads_total", "must be at least head_begin and the heads of q", numbers.heads_total, ", head_begin is ",
                numbers.head_begin, ", q has ", p.heads_q);
    }
    if (sequence_numbers.present) {
        numbers.sequences = read_int32_vector(sequence_numbers, "sequence_numbers", p.batch, p.device, "(batch,)");
    }
}

}  // namespace

void build_shard_tensors(AttentionProblem& p, const ShardTensors& tensors) {
    build_positions(p.row_positions, tensors.row_begins, tensors.row_positions, kRowNames, p.q_rows, p.device);
    build_positions(p.column_positions, tensors.column_begins, tensors.column_positions, kColumnNames, p.k_rows, p.device);
    build_dropout_numbers(p, tensors.sequence_numbers);
    if (p.continues && p.sink.present) {
        invalid("learnable_sink", "belongs to the first call, not to one with FLASH_FLAG_CONTINUE", "given");
    }
}

void check_continuation(const AttentionProblem& p) {
    if (!p.continues) return;
    if (!p.lse.present) invalid("lse", "is required with FLASH_FLAG_CONTINUE", "NULL");
}

namespace {

void check_numbers(const int32_t* numbers, int64_t count, const Argument& argument) {
    for (int64_t b = 0; numbers && b < count; ++b) {
        if (numbers[b] < 0) invalid(argument, "must not have negative numbers", "entry ", b, " is ", numbers[b]);
    }
}

void check_increasing(const Positions& positions, const Sequences& sequences, const Argument& argument) {
    for (int64_t b = 0; positions.of_rows && b < sequences.batch; ++b) {
        const int32_t* row = positions.of_rows + b * positions.batch_stride + sequences.start(b);
        for (int64_t i = 0; i < sequences.length(b); ++i) {
            if (row[i] < 0) invalid(argument, "must not have negative numbers", "row ", i, " of sequence ", b, " is ", row[i]);
            if (i > 0 && row[i] <= row[i - 1]) {
                invalid(argument, "must strictly increase within a sequence", "rows ", i - 1, " and ", i, " of sequence ", b,
                        " are ", row[i - 1], " and ", row[i]);
            }
        }
    }
}

}  // namespace

void check_shard_contents(const AttentionProblem& p) {
    check_numbers(p.row_positions.begins, p.batch, "row_begins");
    check_numbers(p.column_positions.begins, p.batch, "column_begins");
    check_increasing(p.row_positions, p.q_rows, "row_positions");
    check_increasing(p.column_positions, p.k_rows, "column_positions");
    check_numbers(p.dropout_numbers.sequences, p.batch, "sequence_numbers");
}

}  // namespace libflash
