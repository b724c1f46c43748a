// Functions of the driver, asked for at run time: nothing here is linked against it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace libflash::cuda {

// nullptr: the driver has none of that name. The oldest driver that the library runs with is that of CUDA 12.0.
inline void* driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
}

// Whether a context is current on the calling thread. A host thread starts without one, and the runtime makes one current in the calls that
// need it; the driver's own functions, those that encode tensor maps among them, do not.
inline bool has_context() {
    static const auto get_current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(driver_function("cuCtxGetCurrent"));
    CUcontext context = nullptr;
    return get_current && get_current(&context) == CUDA_SUCCESS && context;
}

}  // namespace libflash::cuda
