// Shared by the baselines' kernels: the rows of one head, and launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "problem.h"

// One type per translation unit: BASELINE_TYPE is bf16 or f16 and ends the names of the functions.
#define BASELINE_JOIN(a, b) a##_##b
#define BASELINE_NAME(name, type) BASELINE_JOIN(name, type)
#define BASELINE_EXPORT(name) extern "C" int BASELINE_NAME(name, BASELINE_TYPE)

namespace baselines::types {
using bf16 = __nv_bfloat16;
using f16 = __half;
}  // namespace baselines::types

// A namespace per type, so that the kernels have different symbols.
namespace baselines::BASELINE_TYPE {

using T = types::BASELINE_TYPE;

// The first row of head `index` (of batch * heads) of a (batch, seqlen, heads, head_dim) tensor.
__device__ __forceinline__ int64_t head_offset(int index, int heads, int seqlen, int head_dim) {
    return (int64_t{index / heads} * seqlen * heads + index % heads) * head_dim;
}
template <class Element>
__device__ __forceinline__ Element* head_rows(Element* tensor, int index, int heads, int seqlen, int head_dim) {
    return tensor + head_offset(index, heads, seqlen, head_dim);
}

__device__ __forceinline__ void widen(float (&x)[8], const uint4& chunk) {
    const T* values = reinterpret_cast<const T*>(&chunk);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = libflash::cuda::to_float(values[e]);
}

__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
    using libflash::cuda::pack_pair;
    return {pack_pair(x[0], x[1], T()), pack_pair(x[2], x[3], T()), pack_pair(x[4], x[5], T()), pack_pair(x[6], x[7], T())};
}

// Launches a kernel with more dynamic shared memory than the default limit; returns cudaGetLastError().
template <class... Parameters, class... Arguments>
int enqueue(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes, void* stream, Arguments... arguments) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    return cudaGetLastError();
}

inline unsigned tiles_of(int length, int tile) { return static_cast<unsigned>((length + tile - 1) / tile); }

constexpr int kUnknown = cudaErrorInvalidValue;

}  // namespace baselines::BASELINE_TYPE
