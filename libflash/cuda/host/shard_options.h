// The options of a call on a part of a problem (a shard), and which kernels support them.
#pragma once

#include <string>

#include "cuda/attention/params.h"
#include "problem/attention.h"

namespace libflash::cuda {

// Whether the problem has no such option. If it has one, writes its name to `why`, unless `why` is nullptr. `allows_delta`: delta
// does not count.
bool has_no_shard_options(const AttentionProblem& problem, std::string* why, bool allows_delta = false);

// Whether the general instances of sm80 support the problem's options of this kind. If not, writes the reason to `why`.
bool supports_shard_options(const AttentionProblem& problem, std::string* why);

// Whether a tensor has another type than the inputs of the problem: FLOAT32 with 16-bit inputs.
bool is_wide(const AttentionProblem& problem, const TensorView& tensor);

// Whether the problem has options of this kind, which only general instances of sm80 support.
inline bool has_shard_options(const AttentionProblem& problem) { return !has_no_shard_options(problem, nullptr); }

ShardParams shard_params(const AttentionProblem& problem);

}  // namespace libflash::cuda
