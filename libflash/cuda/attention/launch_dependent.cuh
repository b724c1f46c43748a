// A launch with programmatic dependent launch: the kernel may begin before the previous kernel on the stream has ended. It calls
// wait_for_previous_kernel() before it depends on results of earlier kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace libflash::cuda {

// `cluster`: thread blocks of a cluster. `overlap` requires a GPU with this feature and a kernel that always waits before it
// writes anything or reads data that its results depend on (beside_prefill.cuh has the exception). If the previous kernel does
// not call allow_next_kernel(), only the launch latency is hidden.
template <class... Params>
int launch_clusters(int cluster, void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                    bool overlap, const Params&... params) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (overlap) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params...);
    return error != cudaSuccess ? error : cudaGetLastError();
}

// Without clusters.
template <class... Params>
int launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, bool overlap,
                     const Params&... params) {
    return launch_clusters(1, kernel, blocks, threads, shared_bytes, stream, overlap, params...);
}

}  // namespace libflash::cuda
