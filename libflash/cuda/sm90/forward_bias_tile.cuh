// The bias or the boolean mask of one query tile and one key tile, in shared memory. The producer warp copies it into the stage
// of K, so that the consumers need not wait for loads of single pairs from global memory. Only up to 64 channels there is room.
#pragma once

#include "cuda/attention/row_bias.cuh"
#include "cuda/attention/row_mask.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"

namespace libflash::cuda::sm90 {

template <int kRows, int kKeys>
struct ForwardBiasTile {
    template <class Number>
    static constexpr int kRowBytes = kKeys * static_cast<int>(sizeof(Number));
    static constexpr int kBytes = kRows * kRowBytes<uint16_t>;

    uint32_t address;  // a multiple of 256

    // Rows are swizzled, so that eight of them lie in different banks: vector v (16 bytes) of a row is at v ^ swizzle_of(row).
    // Rows 2 n and 2 n + 1 have their first four vectors in different banks, because hide() loads these together.
    __device__ __forceinline__ static constexpr int swizzle_of(int row) { return (row & 1) << 2 | (row >> 1 & 3); }
    template <class Number>
    __device__ __forceinline__ uint32_t vector_of(int row, int vector) const {
        return address + row * kRowBytes<Number> + (vector ^ swizzle_of(row)) * 16;
    }

    // Whether all keys of the tile exist and whole rows of it can be copied.
    template <class Number>
    __device__ __forceinline__ static bool can_copy(const ScoreRows<Number>& rows) {
        return rows.loads(kKeys, 16);
    }
    // Begins to copy the rows from `first_row` on. Rows that do not exist get zeros. The whole warp calls it.
    template <class Number>
    __device__ __forceinline__ void copy(const ScoreRows<Number>& rows, int first_row, int lane) const {
        first_row + kRows <= rows.rows ? copy_rows<true>(rows, first_row, lane) : copy_rows<false>(rows, first_row, lane);
    }

    // scores = factor * scores + bias.
    template <class T>
    __device__ __forceinline__ void add_bias(float (&scores)[kKeys / 2], float factor,
                                             const ForwardConsumerThread& thread) const {
        const int row = thread.warp() * ForwardConsumerThread::kWarpRows + (thread.lane & 15);
        const uint32_t of_lane = vector_of<T>(row, thread.lane >> 4);
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) {
            uint32_t pairs[4];  // pairs[2 * k + r]: row r, keys from 8 * (n + k) on
            ldmatrix_x4(pairs, of_lane ^ n * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* const two = scores + 4 * n + 2 * i;
                two[0] = fmaf(two[0], factor, low_of(pairs[i], T()));
                two[1] = fmaf(two[1], factor, high_of(pairs[i], T()));
            }
        }
    }
    // Hides scores by the mask. Rows that do not exist, local rows from `rows` on, hide nothing.
    __device__ __forceinline__ void hide(float (&scores)[kKeys / 2], int rows, const ForwardConsumerThread& thread) const {
        RowMaskBits<kKeys> hidden;
        hidden.take(thread.lane, [&](int r, int key) {
            const int row = thread.local_row(r);
            return row < rows ? load_shared_words(vector_of<uint8_t>(row, key / 16)) : make_uint4(~0u, ~0u, ~0u, ~0u);
        });
        hidden.hide(scores);
    }

private:
    // One warp copies whole tiles, so few instructions for each copy matter.
    template <bool kAllExist, class Number>
    __device__ __forceinline__ void copy_rows(const ScoreRows<Number>& rows, int first_row, int lane) const {
        constexpr int kVector = 16 / static_cast<int>(sizeof(Number)), kVectors = kKeys / kVector, kRowsAtOnce = 32 / kVectors,
                      kUnrolled = 4;
        const int row = lane / kVectors, vector = lane % kVectors, left = rows.rows - first_row - row;
        const Number* from = rows.first + (first_row + row) * rows.row_stride + vector * kVector;
        uint32_t to = vector_of<Number>(row, vector);
#pragma unroll 1
        for (int i = 0; i < kRows; i += kUnrolled * kRowsAtOnce) {
            to = hide_from_compiler(static_cast<int>(to));
#pragma unroll
            for (int j = 0; j < kUnrolled; ++j)
                cp_async_16((to ^ swizzle_of(j * kRowsAtOnce) * 16) + j * kRowsAtOnce * kRowBytes<Number>,
                            from + j * kRowsAtOnce * rows.row_stride, kAllExist || i + j * kRowsAtOnce < left);
            to += kUnrolled * kRowsAtOnce * kRowBytes<Number>;
            from += kUnrolled * kRowsAtOnce * rows.row_stride;
        }
    }
};

}  // namespace libflash::cuda::sm90
