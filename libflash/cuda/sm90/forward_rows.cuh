// What the forward kernel for sm_90a writes to memory from registers: the lse of a row, eight channels of a row, and rows that see no key.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_items.cuh"
#include "cuda/sm90/row_softmax.cuh"

namespace libflash::cuda::sm90 {

template <class Row, ForwardKind kKind>
struct ForwardRows : ForwardItems<Row, kKind> {
    using Base = ForwardItems<Row, kKind>;
    using Base::Base, Base::params, Base::kUnequal, Base::is_given_out, Base::next_settled_work, Base::unit_of_order, Base::fill,
        Base::first_rounds, Base::kBlockM, Base::kGeneral, Base::kHeadDimV;
    using typename Base::Item, typename Base::Rounds, typename Base::T;

    // Writes the lse of a row, with the sink if there is one. What its sums of p v are to be multiplied by; 0: the row sees no key, or takes no part.
    __device__ __forceinline__ float finish_row(const Item& item, int row, float base, float sum, bool write) const {
        const WorkTile& work = item.work;
        const float sink = params.sink.data ? head_number<T>(params.sink, work.batch, work.head) * kLog2e : -INFINITY;
        const float largest = fmaxf(base, sink);
        float factor = 1.0f;
        if (largest != kNothing) {  // else no score at all: the sum is 0, or NaN where there was nothing but NaN
            factor = exp2_approx(base - largest);
            sum = sum * factor + exp2_approx(sink - largest);
        }
        const bool sees_keys = row < item.q_rows.length && sum != 0.0f;
        if (params.lse.data && write && row < item.q_rows.owned)
            params.lse
                .data[work.batch * params.lse.batch + work.head * params.lse.head + (item.q_rows.start + row) * params.lse.row] =
                sees_keys ? (largest + __log2f(sum)) * kLn2 : -INFINITY;
        if constexpr (kGeneral) factor *= params.rare.dropout.keep_factor;
        // A NaN row stays one: the sum is NaN then, and so is its reciprocal.
        return sees_keys ? __fdividef(factor, sum) : 0.0f;
    }

    // nullptr: there is no such row.
    __device__ __forceinline__ T* row_of_out(const Item& item, int row) const {
        if (row >= item.q_rows.owned) return nullptr;
        return static_cast<T*>(params.out.data) + item.work.batch * params.out.batch + item.work.head * params.out.head +
               (item.q_rows.start + row) * params.out.row;
    }

    __device__ __forceinline__ void write_eight(T* row, int col, const uint4& eight) const {
        if (row && col < params.head_dim_v) *reinterpret_cast<uint4*>(row + col) = eight;
    }

    // Another warp: rows that see no key.
    __device__ __forceinline__ void write_empty_items() const {
        if constexpr (kUnequal) {
            if (is_given_out()) return write_empty_units();
        }
        Rounds rounds = first_rounds();
        int round;
        WorkTile work;
        while (next_settled_work(rounds, round, work)) write_if_empty(work);
    }
    __device__ __forceinline__ void write_empty_units() const {
        const int units = WorkOrder(params).units();
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) write_if_empty(unit_of_order(unit));
    }
    __device__ __forceinline__ void write_if_empty(const WorkTile& work) const {
        Item item;
        fill(item, 0, work, false);
        if (item.keys.begin == item.keys.end) write_nothing(item);
    }

    __device__ __forceinline__ void write_nothing(const Item& item) const {
        const int end = min(item.keys.first_row + kBlockM, item.q_rows.owned);
        for (int row = item.keys.first_row + static_cast<int>(threadIdx.x % 32); row < end; row += 32) {
            finish_row(item, row, kNothing, 0.0f, true);
            for (int col = 0; col < kHeadDimV; col += 8) write_eight(row_of_out(item, row), col, make_uint4(0, 0, 0, 0));
        }
    }
};

}  // namespace libflash::cuda::sm90
