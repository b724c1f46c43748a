// Zeroes rows in shared memory that lie beyond a sequence, as TMA does beyond a tensor. Where only the device knows the lengths,
// such rows hold other data, possibly NaN or infinity, and products would multiply these by 0, which gives NaN. After zeroing,
// the end of a sequence is handled like the end of a tensor.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sm90/backward_context.cuh"
#include "cuda/sm90/zero_rows.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardZeroFill {
    using KvTile = typename Traits::KvTile;
    using QTile = typename Traits::QTile;
    static constexpr int kGroupBarrier = 9;  // the first of the named barriers that nothing else uses, one for each warpgroup

    const BackwardContext<Traits>& context;

    // A consumer warpgroup calls it when K or V has arrived. Zeroes those of the rows [first, first + count) that are beyond the
    // sequence. Each warpgroup zeroes the rows that it reads, so none waits for another. The dQ warpgroup reads K only after dS,
    // which is computed after the zeroing.
    __device__ __forceinline__ void keys(uint32_t tile, int first, int count) const {
        if constexpr (Traits::kRagged) {
            const int begin = max(context.tile().loaded.keys, first);
            if (begin >= first + count) return;
            zero_rows<KvTile>(tile, begin, first + count);
            publish();
        }
    }
    // A consumer warpgroup calls it when Q and dO of a tile have arrived in a stage.
    __device__ __forceinline__ void queries(int stage, int tile) const {
        if constexpr (Traits::kRagged) {
            const int end = context.tile().loaded.queries - tile * Traits::kBlockM;
            if (end >= Traits::kBlockM) return;
            zero_rows<QTile>(context.tiles.q(stage), end, Traits::kBlockM);
            zero_rows<QTile>(context.tiles.dout(stage), end, Traits::kBlockM);
            publish();
        }
    }

private:
    // Makes the zeros visible to the products of the warpgroup.
    __device__ static __forceinline__ void publish() {
        fence_shared_for_async();
        __syncwarp();
        named_barrier_wait(kGroupBarrier + static_cast<int>(threadIdx.x / 128), 128);
    }
};

}  // namespace libflash::cuda::sm90
