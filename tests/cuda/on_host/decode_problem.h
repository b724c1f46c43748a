// Decode from the problem over the plan to the kernels, for programs that run it on the host: the sources, functions of the CUDA
// runtime, and views of arrays.
#pragma once

#include "cuda/host/decode.cpp"
#include "cuda/host/decode_plan.cpp"
#include "cuda/host/decode_splits.cpp"
#include "cuda/host/limits.cpp"
#ifdef DECODE_SM90
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/decode_plan.cpp"
#else
#include "cuda/sm80/decode.cuh"
#include "cuda/sm80/decode_plan.cpp"
#endif
#include "problem/check.cpp"
#include "problem/workspace.cpp"

using namespace libflash;
using namespace libflash::cuda;

extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaSetDevice(int) { return cudaSuccess; }
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult*) {
    return cudaErrorUnknown;
}
extern "C" const char* cudaGetErrorName(cudaError_t) { return "error"; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "error"; }

TensorView view(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v;
    v.present = true, v.data = const_cast<void*>(data), v.dtype = dtype, v.ndim = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), v.shape);
    int64_t stride = 1;
    for (int i = v.ndim; i-- > 0; stride *= v.shape[i]) v.stride[i] = stride;
    return v;
}

// The kernel of sm80 or sm90 with that configuration (decode_instances.h), as the registry would have it.
template <class Compiled>
cuda::Kernel decode_kernel() {
    cuda::Kernel kernel;
    kernel.config = Compiled::config;
    kernel.resources = resources_of_decode<Compiled>;
    kernel.decode = launch_decode<Compiled>;
    return kernel;
}

// A GPU of compute capability 9.0.
DeviceProperties hopper(int multiprocessors) {
    DeviceProperties device;
    device.arch = 90, device.multiprocessors = multiprocessors, device.shared_memory_bytes = 227 << 10;
    return device;
}
