// Static schedules for tests of kernels: the tails of causal problems take turns.
#pragma once

#include "cuda/host/static_schedule.h"

namespace libflash::cuda {

// Completes a schedule. One causal problem of three has only pairs, one has pairs and a tail, one has no pairs. Returns the
// number of thread blocks.
inline int64_t make_static_schedule(ScheduleParams& schedule, bool causal, int64_t rows, int64_t tile, int64_t most_blocks) {
    static int causal_problems = 0;
    const QueryTileTimes times{rows, rows, {}, tile, tile};
    const int64_t heads = schedule.heads, tail_head = causal ? heads * (causal_problems++ % 3) / 2 : heads;
    const int64_t units = tail_head == heads ? blocks_of(schedule) : heads * times.tiles();
    return set_static_schedule(schedule, {heads, tail_head, std::min(units, most_blocks), times}).blocks;
}

}  // namespace libflash::cuda
