// The parts of a backward plan that all architectures share. Host only, no CUDA header.
#pragma once

#include "cuda/architecture.h"

namespace libflash::cuda {

// Tiles, schedules and workspace; the launches of the softmax statistics, dK/dV, the dQ conversion and dsink. `dq_kernel`: a
// separate kernel computes dq, so there is no dQ accumulator.
BackwardPlan common_backward_plan(const Kernel& kernel, const AttentionProblem& problem, const Instance& instance,
                                  const DeviceProperties& device, bool dq_kernel = false);

// Workspace units of a head; see QueryUnits.
int64_t units_of(const AttentionProblem& problem);

// Adds the first unit of each packed sequence to the workspace; see QueryUnits.
void add_first_units(Workspace& workspace, const AttentionProblem& problem);

// Query rows of all heads in the workspace, with `units` workspace units for each head.
size_t workspace_rows(int64_t units, const AttentionProblem& problem);

// The launch of one step with `blocks` thread blocks.
LaunchShape backward_launch(const Kernel& kernel, const BackwardPlan& plan, BackwardStep step, int64_t blocks);

// An estimate of the thread blocks of a launch that run at the same time, where a multiprocessor has registers for two at most.
int64_t resident_blocks(const DeviceProperties& device, const LaunchShape& shape);

// Tiles of the gradient of a bias, of all its batch entries and heads.
int64_t tiles_of_bias(const ScoreTensor& bias, int tile_q, int tile_k);

// Whether rows of q, k, v, out and dout can be read 16 bytes at a time and head dims are multiples of 16 bytes.
bool backward_loads_in_vectors(const AttentionProblem& problem);

}  // namespace libflash::cuda
