// The options of a call that has a part of a problem (a shard), and which kernels support them.
#pragma once

#include <string>

#include "cuda/attention/params.h"
#include "problem/attention.h"

namespace libflash::cuda {

// Whether the problem has none of them. If it has one, writes its name to `why`, unless that is nullptr.
bool has_no_shard_options(const AttentionProblem& problem, std::string* why);

// Whether the general instances of sm80 support the problem's options of this kind. If not, `why` as above.
bool supports_shard_options(const AttentionProblem& problem, std::string* why);

// Whether a tensor holds floats beside the 16-bit inputs of the problem.
bool is_wide(const AttentionProblem& problem, const TensorView& tensor);

// Whether only a general instance of sm80 supports the problem's options of this kind.
inline bool has_shard_options(const AttentionProblem& problem) { return !has_no_shard_options(problem, nullptr); }

ShardParams shard_params(const AttentionProblem& problem);

}  // namespace libflash::cuda
