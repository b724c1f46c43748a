// The registry of the kernels in this build, which CMake makes from kernels.table.
#include <iterator>

#include "cuda/kernels.h"

namespace libflash::cuda {

#define LIBFLASH_CUDA_KERNEL(operation, name, ...)                                                                \
    int launch_##name(const LaunchPlan<Operation::operation>&, const LaunchParams<Operation::operation>&, void*); \
    KernelResources resources_##name(int step, int instance);
#include "cuda_kernels.inc"
#undef LIBFLASH_CUDA_KERNEL

namespace {

// `member`: the launcher pointer of the kernel's operation.
template <class OfOperation>
[[maybe_unused]] Kernel make_kernel(const KernelConfig& config, KernelResources (*resources)(int, int),
                                    OfOperation Kernel::* member, OfOperation launcher) {
    Kernel kernel{config, &find_architecture(config.backend), resources};
    kernel.*member = launcher;
    return kernel;
}

}  // namespace

const Kernel* compiled_kernels(int* count) {
    static const Kernel kernels[] = {
#define LIBFLASH_CUDA_KERNEL(operation, name, ...) \
    make_kernel(KernelConfig{__VA_ARGS__}, &resources_##name, &Kernel::operation, &launch_##name),
#include "cuda_kernels.inc"
#undef LIBFLASH_CUDA_KERNEL
    };
    *count = static_cast<int>(std::size(kernels));
    return kernels;
}

}  // namespace libflash::cuda
