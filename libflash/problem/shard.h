// Checks of the options of a call that has a part of a problem: positions, the numbers that dropout counts by, continuation.
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

struct ShardTensors {
    TensorView row_begins, column_begins, row_positions, column_positions, sequence_numbers;
};

// The plain values and flags.
void read_shard_options(AttentionProblem& problem, const flash_attention_options_t& options);

ShardTensors read_shard_tensors(Reader& reader, const flash_attention_options_t& options);

// After heads and sequences of the problem are known.
void build_shard_tensors(AttentionProblem& problem, const ShardTensors& tensors);

// Of a forward call, after out and lse are read.
void check_continuation(const AttentionProblem& problem);

// Checks the contents of the arrays, which must be in host memory.
void check_shard_contents(const AttentionProblem& problem);

}  // namespace libflash
