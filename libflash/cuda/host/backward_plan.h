// What the backward plans of all architectures have in common. Host only, no CUDA header.
#pragma once

#include "cuda/architecture.h"

namespace libflash::cuda {

// Tiles, schedules and workspace; the launches of the statistics of query rows, of dk and dv, and of the gradient of the sink.
BackwardPlan common_backward_plan(const Kernel& kernel, const AttentionProblem& problem, const Instance& instance);

// The launch of a step.
LaunchShape backward_launch(const Kernel& kernel, const BackwardPlan& plan, BackwardStep step, int64_t blocks);

// Rows of q, k, v, out and dout can be read 16 bytes at a time, and head dims are whole multiples of that.
bool backward_loads_in_vectors(const AttentionProblem& problem);

}  // namespace libflash::cuda
