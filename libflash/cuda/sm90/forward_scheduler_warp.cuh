// The scheduler warp of the sm_90a forward kernel: finds the work tiles that see keys, one work tile ahead of the producer warp.
// If the producer warp searched itself, its load of the second K tile of a work tile would be delayed.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/forward_tile_scheduler.cuh"

namespace libflash::cuda::sm90 {

template <class Traits>
struct ForwardSchedulerWarp {
    using Storage = ForwardSharedStorage<Traits>;
    using WorkTile = ForwardWorkTile<Traits>;

    const ForwardContext<Traits>& context;
    const ForwardTileScheduler<Traits> scheduler{context};

    // With lengths on the device a work tile depends on memory that the previous kernel may still write, so the warp waits for
    // that kernel. Otherwise it prefetches the first tiles of Q, K and V into L2 while that kernel ends. The next kernel may
    // begin when no work tile is left to be found; the next kernel then waits until this kernel has ended.
    __device__ __forceinline__ void run() const {
        if constexpr (Traits::kDynamic) wait_for_previous_kernel();
        const bool leader = elect_one();
        if constexpr (Traits::kBesideDecode) {
            if (leader && context.params.multiprocessors > 0) allow_next_kernel();
        }
        PipelineState<Storage::kScheduledTiles> scheduled(context.storage.scheduled);
        ScheduleCursor cursor = scheduler.begin();
        int slot = 0;
        bool first = !Traits::kDynamic;
        do {
            bool found = true;
#pragma unroll 1
            while (found) {
                scheduled.wait_empty();
                __syncwarp();  // all lanes have seen this phase before the slot can be filled, taken and empty again
                WorkTile& work_tile = context.storage.work_tiles[slot];
                found = find_work_tile(cursor, leader, work_tile);
                if (leader) {
                    if (found) prefetch_q(work_tile);
                    if (found && first) prefetch_first_keys(work_tile);
                    scheduled.full().arrive();
                }
                __syncwarp();
                scheduled.advance();
                slot = Storage::next_slot(slot);
                first = false;
            }
            if (leader) allow_next_kernel();  // the second call, after recomputation, has no effect
        } while (scheduler.start_recompute(cursor));
    }

private:
    // Finds the next work tile that sees keys. False: none is left, and `work_tile` is the end mark.
    __device__ __forceinline__ bool find_work_tile(ScheduleCursor& cursor, bool leader, WorkTile& work_tile) const {
        TileAssignment assignment;
        while (scheduler.next(cursor, assignment)) {
            bool has_keys = false;
            if (leader) {
                work_tile.init(context.params, assignment, cursor.exact_maximum);
                has_keys = work_tile.has_keys();
            }
            if (__any_sync(0xffffffffu, has_keys)) return true;  // __any_sync: the compiler then knows that all lanes agree
        }
        if (leader) work_tile.init_end(cursor.exact_maximum);
        return false;
    }
    // Prefetches Q into L2, because the stage of Q in shared memory may become free only when the current work tile is nearly
    // done.
    __device__ __forceinline__ void prefetch_q(const WorkTile& work_tile) const {
        for (int group = 0; group < Traits::kGroups; ++group)
            Traits::QTile::prefetch(context.maps.q, work_tile.start_q() + work_tile.keys.first_row + group * Traits::kGroupRows,
                                    work_tile.head(), work_tile.batch());
    }
    // Prefetches K and V of the tile that is loaded first into L2.
    __device__ __forceinline__ void prefetch_first_keys(const WorkTile& work_tile) const {
        const int row = work_tile.key_row(work_tile.keys.end - 1);
        Traits::KTile::prefetch(context.maps.k, row, work_tile.kv_head, work_tile.batch());
        Traits::VTile::prefetch(context.maps.v, row, work_tile.kv_head, work_tile.batch());
    }
};

}  // namespace libflash::cuda::sm90
