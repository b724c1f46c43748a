// The largest score of a row from its largest probability, for the online softmax of sm_90a: a comparison of probabilities
// overlaps with the exponentials, one of scores comes before them and reads registers while wgmma does. Probabilities are not
// negative, so they are ordered as their bits are.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm90 {

// Of a lane's elements until finish_row_largest(). Relative to the kept maximum, as the row sum is.
struct LargestProbability {
    int largest[2];  // bits of it; NaN may be in it or not

    __device__ __forceinline__ void clear_largest() { largest[0] = largest[1] = 0; }

    // of_three, a constant: by the instruction for the largest of three integers. With it the compiler needs more registers.
    __device__ __forceinline__ void see_pair(int r, float p0, float p1, bool of_three) {
        if (of_three) {
            largest[r] = __vimax3_s32(largest[r], __float_as_int(p0), __float_as_int(p1));
        } else {
            largest[r] = __float_as_int(fmaxf(__int_as_float(largest[r]), fmaxf(p0, p1)));
        }
    }
    __device__ __forceinline__ void rescale_largest(int r, float factor) {
        largest[r] = __float_as_int(__int_as_float(largest[r]) * factor);
    }
    // Combines the lanes of row r.
    __device__ __forceinline__ void finish_row_largest(int r) {
        largest[r] = max(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
        largest[r] = max(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
    }
    __device__ __forceinline__ float log2_of_largest(int r) const { return __log2f(__int_as_float(largest[r])); }
};

}  // namespace libflash::cuda::sm90
