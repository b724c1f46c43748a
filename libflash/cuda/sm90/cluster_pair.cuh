// Two thread blocks of a cluster that load parts of the same tiles, each for both.
#pragma once

#include <cstdint>

namespace libflash::cuda::sm90 {

// The rank of this thread block in its pair; 0 without pairs. `in_pairs`: 1 or 0.
__device__ __forceinline__ int rank_of_pair(int in_pairs) { return static_cast<int>(blockIdx.x) & in_pairs; }

constexpr uint32_t kBothOfPair = 3;  // for tma_load_to(): a bit for each rank

// In a cluster, the high bits of a shared memory address are the rank of the thread block. In a wgmma descriptor they would
// change the stride between chunks, which MN-major operands need. (K-major operands do not use that stride.)
__device__ __forceinline__ uint32_t address_in_block(uint32_t shared_memory) { return shared_memory & 0x3ffff; }

}  // namespace libflash::cuda::sm90
