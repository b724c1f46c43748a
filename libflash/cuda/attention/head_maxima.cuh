// The largest score of each head, which all thread blocks compute by atomic maxima. The order of the maxima does not matter: NaN
// stays NaN, and there is no -0.
#pragma once

#include "cuda/params.h"

namespace libflash::cuda {

// An integer with the order of the numbers. NaN has the bits of the largest positive integer, so it is the largest.
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

// *target = max(*target, x). A float x must come from number_of(), so that it is neither -0 nor another NaN; for a double the
// function itself replaces these. Positive numbers have the order of their bits as integers. Negative numbers have the reverse
// order of their bits as unsigned integers, and are larger than positive numbers as unsigned integers.
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
