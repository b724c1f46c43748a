// A tile of 16-bit values or floats in shared memory, with rows of kCols, swizzled so that ldmatrix has no bank conflicts: the
// 16-byte chunks of a group are permuted by an exclusive or with bits of the row number.
//   rows of a multiple of 128 bytes: groups of 8 chunks, chunk c of row r is stored at c ^ (r % 8)
//   other rows (64, 192, ... bytes): groups of 4 chunks, chunk c of row r is stored at c ^ (r / 2 % 4); two rows share 128
//   bytes
// In both cases the 8 rows of an 8x8 matrix are in 8 different groups of 4 banks. Below, a step is 32 bytes: 16 columns, or 8
// columns of floats.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"

namespace libflash::cuda {

template <int kRows, int kCols, int kValueBytes = 2>
struct SharedTile {
    static constexpr int kRowBytes = kCols * kValueBytes;
    static_assert(kRowBytes % 64 == 0, "rows must be whole swizzle groups");
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kGroup = kRowBytes % 128 == 0 ? 8 : 4;  // chunks
    static constexpr int kChunkValues = 16 / kValueBytes;

    // Byte offset of chunk `chunk` (16 bytes) of a row.
    __device__ static __forceinline__ int offset(int row, int chunk) {
        const int twist = kGroup == 8 ? row & 7 : (row >> 1) & 3;
        return row * kRowBytes + (((chunk & ~(kGroup - 1)) | ((chunk ^ twist) & (kGroup - 1))) << 4);
    }

    // ldmatrix addresses for chunk columns that are compile-time constants. `base` holds the lane's row, `twist` its swizzle.
    // Another pair of chunks is reached by an exclusive or, another group by an addition.
    struct LaneAddress {
        uint32_t base;   // address of the lane's row
        uint32_t twist;  // (lane's chunk within the pair ^ row's swizzle) * 16

        // Address for columns [16 * step, 16 * step + 16) of the row that is `row` rows (a multiple of 16) below the lane's row.
        __device__ __forceinline__ uint32_t at(int row, int step) const {
            constexpr int kSteps = kGroup / 2;
            return base + row * kRowBytes + step / kSteps * (kGroup * 16) + (twist ^ ((step % kSteps) << 5));
        }
    };

    // The address from column 16 * `first` on; `kCount` steps of it are used, and `first` is a multiple of kCount.
    template <int kCount>
    __device__ static __forceinline__ LaneAddress skip_columns(LaneAddress address, int first) {
        constexpr int kSteps = kGroup / 2;
        static_assert((kCount & (kCount - 1)) == 0, "other counts change the swizzle from step to step");
        return {address.base + first / kSteps * (kGroup * 16), address.twist ^ ((first % kSteps) << 5)};
    }

    // `chunk` is 0 or 1: the half of the 16 columns that this lane addresses.
    __device__ static __forceinline__ LaneAddress lane_address(uint32_t tile, int row, int chunk) {
        const int twist = kGroup == 8 ? row & 7 : (row >> 1) & 3;
        return {tile + row * kRowBytes, static_cast<uint32_t>((chunk ^ twist) << 4)};
    }

    // A fragment (16 rows x 16 columns, row-major), as matrices (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15),
    // (rows 8-15, k 8-15).
    __device__ static __forceinline__ LaneAddress a_address(uint32_t tile, int first_row, int lane) {
        return lane_address(tile, first_row + ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    }
    // B fragments of two neighbouring blocks of 8 columns, stored [column][k]: (n 0-7, k 0-7), (n 0-7, k 8-15), (n 8-15, k
    // 0-7), (n 8-15, k 8-15).
    __device__ static __forceinline__ LaneAddress b_address(uint32_t tile, int lane) {
        return lane_address(tile, (lane >> 4) * 8 + (lane & 7), (lane >> 3) & 1);
    }
    // B fragments of two neighbouring blocks, stored [k][column] and loaded with .trans: (k 0-7, n 0-7), (k 8-15, n 0-7), (k 0-7,
    // n 8-15), (k 8-15, n 8-15).
    __device__ static __forceinline__ LaneAddress b_trans_address(uint32_t tile, int lane) {
        return lane_address(tile, ((lane >> 3) & 1) * 8 + (lane & 7), lane >> 4);
    }

    // An A fragment, stored [k][row] and loaded with .trans: (k 0-7, rows 0-7), (k 0-7, rows 8-15), (k 8-15, rows 0-7), (k
    // 8-15, rows 8-15).
    __device__ static __forceinline__ LaneAddress a_trans_address(uint32_t tile, int lane) { return b_address(tile, lane); }

    // Floats for a product that sums over the rows of the tile: lane 4 * g + t reads rows 2t and 2t + 1 of eight, in column g of
    // eight, as k = t and k = t + 4 of a fragment. With this permutation of the eight rows an accumulator block can be an A
    // operand.
    struct RowPair {
        LaneAddress even, odd;

        // Loads from the eight rows that are `row` rows (a multiple of 8) below, columns from 8 * `block` on.
        __device__ __forceinline__ void load(int row, int block, uint32_t& x, uint32_t& y) const {
            x = load_shared(even.at(row, block));
            y = load_shared(odd.at(row, block));
        }
    };
    __device__ static __forceinline__ RowPair row_pair(uint32_t tile, int lane) {
        return row_pair_at(tile, lane % 4 * 2, lane / 4 / 4, lane / 4 % 4);
    }
    // As row_pair(), for a tile that store_columns() wrote.
    __device__ static __forceinline__ RowPair row_pair_of_columns(uint32_t tile, int lane) {
        return row_pair_at(tile, lane % 4 * 2, lane / 4 % 2, lane / 4 / 2);
    }
    __device__ static __forceinline__ RowPair row_pair_at(uint32_t tile, int row, int chunk, int value) {
        RowPair pair{lane_address(tile, row, chunk), lane_address(tile, row + 1, chunk)};
        pair.even.base += value * 4;
        pair.odd.base += value * 4;
        return pair;
    }

    // Writes a float accumulator block of 16 rows, from column 8 * `block` on: its even columns to the first four columns, its
    // odd columns to the last four. An A fragment that is loaded from this block has the permutation of row_pair().
    __device__ static __forceinline__ void store_columns(uint32_t tile, int first_row, int block, int lane, const float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            store_shared(tile + offset(first_row + (e >> 1) * 8 + lane / 4, block * 2 + (e & 1)) + lane % 4 * 4, bits_of(x[e]));
    }

    // Starts the asynchronous copy of rows [first_row, first_row + kRows) of a matrix with contiguous, 16-byte aligned rows to
    // the tile. Rows from `row_limit` on and chunks from column `col_limit` on become zeros. All kThreads threads of the thread
    // block call it.
    template <int kThreads, class T>
    __device__ static __forceinline__ void load_async(uint32_t tile, const T* matrix, int64_t row_stride, int first_row,
                                                      int row_limit, int col_limit, int thread) {
        constexpr int kRowsAtOnce = kThreads / kGroup;
        static_assert(kRows % kRowsAtOnce == 0, "every thread copies the same number of chunks");
        static_assert(sizeof(T) == kValueBytes, "another tile's values");
        const int chunk = thread % kGroup;
        const T* source = matrix + (first_row + thread / kGroup) * row_stride + chunk * kChunkValues;
#pragma unroll
        for (int step = 0; step < kRows / kRowsAtOnce; ++step) {
            const int row = thread / kGroup + step * kRowsAtOnce;
            const bool row_valid = first_row + row < row_limit;
#pragma unroll
            for (int group = 0; group < kRowBytes / 16 / kGroup; ++group) {
                const bool valid = row_valid && (group * kGroup + chunk) * kChunkValues < col_limit;
                cp_async_16(tile + offset(row, group * kGroup + chunk), source + group * kGroup * kChunkValues, valid);
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

    // For 16-bit values: writes `col_limit` columns of rows [first_row, min(first_row + kRows, row_limit)) to a matrix.
    // `vectors`: the rows of the matrix are 16-byte aligned and whole chunks. All kThreads threads call it.
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

    // As load_async(), for any alignment: copies value by value and synchronously; the data is visible after a barrier.
    template <int kThreads, class T>
    __device__ static __forceinline__ void load_slow(char* tile, const T* matrix, int64_t row_stride, int first_row,
                                                     int row_limit, int col_limit, int thread) {
        const auto copy = [=](int i) {
            const int row = i / kCols, col = i % kCols;
            T value{};
            if (first_row + row < row_limit && col < col_limit) value = matrix[(first_row + row) * row_stride + col];
            *reinterpret_cast<T*>(tile + offset(row, col / kChunkValues) + col % kChunkValues * kValueBytes) = value;
        };
        if constexpr (kCols > 256) {  // small code
#pragma unroll 1
            for (int i = thread; i < kRows * kCols; i += kThreads) copy(i);
        } else {
            for (int i = thread; i < kRows * kCols; i += kThreads) copy(i);
        }
    }
};

}  // namespace libflash::cuda
