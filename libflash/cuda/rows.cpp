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
    Row row{config};
    row.merge = launcher;
    return row;
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::compress> launcher) {
    Row row{config};
    row.compress = launcher;
    return row;
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::forward> launcher) {
    Row row{config};
    row.forward = launcher;
    return row;
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::backward> launcher) {
    Row row{config};
    row.backward = launcher;
    return row;
}
[[maybe_unused]] Row make_row(const KernelConfig& config, Launcher<Operation::decode> launcher) {
    Row row{config};
    row.decode = launcher;
    return row;
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
