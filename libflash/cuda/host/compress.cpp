// Compress: launches a plan.
#include "cuda/host/launch.h"
#include "cuda/kernels.h"

namespace libflash::cuda {

void compress(const Kernel& kernel, const CompressProblem& problem, const CompressPlan& plan, void* stream) {
    const CompressParams params{problem.mask,       problem.matrices,    problem.rows,       problem.cols,
                                problem.row_counts, problem.row_indices, problem.col_counts, problem.col_indices};
    const DeviceGuard guard(problem.device.id);
    check(kernel.compress(plan, params, stream), "compress");
}

}  // namespace libflash::cuda
