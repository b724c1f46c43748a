// Zeroes rows of a tile in shared memory.
#pragma once

#include "cuda/ptx/cp_async.cuh"

namespace libflash::cuda::sm90 {

// A warpgroup zeroes the rows [begin, end) of the tile at a shared address.
template <class Tile>
__device__ __forceinline__ void zero_rows(uint32_t tile, int begin, int end) {
    constexpr int kVectors = Tile::kChunks * 8;  // of 16 bytes in a row
#pragma unroll 1
    for (int i = begin * kVectors + static_cast<int>(threadIdx.x % 128); i < end * kVectors; i += 128)
        store_zeros_16(tile + Tile::offset(i / kVectors, i % kVectors));
}

}  // namespace libflash::cuda::sm90
