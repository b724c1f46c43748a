// The rows of kernels.table that this build has, as CMake wrote them.
#include <iterator>

#include "cuda/kernels.h"

namespace libflash::cuda {

#define LIBFLASH_CUDA_ROW(operation, name, ...) int launch_##name(const LaunchParams<Operation::operation>&, void*);
#include "cuda_rows.inc"
#undef LIBFLASH_CUDA_ROW

namespace {

// One for each operation, so that a row of the generated list fills in its own launcher.
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::merge> launcher) {
    return {config, launcher, nullptr, nullptr, nullptr};
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::compress> launcher) {
    return {config, nullptr, launcher, nullptr, nullptr};
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::forward> launcher) {
    return {config, nullptr, nullptr, launcher, nullptr};
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::backward> launcher) {
    return {config, nullptr, nullptr, nullptr, launcher};
}

}  // namespace

const Row* all_rows(int* count) {
    static const Row rows[] = {
#define LIBFLASH_CUDA_ROW(operation, name, ...) make_row(KernelConfig{__VA_ARGS__}, launch_##name),
#include "cuda_rows.inc"
#undef LIBFLASH_CUDA_ROW
    };
    *count = static_cast<int>(std::size(rows));
    return rows;
}

}  // namespace libflash::cuda
