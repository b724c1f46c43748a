// The kernels of kernels.table that this build has, as CMake wrote them.
#include <iterator>

#include "cuda/kernels.h"

namespace libflash::cuda {

#define LIBFLASH_CUDA_KERNEL(operation, name, ...)                                                                \
    int launch_##name(const LaunchPlan<Operation::operation>&, const LaunchParams<Operation::operation>&, void*); \
    KernelResources resources_##name(int step, int instance);
#include "cuda_kernels.inc"
#undef LIBFLASH_CUDA_KERNEL

namespace {

// `member`: where the launcher of its operation stands.
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
