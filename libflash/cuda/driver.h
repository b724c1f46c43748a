// Driver functions, looked up at run time: the library is not linked against the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace libflash::cuda {

// The function as CUDA 12.0 defines it; nullptr: the driver has none of that name.
inline void* driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
}

// Whether a context is current on the calling thread. A host thread starts without one. Runtime calls that need a context make
// one current; driver functions, such as those that encode tensor maps, do not.
inline bool has_context() {
    static const auto get_current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(driver_function("cuCtxGetCurrent"));
    CUcontext context = nullptr;
    return get_current && get_current(&context) == CUDA_SUCCESS && context;
}

}  // namespace libflash::cuda
