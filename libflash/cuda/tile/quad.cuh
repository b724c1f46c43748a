// Exchanges between the four neighbouring lanes (a quad) that share the rows of an accumulator.
#pragma once

#include <cstdint>

namespace libflash::cuda {

// The maximum and the sum over a quad.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes the 4 x 4 words of a quad: word k of lane t goes to lane k as word t.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? words[k] : words[k + 1], 1);
        if (odd) {
            words[k] = got;
        } else {
            words[k + 1] = got;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? words[k] : words[k + 2], 2);
        if (upper) {
            words[k] = got;
        } else {
            words[k + 2] = got;
        }
    }
}

}  // namespace libflash::cuda
