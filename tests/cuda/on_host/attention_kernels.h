// The forward and backward kernels of sm80 that a program runs, chosen by its macros, and what it needs to launch them.
// attention_instances.cpp has their code, which is compiled once for all programs that run the same kernels.
#pragma once

#include "emulation.h"

#include "cuda/host/tile_schedule.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/forward.cuh"
#include "numbers.h"

using namespace libflash;
using namespace libflash::cuda;

struct ForwardKernel {
    static constexpr KernelConfig config{
        "forward", Operation::forward, "sm80", KernelType::DTYPE, HEAD_DIM, HEAD_DIM, FORWARD_TILE, 1, ""};
};
struct BackwardKernel {
    static constexpr KernelConfig config{"backward", Operation::backward, "sm80", KernelType::DTYPE, HEAD_DIM,
                                         HEAD_DIM,   BACKWARD_TILE,       ""};
};
extern template int libflash::cuda::launch_forward<ForwardKernel>(const ForwardPlan&, const ForwardParams&, void*);
extern template int libflash::cuda::launch_backward<BackwardKernel>(const BackwardPlan&, const BackwardParams&, void*);

using T = ElementOf<ForwardKernel::config.dtype>;
constexpr int kDim = HEAD_DIM;
constexpr bool kWide = is_wide_backward(kDim);  // then backward is always deterministic
constexpr bool kFloat = ForwardKernel::config.dtype == KernelType::f32_;
// Relative rounding error of a result. For float it includes the error of the arithmetic.
constexpr double kRounding = kFloat ? 0x1p-19 : (ForwardKernel::config.dtype == KernelType::f16_ ? 0x1p-11 : 0x1p-8);

inline Sequences one_sequence(int64_t rows) {
    Sequences sequences;
    sequences.capacity = sequences.max_length = rows;
    return sequences;
}

// Rows of `heads` heads each, without gaps.
template <class Number>
RowsParams dense_rows(std::vector<Number>& x, int heads) {
    return {x.data(), 0, int64_t{heads} * kDim, kDim};
}

// One sequence, and one key head that all query heads share.
template <class Params>
void fill_in_sizes(Params& params, int rows, int keys, int heads, double scale) {
    params.q_lengths = {nullptr, nullptr, rows}, params.k_lengths = {nullptr, nullptr, keys};
    params.batch = 1, params.heads_q = params.group_size = heads, params.head_dim = params.head_dim_v = kDim;
    params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_out = true;
}

// Backward of such a problem: the memory that its kernels share, the schedules, and the launches that every plan has.
struct BackwardLaunch {
    std::vector<SoftmaxStatistics> statistics;
    std::vector<float> dq_accumulator;
    BackwardPlan plan;

    BackwardLaunch(BackwardParams& params, const Instance& instance, bool rare_tiles, bool deterministic) {
        const int rows = params.q_lengths.capacity, keys = params.k_lengths.capacity, heads = params.heads_q;
        params.heads_k = 1;
        params.units = (rows + kUnitRows - 1) / kUnitRows;
        statistics.assign(heads * params.units * kUnitRows, SoftmaxStatistics{NAN, NAN});
        dq_accumulator.assign(statistics.size() * kDim, NAN);
        params.softmax_statistics = statistics.data();
        params.dq_accumulator = deterministic ? nullptr : dq_accumulator.data();
        const int tile_q = kWide ? BackwardKernel::config.tile_q : query_rows_tile_q(kDim, rare_tiles, sizeof(T));
        deterministic |= kWide;
        params.key_schedule = schedule_params(one_sequence(keys), 1, 1, BackwardKernel::config.tile_k, 1e3, false);
        params.query_schedule = schedule_params(one_sequence(rows), 1, heads, kUnitRows, 1e9, false);
        params.query_tile_schedule = schedule_params(one_sequence(rows), 1, heads, tile_q, 1e3, true);
        plan.instance = instance;
        plan.statistics = shape(BackwardStep::statistics, blocks_of(params.query_schedule));
        plan.key_tiles = blocks_of(params.key_schedule);
        plan.dk_dv = shape(BackwardStep::dk_dv, plan.key_tiles);
        if (deterministic) {
            plan.dq = shape(BackwardStep::dq, blocks_of(params.query_tile_schedule));
        } else {
            plan.dq_conversion = shape(BackwardStep::dq_conversion, blocks_of(params.query_schedule));
        }
    }
    LaunchShape shape(BackwardStep step, int64_t blocks) const {
        return launch_shape(blocks, resources_of_backward<BackwardKernel>(int(step), plan.instance.number));
    }
};
