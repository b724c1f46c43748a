// The tile scheduler of the sm_90a forward kernel: which work tiles a thread block computes, and in which order. The first pass
// computes all its work tiles; the second pass recomputes those with overflowed rows. Every warp that iterates over work tiles
// has a cursor.
#pragma once

#include "cuda/attention/schedule.cuh"
#include "cuda/sm90/block_pair.cuh"
#include "cuda/sm90/forward_context.cuh"
#include "cuda/sm90/sequence_order.cuh"
#include "cuda/sm90/static_schedule.cuh"

namespace libflash::cuda::sm90 {

// The position of a warp in a pass: the work tiles with the indices [next, end) are left. (Dynamic schedule: `next` counts the
// units that the thread block has taken.)
struct ScheduleCursor {
    int next, end;
    bool exact_maximum;  // the second pass
};

template <class Traits>
struct ForwardTileScheduler {
    static constexpr int kBlockM = Traits::kBlockM;
    const ForwardContext<Traits>& context;

    // Only some calls of the instance with the rare options have a dynamic schedule.
    __device__ __forceinline__ bool is_dynamic() const { return !Traits::kRareOptions || context.params.sequence_order; }

    // The number of thread blocks that work, or of pairs.
    __device__ __forceinline__ int blocks() const {
        if constexpr (Traits::kBesideDecode) return SequenceOrder(context.params).blocks() >> context.params.in_pairs;
        return static_cast<int>(gridDim.x);
    }
    // The number of this thread block, or of its pair.
    __device__ __forceinline__ int block() const {
        if constexpr (Traits::kPairs) return static_cast<int>(blockIdx.x) >> context.params.in_pairs;
        return static_cast<int>(blockIdx.x);
    }
    // The cursor of the first pass.
    __device__ __forceinline__ ScheduleCursor begin() const { return {0, context.params.schedule.fixed.most_tiles, false}; }
    // Begins the second pass when all warps have finished the first. Returns false if there is nothing to recompute, or if the
    // second pass has ended. A whole warp calls it.
    __device__ __forceinline__ bool start_recompute(ScheduleCursor& cursor) const {
        if (cursor.exact_maximum) return false;
        const MBarrier done{shared_address(&context.storage.first_pass_done)};
        __syncwarp();
        if (threadIdx.x % 32 == 0) done.arrive();
        done.wait(0);
        cursor = {context.storage.recompute.first_index(), context.storage.recompute.end_index(), true};
        return cursor.next < cursor.end;
    }

    // Finds the next work tile. A whole warp calls it; all lanes get the same work tile. Returns false if none is left in this
    // pass.
    __device__ __forceinline__ bool next(ScheduleCursor& cursor, TileAssignment& assignment) const {
        if constexpr (Traits::kDynamic) {
            if (is_dynamic()) return next_dynamic(cursor, assignment);
        }
        return next_static(cursor, assignment);
    }
    __device__ __forceinline__ bool next_static(ScheduleCursor& cursor, TileAssignment& assignment) const {
        while (cursor.next < cursor.end) {
            assignment.index = cursor.next++;
            const auto& params = context.params;
            // Packed sequences have a dynamic schedule.
            const StaticSchedule<kBlockM, false> schedule{params.schedule, params.q_lengths, params.batch};
            assignment.coordinates = schedule.tile(assignment.index);
            if (assignment.coordinates.batch < 0) continue;
            assignment.writers = cursor.exact_maximum ? context.storage.recompute.warps_of(assignment.index) : 0xffffffffu;
            if (assignment.writers != 0) return true;
        }
        return false;
    }
    // The tile of a unit of the dynamic schedule.
    __device__ __forceinline__ TileCoordinates tile_of_unit(int number) const {
        const ScheduledUnit unit = SequenceOrder(context.params).unit(number);
        int head = unit.head;
        if constexpr (Traits::kPairs) head = head_of_pair(context.params, head);
        return {unit.batch, head, unit.tile};
    }

private:
    // The first two units of a thread block are fixed, so that it can begin without the counter. In the second pass the thread
    // block visits the units that it took in the first pass, from the last to the first.
    __device__ __forceinline__ bool next_dynamic(ScheduleCursor& cursor, TileAssignment& assignment) const {
        const SequenceOrder order(context.params);
        const bool leader = threadIdx.x % 32 == 0;
        int& unit = assignment.index;
        if (cursor.exact_maximum) {
            do {
                unit = *const_cast<volatile int*>(&context.storage.dynamic.newest);
                if (unit < 0) return false;
                __syncwarp();
                if (leader) context.storage.dynamic.newest = order.previous_unit(context.params, unit);
                __syncwarp();
                assignment.writers = context.storage.recompute.warps_of(unit);
            } while (assignment.writers == 0);
        } else {
            const int all = blocks(), taken = cursor.next++;
            unit = taken == 0 ? block() : 2 * all - 1 - block();
            if (leader && taken > 1) unit = take_unit(order, 2 * all);
            unit = __shfl_sync(0xffffffffu, unit, 0);
            if (unit >= order.units()) return false;
            if (leader) {
                order.previous_unit(context.params, unit) = context.storage.dynamic.newest;
                context.storage.dynamic.newest = unit;
            }
            assignment.writers = 0xffffffffu;
        }
        assignment.coordinates = tile_of_unit(unit);
        return true;
    }
    // Units before `fixed` are not taken from the counter.
    __device__ __forceinline__ int take_unit(const SequenceOrder& order, int fixed) const {
        if constexpr (Traits::kPairs) {
            if (context.params.in_pairs)
                return take_unit_of_pair(order.counter(), fixed,
                                         order.next_unit(context.params) + context.storage.dynamic.newest);
        }
        return fixed + atomicAdd(order.counter(), 1);
    }
};

}  // namespace libflash::cuda::sm90
