// Writes the statistics of the query rows (attention/row_statistics.cuh). `Body`: Forward in forward.cuh, with statistics.
#pragma once

#include "cuda/attention/head_maxima.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/row_statistics.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/math.cuh"

namespace libflash::cuda::sm80 {

template <class Body>
struct RowStatisticsOutput {
    Body& body;

    // Writes the statistics of row r of slab a. `exists`: the row is in use. `sink`: in base-2 units, -infinity without a sink.
    // `total`: the sum of the exponentials of the scores and of the sink, relative to the larger of the kept maximum and the
    // sink. All lanes of the warp must call it.
    __device__ __forceinline__ void store(int a, int r, bool exists, float sink, float total) const {
        const TileCoordinates work = body.common().work;
        const SequenceRows q_rows = body.common().q_rows;
        const int row = body.row_of(a, 2 * r);
        const bool writes = body.part() == 0 && body.lane % 4 == 0 && row < q_rows.owned, unknown = total != total;
        const auto write = [&](const RowStatisticsParams& to, float x) {
            if (to.data && writes) to.data[work.batch * to.batch + work.head * to.head + (q_rows.start + row) * to.row] = x;
        };
        float largest = unknown ? total : body.largest_score[a][r] * kLn2 + 0.0f;  // never -0
        if (!exists) largest = -INFINITY;
        write(body.params.max_logit, largest);
        if (body.params.entropy.data) {
            const float entropy = row_entropy(body.kept_maximum[a][r], body.row_sum[a][r], body.weighted[a][r], sink, total);
            write(body.params.entropy, exists ? entropy : 0.0f);
        }
        if (body.params.head_maxima && body.part() == 0) {
            const float of_warp = warp_largest(largest);
            if (body.lane == 0) raise_to(body.params.head_maxima + work.head * body.params.head_maxima_stride, of_warp);
        }
    }
};

}  // namespace libflash::cuda::sm80
