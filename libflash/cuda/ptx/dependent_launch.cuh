// Programmatic dependent launch (sm_90): a kernel begins before the previous kernel on the stream has ended. On older
// architectures, and after a launch without the attribute, both functions do nothing.
#pragma once

namespace libflash::cuda {

// Waits until the previous kernel has ended completely and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin once all thread blocks have called this.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace libflash::cuda
