// A tile of 16-bit values in shared memory, rows of kCols, laid out so that ldmatrix reads it without bank conflicts: 16-byte chunks
// are exchanged within a group, by an exclusive or with the row number.
//   kCols a multiple of 64: groups of 8 chunks (128 bytes), chunk c of row r at place c ^ (r % 8)
//   else (32, 96, ...):     groups of 4 chunks (64 bytes), chunk c of row r at place c ^ (r / 2 % 4); two rows share 128 bytes
// Either way the 8 rows of an 8x8 matrix lie in 8 different groups of 4 banks.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma_sync.cuh"

namespace libflash::cuda {

template <int kRows, int kCols>
struct SharedTile {
    static_assert(kCols % 32 == 0, "rows must be whole swizzle groups");
    static constexpr int kRowBytes = kCols * 2;
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kGroup = kCols % 64 == 0 ? 8 : 4;  // chunks

    // Byte offset of chunk `chunk` (8 values) of a row.
    __device__ static __forceinline__ int offset(int row, int chunk) {
        const int twist = kGroup == 8 ? row & 7 : (row >> 1) & 3;
        return row * kRowBytes + (((chunk & ~(kGroup - 1)) | ((chunk ^ twist) & (kGroup - 1))) << 4);
    }

    // ldmatrix addresses for chunk columns that are compile-time constants: `lane_base` holds the lane's row and its own swizzle; stepping to
    // another pair of chunks is an exclusive or, to another group an addition.
    struct LaneAddress {
        uint32_t base;   // address of the lane's row
        uint32_t twist;  // (lane's chunk within the pair ^ row's swizzle) * 16

        // Address of the lane's row in the 16 columns number `step`, `row` rows further down (a multiple of 16).
        __device__ __forceinline__ uint32_t at(int row, int step) const {
            constexpr int kSteps = kGroup / 2;
            return base + row * kRowBytes + step / kSteps * (kGroup * 16) + (twist ^ ((step % kSteps) << 5));
        }
    };

    // The columns from 16 * `first` on; `count` steps of them are used, and `first` is a multiple of it.
    template <int kCount>
    __device__ static __forceinline__ LaneAddress skip_columns(LaneAddress address, int first) {
        constexpr int kSteps = kGroup / 2;
        static_assert((kCount & (kCount - 1)) == 0, "other counts change the swizzle from step to step");
        return {address.base + first / kSteps * (kGroup * 16), address.twist ^ ((first % kSteps) << 5)};
    }

    // `chunk` is 0 or 1: which half of the 16 columns this lane addresses.
    __device__ static __forceinline__ LaneAddress lane_address(uint32_t tile, int row, int chunk) {
        const int twist = kGroup == 8 ? row & 7 : (row >> 1) & 3;
        return {tile + row * kRowBytes, static_cast<uint32_t>((chunk ^ twist) << 4)};
    }

    // A fragment (16 rows x 16 columns, row-major): matrices (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
    __device__ static __forceinline__ LaneAddress a_address(uint32_t tile, int first_row, int lane) {
        return lane_address(tile, first_row + ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    }
    // B fragments of two neighbouring 8-column blocks, stored [column][k]: (n 0-7, k 0-7), (n 0-7, k 8-15), (n 8-15, k 0-7), (n 8-15, k 8-15).
    __device__ static __forceinline__ LaneAddress b_address(uint32_t tile, int lane) {
        return lane_address(tile, (lane >> 4) * 8 + (lane & 7), (lane >> 3) & 1);
    }
    // The same from storage [k][column], to be read transposed: (k 0-7, n 0-7), (k 8-15, n 0-7), (k 0-7, n 8-15), (k 8-15, n 8-15).
    __device__ static __forceinline__ LaneAddress b_trans_address(uint32_t tile, int lane) {
        return lane_address(tile, ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    }

    // An A fragment from storage [k][row], to be read transposed: (k 0-7, rows 0-7), (k 0-7, rows 8-15), (k 8-15, rows 0-7), (k 8-15, rows 8-15).
    __device__ static __forceinline__ LaneAddress a_trans_address(uint32_t tile, int lane) { return b_address(tile, lane); }

    // Starts the copy of rows [first_row, first_row + kRows) of a matrix with contiguous 16-byte aligned rows into the tile. Rows at `row_limit`
    // and past it and chunks past `col_limit` values become zeros. All kThreads threads of the block call it.
    template <int kThreads, class T>
    __device__ static __forceinline__ void load_async(uint32_t tile, const T* matrix, int64_t row_stride, int first_row,
                                                      int row_limit, int col_limit, int thread) {
        constexpr int kRowsAtOnce = kThreads / kGroup;
        static_assert(kRows % kRowsAtOnce == 0, "every thread copies the same number of chunks");
        const int chunk = thread % kGroup;
        const T* source = matrix + (first_row + thread / kGroup) * row_stride + chunk * 8;
#pragma unroll
        for (int step = 0; step < kRows / kRowsAtOnce; ++step) {
            const int row = thread / kGroup + step * kRowsAtOnce;
            const bool row_valid = first_row + row < row_limit;
#pragma unroll
            for (int group = 0; group < kCols / 8 / kGroup; ++group) {
                const bool valid = row_valid && (group * kGroup + chunk) * 8 < col_limit;
                cp_async_16(tile + offset(row, group * kGroup + chunk), source + group * kGroup * 8, valid);
            }
            source += kRowsAtOnce * row_stride;
        }
    }

    // Writes a fragment of 16 rows x 16 columns, in the order of an A fragment, from chunk column `chunk` (even) on.
    __device__ static __forceinline__ void store_fragment(uint32_t tile, int first_row, int chunk, int lane,
                                                          const uint32_t (&f)[4]) {
#if __CUDA_ARCH__ >= 900
        stmatrix_x4(tile + offset(first_row + ((lane >> 3) & 1) * 8 + (lane & 7), chunk + (lane >> 4)), f);
#else
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_shared(tile + offset(first_row + (i & 1) * 8 + lane / 4, chunk + i / 2) + lane % 4 * 4, f[i]);
#endif
    }

    // Writes rows [first_row, min(first_row + kRows, row_limit)) of the tile to a matrix, `col_limit` columns of them. `vectors`: its rows are
    // 16-byte aligned and whole chunks. All kThreads threads call it.
    template <int kThreads, class T>
    __device__ static __forceinline__ void store(const char* tile, T* matrix, int64_t row_stride, int first_row, int row_limit,
                                                 int col_limit, bool vectors, int thread) {
        constexpr int kChunks = kCols / 8;
        for (int i = thread; i < kRows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            if (first_row + row >= row_limit || chunk * 8 >= col_limit) continue;
            const char* source = tile + offset(row, chunk);
            T* target = matrix + (first_row + row) * row_stride + chunk * 8;
            if (vectors) {
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
            } else {
                for (int c = 0; c < min(8, col_limit - chunk * 8); ++c) target[c] = reinterpret_cast<const T*>(source)[c];
            }
        }
    }

    // load_async without any demand on alignment, value by value, done when it returns (after a barrier).
    template <int kThreads, class T>
    __device__ static __forceinline__ void load_slow(char* tile, const T* matrix, int64_t row_stride, int first_row,
                                                     int row_limit, int col_limit, int thread) {
        for (int i = thread; i < kRows * kCols; i += kThreads) {
            const int row = i / kCols, col = i % kCols;
            T value{};
            if (first_row + row < row_limit && col < col_limit) value = matrix[(first_row + row) * row_stride + col];
            *reinterpret_cast<T*>(tile + offset(row, col / 8) + col % 8 * 2) = value;
        }
    }
};

}  // namespace libflash::cuda
