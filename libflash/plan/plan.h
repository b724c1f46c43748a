// How a problem will be done: the kernel and what it needs. Made without touching tensor data; launched once there is a workspace.
#pragma once

#include <cstddef>

#include "plan/registry.h"

namespace libflash {

struct Plan {
    const KernelRow* row = nullptr;
    cpu::Plan cpu;            // if the row is one of the CPU
    int64_t cuda_splits = 0;  // decode on CUDA: ranges of keys; else 0
    int cuda_heads = 1;       // decode on CUDA: key heads that a thread block takes
    size_t workspace_bytes = 0;
};

Plan make_plan(const AttentionProblem& problem);
Plan make_plan(const DecodeProblem& problem);
Plan make_plan(const AttentionProblem& problem, const KernelRow& row);
Plan make_plan(const DecodeProblem& problem, const KernelRow& row);

void launch(const AttentionProblem& problem, const Plan& plan, void* workspace, void* stream);
void launch(const DecodeProblem& problem, const Plan& plan, void* workspace, void* stream);

// These need no workspace and have nothing to plan but the row.
void run(const MergeProblem& problem, void* stream);
void run(const CompressProblem& problem, void* stream);

}  // namespace libflash
