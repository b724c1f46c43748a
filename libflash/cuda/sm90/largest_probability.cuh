// The largest score of a row from its largest probability, for the online softmax of sm_90a: comparing probabilities overlaps the
// exponentials, while comparing scores would come before them and compete with wgmma for register bandwidth. Probabilities are
// not negative, so they have the same order as their bits.
#pragma once

#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm90 {

// The largest probability of a lane's elements; after finish_row_largest(), of the row. Relative to the kept maximum, as the row
// sum is.
struct LargestProbability {
    int largest[2];  // its bits; a NaN may or may not be taken into account

    __device__ __forceinline__ void clear_largest() { largest[0] = largest[1] = 0; }

    // kOfThree: by the instruction for the largest of three integers, with which the compiler needs more registers.
    template <bool kOfThree>
    __device__ __forceinline__ void see_pair(int r, float p0, float p1) {
        if constexpr (kOfThree) {
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
