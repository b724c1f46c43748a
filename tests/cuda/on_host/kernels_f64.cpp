// The float64 kernels of kernels.table, to run on the host: their launchers and resources.
#include "emulation.h"

#include "cuda/sm80/backward_f64.cuh"
#include "cuda/sm80/backward_tangent_f64.cuh"
#include "cuda/sm80/forward_f64.cuh"
#include "cuda/sm80/forward_statistics_f64.cuh"
#include "cuda/sm80/forward_tangent_f64.cuh"

namespace libflash::cuda {

// Forward with statistics of rows has another launcher.
namespace by_config {
using cuda::launch_backward, cuda::launch_forward_tangent, cuda::launch_backward_tangent;
using cuda::resources_of_backward, cuda::resources_of_forward_tangent, cuda::resources_of_backward_tangent;

template <class Kernel>
int launch_forward(const ForwardPlan& plan, const ForwardStatisticsParams& params, void* stream) {
    if constexpr (Kernel::config.statistics) {
        return launch_forward_statistics<Kernel>(plan, params, stream);
    } else {
        return cuda::launch_forward<Kernel>(plan, params, stream);
    }
}
template <class Kernel>
KernelResources resources_of_forward(int step, int instance) {
    if constexpr (Kernel::config.statistics) {
        return resources_of_forward_statistics<Kernel>(step, instance);
    } else {
        return cuda::resources_of_forward<Kernel>(step, instance);
    }
}
}  // namespace by_config

#define LIBFLASH_CUDA_KERNEL(operation, name, ...)                                                                    \
    struct name {                                                                                                     \
        static constexpr KernelConfig config{__VA_ARGS__};                                                            \
    };                                                                                                                \
    int launch_##name(const LaunchPlan<Operation::operation>& plan, const LaunchParams<Operation::operation>& params, \
                      void* stream) {                                                                                 \
        return by_config::launch_##operation<name>(plan, params, stream);                                             \
    }                                                                                                                 \
    KernelResources resources_##name(int step, int instance) { return by_config::resources_of_##operation<name>(step, instance); }
#include "cuda_kernels.inc"

}  // namespace libflash::cuda
