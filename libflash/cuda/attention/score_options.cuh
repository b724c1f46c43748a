// Which of the rare options that change scores a call has, as bits of one register. Without it, the compiler loads and compares
// the parameters again for each tile.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"

namespace libflash::cuda {

struct ScoreOptions {
    enum Bit {
        kNatural = 1,   // are_in_natural_units()
        kScales = 2,    // scale_and_cap() comes first
        kWithBias = 4,  // scales_with_bias()
        kAlibi = 8,
        kBias = 16,
        kMask = 32,
        kDropout = 64
    };
    int bits;

    template <int kHeadDim>
    __device__ __forceinline__ static ScoreOptions of(const RareParams& rare, float scale_log2) {
        const bool natural = are_in_natural_units(rare, scale_log2), with_bias = scales_with_bias<kHeadDim>(rare);
        return {hide_from_compiler((natural ? kNatural : 0) | (natural && !with_bias ? kScales : 0) |
                                   (with_bias ? kWithBias : 0) | (rare.alibi_slopes.data ? kAlibi : 0) |
                                   (rare.bias.data ? kBias : 0) | (rare.mask.data ? kMask : 0) |
                                   (rare.dropout.active ? kDropout : 0))};
    }
    __device__ __forceinline__ bool has(Bit bit) const { return bits & bit; }
};

}  // namespace libflash::cuda
