// The float64 kernels of kernels.table, to run on the host: their launchers and resources.
#include "emulation.h"

#include "cuda/sm80/backward_f64.cuh"
#include "cuda/sm80/backward_tangent_f64.cuh"
#include "cuda/sm80/forward_f64.cuh"
#include "cuda/sm80/forward_tangent_f64.cuh"

namespace libflash::cuda {

#define LIBFLASH_CUDA_KERNEL(operation, name, ...)                                                                    \
    struct name {                                                                                                     \
        static constexpr KernelConfig config{__VA_ARGS__};                                                            \
    };                                                                                                                \
    int launch_##name(const LaunchPlan<Operation::operation>& plan, const LaunchParams<Operation::operation>& params, \
                      void* stream) {                                                                                 \
        return launch_##operation<name>(plan, params, stream);                                                        \
    }                                                                                                                 \
    KernelResources resources_##name(int step, int instance) { return resources_of_##operation<name>(step, instance); }
#include "cuda_kernels.inc"

}  // namespace libflash::cuda
