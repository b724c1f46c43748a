// The lanes of a warp that execute an instruction together, where other lanes may be elsewhere or have ended.
#pragma once

namespace libflash::cuda {

struct ActiveLanes {
    unsigned mask;

    static __device__ __forceinline__ ActiveLanes now() { return {__activemask()}; }

    __device__ __forceinline__ int count() const { return __popc(mask); }
    // The number of this lane among them.
    __device__ __forceinline__ int rank() const { return __popc(mask & ((1u << threadIdx.x % 32) - 1)); }
    __device__ __forceinline__ int max(int x) const { return __reduce_max_sync(mask, x); }
};

}  // namespace libflash::cuda
