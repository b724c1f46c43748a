// The plan of compress: one warp for each row and each column of a block mask.
#include <algorithm>

#include "cuda/any/plan.h"
#include "cuda/kernels.h"

namespace libflash::cuda::any {

CompressPlan plan_compress(const Kernel& kernel, const CompressProblem& problem, const DeviceProperties&) {
    const int64_t rows = problem.row_counts ? problem.matrices * problem.rows : 0;
    const int64_t cols = problem.col_counts ? problem.matrices * problem.cols : 0;
    const KernelResources resources = kernel.resources(0, 0);
    const int64_t warps = resources.threads / 32, blocks = (rows + cols + warps - 1) / warps;
    return {launch_shape(std::min<int64_t>(blocks, INT32_MAX), resources)};
}

}  // namespace libflash::cuda::any
