// Replaces the library's header.
#pragma once

#include <vector>

#include "cuda/ptx/barrier.cuh"

namespace libflash::cuda {

inline void arrive_after_copies(const MBarrier& barrier) {
    std::vector<AsyncCopy> copies;
    for (const auto& group : own_copies()) copies.insert(copies.end(), group.begin(), group.end());
    own_copies().clear();
    emulation::do_later([copies, barrier] {
        for (const AsyncCopy& copy : copies) copy.done();
        barrier.count_arrival();
    });
}

}  // namespace libflash::cuda
