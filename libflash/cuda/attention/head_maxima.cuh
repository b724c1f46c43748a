// The largest score of each head, to which all thread blocks contribute by atomic maxima. Their order does not matter: NaN stays,
// and there is no -0.
#pragma once

#include "cuda/params.h"

namespace libflash::cuda {

// Integers in the order of the numbers; NaN, which has the bits of the largest positive integer, comes last.
__device__ __forceinline__ int ordered(float x) {
    const int bits = x == x ? __float_as_int(x + 0.0f) : 0x7fffffff;
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
__device__ __forceinline__ float number_of(int order) { return __int_as_float(order >= 0 ? order : order ^ 0x7fffffff); }

// The largest of a warp's numbers, in all lanes.
__device__ __forceinline__ float warp_largest(float x) {
    int order = ordered(x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) order = max(order, __shfl_xor_sync(0xffffffffu, order, step));
    return number_of(order);
}

// *target = max(*target, x), for x from number_of(). Positive numbers are ordered as integers, negative ones in reverse as
// unsigned integers, and a positive number is the smaller unsigned integer.
__device__ __forceinline__ void raise_to(float* target, float x) {
    const int bits = __float_as_int(x);
    if (bits >= 0) {
        atomicMax(reinterpret_cast<int*>(target), bits);
    } else {
        atomicMin(reinterpret_cast<unsigned*>(target), static_cast<unsigned>(bits));
    }
}
__device__ __forceinline__ void raise_to(double* target, double x) {
    const long long bits = x == x ? __double_as_longlong(x + 0.0) : 0x7fffffffffffffffLL;
    if (bits >= 0) {
        atomicMax(reinterpret_cast<long long*>(target), bits);
    } else {
        atomicMin(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(bits));
    }
}

}  // namespace libflash::cuda
