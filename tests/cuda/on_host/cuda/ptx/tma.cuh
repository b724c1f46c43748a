// Replaces the library's header.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/tensor_map.cuh"

namespace libflash::cuda {

inline void tma_prefetch_map(const CUtensorMap&) {}
inline void tma_prefetch(const CUtensorMap&, int, int, int, int) {}

void tma_load(uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2, int c3);
void tma_load_to(uint32_t ranks, uint32_t address, const CUtensorMap& map, const MBarrier& barrier, int c0, int c1, int c2,
                 int c3);
void tma_load_bytes(uint32_t address, const void* global, int bytes, const MBarrier& barrier);
void tma_store(uint32_t address, const CUtensorMap& map, int c0, int c1, int c2, int c3);

// In random order, shared memory is read at a random later time, and the sums change even later.
void tma_add_floats(float* global, uint32_t address, int bytes);
void tma_store_commit();
// Waits until all groups but the last `pending` have read shared memory, or are complete.
void wait_for_reads(int pending);
void wait_for_additions(int pending);
template <int kPending>
void tma_store_wait_read() {
    wait_for_reads(kPending);
}
template <int kPending>
void tma_store_wait() {
    wait_for_additions(kPending);
}

}  // namespace libflash::cuda
