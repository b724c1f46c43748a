// What two consumer warpgroups with the same query rows exchange through shared memory: a signal that P of a key tile is written
// and, at the end, the sums of their rows.
#pragma once

#include "cuda/sm90/exchange_barrier.cuh"
#include "cuda/tile/quad.cuh"

namespace libflash::cuda::sm90 {

// Named barriers: for all consumers; for "P of a warpgroup is ready" (one per warpgroup: it arrives, the other one waits); for
// the warps of a warpgroup (one per warpgroup).
constexpr int kAllConsumers = 1, kReadyBarrier = 2, kGroupBarrier = 4;

template <class Traits>
struct ConsumerExchanges {
    float sums[Traits::kGroups][Traits::kBlockM];
    uint64_t barriers[1 + Traits::kGroups];

    // One thread calls it.
    __device__ __forceinline__ void init() {
        sums_are_written().substitute.init(Traits::kConsumers);
        for (int group = 0; group < Traits::kGroups; ++group) p_is_written(group).substitute.init(128);
    }
    __device__ __forceinline__ ExchangeBarrier p_is_written(int group) const {
        return {kReadyBarrier + group, Traits::kConsumers, {shared_address(&barriers[1 + group])}};
    }
    // Turns the sums of the rows `row` and `row` + 8 over the lane's keys into sums over all keys. Both warpgroups have the same
    // kept maxima. Called once in a thread block.
    __device__ __forceinline__ void join(float (&sum)[2], int group, int row, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = quad_sum(sum[r]);
            if (lane % 4 == 0) sums[group][row + 8 * r] = own;
        }
        __syncwarp();
        sums_are_written().arrive_and_wait(0);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = sums[0][row + 8 * r] + sums[1][row + 8 * r];
    }

private:
    __device__ __forceinline__ ExchangeBarrier sums_are_written() const {
        return {kAllConsumers, Traits::kConsumers, {shared_address(&barriers[0])}};
    }
};

}  // namespace libflash::cuda::sm90
