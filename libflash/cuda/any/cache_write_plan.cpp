// The plan of cache_write: one warp for each head of a row of keys, values or rope parts.
#include <algorithm>

#include "cuda/any/plan.h"
#include "cuda/host/cache_params.h"
#include "cuda/kernels.h"

namespace libflash::cuda::any {

CacheWritePlan plan_cache_write(const Kernel& kernel, const CacheWriteProblem& problem, const DeviceProperties&) {
    CacheWritePlan plan;
    plan.rows_type = problem.dtype == DType::f16    ? KernelType::f16_
                     : problem.dtype == DType::bf16 ? KernelType::bf16_
                                                    : KernelType::f32_;
    const KernelResources resources = kernel.resources(0, 0);
    const int64_t warps = resources.threads / 32, items = problem.rows * problem.heads_k * parts_of(problem);
    plan.write = launch_shape(std::min<int64_t>((items + warps - 1) / warps, INT32_MAX), resources);
    return plan;
}

}  // namespace libflash::cuda::any
