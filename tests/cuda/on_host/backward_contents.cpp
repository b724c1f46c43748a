// Runs backward with prefix sums that descend, lie outside of the tensor or overlap, on the host, and compares each sequence that
// overlaps no other one with a call for it alone. Each call must end and must not write outside of its memory. Arguments: 1 is 0,
// or the seed of a random order; 2 is 0, or the number of thread blocks that run at the same time and add to dq in a fixed order
// (backward_sm90.cpp); 3 is the instance; 4 is whether a separate kernel computes dq. Exit code 0 means nothing is wrong.
#include "emulation.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>

#include "contents.h"
#include "cuda/attention/element.cuh"
#include "cuda/attention/query_rows_tiles.h"
#include "cuda/host/tile_schedule.h"
#include KERNEL_HEADER

using namespace libflash;
using namespace libflash::cuda;

struct EmulatedKernel {
    static constexpr KernelConfig config{
        "backward", Operation::backward, ARCHITECTURE, KernelType::DTYPE, HEAD_DIM, HEAD_DIM, BACKWARD_TILE, ""};
};
constexpr bool kDouble = EmulatedKernel::config.dtype == KernelType::f64_,
               kFloat = EmulatedKernel::config.dtype == KernelType::f32_;
using T = std::conditional_t<kDouble, double, ElementOf<EmulatedKernel::config.dtype>>;
using Real = std::conditional_t<kDouble, double, float>;
using Statistics = std::conditional_t<kDouble, DoubleStatistics, SoftmaxStatistics>;
constexpr double kLimit = kDouble                                            ? 1e-12
                          : kFloat                                           ? 0x1p-18
                          : EmulatedKernel::config.dtype == KernelType::f16_ ? 0x1p-10
                                                                             : 0x1p-7;
#ifdef WIDE_HEADS
const auto launch_kernels = launch_backward_wide<EmulatedKernel>;
const auto resources_of_kernels = resources_of_backward_wide<EmulatedKernel>;
#else
const auto launch_kernels = launch_backward<EmulatedKernel>;
const auto resources_of_kernels = resources_of_backward<EmulatedKernel>;
#endif

constexpr int kHeads = 2, kKeyHeads = 1, kDim = HEAD_DIM;
constexpr int64_t kThreadBlocks = 3;  // that run at the same time

struct Options {
    int instance;
    bool sm90, fixed_order, dq_kernel;
};

std::mt19937 generator(7);

struct Tensors {
    std::vector<T> q, k, v, out, dout, dq, dk, dv;
    std::vector<Real> lse;
    int rows, keys;

    Tensors(int row_count, int key_count) : rows(row_count), keys(key_count) {
        const size_t of_rows = size_t(rows) * kHeads * kDim, of_keys = size_t(keys) * kKeyHeads * kDim;
        for (auto* x : {&q, &out, &dout}) *x = random<T>(of_rows, 1, generator);
        for (auto* x : {&k, &v}) *x = random<T>(of_keys, 1, generator);
        lse.assign(size_t(rows) * kHeads, Real(5));
        forget();
    }
    void forget() { dq.assign(q.size(), T(NAN)), dk.assign(k.size(), T(NAN)), dv.assign(v.size(), T(NAN)); }
};

// Returns whether the memory around the workspace is unchanged.
bool run(Tensors& x, const Sides& sides, const Options& options) {
    BackwardParams params{};
    const auto rows_of = [](std::vector<T>& all, int heads, int first) {
        return RowsParams{all.data() + int64_t{first} * heads * kDim, 0, int64_t{heads} * kDim, kDim};
    };
    for (auto [to, from] : {std::pair(&params.q, &x.q), {&params.out, &x.out}, {&params.dout, &x.dout}, {&params.dq, &x.dq}})
        *to = rows_of(*from, kHeads, sides.first_row);
    for (auto [to, from] : {std::pair(&params.k, &x.k), {&params.v, &x.v}, {&params.dk, &x.dk}, {&params.dv, &x.dv}})
        *to = rows_of(*from, kKeyHeads, sides.first_key);
    params.lse = {reinterpret_cast<float*>(x.lse.data() + sides.first_row), 0, 1, x.rows};
    params.q_lengths = lengths_of(sides.queries), params.k_lengths = lengths_of(sides.keys);
    params.batch = sides.batch, params.heads_q = kHeads, params.heads_k = kKeyHeads, params.group_size = kHeads / kKeyHeads;
    params.shard.heads_total = kHeads;
    params.head_dim = params.head_dim_v = kDim;
    const double scale = 1 / std::sqrt(double{kDim});
    params.softmax_scale = static_cast<float>(scale), params.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.in_double = {scale, 0, 1};
    params.mask = {kUnboundedWindow, kUnboundedWindow, false};
    params.rare.dropout.keep_factor = 1;
    params.vector_loads = params.vector_out = true;

    const int64_t capacity = sides.queries.capacity;
    params.units = sides.queries.packed() ? capacity / kUnitRows + sides.batch : ceil_div(capacity, kUnitRows);
    const size_t rows = size_t{kHeads} * params.units * kUnitRows;
    GuardedMemory<Statistics> statistics(rows, {NAN, NAN});
    GuardedMemory<float> sums(options.dq_kernel ? 0 : rows * kDim, NAN);
    GuardedMemory<int32_t> counters(rows / EmulatedKernel::config.tile_q, 0x7ead7ead), first_units(sides.batch, 0x7ead7ead);
    GuardedMemory<int32_t> next_work_tile(1, 0x7ead7ead);
    params.softmax_statistics = reinterpret_cast<SoftmaxStatistics*>(statistics.x.data());
    params.first_units = first_units.x.data();
    if (!options.dq_kernel) params.dq_accumulator = sums.x.data();
    if (options.fixed_order) params.dq_counters = counters.x.data();
    if (options.sm90 && !options.dq_kernel) params.next_work_tile = next_work_tile.x.data();

    const bool general = kDouble || options.instance == kGeneralInstance.number;
    const int dq_tile = kDim > 256 && !kDouble ? EmulatedKernel::config.tile_q : query_rows_tile_q(kDim, general, sizeof(T));
    params.key_schedule =
        schedule_params(sides.keys, sides.batch, kKeyHeads, EmulatedKernel::config.tile_k, 1e3, options.fixed_order);
    params.query_schedule = schedule_params(sides.queries, sides.batch, kHeads, kUnitRows, 1e9, false);
    params.query_tile_schedule = schedule_params(sides.queries, sides.batch, kHeads, dq_tile, 1e3, false);
    BackwardPlan plan;
    plan.instance.number = options.instance;
    const auto launch = [&](BackwardStep step, const ScheduleParams& schedule) {
        return launch_shape(blocks_of(schedule), resources_of_kernels(int(step), plan.instance.number));
    };
    plan.statistics = launch(BackwardStep::statistics, params.query_schedule);
    plan.dk_dv = launch(BackwardStep::dk_dv, params.key_schedule);
    plan.key_tiles = plan.dk_dv.blocks;
    if (options.dq_kernel) {
        plan.dq = launch(BackwardStep::dq, params.query_tile_schedule);
    } else {
        plan.dq_conversion = launch(BackwardStep::dq_conversion, params.query_schedule);
        if (options.sm90) plan.dk_dv.blocks = std::min(plan.key_tiles, kThreadBlocks);
    }
    plan.dynamic = params.next_work_tile != nullptr;
    plan.fixed_order = options.fixed_order;
    if (options.fixed_order) plan.dq_counters = launch(BackwardStep::dq_counters, params.query_schedule);
    launch_kernels(plan, params, nullptr);
    return statistics.is_kept() && sums.is_kept() && counters.is_kept() && first_units.is_kept() && next_work_tile.is_kept();
}

bool check(const Contents& contents, const Options& options) {
    const Entries &queries = contents.queries, &keys = contents.keys;
    Tensors x(queries.rows, keys.rows);
    Tensors alone = x;
    const bool kept = run_alone_and_together(
        contents, false, [&](const Sides& sides) { return run(x, sides, options); }, [&] { alone = x, x.forget(); });
    return kept & same_rows("dq", contents, queries, x.dq, alone.dq, kLimit) &
           same_rows("dk", contents, keys, x.dk, alone.dk, kLimit) & same_rows("dv", contents, keys, x.dv, alone.dv, kLimit);
}

int main(int, char** argv) {
    emulation::set_random_order(std::atoi(argv[1]));
    const int together = std::atoi(argv[2]);
    emulation::machine.most_resident = std::max(together, 1);
    const Options options = {std::atoi(argv[3]), std::strcmp(ARCHITECTURE, "sm90") == 0, together > 0, std::atoi(argv[4]) != 0};
    bool good = true;
    for (const Contents& contents : all_contents()) good &= check(contents, options);
    return good ? 0 : 1;
}
