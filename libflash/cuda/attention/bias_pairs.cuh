// Two neighbouring keys of a row of a bias.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/movmatrix.cuh"

namespace libflash::cuda {

template <class Number>
struct BiasPair {
    uint32_t pair;

    // The lanes of the warp exchange them (ptx/movmatrix.cuh). Then a lane has the numbers of two neighbouring rows for one key.
    __device__ __forceinline__ void transpose() { pair = transpose_matrix(pair); }
    __device__ __forceinline__ float low() const { return low_of(pair, Number()); }
    __device__ __forceinline__ float high() const { return high_of(pair, Number()); }
};
template <>
struct BiasPair<float> {
    uint32_t first, second;

    // Each half of the bits is a matrix of its own.
    __device__ __forceinline__ void transpose() {
        const uint32_t lower = transpose_matrix((first & 0xffffu) | second << 16);
        const uint32_t upper = transpose_matrix(first >> 16 | (second & 0xffff0000u));
        first = (lower & 0xffffu) | upper << 16, second = lower >> 16 | (upper & 0xffff0000u);
    }
    __device__ __forceinline__ float low() const { return __uint_as_float(first); }
    __device__ __forceinline__ float high() const { return __uint_as_float(second); }
};

}  // namespace libflash::cuda
