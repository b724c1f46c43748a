// Static schedules for tests of kernels: the tails of causal problems take turns.
#pragma once

#include "cuda/host/static_schedule.h"

namespace libflash::cuda {

// Completes a schedule. Schedules with pairs take turns: only pairs; pairs and a tail; no pairs; pairs and a tail in rounds;
// rounds alone. Returns the number of thread blocks.
inline int64_t make_static_schedule(ScheduleParams& schedule, int64_t rows, int64_t tile, int64_t most_blocks) {
    static int with_pairs = 0;
    const QueryTileTimes times{rows, rows, {}, tile, tile};
    if (!schedule.paired) return set_static_rounds(schedule, times, std::min(blocks_of(schedule), most_blocks)).blocks;
    const int64_t heads = schedule.heads, kind = with_pairs++ % 5;
    const int64_t tail_head = kind == 0 ? heads : kind % 2 == 1 ? heads / 2 : 0;
    const int64_t blocks = std::min(tail_head == heads ? blocks_of(schedule) : heads * times.tiles(), most_blocks);
    const int64_t of_round = kind < 3 ? 0 : std::min(heads - tail_head, blocks / times.tiles());
    return set_static_schedule(schedule, StaticScheduleChoice{times, heads, tail_head, blocks, of_round}).blocks;
}

}  // namespace libflash::cuda
