// The units of the workspace that the query rows of a sequence have: kUnitRows rows each, with softmax statistics and a part of
// the dQ accumulator. Each head has params.units units. Packed sequences have units of their own in the order of the sequences,
// without gaps. So the number of a unit in its head is the number of its work tile among those of the head in the schedule by
// units. The first kernel writes the number of the first unit of each sequence to the workspace. A rule by the start row alone
// would not do: where prefix sums descend, a later sequence can have earlier rows, and two sequences must not share a unit.
//
// Bounds. n > 0 rows have (n - 1) / T + 1 tiles of T rows, rounded down. So sequences with all rows of a tensor together have at
// most rows / T + batch tiles, rounded down. units_of() and schedule_params() use this bound on the host. Only the device knows
// the prefix sums, and nothing checks them. SequenceRows clamps them to the tensor. The bound then holds unless the sequences
// have more rows together than the tensor, which needs sequences that overlap, or a sequence has more rows than max_seqlen. Then
// there are too few work tiles: no kernel computes the tiles beyond the bound, and the first unit of their sequence may never be
// written. No result of the call has a meaning. But no kernel leaves its memory, because before() clamps what it reads, and no
// kernel waits for a work tile that does not exist (sm90/backward_dq_counters.cuh).
#pragma once

#include "cuda/attention/params.h"
#include "cuda/attention/schedule.cuh"

namespace libflash::cuda {

struct QueryUnits {
    // The number of units before those of a sequence with `owned` query rows in head 0. Not for the first kernel.
    template <class Params>
    __device__ static __forceinline__ int before(const Params& params, int batch, int owned) {
        if (!params.q_lengths.cu) return batch * params.heads_q * params.units;
        const int most = params.units - (owned + kUnitRows - 1) / kUnitRows;
        return static_cast<int>(min(static_cast<uint32_t>(params.first_units[batch]), static_cast<uint32_t>(most)));
    }
    // The first unit of a sequence in a head.
    template <class Params>
    __device__ static __forceinline__ int64_t first(const Params& params, int head, int units_before) {
        return int64_t{head} * params.units + units_before;
    }
    template <class Params>
    __device__ static __forceinline__ int64_t first(const Params& params, int batch, int head, const SequenceRows& rows) {
        return first(params, head, before(params, batch, rows.owned));
    }

    // The unit of work tile `index` of the schedule by units, which is `work`.
    template <class Params>
    __device__ static __forceinline__ int64_t of(const Params& params, const ScheduleParams& schedule, int index,
                                                 const TileCoordinates& work) {
        if (!params.q_lengths.cu) return first(params, work.head, work.batch * params.heads_q * params.units) + work.tile;
        return first(params, work.head, TileInGroups::of(index, schedule.heads, schedule.group, schedule.group_tiles).tile);
    }
    // The same, for the first kernel; it notes where sequences begin. All heads write the same numbers.
    template <class Params>
    __device__ static __forceinline__ int64_t in_first_kernel(const Params& params, const ScheduleParams& schedule, int index,
                                                              const TileCoordinates& work) {
        const int64_t unit = of(params, schedule, index, work);
        if (params.q_lengths.cu && work.tile == 0 && threadIdx.x == 0)
            params.first_units[work.batch] = static_cast<int32_t>(unit - first(params, work.head, 0));
        return unit;
    }
};

}  // namespace libflash::cuda
