// The rows of kernels.table that this build has, as CMake wrote them.
#include <iterator>

#include "cuda/kernels.h"

namespace libflash::cuda {

#define LIBFLASH_CUDA_ROW(operation, name, ...) int launch_##name(const LaunchParams<Operation::operation>&, void*);
#include "cuda_rows.inc"
#undef LIBFLASH_CUDA_ROW

namespace {

// A row with its launcher in the place of its operation.
template <class OfOperation>
[[maybe_unused]] Row make_row(const KernelConfig& config, OfOperation Row::* place, OfOperation launcher) {
    Row row{config};
    row.*place = launcher;
    return row;
}

}  // namespace

const Row* all_rows(int* count) {
    static const Row rows[] = {
#define LIBFLASH_CUDA_ROW(operation, name, ...) make_row(KernelConfig{__VA_ARGS__}, &Row::operation, &launch_##name),
#include "cuda_rows.inc"
#undef LIBFLASH_CUDA_ROW
    };
    *count = static_cast<int>(std::size(rows));
    return rows;
}

}  // namespace libflash::cuda
