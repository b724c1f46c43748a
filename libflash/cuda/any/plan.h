// The plans of the kernels that run on every GPU. No CUDA header.
#pragma once

#include "cuda/architecture.h"
#include "cuda/merge_plan.h"

namespace libflash::cuda::any {

MergePlan plan_merge(const Kernel& kernel, const MergeProblem& problem, const DeviceProperties& device);
CacheWritePlan plan_cache_write(const Kernel& kernel, const CacheWriteProblem& problem, const DeviceProperties& device);
CompressPlan plan_compress(const Kernel& kernel, const CompressProblem& problem, const DeviceProperties& device);

}  // namespace libflash::cuda::any
