// Checks of the options of a call on a part of a problem (a shard): positions, the numbers that dropout uses, continuation.
#pragma once

#include "problem/attention.h"
#include "problem/read.h"

namespace libflash {

struct ShardTensors {
    TensorView row_begins, column_begins, row_positions, column_positions, sequence_numbers;
};

// Reads the plain values and flags.
void read_shard_options(AttentionProblem& problem, const flash_attention_options_t& options);

ShardTensors read_shard_tensors(Reader& reader, const flash_attention_options_t& options);

// Called when the heads and sequences of the problem are known.
void build_shard_tensors(AttentionProblem& problem, const ShardTensors& tensors);

// For a forward call. Called when out and lse have been read.
void check_continuation(const AttentionProblem& problem);

// Checks the contents of the arrays, which must be in host memory.
void check_shard_contents(const AttentionProblem& problem);

}  // namespace libflash
