// As backward_contents.cpp, for the tangents of backward. Arguments: 1 is 0, or the seed of a random order. Exit code 0 means
// nothing is wrong.
#include "emulation.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>

#include "contents.h"
#include "cuda/attention/element.cuh"
#include "cuda/host/tile_schedule.h"
#include KERNEL_HEADER

using namespace libflash;
using namespace libflash::cuda;

struct EmulatedKernel {
    static constexpr KernelConfig config{
        "backward_tangent", Operation::backward_tangent, ARCHITECTURE, KernelType::DTYPE, HEAD_DIM, HEAD_DIM, TANGENT_TILE, ""};
};
constexpr bool kDouble = EmulatedKernel::config.dtype == KernelType::f64_,
               kFloat = EmulatedKernel::config.dtype == KernelType::f32_;
using T = std::conditional_t<kDouble, double, ElementOf<EmulatedKernel::config.dtype>>;
using Real = std::conditional_t<kDouble, double, float>;
using Statistics = std::conditional_t<kDouble, DoubleTangentStatistics, TangentStatistics>;
constexpr double kLimit = kDouble                                            ? 1e-12
                          : kFloat                                           ? 0x1p-18
                          : EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-10
                                                                             : 0x1p-7;
constexpr int kHeads = 2, kKeyHeads = 1, kDim = HEAD_DIM;
constexpr int64_t kThreadBlocks = 3;  // that run at the same time, where a counter gives the next work tile

std::mt19937 generator(7);

struct Tensors {
    std::vector<T> q, k, v, out, dout, tq, tk, tv, tout, tdout, tdq, tdk, tdv;
    std::vector<Real> lse, tlse;
    int rows, keys;

    Tensors(int row_count, int key_count) : rows(row_count), keys(key_count) {
        const size_t of_rows = size_t(rows) * kHeads * kDim, of_keys = size_t(keys) * kKeyHeads * kDim;
        for (auto* x : {&q, &out, &dout, &tq, &tout, &tdout}) *x = random<T>(of_rows, 1, generator);
        for (auto* x : {&k, &v, &tk, &tv}) *x = random<T>(of_keys, 1, generator);
        lse.assign(size_t(rows) * kHeads, Real(5)), tlse.assign(lse.size(), Real(0.25));
        forget();
    }
    void forget() { tdq.assign(q.size(), T(NAN)), tdk.assign(k.size(), T(NAN)), tdv.assign(v.size(), T(NAN)); }
};

// Returns whether the memory after the workspace is unchanged.
bool run(Tensors& x, const Sides& sides) {
    BackwardTangentParams params{};
    const auto rows_of = [](std::vector<T>& all, int heads, int first) {
        return RowsParams{all.data() + int64_t{first} * heads * kDim, 0, int64_t{heads} * kDim, kDim};
    };
    const auto of_queries = [&](std::vector<T>& all) { return rows_of(all, kHeads, sides.first_row); };
    const auto of_keys = [&](std::vector<T>& all) { return rows_of(all, kKeyHeads, sides.first_key); };
    const auto numbers = [&](std::vector<Real>& all) {
        return RowStatisticsParams{reinterpret_cast<float*>(all.data() + sides.first_row), 0, 1, x.rows};
    };
    params.q = of_queries(x.q), params.out = of_queries(x.out), params.dout = of_queries(x.dout);
    params.tq = of_queries(x.tq), params.tout = of_queries(x.tout), params.tdout = of_queries(x.tdout);
    params.k = of_keys(x.k), params.v = of_keys(x.v), params.tk = of_keys(x.tk), params.tv = of_keys(x.tv);
    params.tdq = of_queries(x.tdq), params.tdk = of_keys(x.tdk), params.tdv = of_keys(x.tdv);
    params.lse = numbers(x.lse), params.tlse = numbers(x.tlse);
    params.q_lengths = lengths_of(sides.queries), params.k_lengths = lengths_of(sides.keys);
    params.batch = sides.batch, params.heads_q = kHeads, params.heads_k = kKeyHeads, params.group_size = kHeads / kKeyHeads;
    params.head_dim = params.head_dim_v = kDim;
    const double scale = 1 / std::sqrt(double{kDim});
    params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.in_double = {scale, 0, 1};
    params.mask = {kUnboundedWindow, kUnboundedWindow, false};
    params.rare.dropout.keep_factor = 1;
    params.part.end_row = INT32_MAX;
    params.vector_loads = params.vector_rows = params.vector_out = true;

    const int64_t capacity = sides.queries.capacity;
    params.units = sides.queries.packed() ? capacity / kUnitRows + sides.batch : ceil_div(capacity, kUnitRows);
    GuardedMemory<Statistics> statistics(size_t{kHeads} * params.units * kUnitRows, {NAN, NAN, NAN, NAN});
    GuardedMemory<int32_t> first_units(sides.batch, 0x7ead7ead), next_tiles(2, 0x7ead7ead);
    params.statistics = reinterpret_cast<TangentStatistics*>(statistics.x.data());
    params.first_units = first_units.x.data();
    const int tile = EmulatedKernel::config.tile_q;
    params.unit_schedule = schedule_params(sides.queries, sides.batch, kHeads, kUnitRows, 1e9, false);
    params.query_schedule = schedule_params(sides.queries, sides.batch, kHeads, tile, 1e3, true);
    params.key_schedule = schedule_params(sides.keys, sides.batch, kKeyHeads, tile, 1e3, false);
    BackwardTangentPlan plan;
    const auto launch = [&](BackwardTangentStep step, const ScheduleParams& schedule) {
        return launch_shape(blocks_of(schedule), resources_of_backward_tangent<EmulatedKernel>(int(step), plan.instance.number));
    };
    plan.statistics = launch(BackwardTangentStep::statistics, params.unit_schedule);
#ifdef STAGES  // sm90
    plan.instance = kMovingDoutInstance;
    plan.tdq = launch(BackwardTangentStep::gradients, params.query_schedule);
    plan.tdk_tdv = launch(BackwardTangentStep::gradients_of_keys, params.key_schedule);
    if (plan.statistics.blocks > 0 && !has_kernel_for_each_gradient(EmulatedKernel::config)) {
        params.next_tiles = next_tiles.x.data();
        for (LaunchShape* shape : {&plan.tdq, &plan.tdk_tdv}) shape->blocks = std::min<int64_t>(shape->blocks, kThreadBlocks);
    }
#else
    plan.tdq = launch(BackwardTangentStep::gradients, params.query_schedule);
    plan.tdk = plan.tdv = launch(BackwardTangentStep::gradients, params.key_schedule);
#endif
    launch_backward_tangent<EmulatedKernel>(plan, params, nullptr);
    return statistics.is_kept() && first_units.is_kept() && next_tiles.is_kept();
}

bool check(const Contents& contents) {
    const Entries &queries = contents.queries, &keys = contents.keys;
    Tensors x(queries.rows, keys.rows);
    Tensors alone = x;
    const bool kept = run_alone_and_together(
        contents, false, [&](const Sides& sides) { return run(x, sides); }, [&] { alone = x, x.forget(); });
    return kept & same_rows("tdq", contents, queries, x.tdq, alone.tdq, kLimit) &
           same_rows("tdk", contents, keys, x.tdk, alone.tdk, kLimit) &
           same_rows("tdv", contents, keys, x.tdv, alone.tdv, kLimit);
}

int main(int, char** argv) {
    late_copies = true;
    emulation::set_random_order(std::atoi(argv[1]));
    bool good = true;
    for (const Contents& contents : all_contents()) good &= check(contents);
    return good ? 0 : 1;
}
