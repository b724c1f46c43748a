// What the forward kernel for sm_90a writes to memory from registers: the lse of a row, eight channels of a row, and rows that see no key.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_items.cuh"
#include "cuda/sm90/row_softmax.cuh"

namespace libflash::cuda::sm90 {

template <class Row, ForwardKind kKind>
struct ForwardRows : ForwardItems<Row, kKind> {
    using Base = ForwardItems<Row, kKind>;
    using Base::Base, Base::params, Base::kUnequal, Base::is_given_out, Base::next_settled_work, Base::unit_of_order, Base::fill,
        Base::first_rounds, Base::kBlockM, Base::kGeneral, Base::kHeadDimV, Base::owned_of, Base::start_of;
    using typename Base::Item, typename Base::Rounds, typename Base::T, typename Base::Turn;

    // Writes the lse of a row of the item's tile, with the sink if there is one. What its sums of p v are to be multiplied by; 0: the row sees no key, or does
    // not count.
    __device__ __forceinline__ float finish_row(const Item& item, int place, bool counts, float base, float sum,
                                                bool write) const {
        float largest = base, factor = 1.0f;
        if (params.sink.data) {
            const float sink = head_number<T>(params.sink, item.work.batch, item.work.head) * kLog2e;
            largest = fmaxf(base, sink);
            factor = exp2_approx(base - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const bool sees_keys = counts && sum != 0.0f;
        if (item.lse && write && place < owned_of(item) - item.keys.first_row)
            item.lse[place * params.lse.row] = sees_keys ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        if constexpr (kGeneral) factor *= params.rare.dropout.keep_factor;
        // A NaN row stays one: the sum is NaN then, and so is its reciprocal.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // nullptr: there is no such row.
    __device__ __forceinline__ T* row_of_out(const Item& item, int row) const {
        if (row >= owned_of(item)) return nullptr;
        return static_cast<T*>(params.out.data) + item.work.batch * params.out.batch + item.work.head * params.out.head +
               (start_of(item) + row) * params.out.row;
    }

    __device__ __forceinline__ void write_eight(T* row, int col, const uint4& eight) const {
        if (row && col < params.head_dim_v) *reinterpret_cast<uint4*>(row + col) = eight;
    }

    // Another warp: rows that see no key.
    __device__ __forceinline__ void write_empty_items() const {
        wait_for_kernel_ahead();
        if constexpr (kUnequal) {
            if (is_given_out()) return write_empty_units();
        }
        Rounds rounds = first_rounds();
        Turn turn;
        while (next_settled_work(rounds, turn)) write_if_empty(turn);
    }
    __device__ __forceinline__ void write_empty_units() const {
        const int units = WorkOrder(params).units();
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) write_if_empty({unit_of_order(unit), unit, 0});
    }
    __device__ __forceinline__ void write_if_empty(const Turn& turn) const {
        Item item;
        fill(item, turn, false);
        if (item.keys.begin == item.keys.end) write_nothing(item);
    }

    __device__ __forceinline__ void write_nothing(const Item& item) const {
        const int end = min(item.keys.first_row + kBlockM, item.q_rows.owned);
        for (int row = item.keys.first_row + static_cast<int>(threadIdx.x % 32); row < end; row += 32) {
            finish_row(item, row - item.keys.first_row, row < item.q_rows.length, kNothing, 0.0f, true);
            for (int col = 0; col < kHeadDimV; col += 8) write_eight(row_of_out(item, row), col, make_uint4(0, 0, 0, 0));
        }
    }
};

}  // namespace libflash::cuda::sm90
