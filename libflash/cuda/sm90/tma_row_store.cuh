// Writes 16 rows of an accumulator by TMA: each warp rounds its rows, stores them in a tile in shared memory by stmatrix, and one
// lane issues the TMA store.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/tile/swizzled_tile.cuh"

namespace libflash::cuda::sm90 {

template <class Tile, int kCols>
struct TmaRowStore {
    // Waits until the previous store of this warp has read the rows in shared memory.
    __device__ static __forceinline__ void wait_for_rows(int lane) {
        if (lane == 0) tma_store_wait_read<0>();
        __syncwarp();
    }
    // Stores the rows from `first_row` on. round(x, i) packs two neighbouring sums x[0] and x[1] into a word; they belong to row
    // i % 2 of the thread's two rows.
    template <class Round>
    __device__ static __forceinline__ void write_rows(uint32_t tile, int first_row, int lane, const float (&sums)[kCols / 2],
                                                      const Round& round) {
#pragma unroll
        for (int group = 0; group < kCols / 8; group += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = round(sums + 4 * group + 2 * i, i);
            Tile::store_fragment(tile, first_row, group, lane, words);
        }
        fence_shared_for_async();
        __syncwarp();
    }
    // Called by one lane. `rows`: address of the first row in shared memory. Calls issue(address, column) for each chunk of
    // columns.
    template <class Issue>
    __device__ static __forceinline__ void store_chunks(uint32_t rows, const Issue& issue) {
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) issue(rows + chunk * Tile::kChunkBytes, chunk * Tile::kChunkCols);
        tma_store_commit();
    }
};

}  // namespace libflash::cuda::sm90
