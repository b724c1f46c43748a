// The tile scheduler of the sm_90a backward kernel: persistent thread blocks take work tiles by number, the next work tile when
// the loads of the previous one have been issued. A counter in the workspace gives the next number. Without a counter, as in a
// call without queries, a thread block takes every n-th work tile.
#pragma once

#include "cuda/sm90/backward_context.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct BackwardTileScheduler {
    static constexpr int kBlockN = Traits::kBlockN;

    BackwardContext<Traits>& context;

    // With a fixed order a work tile waits for work tiles with smaller numbers, so those must have begun before it.
    __device__ __forceinline__ int first() const {
        if constexpr (Traits::kFixedOrder) return next(0);
        return static_cast<int>(blockIdx.x);
    }
    __device__ __forceinline__ int next(int number) const {
        const BackwardParams& params = context.params;
        const int blocks = static_cast<int>(gridDim.x);
        if (!params.next_work_tile) return number + blocks;
        int taken = 0;
        if (!Traits::kRagged || threadIdx.x == 0) taken = atomicAdd(params.next_work_tile, 1);
        if constexpr (Traits::kRagged) taken = __shfl_sync(0xffffffffu, taken, 0);
        return taken - params.part.taken_before + (Traits::kFixedOrder ? 0 : blocks);
    }
    // Fills in the current slot. `number`: the number of a work tile in the launch, or a larger number if there is none left. One
    // thread calls it. Where only the device knows the lengths, all lanes of warp 0 call it; some numbers then have no work tile,
    // and the function continues with a later number.
    __device__ __forceinline__ bool find(int number) const {
        TileCoordinates found = coordinates(number);
        if constexpr (Traits::kRagged) {
#pragma unroll 1
            while (found.batch < 0 && number < context.params.part.work_tiles) {
                number = next(number);
                found = coordinates(number);
            }
            if (threadIdx.x == 0) fill_in(found, number);
            __syncwarp();
        } else {
            fill_in(found, number);
        }
        return found.batch >= 0;
    }

private:
    __device__ __forceinline__ TileCoordinates coordinates(int number) const {
        const BackwardParams& params = context.params;
        if (number >= params.part.work_tiles) return {-1, 0, 0};
        const LengthsParams lengths = Traits::kRagged ? params.k_lengths : LengthsParams{};
        const int first_split = params.split_tiles.first;
        const int tile = number < first_split ? params.part.first_work_tile + number
                                              : first_split + divide(number - first_split, params.split_tiles.splits);
        return tile_coordinates<kBlockN>(params.key_schedule, lengths, params.batch, tile);
    }
    __device__ __forceinline__ void fill_in(const TileCoordinates& found, int number) const {
        BackwardWorkTile<Traits>& tile = context.storage.work_tiles[context.slot()];
        tile.work = found;
        if (found.batch >= 0) tile.init(context.params, number);
    }
};

}  // namespace libflash::cuda::sm90
