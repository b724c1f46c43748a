// The zero-fill warp of the sm_90a forward kernel. Rows of V beyond the sequence are multiplied by P = 0, which gives NaN where
// they hold NaN or infinity. So this warp waits for a tile with such rows, zeroes the rows and only then marks the stage full.
// Rows of K need no zeros: scores beyond the end are masked.
#pragma once

#include "cuda/sm90/forward_tile_scheduler.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardZeroFillWarp {
    using VTile = typename Traits::VTile;

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};

    __device__ __forceinline__ void run() const {
        PipelineState<1> requests(context.storage.dynamic.zero_fill.barriers);
        ScheduleCursor cursor{};
        do {
#pragma unroll 1
            while (true) {
                requests.wait_full();
                const volatile ZeroFillRequest& request = context.storage.dynamic.zero_fill;
                const bool first = threadIdx.x % 32 == 0;  // only the lane that releases the request reads it
                const int stage = __shfl_sync(0xffffffffu, first ? request.stage : 0, 0),
                          count = __shfl_sync(0xffffffffu, first ? request.count : 0, 0);
                if (count >= 0) write_zeros(context.tiles.v(stage), count);
                fence_shared_for_async();
                __syncwarp();
                if (first) {
                    requests.empty().arrive();
                    if (count >= 0) MBarrier{shared_address(&context.storage.v.full[stage])}.arrive();
                }
                requests.advance();
                if (count < 0) break;
            }
        } while (scheduler.start_recompute(cursor));
    }

private:
    __device__ __forceinline__ void write_zeros(uint32_t tile, int first_row) const {
        constexpr int kVectors = VTile::kChunks * 8;  // of 16 bytes in a row
        for (int i = first_row * kVectors + static_cast<int>(threadIdx.x % 32); i < Traits::kBlockN * kVectors; i += 32)
            store_zeros_16(tile + VTile::offset(i / kVectors, i % kVectors));
    }
};

}  // namespace libflash::cuda::sm90
