// A launch that may begin before the kernel ahead of it in the stream has ended; the kernel says by wait_for_previous_kernel() when it needs it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace libflash::cuda {

// `overlap`: only if the GPU can, and the kernel, whatever may be ahead of it, waits before it reads what results depend on or writes. Where a kernel
// ahead does not say that the next one may begin, this saves the launch alone.
template <class... Params>
int launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, bool overlap,
                     const Params&... params) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params...);
    return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace libflash::cuda
