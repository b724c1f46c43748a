// A tile of 16-bit values in shared memory, in the 128-byte swizzle that TMA writes and wgmma reads: chunks of 64 columns one
// after the other, each a dense block of kRows rows of 128 bytes; the last chunk may be only partly used. Group g (16 bytes) of
// row r is stored at g ^ (r % 8). The hardware takes these bits from the address, so a tile begins at a multiple of 1024.
//
// A wgmma descriptor gives the location of an operand. Its low word holds address / 16 and the stride between chunks, its high
// word the stride between groups of 8 rows and the swizzle mode. Moving along the columns or rows of a tile changes only the low
// word.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/tma.cuh"

namespace libflash::cuda {

template <int kRows, int kCols>
struct SwizzledTile {
    static_assert(kRows % 8 == 0 && kRows <= 256, "groups of 8 rows, and a TMA box has 256 at most");
    static_assert(kCols % 16 == 0, "what matrix instructions take at a time");
    static constexpr int kChunkCols = 64;
    static constexpr int kChunks = (kCols + kChunkCols - 1) / kChunkCols;
    static constexpr int kChunkBytes = kRows * 128;
    static constexpr int kBytes = kChunks * kChunkBytes;
    static constexpr int kAlignment = 1024;
    // The first aligned address in `memory`, which has kAlignment extra bytes.
    __device__ static __forceinline__ char* align(char* memory) {
        return memory + (kAlignment - shared_address(memory) % kAlignment) % kAlignment;
    }

    // Byte offset of the 16 bytes with columns 8 * group to 8 * group + 7 of a row.
    __device__ static __forceinline__ int offset(int row, int group) {
        return group / 8 * kChunkBytes + row * 128 + (((group ^ row) & 7) << 4);
    }

    // Loads rows [first_row, first_row + kRows) of matrix (head, batch). One thread calls it. The barrier must already expect
    // kBytes.
    __device__ static __forceinline__ void load(uint32_t tile, const CUtensorMap& map, const MBarrier& barrier, int first_row,
                                                int head, int batch) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            tma_load(tile + chunk * kChunkBytes, map, barrier, chunk * kChunkCols, first_row, head, batch);
    }

    // Prefetches the rows of load() into L2.
    __device__ static __forceinline__ void prefetch(const CUtensorMap& map, int first_row, int head, int batch) {
        for (int chunk = 0; chunk < kChunks; ++chunk) tma_prefetch(map, chunk * kChunkCols, first_row, head, batch);
    }

    // The tile as a K-major operand: k runs along the columns (both operands of Q K^T). Columns [16 * step, 16 * step + 16), from
    // row `first_row` (a multiple of 8) on.
    __device__ static __forceinline__ uint64_t k_major_operand(uint32_t tile, int step, int first_row = 0) {
        return descriptor(tile, first_row * 128 + step / 4 * kChunkBytes + step % 4 * 32, 16);
    }
    // The tile as an MN-major operand: k runs down the rows (V in P V, "transposed"). Rows [16 * step, 16 * step + 16), all
    // columns.
    __device__ static __forceinline__ uint64_t mn_major_operand(uint32_t tile, int step) {
        return descriptor(tile, step * 2048, kChunkBytes);
    }

    // Writes a fragment of 16 rows x 16 columns, in the order of an A fragment, from column 8 * group on (`group` even).
    __device__ static __forceinline__ void store_fragment(uint32_t tile, int first_row, int group, int lane,
                                                          const uint32_t (&f)[4]) {
        stmatrix_x4(tile + offset(first_row + (lane & 15), group + (lane >> 4)), f);
    }
    // Reads the fragment of store_fragment(), as an A operand in registers.
    __device__ static __forceinline__ void load_fragment(uint32_t tile, int first_row, int group, int lane, uint32_t (&f)[4]) {
        ldmatrix_x4(f, tile + offset(first_row + (lane & 15), group + (lane >> 4)));
    }

private:
    // `chunk_step`: bytes between chunks, for operands that span several chunks. The constant parts fold into one addition.
    __device__ static __forceinline__ uint64_t descriptor(uint32_t tile, int offset, int chunk_step) {
        constexpr uint32_t kEightRows = 1024, kExchange128 = 1u << 30;
        const uint32_t low = (tile >> 4) + static_cast<uint32_t>(offset >> 4 | chunk_step >> 4 << 16);
        const uint32_t high = kEightRows >> 4 | kExchange128;
        return static_cast<uint64_t>(high) << 32 | low;
    }
};

}  // namespace libflash::cuda
