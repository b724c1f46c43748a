// Compress: from the problem to the parameters of the kernel, and its launch.
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace libflash::cuda {

void compress(const Row& row, const CompressProblem& problem, void* stream) {
    const CompressParams params{problem.mask,       problem.matrices,    problem.rows,       problem.cols,
                                problem.row_counts, problem.row_indices, problem.col_counts, problem.col_indices};
    const DeviceGuard guard(problem.device.id);
    check(row.compress(params, stream), "compress");
}

}  // namespace libflash::cuda
