// A kernel that is launched before the one ahead of it in the stream has ended (programmatic dependent launch, sm_90). Elsewhere, and where
// the launch did not ask for it, both are without effect.
#pragma once

namespace libflash::cuda {

// Until all of the kernel ahead has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may begin, as soon as all thread blocks have come this far.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace libflash::cuda
