// A part of the bias or of the boolean mask in shared memory: one key tile of a work tile. The producer warp copies its rows
// together with K, because the loads of single pairs from global memory limit the kernel up to 64 channels.
#pragma once

#include "cuda/attention/row_bias.cuh"
#include "cuda/attention/row_mask.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/hide_from_compiler.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/forward_consumer_thread.cuh"

namespace libflash::cuda::sm90 {

template <int kRows, int kKeys>
struct ForwardScoreTile {
    // Of rows in shared memory. They are padded, so that eight rows lie in different banks.
    template <class Number>
    static constexpr int kPitch = kKeys * static_cast<int>(sizeof(Number)) + 16;
    static constexpr int kBytes = kRows * kPitch<uint16_t>;

    uint32_t address;

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
        const uint32_t of_lane = address + row * kPitch<T> + (thread.lane >> 4) * 16;
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) {
            uint32_t pairs[4];  // rows r of the keys 8 (n + i) on: pairs[2 * i + r]
            ldmatrix_x4(pairs, of_lane + n * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* const two = scores + 4 * n + 2 * i;
                two[0] = fmaf(two[0], factor, low_of(pairs[i], T()));
                two[1] = fmaf(two[1], factor, high_of(pairs[i], T()));
            }
        }
    }
    __device__ __forceinline__ void hide(float (&scores)[kKeys / 2], const ForwardConsumerThread& thread) const {
        RowMaskBits<kKeys> hidden;
        hidden.take(thread.lane,
                    [&](int r, int key) { return load_shared_words(address + thread.local_row(r) * kPitch<uint8_t> + key); });
        hidden.hide(scores);
    }

private:
    // One warp copies whole tiles, so few instructions for each copy matter.
    template <bool kAllExist, class Number>
    __device__ __forceinline__ void copy_rows(const ScoreRows<Number>& rows, int first_row, int lane) const {
        constexpr int kVector = 16 / static_cast<int>(sizeof(Number)), kVectors = kKeys / kVector, kRowsAtOnce = 32 / kVectors,
                      kUnrolled = 8;
        const int row = lane / kVectors, vector = lane % kVectors, left = rows.rows - first_row - row;
        const Number* from = rows.first + (first_row + row) * rows.row_stride + vector * kVector;
        uint32_t to = address + row * kPitch<Number> + vector * 16;
#pragma unroll 1
        for (int i = 0; i < kRows; i += kUnrolled * kRowsAtOnce) {
            to = hide_from_compiler(static_cast<int>(to));
#pragma unroll
            for (int j = 0; j < kUnrolled; ++j)
                cp_async_16(to + j * kRowsAtOnce * kPitch<Number>, from + j * kRowsAtOnce * rows.row_stride,
                            kAllExist || i + j * kRowsAtOnce < left);
            to += kUnrolled * kRowsAtOnce * kPitch<Number>;
            from += kUnrolled * kRowsAtOnce * rows.row_stride;
        }
    }
};

}  // namespace libflash::cuda::sm90
