// The consumer warpgroups of the sm_90a backward kernel for head_dim above 128, where dK and dV of 64 keys take the registers of
// two warpgroups. Both have all keys of the tile and divide the products:
//   values   S^T = K Q^T, P, dV += P^T dO (backward_values.cuh)
//   keys     dP^T = V dO^T, dS, dK += dS^T Q (backward_keys.cuh)
// P is passed through a stage of dS: a warp of `values` stores P of its 16 keys there; the warp of `keys` that has the same keys
// reads this P and overwrites it with dS, which the dQ warpgroup reads. So `values` computes P of a tile while `keys` adds the
// previous tile to dK. With rare options `values` applies them, and passes P times the slope of the softcap
// (backward_divided_options.cuh).
#pragma once

#include "cuda/sm90/backward_keys.cuh"
#include "cuda/sm90/backward_values.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardDividedConsumer {
    BackwardContext<Traits>& context;
    const BackwardValuesWarpgroup<Traits> values{context};
    const BackwardKeysWarpgroup<Traits> keys{context};

    __device__ __forceinline__ void run() const {
        const int warp = consumer_warp<Traits>(), lane = static_cast<int>(threadIdx.x & 31);
        if (warp < 4)
            values.run(warp, lane);
        else
            keys.run(warp - 4, lane);
    }
};

}  // namespace libflash::cuda::sm90
